"""A network of named hosts inside one Trio run, which serves and dials `sim://` URLs.

    with SimNetwork(seed=17, weather=SimWeather(delay=0.05, loss=0.01)) as network:
        async with muxkit.open_server(echo, "bpmux+sim://server"), muxkit.connect("bpmux+sim://server") as session:
            network.partition("client", "server")

All times are Trio's, so it runs on a virtual clock. Protocols that speak over packets get packets, which are lost,
doubled and reordered; the others get byte streams, on which a lost segment comes late.
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
CLIENT: Final = "client"  # the host of a program that names none
CONNECT_TIMEOUT: Final = 30.0  # s
RESEND_LEAST: Final = 0.2  # s until a lost segment of a stream is sent again, as in Linux
RESEND_MOST: Final = 6  # times that one segment is lost in a row
FORGOTTEN: Final = 60.0  # s after which a packet link ends whose peer has gone without a word
BACKLOG: Final = 128  # connections that a server has not accepted yet; more wait
MOMENTS: Final = 10_000  # times of sending that are remembered
QUEUE_SECONDS: Final = 1.0  # of packets that a throttled line queues; more are lost

_log = logging.getLogger("muxkit.testing")
_host: ContextVar[str] = ContextVar("muxkit simulated host", default=CLIENT)
_current: trio.lowlevel.RunVar[SimNetwork] = trio.lowlevel.RunVar("muxkit simulated network")


@attrs.frozen(kw_only=True)
class SimWeather(PacketWeather):
    """The weather from one host to another; of what is not named below, streams know `delay`, `jitter` and `loss`.

    A lost segment of a stream delays what is behind it until it was sent again; a lost packet is lost.
    """

    rate: float | None = None
    """Bytes a second of each connection."""
    buffer: int = BUFFER
    """Bytes of a stream under way; a sender waits for room."""
    splits: bool = True
    """What is sent on a stream arrives in pieces of random size."""


@attrs.frozen
class SimEvent:
    """One thing that happened on the network."""

    at: float
    """Seconds since the network began."""
    what: str
    source: str
    target: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.at:10.3f} s  {self.what:<10} {self.source} > {self.target} {self.detail}".rstrip()


class SimRoute:
    """The way from one host to another: its weather, and what was done to it since."""

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
        return self.weather.delay + self.extra_delay

    @property
    def rate(self) -> float | None:
        rates = [rate for rate in (self.weather.rate, self.throttled) if rate is not None]
        return min(rates, default=None)

    async def cross(self) -> None:
        """Take as long as a first packet there, which is sent until it arrives."""
        await trio.sleep(self.delay + self._dice.uniform(0.0, self.weather.jitter) + self.lateness(self._dice))
        while self.is_partitioned:
            await self.changed.park()

    def lateness(self, dice: random.Random) -> float:
        """Return how long it takes to send a segment of a stream again, as often as it is lost."""
        late, pause = 0.0, max(RESEND_LEAST, 2 * self.delay)
        for _ in range(RESEND_MOST):
            if dice.random() >= self.weather.loss:
                break
            late += pause
            pause *= 2
        return late

    def renew(self) -> None:
        """Tell all that is under way on this route that something has changed."""
        self.changed.unpark_all()
        for way in self.ways:
            way.retime()
            way.changed.unpark_all()
        for packets in self.packet_ways:
            packets.renew()


@attrs.define(eq=False, kw_only=True)
class _SimWay(StreamWay):
    """One direction of a stream on a route, whose weather may change at any time."""

    route: SimRoute
    # The same as in `Line`, said again because they are assigned here.
    delay: float = 0.0
    rate: float | None = None
    arrived_at: float = -math.inf
    free_at: float = -math.inf
    ended_at: float | None = None

    def add(self, piece: bytes, late: float) -> None:
        route = self.route
        self.delay, self.rate = route.delay, route.rate
        late = self.dice.uniform(0.0, route.weather.jitter) + route.lateness(self.dice)
        StreamWay.add(self, piece, late)  # `super()` finds no class here, since attrs makes another one
        route.network.weigh(route, len(piece))

    def retime(self) -> None:
        """Let pieces that wait for the wire leave at the rate of today."""
        now, free = trio.current_time(), -math.inf
        before, rate = self.arrived_at, self.route.rate
        pieces = [*self.pieces]
        if rate == self.rate or not pieces:
            return
        self.rate = rate
        self.pieces.clear()
        self.arrived_at = -math.inf
        for arrival, piece in pieces:
            if arrival > now + self.delay:  # it has not left
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
    """One end of a connection between two hosts."""

    def __init__(self, outgoing: _SimWay, incoming: _SimWay, peer: str) -> None:
        super().__init__(outgoing, incoming, peer)
        self._routes = (outgoing.route, incoming.route)
        self._ends_of = (outgoing, incoming)

    def cut(self, how: Cut) -> None:
        """Lose the connection."""
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
                self.vanish()  # the peer cannot be told, and has to find out by the silence
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
    """One end of a packet link between two hosts; its peer is not told when it is closed, as with UDP."""

    def __init__(self, outgoing: _SimPacketWay, incoming: _SimPacketWay, peer: str, network: SimNetwork) -> None:
        super().__init__(outgoing, incoming)
        self.peer: str = peer
        self._ends_of = (outgoing, incoming)
        self._network = network

    def cut(self, how: Cut) -> None:
        """Lose the link: what is under way and, after a stall, all that follows; otherwise both ends see its end."""
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


Change = Callable[[SimRoute], None]


class SimNetwork:
    """Hosts and the routes between them, for the `sim://` URLs of one Trio run, as a `with` block inside of it.

    `seed` decides all that is left to chance. Hosts are names, and begin to exist when they are used: `sim://orders`
    is served by the host `orders`, `sim://alice@orders` is dialled from the host `alice`. Without a name before the
    `@` it is dialled from the host of the block or the server that it is called in, otherwise from `client`.
    Where a method takes hosts, "*" is any. Rules that come later win.
    """

    def __init__(self, seed: int = 0, *, weather: SimWeather | None = None) -> None:
        self.seed: int = seed
        self.log: list[SimEvent] = []
        """What has happened: connections, their ends, and what was done to the network; not each message."""
        self.routes: dict[tuple[str, str], SimRoute] = {}
        """The routes that were used, by source and target."""
        self.weather: SimWeather = weather or SimWeather()
        """Of routes for which no other was set."""
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
        """Dial from this host in the block, and in tasks that are started there."""
        token = _host.set(_name(name))
        try:
            yield
        finally:
            _host.reset(token)

    # --- what can be done to it

    def set_weather(self, weather: SimWeather, source: str = ANY, target: str = ANY) -> None:
        """Change the weather from one host to another, in this direction."""
        self._apply("weather", source, target, _set(weather=weather), _told(weather))

    def delay(self, seconds: float, source: str = ANY, target: str = ANY) -> None:
        """Delay what is sent from now on by so much more, in this direction; 0 ends it. Streams keep their order."""
        self._apply("delay", source, target, _set(extra_delay=seconds), f"{seconds:g} s more")

    def throttle(self, rate: float | None, source: str = ANY, target: str = ANY) -> None:
        """Let each connection carry at most so many bytes a second in this direction; None ends it."""
        if rate is not None and rate <= 0:
            raise ValueError(f"throttle(rate={rate}): must be above 0; partition() lets nothing through")
        self._apply("throttle", source, target, _set(throttled=rate), "off" if rate is None else f"{rate:g} bytes/s")

    def partition(self, one: str = ANY, other: str = ANY, *, one_way: bool = False) -> None:
        """Let nothing through between two hosts, or only not from the first to the second, until `heal`.

        Streams hold what is sent, and deliver it when the partition is healed; packets are lost. Neither end is told.
        """
        for source, target in _directions(one, other, one_way):
            self._apply("partition", source, target, _set(is_partitioned=True))

    def heal(self, one: str = ANY, other: str = ANY, *, one_way: bool = False) -> None:
        """End partitions between two hosts, or only from the first to the second; without arguments all of them."""
        for source, target in _directions(one, other, one_way):
            self._apply("heal", source, target, _set(is_partitioned=False))

    def cut(self, one: str = ANY, other: str = ANY, *, how: Cut = Cut.RESET) -> int:
        """Cut the connections that stand now between two hosts; return how many there were."""
        cut = 0
        for connection in dict.fromkeys(self._connections.values()):
            ends = (connection.source, connection.target)
            if _matches(one, other, *ends) or _matches(other, one, *ends):
                self._note("cut", *ends, f"connection {connection.number}, {how.value}")
                connection.ends[0].cut(how)
                cut += 1
        return cut

    # --- what it tells

    def now(self) -> float:
        """Return the seconds since the network began."""
        return trio.current_time() - self._began

    @property
    def connections(self) -> int:
        """How many connections there were and are."""
        return self._count

    def fingerprint(self) -> str:
        """Return a hash of all that has happened, when, and of the size of each piece; equal for equal runs."""
        return self._sum.hexdigest()

    def moments(self) -> list[float]:
        """Return when data was sent, in seconds since the network began; the first thousands of times."""
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
        """Open a connection; takes a round trip, and OSError says that no program serves there."""
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
        """Note that an end was closed by its program."""
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
        """Run `handler` with each connection to the host `name`, until cancelled."""
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
        _host.set(name)  # what the server's handlers dial, they dial from here
        while True:
            link = await accepted.receive()
            await room.acquire_on_behalf_of(link)
            nursery.start_soon(self._handle, handler, link, room)

    async def _handle(
        self, handler: Callable[[Any], Awaitable[None]], link: SimLink, room: trio.CapacityLimiter
    ) -> None:
        try:
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
    """The transport of `sim://`, over links of one kind; `for_links` gives the one that a protocol needs."""

    def __init__(self, link: LinkKind) -> None:
        self.link: LinkKind = link

    def for_links(self, links: frozenset[LinkKind]) -> SimTransport:
        """Return the transport over packets for protocols that speak over them, over streams for the others."""
        return _PACKETS if "packets" in links else sim_transport

    def options(self, side: Literal["client", "server"]) -> frozenset[str]:
        """Return the names of the options that one side takes."""
        return frozenset({"connect_timeout"} if side == "client" else ())

    def connect(self, address: str, **options: Any) -> AbstractAsyncContextManager[SimLink]:
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
_NONE: Final = SimNetwork()  # what stands there after a block: a RunVar cannot be emptied again


def current() -> SimNetwork | None:
    """Return the network of the block that this run is in, or None."""
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
    """Describe the weather by what is not as usual."""
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
