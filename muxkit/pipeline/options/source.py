"""The options of the source. Each is read once, into a checked value; errors name the option."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Final

import attrs

from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.options import values
from muxkit.pipeline.options.tls import TLS_NAMES, Tls
from muxkit.pipeline.options.values import Reference, parse_reference, parse_references, parse_servers

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_ID: Final = 0xFFFFFFFF
PASSED_OVER: Final = ("path",)


class AckMode(Enum):
    """When a server may delete what was read."""

    IDLE = "idle"
    """When Spark commits a batch, or when nothing came after it."""
    COMMIT = "commit"
    """When Spark commits a batch. It does so while it makes the next one, so the last batch is kept."""
    NEVER = "never"


class Planning(Enum):
    """How the driver learns which messages there are."""

    AUTO = "auto"
    """By status requests, by prefetch where a server answers none."""
    STATUS = "status"
    PREFETCH = "prefetch"
    """The driver reads ahead and counts; workers read the same again."""


class Verify(Enum):
    """What is verified beside the ids."""

    NONE = "none"
    NUMBERS = "numbers"
    """The values and, in a range from the first message to the last, the CRC of the document's application."""


class Start(Enum):
    """Where a stream begins that this query has not read before."""

    EARLIEST = "earliest"
    """After what was acknowledged."""
    LATEST = "latest"
    """After what is there when the query first asks."""


Starting = Start | dict[str, int]
Ending = dict[str, int] | None
"""By stream; None means everything."""


@attrs.frozen(kw_only=True)
class SourceOptions:
    """All options of a source."""

    servers: tuple[str, ...] = ()
    streams: tuple[Reference, ...] = ()
    streams_file: str | None = None
    directory: Reference | None = None
    starting: Starting = Start.EARLIEST
    ending: Ending = None
    most_messages: int | None = None
    most_bytes: int | None = None
    least_messages: int | None = None
    most_delay: float = 900.0
    fail_on_data_loss: bool = True
    ack_mode: AckMode = AckMode.IDLE
    planning: Planning = Planning.AUTO
    status_timeout: float = 60.0
    read_timeout: float = 120.0
    ack_timeout: float = 10.0
    prefetch_wait: float = 1.0
    connections: int = 32
    batch_rows: int = 10_000
    most_partitions: int | None = None
    message_bytes: int = 2 << 20
    verify: Verify = Verify.NONE
    json_schema: str | None = None
    filter_pushdown: bool = False
    tls: Tls = attrs.field(factory=Tls)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Read the options that Spark was given; raises `OptionError`."""
        given = values.GivenOptions(options)
        given.refuse_unknown(NAMES, passed_over=PASSED_OVER)
        read = given.read
        parsed = cls(
            servers=read("servers", parse_servers, ()),
            streams=read("streams", parse_references, ()),
            streams_file=given.text("streamsFile"),
            directory=read("directory", parse_reference, None),
            starting=read("startingOffsets", _starting, _EARLIEST),
            ending=read("endingOffsets", _ending, None),
            most_messages=read("maxMessagesPerTrigger", values.count, None),
            most_bytes=read("maxBytesPerTrigger", values.size, None),
            least_messages=read("minMessagesPerTrigger", values.count, None),
            most_delay=read("maxTriggerDelay", values.seconds, 900.0),
            fail_on_data_loss=read("failOnDataLoss", values.yes_or_no, True),
            ack_mode=read("ackMode", values.choice(AckMode), AckMode.IDLE),
            planning=read("planning", values.choice(Planning), Planning.AUTO),
            status_timeout=read("statusTimeout", values.seconds, 60.0),
            read_timeout=read("readTimeout", values.seconds, 120.0),
            ack_timeout=read("ackTimeout", values.seconds, 10.0),
            prefetch_wait=read("prefetchWait", values.seconds, 1.0),
            connections=read("connections", values.count, 32),
            batch_rows=read("batchRows", values.count, 10_000),
            most_partitions=read("maxPartitions", values.count, None),
            message_bytes=read("maxMessageBytes", values.size, 2 << 20),
            verify=read("verify", values.choice(Verify), Verify.NONE),
            json_schema=given.text("jsonSchema"),
            filter_pushdown=read("filterPushdown", values.yes_or_no, False),
            tls=Tls.parse(given),
        )
        parsed._check()
        return parsed

    def _check(self) -> None:
        if not self.streams and self.streams_file is None and self.directory is None:
            raise OptionError("streams", "it is missing: name uuids here, or give streamsFile or directory instead")
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
        if self.least_messages and self.most_messages and self.least_messages > self.most_messages:
            raise OptionError(
                "minMessagesPerTrigger", f"{self.least_messages} is above maxMessagesPerTrigger={self.most_messages}"
            )


NAMES: Final = (
    "servers",
    "streams",
    "streamsFile",
    "directory",
    "startingOffsets",
    "endingOffsets",
    "maxMessagesPerTrigger",
    "maxBytesPerTrigger",
    "minMessagesPerTrigger",
    "maxTriggerDelay",
    "failOnDataLoss",
    "ackMode",
    "planning",
    "statusTimeout",
    "readTimeout",
    "ackTimeout",
    "prefetchWait",
    "connections",
    "batchRows",
    "maxPartitions",
    "maxMessageBytes",
    "verify",
    "jsonSchema",
    "filterPushdown",
    *TLS_NAMES,
)


_EARLIEST: Final[Starting] = Start.EARLIEST


def _starting(value: str, name: str) -> Starting:
    for each in Start:
        if value.lower() == each.value:
            return each
    return _by_stream(value, name, "earliest, latest or ")


def _ending(value: str, name: str) -> Ending:
    return None if value.lower() == "latest" else _by_stream(value, name, "latest or ")


def _by_stream(value: str, name: str, others: str) -> dict[str, int]:
    """Parse the number of messages of each stream before a point: JSON, `{"uuid": id}`."""
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(id) is int and 0 <= id <= MOST_ID for id in found.values()):
        raise OptionError(name, f'{value[:100]!r} is not {others}JSON as {{"uuid": 1750}}')
    return {parse_reference(uuid, name).uuid: id for uuid, id in found.items()}
