"""The errors of protocols: something illegal was asked for on this side, or by the peer.

The errors of a transport that went away need Trio's own classes, so they are in `muxkit.runtime`.
"""

from __future__ import annotations

from typing import ClassVar


class MuxError(Exception):
    """The base of all errors that muxkit raises by itself."""

    _in_repr: ClassVar[tuple[str, ...]] = ("reason", "code")
    """Attributes that `repr` shows, which is what loggers, pytest and notebooks print."""

    def __repr__(self) -> str:
        shown = [repr(each) for each in self.args]
        for name in self._in_repr:
            value = getattr(self, name, None)
            if value and value not in self.args:
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


class ProtocolError(MuxError):
    """One side broke the rules of the protocol."""


class Refused(MuxError):
    """Raised by a server, in `authorize` or in the handler of a session, to send a client away; the text is the reason.

    A client raises it too, when it was not let in with its token; `peer` is then the server.
    """

    def __init__(self, reason: str = "this server does not let you in", *, code: int = 401, peer: str = "") -> None:
        super().__init__(f"{peer}: {reason}" if peer else reason)
        self.reason = reason
        self.code = code
        self.peer = peer


class LocalProtocolError(ProtocolError):
    """The application asked for something that the protocol forbids; nothing was sent and nothing changed."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule or a limit; the connection is over.

    `rule` is the id of the clause that was broken, `offset` the position in the received bytes where the
    offending frame begins, `limit` the field of `muxkit.Limits` to raise if the peer was in the right. `recent` has the
    last events of a session that was traced.
    """

    _in_repr = ("rule", "offset", "limit")

    def __init__(
        self, message: str, *, rule: str | None = None, offset: int | None = None, limit: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rule = rule
        self.offset = offset
        self.limit = limit
        self.recent: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = [part for part in (self.rule, None if self.offset is None else f"byte {self.offset}") if part]
        text = f"{self.message} ({', '.join(where)})" if where else self.message
        return f"{text}; raise Limits({self.limit}=…) if this peer is right" if self.limit else text


class ExtraNeeded(ImportError):
    """A part of muxkit needs packages that are not installed; `extra` of muxkit brings them."""

    def __init__(self, name: str, extra: str, *, link: str = "stream") -> None:
        super().__init__(f"{name} is not installed: pip install 'muxkit[{extra}]'")
        self.extra = extra
        self.link = link
        """The kind of link that it would carry, if it is a transport."""
