"""Forwards of UDP. Each address that sends to a listener has its own channel, and datagrams may be lost as with UDP.

Over e3x, datagrams that fit into a packet travel on an unreliable channel next to the requested one. Over Aqueduct,
each is an unreliable message of the requested channel. Over other protocols, each is an ordinary message. Datagrams
that don't fit into the queue are dropped.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sized
from contextlib import suppress
from typing import Any

import attrs
import trio

from muxkit.forward.addresses import Address, parse_address
from muxkit.forward.client import Forward
from muxkit.forward.line import LOST, PATIENCE, Carrier, request
from muxkit.forward.relay import ForwardLimits, Tally, log
from muxkit.forward.sockets import EXHAUSTED, EXHAUSTED_PAUSE, MOST
from muxkit.forward.wire import NAME, NUMBER_SIZE, Code, Datagrams, ForwardRefused
from muxkit.runtime import Channel, Session, background, protect_package, protected_manager

WAITING = 64  # datagrams of one sender that wait for the session; then the next ones are dropped
WAITING_BYTES = 16 * 1024 * 1024  # of all senders of a forward, or of a client at the server


@attrs.define(eq=False)
class Backlog:
    """Counts the bytes of datagrams of all senders that wait for a session."""

    bytes: int = 0

    def add(self, data: Sized) -> bool:
        """Count a datagram. Return False if there is no room for it."""
        if self.bytes + len(data) > WAITING_BYTES:
            return False
        self.bytes += len(data)
        return True

    def remove(self, *gone: Sized) -> None:
        self.bytes -= sum(map(len, gone))


class DatagramRelay:
    """Forwards the datagrams of one sender, until it has been idle for a while or the channel ends."""

    def __init__(
        self,
        channel: Channel,
        tally: Tally,
        backlog: Backlog,
        deliver: Callable[[bytes], Awaitable[object]],
        *,
        idle: float,
    ) -> None:
        self._channel = channel
        self._tally = tally
        self._backlog = backlog
        self._deliver = deliver
        self._idle = idle
        self._scope = trio.CancelScope()
        self._queue: deque[bytes] = deque()
        self._queued = trio.Event()
        self._unreliable: Channel | None = None
        self._send_unreliable: Callable[[bytes], Awaitable[None]] | None = getattr(channel, "send_unreliable", None)
        self._prefix = b""
        self.dropped: int = 0

    def use(self, unreliable: Channel, prefix: bytes = b"") -> None:
        """From now on, send datagrams that fit into packets over an unreliable channel, with a prefix."""
        self._unreliable, self._prefix = unreliable, prefix

    def push(self, data: bytes) -> None:
        """Queue a datagram for the session."""
        self._stir()
        if len(self._queue) >= WAITING or not self._backlog.add(data):
            self.dropped += 1
            return
        self._tally.bytes_in += len(data)
        self._queue.append(data)
        self._queued.set()

    async def take(self, data: bytes) -> None:
        """Deliver a datagram from the session."""
        self._stir()
        self._tally.bytes_out += len(data)
        with suppress(OSError):  # nothing listens there now, or it is too large: it is lost, as datagrams may be
            await self._deliver(data)

    async def run(self, *sources: Callable[[], Awaitable[None]]) -> None:
        """Forward datagrams, while `sources` push more of them. Closes both channels at the end."""
        self._tally.total += 1
        try:
            with self._scope:
                self._stir()
                async with trio.open_nursery() as nursery:
                    for each in (self._send_queued, *sources):
                        nursery.start_soon(each)
                    await self.hear(self._channel)
                    nursery.cancel_scope.cancel()
        finally:
            self._backlog.remove(*self._queue)
            self._queue.clear()
            for channel in (self._channel, self._unreliable):
                if channel is not None:
                    channel.abort("the forward of datagrams has ended", code=Code.GONE)

    async def hear(self, channel: Channel) -> None:
        """Deliver the datagrams of a channel until it ends."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in channel:
                await self.take(data)

    async def _send_queued(self) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                if not self._queue:
                    self._queued = trio.Event()
                    await self._queued.wait()
                data = self._queue[0]
                unreliable = self._unreliable
                if unreliable is not None and len(self._prefix) + len(data) <= getattr(unreliable, "quota", 0):
                    await unreliable.send(self._prefix + data)
                elif self._send_unreliable is not None:
                    await self._send_unreliable(data)
                else:
                    await self._channel.send(data)
                self._backlog.remove(self._queue.popleft())
        self._scope.cancel()

    def _stir(self) -> None:
        self._scope.deadline = trio.current_time() + self._idle


async def read_datagrams(sock: trio.socket.SocketType, push: Callable[[bytes], None]) -> None:
    """Push the datagrams that a connected socket receives."""
    while True:
        try:
            push(await sock.recv(MOST))
        except (
            OSError
        ) as error:  # that nothing listens there is told by the next call; a later datagram may be answered
            if error.errno in EXHAUSTED:
                await trio.sleep(EXHAUSTED_PAUSE)


