"""The server's side of forwards: a channel handler that connects to targets, and listens for its clients, as its rules
allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import count

import attrs
import trio

from muxkit.forward.addresses import LOOPBACK, Address, parse_address
from muxkit.forward.allow import AllowList
from muxkit.forward.datagrams import Backlog, DatagramRelay, read_datagrams
from muxkit.forward.relay import ForwardLimits, ForwardStats, Relay, Tally, log
from muxkit.forward.sockets import Listeners, Lookups, Reach, dial, dial_udp, listening, peer_of
from muxkit.forward.streams import CarriedStream
from muxkit.forward.wire import (
    NAME,
    NUMBER_SIZE,
    Accepted,
    Code,
    Connect,
    Datagrams,
    Done,
    Dropped,
    ForwardRefused,
    Listen,
    Refusal,
    Take,
    decode_notice,
    decode_request,
    encode,
)
from muxkit.runtime import Channel, Session, bare_nursery, may_log

LOGGED_MOST = 50  # refusals that are logged in a row; a client could fill a disk with them
LOGGED_EVERY = 0.2  # s until another one may be
PATIENCE_FOR_OLD = 1.0  # s that a listener of a client without a connection gets to close for a new one


def handler(
    allow: Iterable[str] | AllowList = (),
    *,
    listen: Iterable[str] | AllowList = (),
    limits: ForwardLimits | None = None,
) -> ForwardHandler:
    """Return the channel handler of a server that forwards: `muxkit.open_server(forward.handler(["db:5432"]), url)`.

    A client may only reach what the rules in `allow` name, and listen where those in `listen` say. Without rules,
    nothing is allowed. A rule without an address means public addresses: a name that resolves to this machine or to a
    private network is refused, unless its rule says `name@network:port`. `AllowList` describes the form of rules. An
    invalid one raises ValueError.

    Use `muxkit.by_name({forward.NAME: forward.handler(…), "chat": chat})` to serve other channels too. A client's
    listeners are closed when its session ends.
    """
    return ForwardHandler(_rules(allow), _rules(listen), limits or ForwardLimits())


def _rules(given: Iterable[str] | AllowList) -> AllowList:
    return given if isinstance(given, AllowList) else AllowList(given)


@attrs.define(eq=False)
class _Pending:
    """A connection that a listener has accepted and the client hasn't taken yet."""

    stream: CarriedStream
    over: trio.Event = attrs.field(factory=trio.Event)
    was_taken: bool = False


@attrs.define(eq=False)
class _Listener:
    """A listener of a client."""

    bind: Address
    client: _Client
    scope: trio.CancelScope
    over: trio.Event = attrs.field(factory=trio.Event)
    pending: dict[int, _Pending] = attrs.field(factory=dict)


@attrs.define(eq=False)
class _Client:
    """The listeners and connections of one session."""

    session: Session
    tally: Tally
    reach: Reach
    channels: int = 0
    listening: int = 0
    """Listeners, and those that are about to be."""
    listeners: dict[int, _Listener] = attrs.field(factory=dict)
    datagrams: dict[int, DatagramRelay] = attrs.field(factory=dict)
    backlog: Backlog = attrs.field(factory=Backlog)
    numbers: count[int] = attrs.field(factory=lambda: count(1))

    @property
    def user(self) -> str | None:
        return _user_of(self.session)

    @property
    def is_absent(self) -> bool:
        """True for a session that is waiting for its client to reconnect."""
        return getattr(self.session, "is_connected", True) is False


@attrs.define(eq=False)
class _RefusalLog:
    """Logs refusals at a limited rate, and the number of those it left out."""

    room: float = LOGGED_MOST
    left_out: int = 0
    _looked_at: float = -math.inf

    def note(self, session: Session, refused: ForwardRefused) -> None:
        now = trio.current_time()
        self.room = min(LOGGED_MOST, self.room + (now - self._looked_at) / LOGGED_EVERY)
        self._looked_at = now
        if self.room < 1:
            self.left_out += 1
            return
        self.room -= 1
        if self.left_out:
            # log: Clients were refused so often that only some refusals were logged. The number counts the others.
            log.warning("%d more refusals were not logged", self.left_out)
            self.left_out = 0
        fields = {"event": "refused", "fields": {"code": int(refused.code)}}
        # log: A client requested an address that the rules don't allow or that couldn't be reached.
        log.info("refused %s: %s", session.info.peer or "a client", refused.reason, extra=fields)


