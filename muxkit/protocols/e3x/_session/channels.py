"""An e3x engine on a link, and what applications hold of it: channels, and receipts for processed messages."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, facts_of, frames_of
from muxkit.core import Headers, Reason, Receiving, Sending, decode_headers, printable, without_name
from muxkit.protocols.e3x.config import LEAST_PACKET, Config
from muxkit.protocols.e3x.engine.channel import EngineChannel
from muxkit.protocols.e3x.engine.chunked import ChunkedEngine, encode_chunks
from muxkit.protocols.e3x.engine.engine import Engine
from muxkit.protocols.e3x.engine.events import Event
from muxkit.runtime import (
    YIELD_BYTES,
    YIELD_LEAST,
    ByteStream,
    ChannelCancelled,
    ChannelStats,
    ChannelStopped,
    DatagramPump,
    ErrorMaker,
    NowaitPackets,
    OutboxBudget,
    PacketLink,
    PumpOwner,
    ReceiveHalf,
    SendHalf,
    Session,
    Side,
    StreamPump,
    Unsupported,
    Watermark,
    as_bytes,
)
from muxkit.runtime import Channel as CommonChannel

OVERHEAD = 64  # bytes that a waiting message counts beside its own
MESSAGES_MOST = 1_000_000  # messages that one call of `receive_many` takes
REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH})
BYE: Final = "muxkit.bye"  # the type of channels that tell that their sender leaves
TYPE: Final = "muxkit"  # the type of channels without a name
NO_REASON: Final = "given up"  # the err of a channel that was aborted without a reason: an empty one may be overlooked
WITHOUT_REASON: Final = b"\1"  # the body of a goodbye that is not in order, and gives no reason
IN_ORDER: Final = b"\0"  # how the body of a goodbye begins that is in order
REASON_MOST: Final = 512  # bytes
BYE_HEAD: Final = 64  # bytes of the packet of a goodbye beside its body


class Connection(PumpOwner[Event]):
    """Runs an engine over a link; `on_events` receives the engine's events, `on_lost` is called once.

    `on_aborted` is called for each channel that this side aborts, because the engine reports no event for that.
    """

    wire_name = "e3x"

    def __init__(
        self,
        link: PacketLink | trio.abc.Stream,
        *,
        session: Session,
        odd: bool,
        config: Config,
        limits: Limits,
        observer: Observer | None,
        on_events: Callable[[Sequence[Event]], None],
        on_lost: Callable[[], None],
        on_aborted: Callable[[EngineChannel], object],
        on_written: Callable[[], None],
    ) -> None:
        self.session = session
        self.is_on_packets: bool = not isinstance(link, trio.abc.Stream)
        if not self.is_on_packets:
            config = attrs.evolve(config, congestion=False)  # the stream limits the rate itself
        self.facts = facts_of(observer)
        self.observer = frames_of(observer)
        self.engine: Engine = Engine(odd, config, limits=limits, observer=self.observer)
        self.budget: OutboxBudget = OutboxBudget(facts=self.facts)  # the engine itself limits what each channel queues
        self.reminder = self.budget.watchdog
        self._on_events = on_events
        self._on_lost = on_lost
        self.pump: StreamPump[Event] | DatagramPump[Event]
        if isinstance(link, trio.abc.Stream):
            chunked = ChunkedEngine(self.engine, trio.current_time, observer=self.observer)
            self.pump = StreamPump(link, chunked, self)
        else:
            self.pump = DatagramPump(link, self.engine, self, fatal=REFUSED if config.refusal_is_fatal else ())
            if isinstance(link, NowaitPackets):
                self.engine.packet_size = min(config.packet, link.packet_limit)
        self.pump.phase = "handshake"  # a packet link has none: until something was heard
        self.request_write: Final = self.pump.request_write
        self.gone: Final = trio.lowlevel.ParkingLot()  # tasks that wait until channels are gone
        self.acked: trio.lowlevel.ParkingLot = (
            trio.lowlevel.ParkingLot()
        )  # tasks that wait until something is confirmed
        self.written: trio.lowlevel.ParkingLot = (
            trio.lowlevel.ParkingLot()
        )  # tasks that wait until something is written
        self.heard_at: float = trio.current_time()
        self.was_heard: bool = False
        self.unread = 0  # bytes in the inboxes of all channels
        self.dropped = 0
        self.messages_received = 0
        self.messages_sent = 0
        self._on_aborted = on_aborted
        self._on_packets_written = on_written

    def heard(self) -> None:
        """Note that the peer answered now."""
        self.heard_at = trio.current_time()
        if not self.was_heard:
            self.was_heard = True
            if self.pump.phase == "handshake":
                self.pump.phase = "open"

    def wake_all(self) -> None:
        """Wake the tasks in all three parking lots."""
        for lot in (self.gone, self.acked, self.written):
            if lot:
                lot.unpark_all()

    # --- commands

    def update_time(self) -> None:
        """Tell the engine the time before a command, which may follow a long silence."""
        self.engine.tell_time(trio.current_time())

    def after_command(self) -> None:
        """Dispatch the events of a command, write its acks and set its timers."""
        self.pump.dispatch_events()
        if self.engine.owes:
            self.pump.request_write()
        self.pump.rearm()

    def done(self, channel: EngineChannel) -> None:
        """Count the messages that the application has as processed."""
        self.update_time()
        self.engine.done(channel)
        self.after_command()

    def close(self, channel: EngineChannel) -> None:
        """End a channel, and discard what arrives on it."""
        self.update_time()
        self.engine.close(channel)
        self.after_command()
        self.request_write()

    def abort(self, channel: EngineChannel, reason: Reason) -> None:
        """Tell the peer that this side gives a channel up, and forget it."""
        if not self.pump.is_lost:
            self.update_time()
            self.engine.err(channel, reason.encode().decode() or NO_REASON)
            self.engine.blame(channel)
        self._on_aborted(channel)
        self.after_command()
        self.request_write()

    # --- the pump

    def lose(self, reason: str, *, by: Side, told: Reason | None = None, in_order: bool = False) -> None:
        """Hang up at once, and tell the peer why; on a packet link it is told even without a reason."""
        is_stream = isinstance(self.pump, StreamPump)
        body = told.encode(min(REASON_MOST, self.engine.packet_size - BYE_HEAD)) if told else WITHOUT_REASON
        packets: list[bytes] = []
        if told if is_stream else self.was_heard or self.engine.counters["packets_sent"]:
            with suppress(LocalProtocolError):  # no id is left
                packet = self.engine.parting(BYE, IN_ORDER if in_order else body)
                packets.append(encode_chunks(packet) if is_stream else packet)
        self.pump.lose(reason, by=by, parting=packets)

    def raise_if_lost(self) -> None:
        if self.pump.is_lost:
            raise self.pump.loss()

    def handle_events(self, events: Sequence[Event]) -> None:
        self._on_events(events)

    def handle_lost(self) -> None:
        self._on_lost()

    def queued_bytes(self) -> int:
        return self.engine.stats().unsent

    def has_understood_peer(self) -> bool:
        return self.was_heard

    def handle_written(self) -> None:
        if self.written:
            self.written.unpark_all()
        self._on_packets_written()

    def handle_packet_limit(self, limit: int) -> None:
        self.engine.packet_size = max(LEAST_PACKET, min(self.engine.config.packet, limit))


class Channel(CommonChannel):
    """A channel; made by `session.open`, or taken from `session.incoming`.

    On a reliable channel a message counts as processed, and the peer is told, with the next call of `receive` or
    `receive_many`, with `done`, or when the channel is closed. On an unreliable one `send` never waits, each message
    must fit into one packet (`quota`), and the oldest messages are dropped if too much waits at either end.
    """

    __slots__ = ("_connection", "_engine_channel", "_headers", "_inbox", "_opening", "_sender")

    def __init__(self, connection: Connection, engine_channel: EngineChannel, opening: bytes = b"") -> None:
        self._connection = connection
        opened = without_name(opening)  # its type is the name, so the opening holds no other one
        self._opening = opened.payload if engine_channel.is_reliable else b""
        self._headers = opened.headers
        self._engine_channel: EngineChannel = engine_channel
        self._sender: Sender = Sender(connection, engine_channel, spoke=engine_channel.ours and bool(opening))
        self._inbox: Inbox = Inbox(connection, engine_channel)
        if opened.payload and not engine_channel.ours and not engine_channel.is_reliable:
            self._inbox._deliver(opened.payload)

    @property
    def id(self) -> int:
        """The number of the channel in its packets."""
        return self._engine_channel.id

    @property
    def type(self) -> str:
        """The type that its opener gave it, as it came."""
        return self._engine_channel.type

    @property
    def name(self) -> str:
        return "" if self.type == TYPE else printable(self.type)

    @property
    def opening(self) -> bytes:
        return self._opening

    @property
    def headers(self) -> Headers:
        return decode_headers(self._headers)

    @property
    def session(self) -> Session:
        return self._connection.session

    @property
    def is_reliable(self) -> bool:
        """False for a channel whose messages may be lost and may overtake each other."""
        return self._engine_channel.is_reliable

    @property
    def quota(self) -> int:
        """Bytes that fit into the next packet: on an unreliable channel, the largest message."""
        return self._connection.engine.quota(self._engine_channel)

    @property
    def dropped(self) -> int:
        """Received messages of an unreliable channel that made way for newer ones before the application took them."""
        return self._inbox.dropped

    # --- sending

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self._sender.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self._sender.send_many(messages)

    def _cancel_when_stopped(self, scope: trio.CancelScope) -> None:
        # The end of a channel that the peer closed looks like the end of its messages, until we send something.
        self._sender.cancel_when_over(scope)
        self._inbox.cancel_when_ended(scope)

    def _try_send(self, message: bytes) -> bool:
        return self._sender._try_send(message)

    async def post(self, message: bytes) -> Receipt:
        """Send a message; `await receipt.delivered()` returns when the peer's application has processed it."""
        self._need_receipts()
        return await self._sender.post(message)

    async def delivered(self) -> None:
        """Wait until the peer's application has processed everything sent so far, with a `finish`."""
        self._need_receipts()
        await self._sender.wait_delivered()

    async def finish(self) -> None:
        """End this side of the channel, and wait until the end was sent; receiving goes on.

        e3x confirms only what an application has processed, so this does not wait for a confirmation; `delivered` waits
        until the peer has processed everything.
        """
        await self._sender.finish()

    # --- receiving

    def receive(self) -> Coroutine[object, object, bytes]:
        return self._inbox.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        return self._inbox.receive_many(limit)

    def done(self) -> None:
        """Count the received messages as processed, before the next one is asked for."""
        self._inbox.done()

    # --- the end

    async def aclose(self) -> None:
        """End this side behind everything that was sent, and stop receiving.

        Does not wait for the peer. A peer that goes on sending gets `ChannelStopped` once it has processed everything.
        """
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self._sender.close()
        self._inbox.close()
        self._connection.close(self._engine_channel)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        told = Reason(reason, code)
        self._sender.abort(reason, code=code)
        self._inbox._drop()
        self._connection.abort(self._engine_channel, told)

    def as_stream(self) -> ByteStream:
        """Return the channel as a `trio.abc.HalfCloseableStream`; use either that or the methods of the channel.

        Raises `Unsupported` for an unreliable channel.
        """
        if not self.is_reliable:
            raise Unsupported("messages of an unreliable channel may be lost, so it is no stream of bytes")
        return _Stream(self)

    def stats(self) -> ChannelStats:
        """Return the gauges of now; the credits are in packets, as the windows of the document are."""
        channel, inbox = self._engine_channel, self._inbox
        outgoing, incoming = channel.outgoing, channel.incoming
        if outgoing is None or incoming is None:
            return ChannelStats(
                queued=channel.queued, unread=inbox.size, credit_out=None, credit_in=None, waiting_since=None
            )
        return ChannelStats(
            queued=outgoing.unsent,
            unread=incoming.bytes,
            credit_out=max(0, outgoing.limit - outgoing.sent),
            credit_in=incoming.capacity - incoming.waiting,
            waiting_since=self._sender.waiting_since,
        )

    def __repr__(self) -> str:
        kind = "reliable" if self.is_reliable else "unreliable"
        state = self._sender._state_text()
        return f"<e3x.Channel {self.id} {self.type[:64]!r}, {kind}, {state}, {self._inbox.unread} unread>"

    # --- for the session

    def _took(self) -> None:
        """The application has accepted it; its opening is processed thereby."""
        self._connection.done(self._engine_channel)

    def _broken(self, text: str) -> None:
        """The peer broke the channel."""
        said = text.encode(errors="replace")
        told = Reason() if text == NO_REASON else Reason.decode(said)
        self._sender._broken(lambda: ChannelStopped("the peer broke the channel off", payload=said, told=told))
        self._inbox._ended(lambda: ChannelCancelled("the peer broke the channel off", payload=said, told=told))

    def _lost(self, error: ErrorMaker) -> None:
        self._sender._lost(error)
        self._inbox._ended(error)

    def _need_receipts(self) -> None:
        if not self.is_reliable:
            raise Unsupported("an unreliable channel confirms nothing, so it has no receipts")


