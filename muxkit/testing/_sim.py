"""A network of named hosts inside one Trio run, which serves and dials `sim://` URLs.

    with SimNetwork(seed=17, weather=SimWeather(delay=0.05, loss=0.01)) as network:
        async with muxkit.open_server(echo, "bpmux+sim://server"), muxkit.connect("bpmux+sim://server") as session:
            network.partition("client", "server")

All times are Trio's, so the network works on a virtual clock. Protocols that speak over packets get packet links, on
which packets are lost, duplicated and reordered. Other protocols get byte streams, on which lost segments arrive late.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Literal, Self

import attrs
import trio

from muxkit._limits import Limits
from muxkit._racing import winners
from muxkit.runtime import LinkKind, bare_nursery, check_options, close_at_once
from muxkit.testing._chaos import Cut
from muxkit.testing._network import Bottleneck
from muxkit.testing._weather import BUFFER, PacketChannel, PacketWay, PacketWeather, StreamWay, WeatherStream

ANY: Final = "*"
CLIENT: Final = "client"  # the host of a program that doesn't name one
CONNECT_TIMEOUT: Final = 30.0  # s
RESEND_LEAST: Final = 0.2  # s until a lost segment of a stream is retransmitted, as in Linux
RESEND_MOST: Final = 6  # times that one segment can be lost in a row
FORGOTTEN: Final = 60.0  # s after its peer was closed, until a packet link reports the end
BACKLOG: Final = 128  # connections that a server hasn't accepted yet; further clients wait
MOMENTS: Final = 10_000  # times of sending that are recorded
QUEUE_SECONDS: Final = 1.0  # the queue of a throttled line takes this long to drain; further packets are lost

_log = logging.getLogger("muxkit.testing")
_host: ContextVar[str] = ContextVar("muxkit simulated host", default=CLIENT)
_current: trio.lowlevel.RunVar[SimNetwork] = trio.lowlevel.RunVar("muxkit simulated network")


@attrs.frozen(kw_only=True)
class SimWeather(PacketWeather):
    """The network conditions from one host to another.

    On packet links, all settings apply except `buffer` and `splits`. On streams, `delay`, `jitter`, `loss`, `rate`,
    `buffer` and `splits` apply, and a lost segment delays the bytes after it until it is retransmitted.
    """

    rate: float | None = None
    """Bytes per second of each connection. None means no limit."""
    buffer: int = BUFFER
    """Bytes of a stream that may be in flight. When the buffer is full, the sender waits."""
    splits: bool = True
    """Whether data that is sent on a stream arrives in pieces of random size."""


@attrs.frozen
class SimEvent:
    """An event on the network."""

    at: float
    """Seconds since the network began."""
    what: str
    source: str
    target: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.at:10.3f} s  {self.what:<10} {self.source} > {self.target} {self.detail}".rstrip()


class SimRoute:
    """The route from one host to another: its network conditions, and the faults that are active on it."""

    def __init__(self, network: SimNetwork, source: str, target: str, weather: SimWeather) -> None:
        self.network: SimNetwork = network
        self.source: str = source
        self.target: str = target
        self.weather: SimWeather = weather
        self.extra_delay: float = 0.0
        self.throttled: float | None = None
        self.is_partitioned: bool = False
        self.changed: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()
        self.ways: list[_SimWay] = []
        self.packet_ways: list[_SimPacketWay] = []
        self._dice = random.Random(f"{network.seed}/{source}>{target}")

    @property
    def delay(self) -> float:
        """The delay in seconds, including an additional delay that `SimNetwork.delay` set."""
        return self.weather.delay + self.extra_delay

    @property
    def rate(self) -> float | None:
        """The lowest limit in bytes per second that applies to each connection, or None."""
        rates = [rate for rate in (self.weather.rate, self.throttled) if rate is not None]
        return min(rates, default=None)

    async def cross(self) -> None:
        """Sleep for as long as a first packet takes to arrive, including retransmissions and partitions."""
        await trio.sleep(self.delay + self._dice.uniform(0.0, self.weather.jitter) + self.lateness(self._dice))
        while self.is_partitioned:
            await self.changed.park()

    def lateness(self, dice: random.Random) -> float:
        """Return the additional delay of a stream segment, which is retransmitted each time that it is lost."""
        late, pause = 0.0, max(RESEND_LEAST, 2 * self.delay)
        for _ in range(RESEND_MOST):
            if dice.random() >= self.weather.loss:
                break
            late += pause
            pause *= 2
        return late

    def renew(self) -> None:
        """Apply changed conditions to everything that is in flight on this route."""
        self.changed.unpark_all()
        for way in self.ways:
            way.retime()
            way.changed.unpark_all()
        for packets in self.packet_ways:
            packets.renew()


@attrs.define(eq=False, kw_only=True)
class _SimWay(StreamWay):
    """One direction of a stream on a route. The conditions may change at any time."""

    route: SimRoute
    # The attributes below repeat those of `Line`, because this class assigns them too.
    delay: float = 0.0
    rate: float | None = None
    arrived_at: float = -math.inf
    free_at: float = -math.inf
    ended_at: float | None = None

    def add(self, piece: bytes, late: float) -> None:
        route = self.route
        self.delay, self.rate = route.delay, route.rate
        late = self.dice.uniform(0.0, route.weather.jitter) + route.lateness(self.dice)
        StreamWay.add(self, piece, late)
        route.network.weigh(route, len(piece))

    def retime(self) -> None:
        """Recompute when the pieces that wait for the line arrive, after its rate has changed."""
        now, free = trio.current_time(), -math.inf
        before, rate = self.arrived_at, self.route.rate
        pieces = [*self.pieces]
        if rate == self.rate or not pieces:
            return
        self.rate = rate
        self.pieces.clear()
        self.arrived_at = -math.inf
        for arrival, piece in pieces:
            if arrival > now + self.delay:  # it is still waiting for the line
                free = max(free, now) + (len(piece) / rate if rate else 0.0)
                arrival = free + self.route.delay
            self.arrived_at = max(self.arrived_at, arrival)
            self.pieces.append((self.arrived_at, piece))
        self.free_at = max(free, now)
        if self.ended_at == before:
            self.ended_at = self.arrived_at

    def next_arrival(self) -> float | None:
        return None if self.route.is_partitioned else StreamWay.next_arrival(self)


class SimStream(WeatherStream):
    """One end of a stream between two hosts."""

    def __init__(self, outgoing: _SimWay, incoming: _SimWay, peer: str) -> None:
        super().__init__(outgoing, incoming, peer)
        self._routes = (outgoing.route, incoming.route)
        self._ends_of = (outgoing, incoming)

    def cut(self, how: Cut) -> None:
        """Cut the connection."""
        if how is Cut.RESET:
            self.reset()
            return
        if how is Cut.END:
            for way in self._ends_of:
                way.end()
        self.vanish()

    async def aclose(self) -> None:
        if not self._closed:
            if any(route.is_partitioned for route in self._routes):
                self.vanish()  # the peer can't be notified, and has to conclude it from the silence
            self._routes[0].network.forget(self)
        await super().aclose()


class _SimPacketWay(PacketWay):
    """One direction of a packet link on a route."""

    def __init__(self, route: SimRoute, seed: str) -> None:
        super().__init__(route.weather, seed)
        self._route = route
        self.renew()

    def renew(self) -> None:
        route, rate = self._route, self._route.rate
        self.path.weather = attrs.evolve(route.weather, delay=route.delay)
        if rate is None:
            self.path.via = None
        elif self.path.via is None or self.path.via.bandwidth != rate:
            self.path.via = Bottleneck(rate, queue=max(2000, int(rate * QUEUE_SECONDS)))

    def put(self, packet: bytes) -> None:
        self._route.network.weigh(self._route, len(packet))
        if not self._route.is_partitioned:
            super().put(packet)


class SimPackets(PacketChannel):
    """One end of a packet link between two hosts. As with UDP, closing it doesn't notify the peer."""

    def __init__(self, outgoing: _SimPacketWay, incoming: _SimPacketWay, peer: str, network: SimNetwork) -> None:
        super().__init__(outgoing, incoming)
        self.peer: str = peer
        self._ends_of = (outgoing, incoming)
        self._network = network

    def cut(self, how: Cut) -> None:
        """Cut the link. Packets in flight are lost.

        After a stall, later packets are lost too, and neither end is notified. After any other cut, both ends see the
        end of the link.
        """
        for way in self._ends_of:
            way.under_way.clear()
            way.unwanted = True
            if how is not Cut.STALL:
                way.over_at = -math.inf
            way.changed.unpark_all()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.forget(self)
            there, back = self._ends_of
            there.over_at = min(there.over_at, trio.current_time() + FORGOTTEN)
            back.unwanted = True
            back.under_way.clear()
            for way in self._ends_of:
                way.changed.unpark_all()
        await trio.lowlevel.checkpoint()


