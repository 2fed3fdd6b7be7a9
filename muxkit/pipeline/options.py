"""The options of the source and of the sink, which are parsed from text. Errors name the option.

Spark passes options as strings. `SourceOptions` and `SinkOptions` declare each option once, with its parser and its
default. They are parsed before a query starts. Unknown names are errors.
"""

from __future__ import annotations

import json
import math
import re
import ssl
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, TypeVar

import attrs

from muxkit.core import without_secrets
from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.staging.records import LONGEST_NAME

ChoiceT = TypeVar("ChoiceT", bound=Enum)
ValueT = TypeVar("ValueT")
OptionsT = TypeVar("OptionsT", bound=attrs.AttrsInstance)

# ---------------------------------------------------------------------------- fields that options set


def option(
    name: str, parse: Callable[[str, str], ValueT], default: ValueT, *, shown: bool | Callable[[ValueT], str] = True
) -> ValueT:
    """Return an attrs field that an option sets.

    Args:
        name: the name of the option.
        parse: a function of the option's text and name. It raises `OptionError` for an invalid text.
        default: the value without the option.
        shown: what the `repr` shows: whether to show the value, or a function that formats it.
    """
    field: ValueT = attrs.field(default=default, repr=shown, metadata={"option": name, "parse": parse})
    return field


def option_names(kind: type[attrs.AttrsInstance]) -> tuple[str, ...]:
    """Return the names of the options that set the fields of a class, including its nested classes."""
    names: list[str] = []
    for field in attrs.fields(kind):
        if "option" in field.metadata:
            names.append(field.metadata["option"])
        elif "nested" in field.metadata:
            names += option_names(field.metadata["nested"])
    return tuple(names)


class GivenOptions:
    """The options that Spark was given. Names are case-insensitive, and empty values count as missing.

    Raises `OptionError` for an unknown name, because Spark wouldn't notice a misspelled one.
    """

    def __init__(self, options: Mapping[str, str], known: Collection[str], *, passed_over: Collection[str]) -> None:
        self._values = {name.lower(): str(options[name]).strip() for name in options}
        unknown = self._values.keys() - {name.lower() for name in (*known, *passed_over)}
        if unknown:
            raise OptionError(min(unknown), f"there is no such option; there are {', '.join(sorted(known))}")

    def text(self, name: str) -> str | None:
        """Return the text of an option, or None if it is missing or empty."""
        return self._values.get(name.lower()) or None

    def read(self, kind: type[OptionsT], **others: object) -> OptionsT:
        """Make an instance of a class whose fields were made with `option`. `others` are values of other fields."""
        found = dict(others)
        for field in attrs.fields(kind):
            if "nested" in field.metadata:
                found[field.name] = self.read(field.metadata["nested"])
            elif (value := self.text(name := field.metadata.get("option", ""))) is not None:
                found[field.name] = field.metadata["parse"](value, name)
        return kind(**found)


# ---------------------------------------------------------------------------- values

_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {
    "": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30,
}  # fmt: skip
_MEASURE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_YES_NO: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
MOST_ID: Final = 0xFFFFFFFF
LEAST_WINDOW: Final = 4 << 10
MOST_CHANNELS: Final = 64


def text(value: str, name: str) -> str:
    """Return the text of an option unchanged."""
    return value


def count(value: str, name: str) -> int:
    """Parse an integer above 0."""
    if not re.fullmatch(r"\d{1,18}", value) or int(value) < 1:
        raise OptionError(name, f"expected a whole number above 0, got {value[:100]!r}")
    return int(value)


def seconds(value: str, name: str) -> float:
    """Parse a duration above 0: a number of seconds, or a number with the unit ms, s, m, h or d."""
    time = _measured(value, _SECONDS)
    if not 0 < time < math.inf:
        raise OptionError(
            name, f"expected a time above 0, such as 30s, 500ms, 2h or a number of seconds, got {value[:100]!r}"
        )
    return time


def moment(value: str, name: str) -> float:
    """Parse a time into seconds since 1970: ISO 8601, in UTC without a time zone, or milliseconds since 1970."""
    if re.fullmatch(r"\d{1,15}", value):
        return int(value) / 1000
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise OptionError(
            name, f"expected a time such as 2026-11-25T12:00:00Z or milliseconds since 1970, got {value[:100]!r}"
        ) from None
    return (found.replace(tzinfo=UTC) if found.tzinfo is None else found).timestamp()