class _Stream(ByteStream):
    """A channel as a stream; closing it closes the channel."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel._sender, channel._inbox)
        self._channel = channel

    async def aclose(self) -> None:
        self._channel.close()
        await super().aclose()


@attrs.define(eq=False)
class Receipt:
    """A receipt for a message sent on a reliable channel."""

    _sender: Sender
    number: int
    """The seq of its last packet."""

    @property
    def is_delivered(self) -> bool:
        return self._sender.delivery.value >= self.number

    async def delivered(self) -> None:
        """Wait until the peer's application has processed the message.

        Raises `ChannelStopped` if the peer broke the channel before, `LinkLost` if it is lost and the peer may have
        processed the message or not. A cancellation changes nothing.
        """
        await self._sender.wait_delivered(self.number)

    def __repr__(self) -> str:
        return f"<e3x.Receipt {self.number} {'delivered' if self.is_delivered else 'under way'}>"


class Sender(SendHalf):
    """The sending side of a channel; an unreliable one never waits, and has no receipts."""

    def __init__(self, connection: Connection, channel: EngineChannel, *, spoke: bool) -> None:
        super().__init__(connection.budget, connection.request_write)
        self._connection = connection
        self._engine = connection.engine
        self._channel = channel
        self.last: int = 0
        """The receipt of the last message."""
        self.end: int | None = None
        """The receipt of the end."""
        self.delivery: Watermark = Watermark(0)
        """The receipt up to which the peer's application has processed everything."""
        self._failure: ErrorMaker | None = None
        self._is_broken = False  # by the peer, so it knows that messages are missing
        if spoke and channel.outgoing is not None:
            self.last = channel.outgoing.next_seq - 1  # the opening carried a message

    def __repr__(self) -> str:
        return f"<e3x.Sender {self._channel.id} {self._channel.type[:64]!r}: {self._state_text()}>"

    def unread_beside(self) -> int:
        return self._channel.incoming.waiting if self._channel.incoming is not None else 0

    # --- for the application

    async def post(self, message: bytes) -> Receipt:
        """Send a message; return its receipt."""
        self._budget.owner.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._hand_over(message if type(message) is bytes else as_bytes(message))
        receipt = Receipt(self, self.last)
        self._request_write()
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return receipt

    async def finish(self, payload: bytes = b"") -> None:
        """End this side, and wait until the end was sent.

        The peer confirms only what its application has processed: `wait_delivered` waits for that.
        """
        self._budget.owner.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.state is Sending.OPEN:
            self.close()
        elif self._error is not None:
            await self._refuse()
        while self._error is None and not self._is_written():
            await self._connection.written.park()
        await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error()

    def _is_written(self) -> bool:
        channel = self._channel
        if channel.outgoing is None:
            return not channel.datagrams
        return channel.gone or self.end is None or channel.outgoing.sent >= self.end

    async def wait_delivered(self, number: int | None = None) -> None:
        """Wait until the peer's application has processed everything up to a receipt; None waits for everything."""
        self._budget.owner.check()
        if number is None:
            number = self.last if self.end is None else self.end
        await self.delivery.reached(number, self._raise_if_failed)

    # --- for the session

    @property
    def _is_undelivered(self) -> bool:
        """Whether messages may be unprocessed by the peer's application, on a channel that was not aborted."""
        if self._channel.outgoing is None or self._given_up or self._is_broken:
            return False
        return self.delivery.value < self.last

    def _mark_delivered(self, last: int) -> None:
        """Note that the peer's application has processed everything up to a receipt."""
        self.delivery.advance(last)
        if self.end is not None and last >= self.end:
            self._confirmed()

    def _broken(self, error: ErrorMaker) -> None:
        """The peer broke the channel."""
        self._is_broken = True
        self._fail(error)
        self._stopped(error)

    def _lost(self, error: ErrorMaker) -> None:
        self._fail(error)
        super()._lost(error)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        super().abort(reason, code=code)
        self._fail(partial(trio.ClosedResourceError, "this side gave the channel up"))

    def _raise_if_failed(self) -> None:
        """Raise why nothing more will be confirmed."""
        if self._failure is not None:
            raise self._failure()

    def _fail(self, error: ErrorMaker) -> None:
        self._failure = self._failure or error
        self.delivery.wake_all()

    # --- engine commands of `SendHalf`

    def has_room(self, size: int) -> bool:
        return self._engine.admits(self._channel, size)

    def _watch(self, size: int) -> None:
        self._engine.watch(self._channel, size)

    def _push(self, message: bytes) -> None:
        self.last = self._engine.send(self._channel, message) or self.last
        self._connection.messages_sent += 1

    def _check_size(self, size: int) -> None:
        limit = self._engine.limits.message
        if size > limit:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={limit})")

    def _finish(self, payload: bytes) -> None:
        if not self._channel.gone and not self._channel.ended:
            self._connection.update_time()
            self.end = self._engine.end(self._channel)

    def _abort(self, reason: Reason) -> None:
        pass  # the channel tells the engine, about both directions


