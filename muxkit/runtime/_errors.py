"""The errors of a live connection: subclasses of Trio's own, so that code written for sockets handles them.

`can_heal` decides for the whole library whether an error is worth another attempt.
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
"""When a connection was lost: before it stood, before the protocol began, while it was used, while it was closed."""


SHORTEST_TOLD: Final = 1.0  # s that a connection has to live for the text of its loss to say how long it did


class LinkLost(MuxError, trio.BrokenResourceError):
    """The connection is gone; raised by every call that waits for it, each time as a new error.

    `by` says which side ended it, `peer_reason` and `code` what the peer gave as its reason (None if it gave none),
    `phase` when it was, `hint` what to try. `after` is how long the connection had lived in seconds, `unsent` how many
    bytes accepted by `send` never reached the transport. `found` names another protocol that the peer's first bytes
    look like, such as "an HTTP response". The cause, if there is one, is `__cause__`.
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
        # Below a second the time says nothing that the reader doesn't know: the connection ended as it began.
        when = "" if self.after is None or self.after < SHORTEST_TOLD else f", {self.after:.1f} s after it began"
        unsent = f"; {self.unsent:,} bytes were not sent" if self.unsent else ""
        return f"{who}{why}{when}{unsent}{f'. {self.hint}' if self.hint else ''}"


class _EndedByPeer(MuxError, trio.BrokenResourceError):
    """The peer ended one direction of a channel; `text` and `code` are the reason that it gave, `payload` its bytes."""

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
    """The peer does not want to receive on this channel any more; `reason` and `code` are what it said about that."""


class ChannelCancelled(_EndedByPeer):
    """The peer gave up sending on this channel before it was done; `reason` and `code` are what it said about that.

    A session keeps the first 4 KiB of its `payload`.
    """


class Unsupported(MuxError):
    """The protocol or the link has no such operation."""


class HandshakeFailed(ConnectionError):
    """The peer was reached, but one side refused the other; the text names the host and the reason.

    The attributes hold the facts by which `can_heal` decides whether another attempt makes sense. `status` is the
    status of an HTTP answer, `alert` the TLS alert that one side sent, and `found` the protocol that the peer's bytes
    look like. Each is None if it doesn't apply.
    """

    def __init__(
        self, text: str, *, status: int | None = None, alert: str | None = None, found: str | None = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.alert = alert
        self.found = found


class AllAttemptsFailed(ConnectionError):
    """Several URLs or addresses were tried, and none of them gave a connection; the text has the reason for each.

    `attempts` has the name of each attempt, such as its URL without a password, and its error. The errors are also the
    members of an exception group in `__cause__`.
    """

    def __init__(self, text: str, attempts: Sequence[tuple[str, Exception]] = ()) -> None:
        super().__init__(text)
        self.attempts: tuple[tuple[str, Exception], ...] = tuple(attempts)


class PlaintextWarning(UserWarning):
    """A connection without encryption leaves this machine, because `insecure=True` asked for it."""


class LossRecord:
    """Why a connection ended, from which each task that raises gets an error of its own; made when it begins."""

    __slots__ = ("_began", "_cause", "_is_recorded", "_make", "_peer", "told")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.told: Reason | None = None
        """What the peer gave as its reason, which may come before the end of the connection."""
        self._began = trio.current_time()
        self._cause: BaseException | None = None
        self._is_recorded = False
        self._make = partial(LinkLost, "the connection is over", by="local", peer=peer)

    def tell(self, reason: Reason) -> None:
        """Note why the peer ends the connection, whose end may still be on its way; the first reason counts."""
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
        """The connection ends now; `unsent` bytes were not taken by the transport."""
        self._cause = cause
        self._is_recorded = True
        after = trio.current_time() - self._began
        self._make = partial(
            LinkLost, reason, by=by, peer=self._peer, after=after, unsent=unsent, phase=phase, hint=hint, found=found
        )

    @property
    def is_refusal(self) -> bool:
        """True if the peer sent this side away: it gave a code from 400 to 499, such as 401, or sent it elsewhere."""
        return self.told is not None and (400 <= self.told.code < 500 or self.told.code == MOVED)

    @property
    def is_violation(self) -> bool:
        """True if it ended because the peer broke a rule."""
        return isinstance(self._cause, RemoteProtocolError)

    def error(self) -> LinkLost:
        told = self.told or Reason()
        error = self._make(peer_reason=told.text or None, code=told.code or None)
        error.__cause__ = self._cause
        return error


_ALERT = re.compile(r"(?:SSLV3|TLSV1|TLSV13)_ALERT_(\w+)")  # OpenSSL's names for the alerts that it received


def alert_of(error: ssl.SSLError) -> str | None:
    """Return the alert that the peer sent, such as "certificate required"; None if the error is another one."""
    found = _ALERT.fullmatch(error.reason or "")
    return None if found is None else found[1].replace("_", " ").lower()


# ---------------------------------------------------------------------------- retries

RETRIED_ERRORS = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, Refused)
BROKE_A_RULE = 400
MOVED: Final = 307
"""The code of an end by which a server names the URL of another server, as HTTP's temporary redirect."""
PASSING_CODES = frozenset({408, 425, 429})  # of 400 to 499: request timeout, too early, too many requests
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
"""The TLS alerts, by the names of RFC 8446, that the same attempt would bring again."""
HOPELESS_ERRNOS = {errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ENAMETOOLONG, errno.ENOTSOCK, errno.EINVAL}
CAUSES = 10  # of an error to look at


def can_heal(error: BaseException) -> bool:
    """Return True if the same attempt may succeed later.

    Everything that dials again asks this function: `redial` and with it Relink and restream, `reconnecting`, forwards,
    the command line and the pipeline. Waiting doesn't change an address of the wrong kind, a refused certificate, a
    refused token (401) or path (404), or a server of another protocol. A host that isn't found may only be out of
    reach for now, and codes such as 429 and 503 ask for another attempt.
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
    """Return True if the facts in one error of a chain show that waiting won't help."""
    match error:
        case Refused():
            return _is_final_code(error.code)
        case LinkLost():
            # 400 says that we broke a rule, perhaps after hours. A new session may not do it again.
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

HEAD = 24  # bytes that are kept of what a peer sent first

_AQUEDUCT = b"AQUEDUX1"
_RELINK = bytes(8)  # the version, from either side
_BPMUX = b"\xa8\x00"  # credit for the top level
_E3X = re.compile(rb".{1,5}\{\"(c|type|seq|ack|miss|end|err)\"", re.DOTALL)  # the lengths before a head
_YAMUX = re.compile(
    rb"\x00(?:[\x00\x01]\x00[\x01-\x0f]\x00\x00|\x02\x00[\x01\x02]\x00{4}|\x03\x00{6})", re.DOTALL
)  # a header
_TOKEN = b"muxkit 1 "

_METHODS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"TRACE ")


def looks_like(head: bytes) -> str | None:
    """Name what a peer that begins with these bytes probably speaks, None if they could be anything."""
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