def size(value: str, name: str) -> int:
    """Parse a size of at least one byte: a number, optionally with the unit k, m or g."""
    found = _measured(value, _BYTES)
    if not 1 <= found < math.inf:
        raise OptionError(name, f"expected a size such as 65536, 64k or 16m, got {value[:100]!r}")
    return int(found)


def _measured(value: str, units: Mapping[str, float]) -> float:
    """Parse a number with a unit. Return 0 if it is invalid."""
    found = _MEASURE.fullmatch(value)
    return 0.0 if found is None else float(found[1]) * units.get(found[2].lower(), 0.0)


def yes_or_no(value: str, name: str) -> bool:
    """Parse `true` or `false`."""
    try:
        return _YES_NO[value.lower()]
    except KeyError:
        raise OptionError(name, f"expected true or false, got {value[:100]!r}") from None


def parse_pattern(value: str, name: str) -> re.Pattern[str]:
    """Parse a regular expression in Python's syntax."""
    try:
        return re.compile(value)
    except re.error as error:
        raise OptionError(name, f"expected a regular expression, got {value[:100]!r}: {error}") from None


def choice(of: type[ChoiceT]) -> Callable[[str, str], ChoiceT]:
    """Return a parser for the values of an enumeration."""

    def parse(value: str, name: str) -> ChoiceT:
        for each in of:
            if each.value == value.lower():
                return each
        raise OptionError(name, f"expected one of {', '.join(str(each.value) for each in of)}, got {value[:100]!r}")

    return parse


def parse_channels(value: str, name: str) -> int:
    """Parse a number of channels, up to `MOST_CHANNELS`."""
    number = count(value, name)
    if number > MOST_CHANNELS:
        raise OptionError(name, f"expected at most {MOST_CHANNELS}, got {number}")
    return number


def parse_window(value: str, name: str) -> int:
    """Parse a size of at least `LEAST_WINDOW` bytes."""
    found = size(value, name)
    if found < LEAST_WINDOW:
        raise OptionError(name, f"expected at least {LEAST_WINDOW} bytes, got {found}")
    return found


def parse_name(value: str, name: str) -> str:
    """Parse the name of a stream, an application or a batch write."""
    if len(value) > LONGEST_NAME or not value.isprintable():
        raise OptionError(name, f"expected 1 to {LONGEST_NAME} printable characters, got {value[:100]!a}")
    return value


# ---------------------------------------------------------------------------- servers and streams

_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ONE: Final = re.compile(rf"(?:(?P<server>restream\+[a-z][a-z0-9]*://[^\s#]+)#)?(?P<uuid>{_UUID})", re.IGNORECASE)
# A comma may also separate the hosts of a URL. So it ends an item only before another item or at the end of the text.
_BETWEEN: Final = re.compile(rf"\s+|,\s*(?={_UUID}|restream\+|$)", re.IGNORECASE)
_SERVER: Final = re.compile(r"restream\+[a-z][a-z0-9]*://[^\s#]+", re.IGNORECASE)


def is_uuid(text: str) -> bool:
    """Return True for a UUID in lower case, as offsets contain it."""
    return re.fullmatch(_UUID, text) is not None


@attrs.frozen
class Reference:
    """A restream session. `server` is the URL of its server, or None if the server has to be found."""

    uuid: str
    server: str | None = attrs.field(default=None, repr=lambda url: repr(url and without_secrets(url)))

    def __str__(self) -> str:
        return self.uuid if self.server is None else f"{without_secrets(self.server)}#{self.uuid}"


def _shown(url: str) -> str:
    """Return a URL for an error text, without secrets and at most 200 characters long."""
    return without_secrets(url)[:200]


def _shown_urls(urls: tuple[str, ...]) -> str:
    return repr(tuple(map(without_secrets, urls)))


def parse_reference(text: str, option: str) -> Reference:
    """Parse one stream, `uuid` or `url#uuid`. Raises `OptionError` for this option."""
    found = _ONE.fullmatch(text)
    if found is None:
        raise OptionError(
            option, f"expected a uuid, or url#uuid with a URL such as restream+tcp://…, got {_shown(text)!r}"
        )
    return Reference(found["uuid"].lower(), found["server"])


