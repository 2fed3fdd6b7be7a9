"""How did a QUIC connection end, in words? By whom, with which code, and what the peer said about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import trio
from aioquic.quic.packet import QuicErrorCode

if TYPE_CHECKING:
    from muxkit import RemoteProtocolError

    from .connection import LimitedConnection

ORDERLY: Final = 0
FAILED: Final = 1  # the codes with which an application ends a connection are its own; these are ours
REASON_MOST = 256  # bytes of text in a goodbye
TLS_ALERTS: Final = 0x100  # and above: an alert of TLS


class ConnectionEnded(trio.BrokenResourceError):
    """A QUIC connection is over, and not in order.

    `code` is the number in the goodbye, `is_application` whether the application gave it rather than QUIC, `reason`
    the text that came with it. `by` says whose doing it was.
    """

    def __init__(
        self, text: str, *, code: int, is_application: bool, reason: str, by: Literal["peer", "local", "network"]
    ) -> None:
        super().__init__(text)
        self.code = code
        self.is_application = is_application
        self.reason = reason
        self.by: Literal["peer", "local", "network"] = by


def ending_of(
    quic: LimitedConnection, name: str, *, by_us: bool, failure: RemoteProtocolError | None
) -> ConnectionEnded | None:
    """What to raise; None while it lives, after an orderly end, and when we closed it ourselves."""
    ending = quic.ending
    if ending is None or by_us:
        return None
    code, reason = ending.error_code, printable(ending.reason_phrase)
    is_application = ending.frame_type is None
    by: Literal["peer", "local", "network"] = "peer"
    if failure is not None:
        text = f"{name}: {failure}"
    elif quic.is_ended_by_peer:
        if code == ORDERLY:
            return None
        text = f"{name}: the peer closed the connection with {_named(code, is_application)}{_with(reason)}"
    elif quic.is_timed_out:
        by = "network"
        text = f"{name}: nothing was heard for {quic.configuration.idle_timeout:g} s"
    else:
        text = f"{name}: the peer broke a rule of QUIC, {_named(code, is_application)}{_with(reason)}"
    error = ConnectionEnded(text, code=code, is_application=is_application, reason=reason, by=by)
    error.__cause__ = failure
    return error


def clipped(text: str) -> str:
    """So much of it as may stand in a goodbye, which is one packet."""
    return text.encode()[:REASON_MOST].decode(errors="ignore")


def printable(text: str) -> str:
    """What a peer wrote, for a log or a terminal."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text[:REASON_MOST])


def _named(code: int, is_application: bool) -> str:
    if is_application:
        return f"code {code}"
    if code in {known.value for known in QuicErrorCode}:
        return QuicErrorCode(code).name.lower().replace("_", " ")
    return f"TLS alert {code - TLS_ALERTS}" if code >= TLS_ALERTS else f"code {code:#x} of QUIC"


def _with(reason: str) -> str:
    return f": {reason}" if reason else ""