class Inbox(ReceiveHalf[bytes]):
    """The receiving side of a channel.

    On a reliable channel packets wait in the engine, so that the peer's window counts them; the inbox holds only the
    message that the application takes next. On an unreliable one messages wait here, and the oldest are dropped.
    """

    __slots__ = ("_channel", "_connection", "_scope", "_size", "dropped")

    def __init__(self, connection: Connection, channel: EngineChannel) -> None:
        super().__init__(connection.request_write)
        self._connection = connection
        self._channel: EngineChannel = channel
        self._scope: trio.CancelScope | None = None  # cancelled when the peer sends no more
        self._size = 0  # bytes that were not taken, with their overhead
        self.dropped: int = 0

    def cancel_when_ended(self, scope: trio.CancelScope) -> None:
        """Cancel this scope when the peer sends no more."""
        self._scope = scope
        if self.state is not Receiving.OPEN:
            scope.cancel()

    def _ended(self, error: ErrorMaker) -> None:
        super()._ended(error)
        if self._scope is not None:
            self._scope.cancel()

    # --- for the application

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        """Wait for at least one message, then take all that have arrived; they count as processed together."""
        messages = await super().receive_many(limit)
        if self._channel.is_reliable:
            most = MESSAGES_MOST if limit is None else limit
            further = self._connection.engine.take(self._channel, most - len(messages))
            self._connection.messages_received += len(further)
            self._since_yield += max(sum(map(len, further)), YIELD_LEAST * len(further))
            messages += further
            if self._since_yield >= YIELD_BYTES:
                await self._yield()
        return messages

    def done(self) -> None:
        """Count the taken messages as processed, and tell the peer. Harmless if none was taken."""
        self._owner.check()
        incoming = self._channel.incoming
        if incoming is not None and incoming.handed and not self._stored.count:
            self._connection.done(self._channel)

    def close(self) -> None:
        """Stop receiving; the taken messages count as processed."""
        self.done()
        super().close()

    def _drop(self) -> None:
        """Stop receiving; the taken messages do not count as processed."""
        super().close()

    # --- for the session

    @property
    def size(self) -> int:
        """Bytes that were not taken, with what each message counts beside its own."""
        return self._size

    def _deliver(self, message: bytes) -> None:
        if self.state is not Receiving.CLOSED:
            self._count(len(message) + OVERHEAD)
        super()._deliver(message)
        if not self._channel.is_reliable:
            self._make_room()

    @property
    def unread(self) -> int:
        """Messages that wait to be received."""
        waiting = 0 if self._channel.incoming is None else self._channel.incoming.waiting
        return max(super().unread, waiting)

    # --- inside

    async def _wait(self) -> bytes:
        """Count the message before as processed: the engine may have the next one."""
        self.done()
        if not self._stored.count:
            return await super()._wait()
        message = self._stored.take()
        self._since_yield += max(len(message), YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return message

    def _taken(self, items: Sequence[bytes], size: int) -> bool:
        if items:
            self._count(-size - OVERHEAD * len(items))
        return False

    def _discard(self) -> int:
        unread = self._stored.take_all()
        self._count(-sum(map(len, unread)) - OVERHEAD * len(unread))
        return 0

    def _stop(self) -> None:
        pass  # the session closes the channel

    def _drain(self) -> None:
        pass  # after the loss of the link the engine still gives what came before

    def _make_room(self) -> None:
        """Drop the oldest messages when one channel, or all together, hold too much."""
        connection = self._connection
        limits = connection.engine.limits
        while self._stored.count and (self._size > limits.channel_first or connection.unread > limits.connection_bytes):
            self._count(-len(self._stored.take()) - OVERHEAD)
            self.dropped += 1
            connection.dropped += 1

    def _count(self, size: int) -> None:
        self._size += size
        self._connection.unread += size


Inbox.receive_many.__qualname__ = "Channel.receive_many"  # which Python prints if it is never awaited