def parse_references(text: str, option: str) -> tuple[Reference, ...]:
    """Parse streams separated by white space or commas. Of several with the same UUID, the first is used."""
    found = {each.uuid: each for each in reversed([parse_reference(item, option) for item in items(text)])}
    return tuple(sorted(found.values(), key=lambda each: each.uuid))


def parse_servers(text: str, option: str) -> tuple[str, ...]:
    """Parse the URLs of servers, separated by white space or commas."""
    servers = items(text)
    for server in servers:
        if not _SERVER.fullmatch(server):
            raise OptionError(option, f"expected a URL such as restream+tcp://127.0.0.1:7000, got {_shown(server)!r}")
    return tuple(dict.fromkeys(servers))


def items(text: str) -> list[str]:
    """Split text at white space and commas."""
    return [item for item in _BETWEEN.split(text.strip()) if item]


class Start(Enum):
    """Where a query starts to read a stream that it hasn't read before."""

    EARLIEST = "earliest"
    """After the last acknowledged message."""
    LATEST = "latest"
    """After the last message that exists when the query first asks the server."""


Starting = Start | dict[str, int]
EARLIEST: Final[Starting] = Start.EARLIEST
Ending = dict[str, int] | None
"""The last message to read, by stream. None means all messages."""


def parse_starting(value: str, name: str) -> Starting:
    """Parse `earliest`, `latest`, or a JSON object with the number of messages to skip in each stream."""
    for each in Start:
        if value.lower() == each.value:
            return each
    return _ids(value, name, "earliest, latest or ")


def parse_ending(value: str, name: str) -> Ending:
    """Parse `latest`, or a JSON object with the last message of each stream."""
    return None if value.lower() == "latest" else _ids(value, name, "latest or ")


def _ids(value: str, name: str, others: str) -> dict[str, int]:
    """Parse a JSON object `{"uuid": id}` with the number of messages of each stream before a point."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):  # RecursionError is raised for deeply nested brackets
        found = None
    if not isinstance(found, dict) or not all(type(id) is int and 0 <= id <= MOST_ID for id in found.values()):
        raise OptionError(name, f'expected {others}JSON such as {{"uuid": 1750}}, got {value[:100]!r}')
    return {parse_reference(uuid, name).uuid: id for uuid, id in found.items()}


# ---------------------------------------------------------------------------- TLS

ENCRYPTED: Final = frozenset({"tls", "wss"})


@attrs.frozen(kw_only=True)
class Tls:
    """TLS options. The files are in PEM format, and have to exist on every machine that reads or writes."""

    ca_file: str | None = option("tlsCaFile", text, None)
    cert_file: str | None = option("tlsCertFile", text, None)
    key_file: str | None = option("tlsKeyFile", text, None)
    server_hostname: str | None = option("tlsServerHostname", text, None)
    insecure: bool = option("insecure", yes_or_no, False)

    def __attrs_post_init__(self) -> None:
        if self.key_file and not self.cert_file:
            raise OptionError("tlsKeyFile", "a key without a certificate: tlsCertFile is missing")


def link_options(url: str, tls: Tls) -> dict[str, Any]:
    """Return the options of a URL's transport. Raises `OptionError` for an option that the transport can't use."""
    transport = url.partition("://")[0].rpartition("+")[2].lower()
    options: dict[str, Any] = {}
    if transport in ENCRYPTED:
        options["ssl_context"] = _context(tls)
        if tls.server_hostname is not None:
            if transport != "tls":
                raise OptionError("tlsServerHostname", f"{without_secrets(url)}: only tls takes one")
            options["server_hostname"] = tls.server_hostname
    if tls.insecure and transport not in ("mem", "unix"):
        options["insecure"] = True
    return options


def _context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
    except OSError as error:
        raise OptionError("tlsCaFile", f"{tls.ca_file}: {error}") from error
    if tls.cert_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        except OSError as error:
            raise OptionError("tlsCertFile", f"{tls.cert_file}: {error}") from error
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


# ---------------------------------------------------------------------------- the source


class AckMode(Enum):
    """When the source allows a server to delete messages."""

    IDLE = "idle"
    """When Spark commits a batch, or when no messages followed the batch."""
    COMMIT = "commit"
    """When Spark commits a batch. Spark does so while it plans the next one, so the server keeps the last batch."""
    NEVER = "never"


class Planning(Enum):
    """How the driver learns which messages exist."""

    AUTO = "auto"
    """Status requests, or prefetch if a server doesn't support them."""
    STATUS = "status"
    PREFETCH = "prefetch"
    """The driver reads ahead and counts. The workers read the same messages again."""


