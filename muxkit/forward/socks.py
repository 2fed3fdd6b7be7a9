"""SOCKS5 (RFC 1928, and RFC 1929 for users). Each connection names its target, and the server resolves it."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import AsyncGenerator, Iterable, Mapping
from enum import IntEnum

import trio

from muxkit.forward.addresses import Address, checked_host, parse_address
from muxkit.forward.allow import AllowList
from muxkit.forward.client import Forward, ListeningForward
from muxkit.forward.line import LOST, PATIENCE, Carrier
from muxkit.forward.relay import ForwardLimits, Relay, log
from muxkit.forward.sockets import Listeners, listening
from muxkit.forward.streams import CarriedStream
from muxkit.forward.wire import Code, Connect, ForwardRefused
from muxkit.runtime import background, protect_package, protected_manager

VERSION = 5
USER_VERSION = 1  # of the exchange of user and password
CONNECT = 1
NO_METHOD = 0xFF
READ = 4096  # bytes


class Method(IntEnum):
    """How a client authenticates."""

    NONE = 0
    PASSWORD = 2


class Kind(IntEnum):
    """The kind of an address."""

    IPV4 = 1
    NAME = 3
    IPV6 = 4


class Reply(IntEnum):
    """The proxy's answer to a client."""

    SUCCEEDED = 0
    FAILED = 1
    NOT_ALLOWED = 2
    NETWORK_UNREACHABLE = 3
    HOST_UNREACHABLE = 4
    REFUSED = 5
    TIMED_OUT = 6  # "TTL expired"
    NO_SUCH_COMMAND = 7
    NO_SUCH_ADDRESS = 8


REPLIES = {
    Code.MALFORMED: Reply.NO_SUCH_ADDRESS,
    Code.NOT_ALLOWED: Reply.NOT_ALLOWED,
    Code.NOT_FOUND: Reply.HOST_UNREACHABLE,
    Code.REFUSED: Reply.REFUSED,
    Code.UNREACHABLE: Reply.NETWORK_UNREACHABLE,
    Code.TIMED_OUT: Reply.TIMED_OUT,
}


class SocksError(Exception):
    """A failed handshake. `reply` is the answer to the client, or None if there is none."""

    def __init__(self, reason: str, reply: Reply | None = None) -> None:
        super().__init__(reason)
        self.reply = reply


def encode_reply(reply: Reply) -> bytes:
    """Encode a reply. Its address is empty, because the bound address is on the server."""
    return bytes((VERSION, reply, 0, Kind.IPV4, 0, 0, 0, 0, 0, 0))


class Handshake:
    """The server's side of one handshake."""

    def __init__(self, stream: trio.abc.Stream, users: Mapping[str, str] | None) -> None:
        self._stream = stream
        self._users = None if users is None else {name.encode(): word.encode() for name, word in users.items()}
        self._held = b""

    @property
    def rest(self) -> bytes:
        """The bytes that followed the handshake."""
        return self._held

    async def run(self) -> Address:
        """Return the client's target. Raises `SocksError`."""
        version, count = await self._take(2)
        if version != VERSION:
            what = "SOCKS4" if version == 4 else "HTTP" if bytes((version,)).isalpha() else f"version {version}"
            raise SocksError(f"this is a SOCKS5 proxy, and the client sent {what}")
        await self._agree(set(await self._take(count)))
        version, command, _, kind = await self._take(4)
        if version != VERSION:
            raise SocksError(f"a request of version {version}", Reply.FAILED)
        target = await self._target(kind)
        if command != CONNECT:
            names = {2: "BIND", 3: "UDP ASSOCIATE"}
            wanted = names.get(command, f"command {command}")
            raise SocksError(f"unsupported SOCKS command {wanted}: expected CONNECT", Reply.NO_SUCH_COMMAND)
        return target

    async def _agree(self, offered: set[int]) -> None:
        wanted = Method.NONE if self._users is None else Method.PASSWORD
        if wanted not in offered:
            await self._stream.send_all(bytes((VERSION, NO_METHOD)))
            raise SocksError("the client shows no user" if self._users is not None else "the client wants a user")
        await self._stream.send_all(bytes((VERSION, wanted)))
        if self._users is None:
            return
        version, size = await self._take(2)
        user = await self._take(size)
        (size,) = await self._take(1)
        word = await self._take(size)
        known = [
            hmac.compare_digest(user, name) & hmac.compare_digest(word, theirs) for name, theirs in self._users.items()
        ]
        is_known = version == USER_VERSION and any(known)
        await self._stream.send_all(bytes((USER_VERSION, 0 if is_known else 1)))
        if not is_known:
            raise SocksError("wrong user or password")

    async def _target(self, kind: int) -> Address:
        match kind:
            case Kind.IPV4:
                host = str(ipaddress.IPv4Address(await self._take(4)))
            case Kind.IPV6:
                host = str(ipaddress.IPv6Address(await self._take(16)))
            case Kind.NAME:
                (size,) = await self._take(1)
                # A name whose bytes are none is refused below; some clients leave the brackets of IPv6.
                host = (await self._take(size)).decode("ascii", "replace").strip("[]")
            case _:
                raise SocksError(f"an address of kind {kind}", Reply.NO_SUCH_ADDRESS)
        port = int.from_bytes(await self._take(2), "big")
        try:
            host = checked_host(host)
        except ValueError:
            raise SocksError("invalid name of the target", Reply.NO_SUCH_ADDRESS) from None
        if not port:
            raise SocksError("port 0 can't be connected to", Reply.NO_SUCH_ADDRESS)
        return Address(host, port)

    async def _take(self, size: int) -> bytes:
        """Read exactly that many bytes."""
        while len(self._held) < size:
            data = await self._stream.receive_some(READ)
            if not data:
                raise SocksError("the client closed the connection during its handshake")
            self._held += data
        taken, self._held = self._held[:size], self._held[size:]
        return taken