SimLink = SimStream | SimPackets


@attrs.define(eq=False)
class _Connection:
    number: int
    source: str
    target: str
    ends: tuple[SimLink, SimLink]
    open: int = 2
    dialled: trio.Event = attrs.field(factory=trio.Event)
    """Set once the program that dials has the connection, or has given up."""

    async def accepted(self, route: SimRoute) -> None:
        """Wait until the third packet of TCP's handshake has come, before which a server can't send anything."""
        await self.dialled.wait()
        await route.cross()


Change = Callable[[SimRoute], None]


class SimNetwork:
    """A network of hosts, which serves the `sim://` URLs of one Trio run. Use it as a `with` block inside the run.

    Hosts are names, and need no declaration. `sim://orders` is served by the host `orders`, and `sim://alice@orders` is
    dialled from the host `alice`. Without a name before the `@`, the source is the host of the surrounding `host` block
    or of the server whose handler is dialling, and `client` otherwise.

    Methods that take hosts accept "*" for any host. When rules contradict each other, the latest one applies.

    Args:
        seed: decides everything that is left to chance.
        weather: the network conditions of routes for which `set_weather` wasn't called.
    """

    def __init__(self, seed: int = 0, *, weather: SimWeather | None = None) -> None:
        self.seed: int = seed
        self.log: list[SimEvent] = []
        """Connections, their ends, and the changes made to the network. Messages aren't logged."""
        self.routes: dict[tuple[str, str], SimRoute] = {}
        """The routes that were used, by source and target."""
        self.weather: SimWeather = weather or SimWeather()
        """The network conditions of routes for which no others were set."""
        self._rules: list[tuple[str, str, Change]] = []
        self._servers: dict[tuple[str, LinkKind], trio.MemorySendChannel[SimLink]] = {}
        self._connections: dict[SimLink, _Connection] = {}
        self._count = 0
        self._began = 0.0
        self._sum = hashlib.blake2b(digest_size=16)
        self._moments: list[float] = []

    # --- the block

    def __enter__(self) -> Self:
        if current() is not None:
            raise RuntimeError("there is a SimNetwork in this run already: enter one at a time")
        self._began = trio.current_time()
        _current.set(self)
        winners.clear()  # which URL of a list won on an earlier network means nothing on this one
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if current() is self:
            _current.set(_NONE)

    @contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Dial from this host inside the block, and in tasks that are started there."""
        token = _host.set(_name(name))
        try:
            yield
        finally:
            _host.reset(token)

    # --- network conditions and faults

    def set_weather(self, weather: SimWeather, source: str = ANY, target: str = ANY) -> None:
        """Change the network conditions from one host to another, in this direction only."""
        self._apply("weather", source, target, _set(weather=weather), _told(weather))

    def delay(self, seconds: float, source: str = ANY, target: str = ANY) -> None:
        """Delay data that is sent from now on by this many additional seconds, in this direction only.

        Streams keep their order. `delay(0, …)` ends the additional delay.
        """
        self._apply("delay", source, target, _set(extra_delay=seconds), f"{seconds:g} s more")

    def throttle(self, rate: float | None, source: str = ANY, target: str = ANY) -> None:
        """Limit each connection to `rate` bytes per second, in this direction only. None removes the limit.

        Raises:
            ValueError: if the rate isn't positive. Use `partition` to let nothing through.
        """
        if rate is not None and rate <= 0:
            raise ValueError(f"throttle(rate={rate}): must be above 0; partition() lets nothing through")
        self._apply("throttle", source, target, _set(throttled=rate), "off" if rate is None else f"{rate:g} bytes/s")

    def partition(self, one: str = ANY, other: str = ANY, *, one_way: bool = False) -> None:
        """Block all data between two hosts until `heal`. With `one_way`, block only data from `one` to `other`.

        Streams hold the data, and deliver it after the partition is healed. Packets are lost. Neither end is notified.
        """
        for source, target in _directions(one, other, one_way):
            self._apply("partition", source, target, _set(is_partitioned=True))

    def heal(self, one: str = ANY, other: str = ANY, *, one_way: bool = False) -> None:
        """End partitions between two hosts, with `one_way` only from `one` to `other`. By default, end all of them."""
        for source, target in _directions(one, other, one_way):
            self._apply("heal", source, target, _set(is_partitioned=False))

    def cut(self, one: str = ANY, other: str = ANY, *, how: Cut = Cut.RESET) -> int:
        """Cut the live connections between two hosts, in the way that `how` says. Return how many there were."""
        cut = 0
        for connection in dict.fromkeys(self._connections.values()):
            ends = (connection.source, connection.target)
            if _matches(one, other, *ends) or _matches(other, one, *ends):
                self._note("cut", *ends, f"connection {connection.number}, {how.value}")
                connection.ends[0].cut(how)
                cut += 1
        return cut

    # --- reports

    def now(self) -> float:
        """Return the seconds since the network began."""
        return trio.current_time() - self._began

    @property
    def connections(self) -> int:
        """The number of connections so far, including closed ones."""
        return self._count

    def fingerprint(self) -> str:
        """Return a hash of all events, their times, and the size of each piece of data. It is equal for equal runs."""
        return self._sum.hexdigest()

    def moments(self) -> list[float]:
        """Return the times at which data was sent, in seconds since the network began. At most `MOMENTS` are kept."""
        return [*self._moments]

    def weigh(self, route: SimRoute, size: int) -> None:
        """Add a piece of data to the fingerprint."""
        now = self.now()
        self._sum.update(f"{now:.9f} {route.source}>{route.target} {size}\n".encode())
        if len(self._moments) < MOMENTS and (not self._moments or self._moments[-1] != now):
            self._moments.append(now)

    def _note(self, what: str, source: str, target: str, detail: str = "") -> None:
        event = SimEvent(self.now(), what, source, target, detail)
        self.log.append(event)
        self._sum.update(f"{event.at:.9f} {event}\n".encode())

    # --- routes

    def route(self, source: str, target: str) -> SimRoute:
        """Return the route from one host to another."""
        found = self.routes.get((source, target))
        if found is None:
            found = self.routes[source, target] = SimRoute(self, source, target, self.weather)
            for one, other, change in self._rules:
                if _matches(one, other, source, target):
                    change(found)
            found.renew()
        return found

    def _apply(self, what: str, source: str, target: str, change: Change, detail: str = "") -> None:
        self._rules.append((source, target, change))
        self._note(what, source, target, detail)
        for route in self.routes.values():
            if _matches(source, target, route.source, route.target):
                change(route)
                route.renew()

    # --- connections

    async def dial(self, address: str, kind: LinkKind) -> SimLink:
        """Open a connection. A stream takes a round trip to open.

        Raises:
            ConnectionRefusedError: if no program serves the target.
            ValueError: if the address is invalid.
        """
        source, target = _read_address(address)
        there, back = self.route(source, target), self.route(target, source)
        if kind == "stream":
            await there.cross()
        server = self._servers.get((target, kind))
        if server is None:
            await back.cross()
            self._note("refused", source, target)
            raise _refused(f"sim {target}: connection refused (no program serves this name; {self._served()})")
        connection = self._connect(source, target, there, back, kind)
        ours, theirs = connection.ends
        try:
            await server.send(theirs)
            if kind == "stream":
                await back.cross()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await trio.aclose_forcefully(theirs)
            raise _refused(f"sim {target}: connection refused (its server ends)") from None
        except BaseException:
            await trio.aclose_forcefully(ours)
            raise
        finally:
            connection.dialled.set()
        return ours

    def _connect(self, source: str, target: str, there: SimRoute, back: SimRoute, kind: LinkKind) -> _Connection:
        number = self._count
        self._count += 1
        seed = f"{self.seed}/{source}>{target}/{number}"
        ours: SimLink
        theirs: SimLink
        if kind == "packets":
            sent, returned = _SimPacketWay(there, f"{seed}/there"), _SimPacketWay(back, f"{seed}/back")
            there.packet_ways.append(sent)
            back.packet_ways.append(returned)
            ours = SimPackets(sent, returned, f"sim {target}", self)
            theirs = SimPackets(returned, sent, f"sim {source}", self)
        else:
            way, home = _way(there, f"{seed}/there"), _way(back, f"{seed}/back")
            ours, theirs = SimStream(way, home, f"sim {target}"), SimStream(home, way, f"sim {source}")
        made = _Connection(number, source, target, (ours, theirs))
        self._connections[ours] = self._connections[theirs] = made
        self._note("connected", source, target, f"connection {number}")
        return made

    def forget(self, end: SimLink) -> None:
        """Record that the program closed this end, and remove the connection once both ends are closed."""
        connection = self._connections.pop(end, None)
        if connection is None:
            return
        by = connection.source if end is connection.ends[0] else connection.target
        self._note("closed", connection.source, connection.target, f"connection {connection.number} by {by}")
        connection.open -= 1
        if not connection.open:
            for way in end._ends_of:
                for route in self.routes.values():
                    if way in route.ways:
                        route.ways.remove(way)
                    if way in route.packet_ways:
                        route.packet_ways.remove(way)

    async def serve(
        self,
        handler: Callable[[Any], Awaitable[None]],
        name: str,
        kind: LinkKind,
        most: int,
        task_status: trio.TaskStatus[list[str]],
    ) -> None:
        """Run `handler` with each connection to the host `name`, with up to `most` simultaneously, until cancelled.

        Raises:
            OSError: if another server has this name.
        """
        _name(name)
        if (name, kind) in self._servers:
            raise OSError(errno.EADDRINUSE, f"sim {name}: this name is served already")
        arrived, accepted = trio.open_memory_channel[SimLink](BACKLOG)
        self._servers[name, kind] = arrived
        room = trio.CapacityLimiter(most)
        try:
            async with bare_nursery() as nursery:
                nursery.start_soon(self._accept, handler, accepted, name, room, nursery)
                task_status.started([name])
        finally:
            del self._servers[name, kind]
            arrived.close()
            while True:
                try:
                    await close_at_once(accepted.receive_nowait())
                except (trio.WouldBlock, trio.EndOfChannel):
                    break
            accepted.close()

    async def _accept(
        self,
        handler: Callable[[Any], Awaitable[None]],
        accepted: trio.MemoryReceiveChannel[SimLink],
        name: str,
        room: trio.CapacityLimiter,
        nursery: trio.Nursery,
    ) -> None:
        _host.set(name)  # connections that the handlers dial start from this host
        while True:
            link = await accepted.receive()
            await room.acquire_on_behalf_of(link)
            nursery.start_soon(self._handle, handler, link, room)

    async def _handle(
        self, handler: Callable[[Any], Awaitable[None]], link: SimLink, room: trio.CapacityLimiter
    ) -> None:
        try:
            connection = self._connections.get(link)
            if connection is not None and isinstance(link, SimStream):
                await connection.accepted(self.route(connection.source, connection.target))
            await handler(link)
        except Exception as error:
            # log: A handler on a simulated network raised an error.
            _log.error("the handler of a connection failed with %s", type(error).__name__)
            # log: The traceback and the text of the error in the line before. They may quote what a peer sent.
            _log.debug("the handler's failure", exc_info=error)
        finally:
            room.release_on_behalf_of(link)
            await close_at_once(link)

    def _served(self) -> str:
        return f"served are: {', '.join(sorted({name for name, _ in self._servers})) or 'none'}"


class SimTransport:
    """The `sim` transport for one kind of link. `for_links` returns the variant that a protocol needs."""

    def __init__(self, link: LinkKind) -> None:
        self.link: LinkKind = link

    def for_links(self, links: frozenset[LinkKind]) -> SimTransport:
        """Return the packet transport if the protocol supports packet links, otherwise the stream transport."""
        return _PACKETS if "packets" in links else sim_transport

    def options(self, side: Literal["client", "server"]) -> frozenset[str]:
        """Return the names of the options that one side accepts."""
        return frozenset({"connect_timeout"} if side == "client" else ())

    def connect(self, address: str, **options: Any) -> AbstractAsyncContextManager[SimLink]:
        """Return a context manager that opens a connection, for `muxkit.connect`."""
        check_options("sim", options, self.options("client"))
        return _connect(address, self.link, **options)

    async def serve(
        self,
        handler: Callable[[Any], Awaitable[None]],
        address: str,
        *,
        limits: Limits | None = None,
        task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
        **options: Any,
    ) -> None:
        """Run `handler` with each connection until cancelled, for `muxkit.serve`."""
        check_options("sim", options, self.options("server"))
        most = (limits or Limits()).connections
        await _needed(address).serve(handler, address, self.link, most, task_status)


@asynccontextmanager
async def _connect(
    address: str, kind: LinkKind, *, connect_timeout: float = CONNECT_TIMEOUT
) -> AsyncGenerator[SimLink, None]:
    network = _needed(address)
    link: SimLink | None = None
    with trio.move_on_after(connect_timeout) as scope:
        link = await network.dial(address, kind)
    if link is None:
        if scope.cancelled_caught:
            raise TimeoutError(f"sim {address}: no answer within {connect_timeout:g} s (connect_timeout=)")
        raise AssertionError("a dial that was not cancelled gave no link")
    async with link:
        yield link


sim_transport: SimTransport = SimTransport("stream")
_PACKETS: Final = SimTransport("packets")
_NONE: Final = SimNetwork()  # stands for "no network", because a RunVar can't be reset to unset


def current() -> SimNetwork | None:
    """Return the network of the surrounding `with` block in this Trio run, or None."""
    found = _current.get(_NONE)
    return None if found is _NONE else found


def _needed(address: str) -> SimNetwork:
    network = current()
    if network is None:
        raise RuntimeError(
            f"sim://{address}: there is no simulated network in this run of Trio. Run the program inside "
            "`with muxkit.testing.SimNetwork(seed=17):`, or use the pytest fixture `weather`"
        )
    return network


def _read_address(address: str) -> tuple[str, str]:
    source, at, target = address.rpartition("@")
    return (_name(source) if at else _host.get()), _name(target)


def _name(name: str) -> str:
    if not name or set(name) & set("*@ /?#>"):
        raise ValueError(f"address {name!r}: expected the name of a host, such as sim://orders or sim://alice@orders")
    return name


def _directions(one: str, other: str, one_way: bool) -> list[tuple[str, str]]:
    return [(one, other)] if one_way or one == other else [(one, other), (other, one)]


def _matches(one: str, other: str, source: str, target: str) -> bool:
    return one in (ANY, source) and other in (ANY, target)


def _set(**values: object) -> Change:
    def change(route: SimRoute) -> None:
        for name, value in values.items():
            setattr(route, name, value)

    return change


def _told(weather: SimWeather) -> str:
    """Describe network conditions by the settings that differ from the defaults."""
    usual = SimWeather()
    names: Sequence[str] = [field.name for field in attrs.fields(SimWeather)]
    return " ".join(
        f"{name}={getattr(weather, name):g}" for name in names if getattr(weather, name) != getattr(usual, name)
    )


def _way(route: SimRoute, seed: str) -> _SimWay:
    weather = route.weather
    way = _SimWay(
        route=route, dice=random.Random(seed), jitter=weather.jitter, buffer=weather.buffer, splits=weather.splits
    )
    way.delay, way.rate = route.delay, route.rate
    route.ways.append(way)
    return way


def _refused(text: str) -> ConnectionRefusedError:
    error = ConnectionRefusedError(text)
    error.errno = errno.ECONNREFUSED
    return error