class ForwardHandler:
    """A channel handler, created by `handler`."""

    def __init__(self, allow: AllowList, listen: AllowList, limits: ForwardLimits) -> None:
        self._allow = allow
        self._listen_allow = listen
        self._limits = limits
        self._clients: dict[Session, _Client] = {}
        self._all = Tally(limits.connections)
        self._lookups = Lookups(limits.lookups)
        self._refusals = _RefusalLog()

    def stats(self) -> ForwardStats:
        """Return the gauges and counters of all clients together."""
        return self._all.stats()

    @property
    def listeners(self) -> list[str]:
        """The addresses it currently listens on for its clients."""
        return [str(each.bind) for client in self._clients.values() for each in client.listeners.values()]

    async def __call__(self, channel: Channel) -> None:
        if channel.name != NAME:
            channel.abort(f"this server only forwards: unknown channel name {channel.name[:64]!r}", code=404)
            return
        session = channel.session
        client = self._clients.get(session)
        if client is None:
            reach = Reach(self._allow, self._lookups, _user_of(session) or session)
            client = self._clients[session] = _Client(session, Tally(self._limits.connections), reach)
        client.channels += 1
        try:
            if getattr(channel, "is_reliable", True):
                await self._serve(channel, client)
            else:
                await self._take_datagrams(channel, client)
        except ForwardRefused as refused:
            self._all.refused += 1
            self._refusals.note(session, refused)
            await channel.send(encode(Refusal(refused.reason, int(refused.code))))
            await channel.aclose()
        finally:
            client.channels -= 1
            if not client.channels:
                self._clients.pop(session, None)

    async def _serve(self, channel: Channel, client: _Client) -> None:
        match decode_request(channel.opening):
            case Connect(target):
                await self._connect(channel, client, _parsed(target))
            case Listen(bind):
                await self._listen(channel, client, _parsed(bind, any_port=True))
            case Take(listener, connection):
                await self._take(channel, client, listener, connection)

            case Datagrams(target):
                await self._datagrams(channel, client, _parsed(target))

    # --- datagrams

    async def _datagrams(self, channel: Channel, client: _Client, target: Address) -> None:
        self._enter(client)
        number = next(client.numbers)
        try:
            with await dial_udp(target, client.reach, seconds=self._limits.connect) as sock:
                relay = client.datagrams[number] = DatagramRelay(
                    channel, self._all, client.backlog, sock.send, idle=self._limits.idle
                )
                await channel.send(encode(Done(str(target), number)))
                await relay.run(partial(read_datagrams, sock, relay.push))
        finally:
            client.datagrams.pop(number, None)
            client.tally.leave()
            self._all.leave()

    async def _take_datagrams(self, channel: Channel, client: _Client) -> None:
        """Read an unreliable channel. Each message is a number and a datagram. Datagrams with an unknown number are
        dropped.
        """
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for message in channel:
                relay = client.datagrams.get(int.from_bytes(message[:NUMBER_SIZE], "big"))
                if relay is not None:
                    relay.use(channel)
                    await relay.take(message[NUMBER_SIZE:])

    # --- connections

    async def _connect(self, channel: Channel, client: _Client, target: Address) -> None:
        self._enter(client)
        try:
            stream = await dial(target, client.reach, seconds=self._limits.connect)
            await self._carry(stream, channel, client, str(target))
        finally:
            client.tally.leave()
            self._all.leave()

    async def _take(self, channel: Channel, client: _Client, listener: int, connection: int) -> None:
        found = client.listeners.get(listener)
        pending = None if found is None else found.pending.pop(connection, None)
        if pending is None:
            raise ForwardRefused("the connection has ended", Code.GONE)
        pending.was_taken = True
        pending.over.set()
        try:
            self._enter(client)
        except ForwardRefused:
            pending.stream.reset()
            raise
        try:
            await self._carry(pending.stream, channel, client, "")
        finally:
            client.tally.leave()
            self._all.leave()

    def _enter(self, client: _Client) -> None:
        if client.tally.is_full:
            raise ForwardRefused(f"{client.tally.most} connections of this client are open", Code.TOO_MANY)
        client.tally.enter()
        self._all.enter()

    async def _carry(self, stream: CarriedStream, channel: Channel, client: _Client, address: str) -> None:
        try:
            await channel.send(encode(Done(address)))
        except BaseException:
            stream.reset()
            raise
        await Relay(stream, channel, self._all).run()

    # --- listeners

    async def _listen(self, channel: Channel, client: _Client, bind: Address) -> None:
        self._check_bind(bind)
        if client.listening >= self._limits.listeners:
            raise ForwardRefused(f"this client has {client.listening} listeners", Code.TOO_MANY)
        client.listening += 1
        try:
            await self._close_listeners_of_absent(client, bind)
            async with listening(bind) as opened:
                await self._run_listener(channel, client, bind, opened)
        except OSError as error:
            raise ForwardRefused(str(error.strerror or error), Code.IN_USE) from error
        finally:
            client.listening -= 1

    def _check_bind(self, bind: Address) -> None:
        rules = self._listen_allow
        if bind.path:
            is_allowed = rules.allows_path(bind.path)
        else:
            address = Address(LOOPBACK).ip if bind.host == "localhost" else bind.ip
            is_allowed = address is not None and rules.allows(None, address, bind.port)
        if not is_allowed:
            raise ForwardRefused(f"listening on {bind} is not allowed here", Code.NOT_ALLOWED)

    async def _close_listeners_of_absent(self, client: _Client, bind: Address) -> None:
        """Close an absent client's listener at the same address: the same user is back with a new session."""
        if not bind.path and not bind.port:
            return
        for other in [*self._clients.values()]:
            if other is not client and other.is_absent and other.user == client.user:
                for each in [*other.listeners.values()]:
                    if each.bind == bind:
                        each.scope.cancel()
                        with trio.move_on_after(PATIENCE_FOR_OLD):
                            await each.over.wait()

    async def _run_listener(self, channel: Channel, client: _Client, bind: Address, opened: Listeners) -> None:
        number = next(client.numbers)
        is_logged = may_log("listeners of clients")
        async with bare_nursery() as nursery:
            listener = client.listeners[number] = _Listener(bind, client, nursery.cancel_scope)
            if bind.port == 0 and not bind.path:
                listener.bind = parse_address(opened.addresses[0])
            try:
                await channel.send(encode(Done(opened.addresses[0], number)))
                if is_logged:
                    # log: This machine listens for a client's remote forward.
                    log.info("listening on %s for %s", listener.bind, client.session.info.peer or "a client")
                nursery.start_soon(self._accept, channel, listener, opened, nursery)
                await self._hear(channel, listener)
            finally:
                nursery.cancel_scope.cancel()
                client.listeners.pop(number, None)
                for pending in listener.pending.values():
                    pending.stream.reset()
                listener.over.set()
                if is_logged:
                    # log: That listener was closed.
                    log.info("no longer listening on %s", listener.bind)

    async def _hear(self, channel: Channel, listener: _Listener) -> None:
        """Read which connections the client drops, until the client ends the channel."""
        try:
            async for message in channel:
                dropped = decode_notice(message, Dropped)
                pending = listener.pending.pop(dropped.connection, None)
                if pending is not None:
                    pending.over.set()
        except ForwardRefused as error:
            channel.abort(error.reason, code=error.code)

    async def _accept(self, channel: Channel, listener: _Listener, opened: Listeners, nursery: trio.Nursery) -> None:
        numbers = count(1)
        waiting = Tally(self._limits.pending)

        async def offer(stream: CarriedStream) -> None:
            number = next(numbers)
            pending = listener.pending[number] = _Pending(stream)
            try:
                await channel.send(encode(Accepted(number, peer_of(stream))))
                with trio.move_on_after(self._limits.take):
                    await pending.over.wait()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                nursery.cancel_scope.cancel()
            finally:
                listener.pending.pop(number, None)
                waiting.leave()
                if not pending.was_taken:
                    stream.reset()

        await opened.accept_for_ever(waiting, offer, nursery)


def _user_of(session: Session) -> str | None:
    identity = session.info.identity
    return None if identity is None else identity.user or identity.subject


def _parsed(text: str, *, any_port: bool = False) -> Address:
    try:
        return parse_address(text, any_port=any_port)
    except ValueError as error:
        raise ForwardRefused(str(error), Code.MALFORMED) from None