class _SocksForward(ListeningForward):
    """A listener whose connections name their targets."""

    def __init__(
        self,
        allow: AllowList | None,
        users: Mapping[str, str] | None,
        opened: Listeners,
        carrier: Carrier,
        patience: float,
        limits: ForwardLimits | None,
    ) -> None:
        super().__init__(opened, carrier, patience, limits)
        self._allow = allow
        self._users = users
        self._half_open: dict[trio.CancelScope, None] = {}  # oldest first

    @property
    def half_open(self) -> int:
        return len(self._half_open)

    async def carry(self, stream: CarriedStream) -> None:
        handshake = Handshake(stream, self._users)
        try:
            target = await self._greet(handshake)
            if target is None:
                return
            if self._allow is not None and not self._allow.admits(target):
                raise ForwardRefused(f"{target} is not allowed by this proxy", Code.NOT_ALLOWED)
            channel = await self._ask(Connect(str(target)))
        except SocksError as error:
            await self._tell(stream, error, error.reply)
        except ForwardRefused as error:
            await self._tell(stream, error, _reply_to(error))
        except LOST as error:
            await self._tell(stream, error, Reply.FAILED)
        except trio.BrokenResourceError:
            pass  # the client is gone
        else:
            try:
                await stream.send_all(encode_reply(Reply.SUCCEEDED))
            except trio.BrokenResourceError:
                channel.abort("the connection was reset", code=Code.RESET)
            except BaseException:
                channel.abort("the forward was closed", code=Code.GONE)
                raise
            else:
                await Relay(stream, channel, self._tally).run(handshake.rest)

    async def _greet(self, handshake: Handshake) -> Address | None:
        """Return the client's target, or None if it took too long or had to make room for a newer one."""
        while len(self._half_open) >= self._limits.half_open:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.cancel()
        with trio.move_on_after(self._limits.handshake) as scope:
            self._half_open[scope] = None
            try:
                return await handshake.run()
            finally:
                self._half_open.pop(scope, None)
        self._tally.refused += 1
        # log: A client connected to the proxy and didn't send its target.
        log.debug("%s: a SOCKS handshake was not finished in time", self.address)
        return None

    async def _tell(self, stream: CarriedStream, error: Exception, reply: Reply | None) -> None:
        self._refused(f"{self.address}: failed to forward a connection", error)
        try:
            if reply is not None:
                await stream.send_all(encode_reply(reply))
            await stream.aclose()
        except trio.BrokenResourceError:
            pass

    def __repr__(self) -> str:
        return f"<forward {self.address} by SOCKS5: {self._tally.live} connections, {self.half_open} half-open>"


def _reply_to(error: ForwardRefused) -> Reply:
    return next((reply for code, reply in REPLIES.items() if code == error.code), Reply.FAILED)


@protected_manager
async def socks(
    carrier: Carrier,
    bind: str | Address,
    *,
    allow: Iterable[str] | AllowList | None = None,
    users: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
    limits: ForwardLimits | None = None,
) -> AsyncGenerator[Forward, None]:
    """Listen at `bind` as a SOCKS5 proxy whose connections are made by the server, like `ssh -D`.

    The proxy supports CONNECT to IPv4 addresses, IPv6 addresses and names, which the server resolves. Everything else
    is as for `open_local`.

    Args:
        carrier: A session or a `Line`.
        bind: The address to listen on.
        users: Names and passwords that clients must send. They are sent in plaintext, so listen on loopback.
        allow: Rules for the targets of clients, as for `AllowList`, in addition to those of the server.
    """
    at = bind if isinstance(bind, Address) else parse_address(bind, any_port=True)
    rules = allow if allow is None or isinstance(allow, AllowList) else AllowList(allow)
    async with listening(at) as opened, background() as nursery:
        forward = _SocksForward(rules, users, opened, carrier, patience, limits)
        nursery.start_soon(forward._run)
        yield forward


protect_package(__name__)
