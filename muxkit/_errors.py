"""The errors that need no Trio: violations of a protocol, refusals, and missing packages.

Engines raise them, and engines can be used without Trio. The errors for lost connections are subclasses of Trio's
errors, so they are in `muxkit.runtime`.
"""

from __future__ import annotations

from typing import ClassVar


class MuxError(Exception):
    """Base class of the errors that muxkit defines."""

    _in_repr: ClassVar[tuple[str, ...]] = ("reason", "code")
    """The attributes that `repr` shows. Loggers, pytest and notebooks print it."""

    def __repr__(self) -> str:
        shown = [repr(each) for each in self.args]
        for name in self._in_repr:
            value = getattr(self, name, None)
            if value and value not in self.args:
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


class ProtocolError(MuxError):
    """One of the sides broke a rule of the protocol."""


class Refused(MuxError):
    """The server refuses a client.

    A server's program raises this in `authorize` or in the handler of a session, and the client gets the reason. In a
    handler of a channel, it refuses only the channel.

    At the client, `muxkit.connect` raises this if the server refuses the client's token.

    Attributes:
        reason: The text that the client gets.
        code: The code that the client gets. Codes have the meanings of HTTP.
        peer: The address of the server, if a client raises this.
    """

    def __init__(self, reason: str = "this server does not let you in", *, code: int = 401, peer: str = "") -> None:
        super().__init__(f"{peer}: {reason}" if peer else reason)
        self.reason = reason
        self.code = code
        self.peer = peer


class LocalProtocolError(ProtocolError):
    """The application called for something that the protocol forbids. Nothing was sent, and nothing has changed."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule or exceeded a limit. The connection can't continue.

    Attributes:
        message: A description of the problem.
        rule: The id of the rule, as in the conformance page, or None.
        offset: The position of the invalid frame in all received bytes, or None.
        limit: The field of `muxkit.Limits` that was exceeded, or None. Raise it if the peer's behavior is legitimate.
        recent: The last events of the session, if it was traced.
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
    """A part of muxkit needs packages that aren't installed.

    Attributes:
        extra: The extra of muxkit that installs them.
    """

    def __init__(self, name: str, extra: str, *, link: str = "stream") -> None:
        super().__init__(f"{name} is not installed: pip install 'muxkit[{extra}]'")
        self.extra = extra
        self.link = link
        """The kind of link of the transport, if a transport is missing."""
