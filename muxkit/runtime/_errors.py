"""The errors of connections, and the decision whether another attempt to connect makes sense.

The errors of channels and sessions are subclasses of Trio's, so code that handles errors of Trio's streams handles them
too. `LossRecord` makes the error for a lost connection, which many tasks may raise. `can_heal` decides for the whole
library whether an attempt that has failed is repeated. `looks_like` guesses from the first bytes of a peer which other
protocol it speaks, for the text of the error.
"""

from __future__ import annotations

import errno
import re
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Final, Literal

import trio

from muxkit._errors import ExtraNeeded as ExtraNeeded
from muxkit._errors import MuxError, Refused, RemoteProtocolError
from muxkit.core import Reason

Side = Literal["peer", "local", "network"]


CLOSED_HERE: Final = "this side closed the session, which ends with its async with block"
"""The reason of a loss that the program itself asked for."""

Phase = Literal["connect", "handshake", "open", "leave"]
"""When a connection was lost: while connecting, during the handshakes before the protocol, in use, or while closing."""


SHORTEST_TOLD: Final = 1.0  # seconds; the text of a loss says how long the connection has lasted only if it was longer


class LinkLost(MuxError, trio.BrokenResourceError):
    """The connection was lost. Every call that needs it raises this error, each time as a new object.

    If an exception caused the loss, it is the `__cause__` of this error.

    Attributes:
        reason: A description of what happened.
        by: The side that ended the connection: "peer", "local" or "network".
        peer: The address of the peer.
        after: How long the connection had lasted, in seconds.
        unsent: How many bytes `send` had accepted and the transport hadn't taken. They certainly didn't arrive.
        peer_reason: The reason that the peer gave, or None.
        code: The code that the peer gave with its reason, or None.
        phase: When the connection was lost. See `Phase`.
        hint: What to do about it, or None.
        found: The protocol that the peer seems to speak instead, such as "an HTTP response", or None.
    """

    _in_repr = ("by", "peer_reason", "code")

    def __init__(
        self,
        reason: str,
        *,
        by: Side,
        peer: str = "",
        after: float | None = None,
        unsent: int = 0,
        peer_reason: str | None = None,
        code: int | None = None,
        phase: Phase = "open",
        hint: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by: Side = by
        self.peer = peer
        self.after = after
        self.unsent = unsent
        self.peer_reason = peer_reason
        self.code = code
        self.phase: Phase = phase
        self.hint = hint
        self.found = found

    def __str__(self) -> str:
        who = f"{self.peer}: " if self.peer else ""
        told = Reason(self.peer_reason or "", self.code or 0)
        why = f"{self.reason}: {told}" if told else self.reason
        # A time below a second is left out, because it only says that the connection was lost immediately.
        when = "" if self.after is None or self.after < SHORTEST_TOLD else f", {self.after:.1f} s after it began"
        unsent = f"; {self.unsent:,} bytes were not sent" if self.unsent else ""
        return f"{who}{why}{when}{unsent}{f'. {self.hint}' if self.hint else ''}"


class _EndedByPeer(MuxError, trio.BrokenResourceError):
    """The peer has ended one direction of a channel.

    Attributes:
        reason: The text of the reason that the peer gave, or "".
        code: The code of the reason, or 0.
        payload: The bytes from which `reason` and `code` were decoded.
    """

    def __init__(self, reason: str, *, payload: bytes = b"", told: Reason | None = None) -> None:
        super().__init__(reason)
        self.payload = payload
        given = Reason.decode(payload) if told is None else told
        self.reason: str = given.text
        self.code: int = given.code

    def __str__(self) -> str:
        told = Reason(self.reason, self.code)
        return f"{super().__str__()}: {told}" if told else super().__str__()


class ChannelStopped(_EndedByPeer):
    """The peer doesn't want to receive any more on this channel. Sending raises this.

    `reason` and `code` say why, if the peer gave a reason.
    """


class ChannelCancelled(_EndedByPeer):
    """The peer has cancelled this channel before it had sent everything. Receiving raises this.

    `reason` and `code` say why, if the peer gave a reason. At most 4 KiB of its `payload` are kept.
    """


class Unsupported(MuxError):
    """The protocol or the transport doesn't have the operation that was called."""


class HandshakeFailed(ConnectionError):
    """The peer was reached, but one side has rejected the other. The text names the host and the reason.

    The attributes are facts from which `can_heal` decides whether another attempt makes sense. Each is None if it
    doesn't apply.

    Attributes:
        status: The status of the peer's HTTP response.
        alert: The TLS alert that one of the sides sent.
        found: The protocol that the peer seems to speak instead.
    """

    def __init__(
        self, text: str, *, status: int | None = None, alert: str | None = None, found: str | None = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.alert = alert
        self.found = found


class AllAttemptsFailed(ConnectionError):
    """Several URLs or addresses were tried, and no attempt succeeded. The text contains the reason for each.

    Attributes:
        attempts: For each attempt, its name and its error. The name is the URL or address, without a password. The
            errors are also the members of an exception group, which is the `__cause__` of this error.
    """

    def __init__(self, text: str, attempts: Sequence[tuple[str, Exception]] = ()) -> None:
        super().__init__(text)
        self.attempts: tuple[tuple[str, Exception], ...] = tuple(attempts)


class PlaintextWarning(UserWarning):
    """A connection to another machine isn't encrypted, because the program passed `insecure=True`."""


class LossRecord:
    """Records why a connection ends, and makes a new error for each task that raises it.

    A task adds its traceback to the exception that it raises, so tasks mustn't share one. The record is created when
    the connection begins.
    """

    __slots__ = ("_began", "_cause", "_is_recorded", "_make", "_peer", "told")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.told: Reason | None = None
        """The reason that the peer gave. It may arrive before the connection ends."""
        self._began = trio.current_time()
        self._cause: BaseException | None = None
        self._is_recorded = False  # True once the connection has ended
        self._make = partial(LinkLost, "the connection has ended", by="local", peer=peer)

    def tell(self, reason: Reason) -> None:
        """Record the peer's reason for ending the connection. Only the first reason counts."""
        if self.told is None:
            self.told = reason
            if not self._is_recorded:
                self._make = partial(LinkLost, "the peer ends the connection", by="peer", peer=self._peer)

    def record(
        self,
        reason: str,
        *,
        by: Side,
        cause: BaseException | None,
        unsent: int,
        phase: Phase = "open",
        hint: str | None = None,
        found: str | None = None,
    ) -> None:
        """Record that the connection ends now. The arguments become attributes of the errors (`LinkLost`)."""
        self._cause = cause
        self._is_recorded = True
        after = trio.current_time() - self._began
        self._make = partial(
            LinkLost, reason, by=by, peer=self._peer, after=after, unsent=unsent, phase=phase, hint=hint, found=found
        )

    @property
    def is_refusal(self) -> bool:
        """True if the peer doesn't want this client: its code is from 400 to 499, such as 401, or is a redirect."""
        return self.told is not None and (400 <= self.told.code < 500 or self.told.code == MOVED)

    @property
    def is_violation(self) -> bool:
        """True if the connection ended because the peer broke a rule of the protocol."""
        return isinstance(self._cause, RemoteProtocolError)

    def error(self) -> LinkLost:
        """Return a new error for the loss."""
        told = self.told or Reason()
        error = self._make(peer_reason=told.text or None, code=told.code or None)
        error.__cause__ = self._cause
        return error


_ALERT = re.compile(r"(?:SSLV3|TLSV1|TLSV13)_ALERT_(\w+)")  # OpenSSL's names for the alerts that it received


def alert_of(error: ssl.SSLError) -> str | None:
    """Return the TLS alert of the peer that caused an error, such as "certificate required", or None."""
    found = _ALERT.fullmatch(error.reason or "")
    return None if found is None else found[1].replace("_", " ").lower()


# ---------------------------------------------------------------------------- retries

RETRIED_ERRORS = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, Refused)
BROKE_A_RULE = 400
MOVED: Final = 307
"""The code with which a server redirects a client to the URL of another server. It is HTTP's temporary redirect."""
# Codes from 400 to 499 after which another attempt makes sense: request timeout, too early, too many requests
PASSING_CODES = frozenset({408, 425, 429})
FINAL_ALERTS = frozenset(
    {
        "access denied",
        "bad certificate",
        "certificate expired",
        "certificate required",
        "certificate revoked",
        "certificate unknown",
        "handshake failure",
        "insufficient security",
        "missing extension",
        "no application protocol",
        "no application protocol in common",  # as QUIC's transport calls it
        "protocol version",
        "unknown authority",  # as the transports of QUIC and DTLS call it
        "unknown ca",
        "unrecognized name",
        "unsupported certificate",
    }
)
"""The TLS alerts after which another attempt would fail in the same way. The names are those of RFC 8446."""
HOPELESS_ERRNOS = {errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ENAMETOOLONG, errno.ENOTSOCK, errno.EINVAL}
CAUSES = 10  # maximum number of errors in a chain of causes that `can_heal` looks at


def can_heal(error: BaseException) -> bool:
    """Return True if the same attempt may succeed later.

    All code that reconnects uses this function: `reconnecting`, Relink, restream, forwards, the command line and the
    pipeline. It returns False for errors that waiting doesn't change, such as an address of the wrong kind, a rejected
    certificate, a rejected token (401), an unknown path (404), or a server that speaks another protocol. It returns
    True if a host isn't found, because the name server may be unreachable only now, and for codes such as 429 and 503,
    which ask for another attempt.
    """
    if isinstance(error, RemoteProtocolError) or not isinstance(error, RETRIED_ERRORS):
        return False
    link: BaseException | None = error
    for _ in range(CAUSES):
        if link is None:
            break
        if _is_final(link):
            return False
        link = link.__cause__
    return True


def _is_final(error: BaseException) -> bool:
    """Return True if this error shows that another attempt will fail too. The caller checks its causes."""
    match error:
        case Refused():
            return _is_final_code(error.code)
        case LinkLost():
            # 400 means that we broke a rule, perhaps after hours. A new session may work for as long.
            return error.found is not None or (error.code != BROKE_A_RULE and _is_final_code(error.code))
        case HandshakeFailed():
            is_answer = error.status is not None and (error.status < 400 or _is_final_code(error.status))
            return error.found is not None or is_answer or error.alert in FINAL_ALERTS
        case RemoteProtocolError():
            return error.offset == 0  # the very first bytes were wrong, so the peer speaks something else
        case AllAttemptsFailed():
            return not any(can_heal(each) for _, each in error.attempts)
        case ssl.SSLCertVerificationError():
            return True
        case ssl.SSLError():
            return alert_of(error) in FINAL_ALERTS
        case OSError():
            return error.errno in HOPELESS_ERRNOS
        case _:
            return False


def _is_final_code(code: int | None) -> bool:
    return code is not None and 400 <= code < 500 and code not in PASSING_CODES


# ---------------------------------------------------------------------------- hints

HEAD = 24  # number of bytes from the beginning of a connection that are kept for `looks_like`

_AQUEDUCT = b"AQUEDUX1"
_RELINK = bytes(8)  # the version number, with which both sides begin
_BPMUX = b"\xa8\x00"  # the frame that grants credit for opening channels
_E3X = re.compile(rb".{1,5}\{\"(c|type|seq|ack|miss|end|err)\"", re.DOTALL)  # a packet: its lengths and a JSON object
_YAMUX = re.compile(
    rb"\x00(?:[\x00\x01]\x00[\x01-\x0f]\x00\x00|\x02\x00[\x01\x02]\x00{4}|\x03\x00{6})", re.DOTALL
)  # a header
_TOKEN = b"muxkit 1 "

_METHODS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"TRACE ")


def looks_like(head: bytes) -> str | None:
    """Return the name of the protocol that a peer probably speaks if it begins with these bytes, or None."""
    if head[:1] == b"\x16" and head[1:2] == b"\x03":
        return "TLS"
    if head[:1] == b"\x15" and head[1:2] == b"\x03":
        return "a TLS alert"
    if head.startswith(b"HTTP/"):
        return "an HTTP response"
    if head.startswith(b"PRI * HTTP/2"):
        return "HTTP/2"
    if head.startswith(_METHODS):
        return "an HTTP request"
    if head.startswith(b"SSH-"):
        return "SSH"
    if head.startswith((b"220 ", b"220-")):
        return "a mail or FTP server"
    if head.lstrip()[:1] == b"{":
        return "JSON, such as restream"
    if head.startswith(_AQUEDUCT):
        return "Aqueduct"
    if head.startswith(_RELINK):
        return "Relink"
    if head.startswith(_TOKEN):
        return "the token of a muxkit client, for a server with authorize="
    if _E3X.match(head):
        return "e3x"
    if _YAMUX.match(head):
        return "yamux"
    if head.startswith(_BPMUX):
        return "bpmux"
    return None
