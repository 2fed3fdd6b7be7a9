"""The options of the sink. Each is read once, into a checked value; errors name the option."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import attrs

from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.options import values
from muxkit.pipeline.options.tls import TLS_NAMES, Tls
from muxkit.pipeline.staging.records import LONGEST_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

PASSED_OVER: Final = ("path", "checkpointLocation", "queryName")
LEAST_WINDOW: Final = 4 << 10
MOST_CHANNELS: Final = 64


class RowEncoding(Enum):
    """How a row is encoded."""

    AUTO = "auto"
    """VALUE if there is one column, `value`, of strings or bytes; else JSON."""
    VALUE = "value"
    """The column `value`, as it is."""
    JSON = "json"
    """An object with all columns."""


@attrs.frozen(kw_only=True)
class SinkOptions:
    """All options of a sink."""

    urls: tuple[str, ...]
    stream: str = "main"
    app: str | None = None
    txn: str | None = None
    ttl: float = 86_400.0
    channels: int = 1
    window: int = 1 << 20
    encoding: RowEncoding = RowEncoding.AUTO
    token: str = attrs.field(default="", repr=False)
    patience: float = 60.0
    tls: Tls = attrs.field(factory=Tls)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Read the options that Spark was given; raises `OptionError`."""
        given = values.GivenOptions(options)
        given.refuse_unknown(NAMES, passed_over=PASSED_OVER)
        read = given.read
        parsed = cls(
            urls=_urls(given),
            stream=read("stream", _name, "main"),
            app=read("txnAppId", _name, None),
            txn=read("txnId", _name, None),
            ttl=read("txnTtl", values.seconds, 86_400.0),
            channels=read("channels", _channels, 1),
            window=read("windowBytes", _window, 1 << 20),
            encoding=read("encoding", values.choice(RowEncoding), RowEncoding.AUTO),
            token=given.text("token") or "",
            patience=read("patience", values.seconds, 60.0),
            tls=Tls.parse(given),
        )
        if streaming and parsed.txn is not None:
            raise OptionError(
                "txnId", "it is for batch writes; a streaming query has txnAppId and its own batch numbers"
            )
        if not streaming and parsed.app is not None:
            raise OptionError("txnAppId", "it is for streaming queries; a batch write has txnId")
        return parsed


NAMES: Final = (
    "url",
    "urls",
    "stream",
    "txnAppId",
    "txnId",
    "txnTtl",
    "channels",
    "windowBytes",
    "encoding",
    "token",
    "patience",
    *TLS_NAMES,
)


def _urls(given: values.GivenOptions) -> tuple[str, ...]:
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
            raise OptionError(name, f"{url[:100]!r} is no URL such as bpmux+tcp://127.0.0.1:7000")
    if len(set(found)) < len(found):
        raise OptionError(name, "a server is named twice")
    if name == "url" and len(found) > 1:
        raise OptionError(name, "there are several; that is the option urls")
    return found


def _name(value: str, name: str) -> str:
    if len(value) > LONGEST_NAME or not value.isprintable():
        raise OptionError(name, f"{value[:100]!a} is not 1 to {LONGEST_NAME} printable characters")
    return value


def _channels(value: str, name: str) -> int:
    count = values.count(value, name)
    if count > MOST_CHANNELS:
        raise OptionError(name, f"{count} is above {MOST_CHANNELS}")
    return count


def _window(value: str, name: str) -> int:
    size = values.size(value, name)
    if size < LEAST_WINDOW:
        raise OptionError(name, f"{size} bytes are less than {LEAST_WINDOW}")
    return size