class _DatagramForward(Forward):
    """A UDP listener on this machine whose datagrams all go to one target."""

    def __init__(
        self,
        sock: trio.socket.SocketType,
        target: Address,
        carrier: Carrier,
        patience: float,
        limits: ForwardLimits | None,
    ) -> None:
        super().__init__(carrier, patience, limits)
        self._sock = sock
        self._target = target
        host, port = sock.getsockname()[:2]
        self._addresses = (str(Address(host, port)),)
        self._backlog = Backlog()
        self._relays: dict[Any, DatagramRelay | list[bytes]] = {}  # by the address of the sender

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    async def shutdown(self, *, grace: float) -> None:
        """End immediately, because datagrams have no end to wait for."""
        self._scope.cancel()
        await trio.lowlevel.checkpoint()

    async def _run(self) -> None:
        """Forward datagrams until it is shut down."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                while True:
                    try:
                        data, sender = await self._sock.recvfrom(MOST)
                    except OSError as error:
                        if error.errno in EXHAUSTED:
                            await trio.sleep(EXHAUSTED_PAUSE)
                        continue
                    match self._relays.get(sender):
                        case DatagramRelay() as relay:
                            relay.push(data)
                        case list() as early:
                            if len(early) < WAITING and self._backlog.add(data):
                                early.append(data)
                        case None if self._tally.is_full:
                            self._tally.refused += 1
                        case None:
                            self._tally.enter()
                            self._relays[sender] = [data] if self._backlog.add(data) else []
                            nursery.start_soon(self._carry, sender)

    async def _carry(self, sender: Any) -> None:  # noqa: ANN401 - an address of the kernel, of any family
        try:
            wanted = Datagrams(str(self._target))
            channel, done, session = await request(self._carrier, wanted, patience=self._patience, limits=self._limits)

            async def deliver(data: bytes) -> None:
                await self._sock.sendto(data, sender)

            relay = DatagramRelay(channel, self._tally, self._backlog, deliver, idle=self._limits.idle)
            unreliable = await _open_unreliable(session, channel)
            for data in self._replaced(sender, relay):
                relay.push(data)
            if unreliable is None:
                await relay.run()
            else:
                relay.use(unreliable, done.listener.to_bytes(NUMBER_SIZE, "big"))
                await relay.run(lambda: relay.hear(unreliable))
        except (ForwardRefused, *LOST) as error:
            self._refused(f"{self.address}: failed to forward datagrams", error)
        finally:
            early = self._relays.pop(sender)
            if isinstance(early, list):
                self._backlog.remove(*early)
            self._tally.leave()

    def _replaced(self, sender: Any, relay: DatagramRelay) -> list[bytes]:  # noqa: ANN401
        """Give a sender its relay. Return the datagrams that arrived earlier."""
        early = self._relays[sender]
        self._relays[sender] = relay
        if not isinstance(early, list):
            return []
        self._backlog.remove(*early)
        return early

    def __repr__(self) -> str:
        return f"<forward {self.address}/udp to {self._target}/udp: {self._tally.live} senders>"


async def _open_unreliable(session: Session, channel: Channel) -> Channel | None:
    """Open an unreliable channel, if the protocol has reliable and unreliable ones."""
    if getattr(channel, "is_reliable", None) is None:
        return None
    open_as: Any = session.open
    try:
        opened: Channel = await open_as(NAME, reliable=False)
    except BaseException:
        channel.abort("given up", code=Code.GONE)
        raise
    return opened


@protected_manager
async def open_datagrams(
    carrier: Carrier,
    bind: str | Address,
    target: str | Address,
    *,
    patience: float = PATIENCE,
    limits: ForwardLimits | None = None,
) -> AsyncGenerator[Forward, None]:
    """Listen for UDP at `bind` on this machine, and forward datagrams to `target` and back through the server.

    The server opens a socket for each sending address, and closes it after `ForwardLimits.idle` seconds without a
    datagram. Datagrams may be lost. The server's rules must allow the target for UDP, as in `db:53/udp`. Everything
    else is as for `open_local`. Unix sockets raise ValueError.
    """
    at = bind if isinstance(bind, Address) else parse_address(bind, any_port=True)
    to = target if isinstance(target, Address) else parse_address(target)
    if at.path or to.path:
        raise ValueError(f"{at} to {to}: UDP forwards don't support Unix sockets; expected host:port")
    with await _bound(at) as sock:
        async with background() as nursery:
            forward = _DatagramForward(sock, to, carrier, patience, limits)
            nursery.start_soon(forward._run)
            yield forward


async def _bound(at: Address) -> trio.socket.SocketType:
    try:
        found = await trio.socket.getaddrinfo(at.host, at.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        sock = trio.socket.socket(family, kind, protocol)
        try:
            await sock.bind(place)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {at}/udp: {error.strerror or error}") from error
    # log: A forward of datagrams is listening.
    log.debug("listening for UDP on %s", at)
    return sock


protect_package(__name__)
