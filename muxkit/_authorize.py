"""Authentication of clients with tokens, and the decision of a server which clients it accepts.

A client with a token sends a line before the first byte of its protocol, and the server answers with another line:

    client:  muxkit 1 <protocol> <token in base64url>\\n
    server:  ok\\n    or    no <reason>\\n

A client without a token sends no line. The server knows the difference from the first byte, because no protocol begins
with an "m". This works on byte streams only. Clients on other links authenticate with a certificate.
"""

from __future__ import annotations

import base64
import hmac
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import attrs
import trio

from muxkit._errors import Refused, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core import Reason, printable
from muxkit.runtime import (
    HandshakeQueue,
    LinkLost,
    SessionInfo,
    describe,
    log_failure,
    looks_like,
    meaning_of,
    prefixed,
    protect_package,
)

MAGIC = b"muxkit 1 "
LINE_MOST = 4096  # maximum length of a line in bytes
NO_AUTHORIZE = "It may have no authorize=; then leave token= out"
TOKEN_MOST = 2048  # maximum length of a token in characters
ANSWER_TIMEOUT = 10.0  # maximum number of seconds until the server's line
AUTHORIZE_FAILED = 500  # the code of a refusal because `authorize` itself failed, as in HTTP

Authorize: TypeAlias = "Callable[[SessionInfo, str | None], str | Awaitable[str | None] | None]"
"""A function that decides whether a server accepts a client. It may be a coroutine function.

It gets the information about the connection, and the client's token, which is None if the client has sent none. It
returns the name of the user for `session.info.user`, or raises `Refused` with the reason that the client gets.
"""


def tokens(users: Mapping[str, str]) -> Authorize:
    """Return a function for `authorize=` that accepts clients with one of these tokens.

    The token of a client is compared with all of them, each time in constant time, so that an attacker can't learn
    anything from how long the answer takes.

    Args:
        users: The token of each user, by the user's name.
    """
    known = {name: token.encode() for name, token in users.items()}
    for name, token in known.items():
        if not token:
            raise ValueError(f"tokens({{{name!r}: ''}}): expected a token, got an empty string")

    def authorize(info: SessionInfo, token: str | None) -> str:
        shown = (token or "").encode()
        found = [name for name, expected in known.items() if hmac.compare_digest(shown, expected)]
        if token is None:
            raise Refused("this server wants a token: connect(…, token=…)")
        if not found:
            raise Refused("this server does not know the token")
        return found[0]

    return authorize


def first_line(protocol: str, token: str) -> bytes:
    """Return the line of a client with a token."""
    if not token or len(token) > TOKEN_MOST:
        raise ValueError(f"invalid token=…: expected 1 to {TOKEN_MOST} characters, got {len(token)}")
    return MAGIC + protocol.encode() + b" " + base64.urlsafe_b64encode(token.encode()) + b"\n"


async def show_token(stream: trio.abc.Stream, protocol: str, token: str) -> trio.abc.Stream:
    """Send a token to the server, wait for the answer, and return the stream for the protocol.

    Raises:
        Refused: If the server refuses the token.
        LinkLost: If the server hangs up, doesn't answer in time, or answers with something else.
    """
    peer: str = getattr(stream, "peer", "")
    held = b""
    try:
        with trio.fail_after(ANSWER_TIMEOUT):
            await stream.send_all(first_line(protocol, token))
            while b"\n" not in held:
                data = await stream.receive_some(LINE_MOST)
                held += data
                if not (b"ok\n".startswith(held[:3]) or b"no ".startswith(held[:3])):
                    # The server doesn't know about tokens: it already speaks its own protocol.
                    found = looks_like(held)
                    text = "the server did not answer about the token"
                    hint = f"Its bytes look like {found or 'another protocol'}"
                    if found is not None and found.lower() == protocol:
                        hint = NO_AUTHORIZE
                    raise LinkLost(
                        text, by="peer", peer=peer, phase="handshake", hint=hint, found=found or "another protocol"
                    )
                if not data or len(held) > 2 * LINE_MOST:
                    text = "the server did not answer about the token"
                    raise LinkLost(text, by="peer", peer=peer, phase="handshake", hint=NO_AUTHORIZE)
    except trio.TooSlowError:
        text = f"the server did not answer about the token within {ANSWER_TIMEOUT:g} s; does it have authorize=?"
        raise LinkLost(text, by="peer", peer=peer, phase="handshake") from None
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        if isinstance(error, LinkLost):
            raise
        raise LinkLost("the connection broke", by="network", peer=peer, phase="handshake") from error
    line, _, rest = held.partition(b"\n")
    if line != b"ok":
        told = Reason.decode(line.removeprefix(b"no "))
        raise Refused(told.text, code=told.code, peer=peer)
    return prefixed(stream, rest)


