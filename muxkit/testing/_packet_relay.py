"""A relay between real UDP sockets that delays, limits and loses packets, as a seed decides.

    async with chaos_packet_relay("127.0.0.1:7000", ChaosPlan(delay=0.04, loss=0.01), seed=17) as relay:
        ... send to relay.address instead ...

For each client address, the relay keeps a separate simulated line in each direction, with a queue in front of it, and
a separate socket to the target. The target therefore sees several clients. Of a `ChaosPlan`, the relay uses `delay`,
`jitter`, `rate`, `buffer` and `loss`. Jitter lets packets overtake each other, as on a real path.
"""

from __future__ import annotations

import errno
import heapq
import math
import random
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Final

import attrs
import trio

from muxkit._limits import KIB, MIB
from muxkit.runtime import background
from muxkit.testing._chaos import ChaosPlan
from muxkit.testing._network import Bottleneck
from muxkit.testing._relay import parse_place

SOCKET_BYTES: Final = 4 * MIB  # requested buffer of each socket, so that the kernel doesn't lose packets
PACKET_MOST: Final = 65_535  # bytes
AT_ONCE: Final = 256  # packets to read before other tasks get to run
UNREAD_MOST: Final = 64 * MIB  # bytes in flight per direction when the plan has no rate; further packets are lost
FLOWS_MOST: Final = 1024  # client addresses
FORGOTTEN: Final = 120.0  # s without a packet, after which a client may be dropped in favour of a new one
QUEUE_SECONDS: Final = 0.05  # s that a full queue takes to drain, unless the plan sets `buffer`
Address = tuple[str, int] | tuple[str, int, int, int]


@attrs.define(kw_only=True)
class PacketStats:
    """Counters of a `ChaosPacketRelay`."""

    clients: int = 0
    """The number of client addresses seen."""
    packets_there: int = 0
    """Packets delivered to the target."""
    packets_back: int = 0
    """Packets delivered to clients."""
    bytes_there: int = 0
    bytes_back: int = 0
    lost: int = 0
    """Packets lost because of `loss` in the plan."""
    overflowed: int = 0
    """Packets lost because a queue was full."""


class _Way:
    """One direction of one client. Decides when each packet arrives, or that it is lost."""

    def __init__(self, plan: ChaosPlan, seed: str) -> None:
        self._plan = plan
        self._dice = random.Random(seed).random
        self._line: Bottleneck | None = None
        if plan.rate is not None:
            queue = plan.buffer if plan.buffer is not None else max(64 * KIB, int(plan.rate * QUEUE_SECONDS))
            self._line = Bottleneck(plan.rate, queue=queue, keep=False)
        self.under_way = 0  # bytes in flight

    def arrival(self, size: int, now: float, stats: PacketStats) -> float | None:
        """Return when a packet that is sent now arrives, or None if it is lost."""
        plan = self._plan
        lost, late = (self._dice(), self._dice()) if plan.loss or plan.jitter else (1.0, 0.0)
        if lost < plan.loss:
            stats.lost += 1
            return None
        leaves: float | None = now
        if self._line is not None:
            leaves = self._line.enter(size, now)
        elif self.under_way + size > (UNREAD_MOST if plan.buffer is None else plan.buffer):
            leaves = None
        if leaves is None:
            stats.overflowed += 1
            return None
        self.under_way += size
        return leaves + plan.delay + late * plan.jitter


@attrs.define(eq=False)
class _Flow:
    """One client address, with its socket to the target."""

    client: Address
    socket: socket.socket
    there: _Way
    back: _Way
    heard_at: float
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