class Verify(Enum):
    """What is verified in addition to the ids."""

    NONE = "none"
    NUMBERS = "numbers"
    """The values of restream's `Numbers` application, and their CRC in a range from the first to the last message."""


@attrs.frozen(kw_only=True)
class SourceOptions:
    """All options of the source."""

    servers: tuple[str, ...] = option("servers", parse_servers, (), shown=_shown_urls)
    streams: tuple[Reference, ...] = option("streams", parse_references, ())
    streams_file: str | None = option("streamsFile", text, None)
    directory: Reference | None = option("directory", parse_reference, None)
    pattern: re.Pattern[str] | None = option("subscribePattern", parse_pattern, None)
    starting: Starting = option("startingOffsets", parse_starting, EARLIEST)
    starting_time: float | None = option("startingTimestamp", moment, None)
    ending: Ending = option("endingOffsets", parse_ending, None)
    most_messages: int | None = option("maxMessagesPerTrigger", count, None)
    most_bytes: int | None = option("maxBytesPerTrigger", size, None)
    least_messages: int | None = option("minMessagesPerTrigger", count, None)
    most_delay: float = option("maxTriggerDelay", seconds, 900.0)
    fail_on_missing_server: bool = option("failOnMissingServer", yes_or_no, False)
    fail_on_data_loss: bool = option("failOnDataLoss", yes_or_no, True)
    reader: str = option("reader", parse_name, "")
    ack_mode: AckMode | None = option("ackMode", choice(AckMode), None)
    planning: Planning = option("planning", choice(Planning), Planning.AUTO)
    status_timeout: float = option("statusTimeout", seconds, 60.0)
    read_timeout: float = option("readTimeout", seconds, 120.0)
    ack_timeout: float = option("ackTimeout", seconds, 10.0)
    prefetch_wait: float = option("prefetchWait", seconds, 1.0)
    connections: int = option("connections", count, 32)
    batch_rows: int = option("batchRows", count, 10_000)
    most_partitions: int | None = option("maxPartitions", count, None)
    least_partitions: int | None = option("minPartitions", count, None)
    partition_messages: int = option("maxMessagesPerPartition", count, 100_000)
    message_bytes: int = option("maxMessageBytes", size, 2 << 20)
    verify: Verify = option("verify", choice(Verify), Verify.NONE)
    pushes_filters: bool = option("filterPushdown", yes_or_no, False)
    stop_file: str | None = option("stopFile", text, None)
    tls: Tls = attrs.field(factory=Tls, metadata={"nested": Tls})

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse the options that Spark was given. Raises `OptionError`."""
        given = GivenOptions(options, SOURCE_OPTIONS, passed_over=("path",))
        parsed = given.read(cls)
        parsed._check()
        return parsed

    @property
    def acknowledging(self) -> AckMode:
        """When to acknowledge. By default, a query without the option `reader` never does."""
        return self.ack_mode or (AckMode.IDLE if self.reader else AckMode.NEVER)

    @property
    def enrolled(self) -> str:
        """The reader for which servers keep messages, or an empty string if they keep none for this query."""
        return "" if self.acknowledging is AckMode.NEVER else self.reader

    def _check(self) -> None:
        if not self.streams and self.streams_file is None and self.directory is None and self.pattern is None:
            raise OptionError(
                "streams", "it is missing: name uuids here, or give subscribePattern, streamsFile or directory instead"
            )
        if self.pattern is not None and not self.servers:
            raise OptionError("servers", "it is missing, and subscribePattern needs servers to ask for their streams")
        if self.pattern is not None and self.planning is Planning.PREFETCH:
            raise OptionError("planning", "subscribePattern needs status requests: use auto or status")
        named = [*self.streams, *([self.directory] if self.directory else [])]
        lost = [each.uuid for each in named if each.server is None]
        if not self.servers and lost:
            raise OptionError("servers", f"it is missing, and stream {lost[0]} comes without a server of its own")
        if self.planning is Planning.PREFETCH and len(self.servers) > 1 and lost:
            raise OptionError(
                "planning",
                f"with prefetch it cannot be asked which of {len(self.servers)} servers has stream {lost[0]}: "
                "write url#uuid",
            )
        if self.starting_time is not None and self.starting is not Start.EARLIEST:
            raise OptionError("startingTimestamp", "startingOffsets is given as well")
        if self.least_partitions and self.most_partitions and self.least_partitions > self.most_partitions:
            raise OptionError("minPartitions", f"{self.least_partitions} is above maxPartitions={self.most_partitions}")
        if self.least_messages and self.most_messages and self.least_messages > self.most_messages:
            raise OptionError(
                "minMessagesPerTrigger", f"{self.least_messages} is above maxMessagesPerTrigger={self.most_messages}"
            )


SOURCE_OPTIONS: Final = option_names(SourceOptions)


# ---------------------------------------------------------------------------- the sink


class RowEncoding(Enum):
    """The encoding of a row."""

    AUTO = "auto"
    """VALUE for one column `value` of strings or bytes, RECORD if there are also `key` or `headers` and no others, and
    otherwise JSON."""
    VALUE = "value"
    """The content of the column `value`."""
    JSON = "json"
    """A JSON object with all columns."""
    RECORD = "record"
    """The columns `value`, `key` and `headers`, as in Kafka and in the rows of the source."""


class Spread(Enum):
    """How rows are distributed to several servers."""

    COPIES = "copies"
    """Each server gets every row."""
    PARTITIONS = "partitions"
    """Each partition goes to one of the servers."""


@attrs.frozen(kw_only=True)
class SinkOptions:
    """All options of the sink."""

    urls: tuple[str, ...] = attrs.field(repr=_shown_urls)
    spread: Spread = option("spread", choice(Spread), Spread.COPIES)
    stream: str = option("stream", parse_name, "main")
    app: str | None = option("txnAppId", parse_name, None)
    txn: str | None = option("txnId", parse_name, None)
    ttl: float = option("txnTtl", seconds, 86_400.0)
    channels: int = option("channels", parse_channels, 1)
    window: int = option("windowBytes", parse_window, 1 << 20)
    encoding: RowEncoding = option("encoding", choice(RowEncoding), RowEncoding.AUTO)
    token: str = option("token", text, "", shown=False)
    patience: float = option("patience", seconds, 60.0)
    tls: Tls = attrs.field(factory=Tls, metadata={"nested": Tls})

    def urls_of(self, partition: int, batch: int) -> tuple[str, ...]:
        """Return the servers for a partition of a batch. The result is the same whenever the batch is repeated."""
        if self.spread is Spread.COPIES:
            return self.urls
        return (sorted(self.urls)[(partition + batch) % len(self.urls)],)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Parse the options that Spark was given. Raises `OptionError`."""
        given = GivenOptions(options, SINK_OPTIONS, passed_over=("path", "checkpointLocation", "queryName"))
        parsed = given.read(cls, urls=_urls(given))
        if streaming and parsed.txn is not None:
            raise OptionError(
                "txnId", "it is for batch writes; a streaming query has txnAppId and its own batch numbers"
            )
        if not streaming and parsed.app is not None:
            raise OptionError("txnAppId", "it is for streaming queries; a batch write has txnId")
        return parsed


SINK_OPTIONS: Final = ("url", "urls", *option_names(SinkOptions))


def _urls(given: GivenOptions) -> tuple[str, ...]:
    one, several = given.text("url"), given.text("urls")
    if one is None and several is None:
        raise OptionError("url", "it is missing; such as bpmux+tcp://127.0.0.1:7000")
    if one is not None and several is not None:
        raise OptionError("urls", "url is given as well; write all of them here, with spaces between them")
    found = tuple((one or several or "").split())
    name = "url" if several is None else "urls"
    for url in found:
        scheme, separator, address = url.partition("://")
        if not (separator and address and "+" in scheme):
            raise OptionError(name, f"expected a URL such as bpmux+tcp://127.0.0.1:7000, got {_shown(url)!r}")
    if len(set(found)) < len(found):
        raise OptionError(name, "a server is named twice")
    if name == "url" and len(found) > 1:
        raise OptionError(name, "there are several; that is the option urls")
    return found