@attrs.frozen
class _Shown:
    """The content of a client's line. Both attributes are None if there was no line."""

    protocol: str | None = None
    token: str | None = attrs.field(default=None, repr=False)


class _LineReader:
    """Reads the line of a client, if the first bytes show that there is one."""

    def __init__(self) -> None:
        self._held = b""

    def receive_bytes(self, data: bytes) -> _Shown | None:
        self._held += data
        if not MAGIC.startswith(self._held[: len(MAGIC)]):
            return _Shown()
        line, newline, rest = self._held.partition(b"\n")
        if not newline:
            return None
        self._held = rest
        try:
            protocol, _, token = line[len(MAGIC) :].partition(b" ")
            return _Shown(protocol.decode("ascii"), base64.b64decode(token, b"-_", validate=True).decode())
        except ValueError as error:  # not ASCII, not base64, not UTF-8
            raise RemoteProtocolError("invalid line with a token: expected a protocol and base64url") from error

    def bytes_to_send(self) -> bytes:
        return b""

    def leftover(self) -> bytes:
        return self._held


class Gatekeeper:
    """Accepts or refuses the clients of one server, as its `authorize` decides."""

    def __init__(self, protocol: str, authorize: Authorize, limits: Limits) -> None:
        self._protocol = protocol
        self._authorize = authorize
        self._handshakes = HandshakeQueue(limits, most=LINE_MOST)

    async def admit(self, stream: trio.abc.Stream) -> tuple[trio.abc.Stream | None, Refused | None]:
        """Read the line of a client, and decide about the client.

        Returns:
            The stream for the protocol, or None if the client mustn't or can't get any more data. And the refusal, or
            None if the client is accepted. If there are both, the caller has to refuse the client in the protocol.

        Raises:
            LinkLost: If the connection was lost.
        """
        try:
            shown, rest = await self._handshakes.read_handshake(stream, _LineReader())
        except RemoteProtocolError as error:
            return None, Refused(error.message, code=400)
        refused: Refused | None = None
        if shown.protocol not in (None, self._protocol):
            refused = Refused(f"this is a server of {self._protocol}, not of {shown.protocol}", code=400)
        else:
            refused = await self.judge(rest, shown.token)
        if shown.protocol is None:
            return rest, refused
        answer = b"ok" if refused is None else b"no " + Reason(printable(refused.reason), refused.code).encode()
        await stream.send_all(answer + b"\n")
        return None if refused else rest, refused

    async def judge(self, link: Any, token: str | None) -> Refused | None:  # noqa: ANN401 - of any kind of link
        """Call `authorize`, and store the name that it returns in the link's `user`. Return the refusal, if any.

        If `authorize` raises any other error, the client is refused with code 500, which lets it try again later.
        """
        try:
            user = self._authorize(describe(link, self._protocol), token)
            link.user = await user if inspect.isawaitable(user) else user
        except BaseException as raised:
            error = meaning_of(raised)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, Refused):
                return error
            # log: Your `authorize` raised an error other than `Refused`, and the line says where. The client receives
            # code 500 and may try again.
            log_failure("authorize failed, the client was not let in", error, {"peer": getattr(link, "peer", "")})
            return Refused("this server failed to check who you are", code=AUTHORIZE_FAILED)
        return None


protect_package(__name__)