class ChaosPacketRelay:
    """A relay made by `chaos_packet_relay`."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], plan: ChaosPlan, seed: int) -> None:
        self.address: str = ""
        """The address to send to, as `host:port`."""
        self._plan = plan
        self._seed = seed
        self._listen = listen
        self._target = target
        self._stats = PacketStats()
        self._family = 0  # address family of the sockets to the target
        self._target_at: Any = ()
        self._flows: dict[Address, _Flow] = {}
        self._under_way: list[tuple[float, int, _Flow, bool, bytes]] = []
        self._numbers = count()
        self._alarm = trio.CancelScope()
        self._due = math.inf  # when the delivering task wakes up

    def stats(self) -> PacketStats:
        """Return a copy of the counters."""
        return attrs.evolve(self._stats)

    @property
    def port(self) -> int:
        """The port number in `address`."""
        return int(self.address.rpartition(":")[2])

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Relay packets until cancelled."""
        family, *_, listen = (await trio.socket.getaddrinfo(*self._listen, type=socket.SOCK_DGRAM))[0]
        with _udp_socket(family) as front:
            front.bind(listen)
            host, port = front.getsockname()[:2]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._family, *_, self._target_at = (await trio.socket.getaddrinfo(*self._target, type=socket.SOCK_DGRAM))[
                0
            ]
            task_status.started()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._deliver, front)
                    await self._take_from_clients(front, nursery)
            finally:
                for flow in self._flows.values():
                    flow.socket.close()

    async def _take_from_clients(self, front: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(front)
            now = trio.current_time()
            for _ in range(AT_ONCE):
                try:
                    packet, client = front.recvfrom(PACKET_MOST)
                except OSError as error:
                    if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                        break
                    continue  # an ICMP error: an earlier packet didn't arrive
                flow = self._flows.get(client) or self._new_flow(client, now, nursery)
                if flow is not None:
                    flow.heard_at = now
                    self._send_on(flow, packet, now, is_there=True)
            await trio.lowlevel.checkpoint()

    def _new_flow(self, client: Address, now: float, nursery: trio.Nursery) -> _Flow | None:
        if len(self._flows) >= FLOWS_MOST:
            oldest = min(self._flows.values(), key=lambda flow: flow.heard_at)
            if now - oldest.heard_at < FORGOTTEN:
                return None
            oldest.scope.cancel()
        number = self._stats.clients
        there, back = (_Way(self._plan, f"{self._seed}/{number}/{way}") for way in ("there", "back"))
        flow = _Flow(client, _udp_socket(self._family), there, back, now)
        with suppress(OSError):  # packets to an unreachable target are lost
            flow.socket.connect(self._target_at)
        self._stats.clients += 1
        self._flows[client] = flow
        nursery.start_soon(self._take_from_target, flow)
        return flow

    async def _take_from_target(self, flow: _Flow) -> None:
        with flow.scope, flow.socket:
            while True:
                await trio.lowlevel.wait_readable(flow.socket)
                now = trio.current_time()
                for _ in range(AT_ONCE):
                    try:
                        packet = flow.socket.recv(PACKET_MOST)
                    except OSError as error:
                        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                            break
                        continue
                    self._send_on(flow, packet, now, is_there=False)
                await trio.lowlevel.checkpoint()
        if self._flows.get(flow.client) is flow:
            del self._flows[flow.client]

    def _send_on(self, flow: _Flow, packet: bytes, now: float, *, is_there: bool) -> None:
        way = flow.there if is_there else flow.back
        due = way.arrival(len(packet), now, self._stats)
        if due is None:
            return
        heapq.heappush(self._under_way, (due, next(self._numbers), flow, is_there, packet))
        if due < self._due:
            self._alarm.deadline = self._due = due

    async def _deliver(self, front: socket.socket) -> None:
        while True:
            self._due = self._under_way[0][0] if self._under_way else math.inf
            with trio.CancelScope(deadline=self._due) as self._alarm:
                await trio.sleep_forever()
            now = trio.current_time()
            while self._under_way and self._under_way[0][0] <= now:
                _, _, flow, is_there, packet = heapq.heappop(self._under_way)
                self._hand_over(front, flow, packet, is_there=is_there)

    def _hand_over(self, front: socket.socket, flow: _Flow, packet: bytes, *, is_there: bool) -> None:
        stats = self._stats
        if is_there:
            flow.there.under_way -= len(packet)
            stats.packets_there += 1
            stats.bytes_there += len(packet)
        else:
            flow.back.under_way -= len(packet)
            stats.packets_back += 1
            stats.bytes_back += len(packet)
        with suppress(OSError):  # the receiver is gone or the socket is full: losing the packet is allowed
            if is_there:
                flow.socket.send(packet)
            else:
                front.sendto(packet, flow.client)


def _udp_socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
    return sock


@asynccontextmanager
async def chaos_packet_relay(
    target: str, plan: ChaosPlan, seed: int = 0, *, listen: str = "127.0.0.1:0"
) -> AsyncGenerator[ChaosPacketRelay, None]:
    """Relay UDP packets to `target`, with the faults of `plan`, while the block runs.

    The fate of a client's n-th packet depends only on the seed.

    Args:
        target: the server's address, as `host:port` with an optional `udp://` prefix.
        plan: the faults. It must not cut connections, because packets have no connection.
        seed: decides everything that the plan leaves to chance.
        listen: the address to listen on. By default a free port on loopback.

    Yields:
        The relay. Send to its `address`.

    Raises:
        ValueError: if an address is invalid, or if `plan.cut_after` is set.
        OSError: if the relay can't listen on `listen`.
    """
    if plan.cut_after is not None:
        raise ValueError(f"ChaosPlan(cut_after={plan.cut_after}): packets have no connection that could be cut")
    relay = ChaosPacketRelay(_place(listen), _place(target), plan, seed)
    async with background() as nursery:
        await nursery.start(relay.run)
        yield relay


def _place(address: str) -> tuple[str, int]:
    place = parse_place(address.removeprefix("udp://"))
    if isinstance(place, str):
        raise ValueError(f"address {address!r}: expected host:port, such as 127.0.0.1:7000, as packets go over UDP")
    return place
