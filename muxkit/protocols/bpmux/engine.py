"""The bpmux engine: one side of a connection, without I/O.

Received bytes and the session's commands go in. Events, such as received messages, and bytes to send come out. The
session (`_connection`) connects an engine to Trio, and the tests and the decoders of recordings use it directly.

`StreamMuxEngine` has everything that engines over a byte stream share: the timers, the keepalive, the end of the
connection. This module adds the commands that open entities, the end of the peer's direction, and the last bytes to
write. The modules `entities`, `send` and `receive` have the commands for a single entity, and the module `state` the
theory of operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import U64_MAX, Buffer, Reason
from muxkit.core.events import Failed, Halves, Probed, Silent
from muxkit.core.mux_state import Vital
from muxkit.core.stream_engine import StreamMuxEngine
from muxkit.protocols.bpmux.config import Config
from muxkit.protocols.bpmux.entities import NO_REASON, UNANNOUNCED, Entity, Kind
from muxkit.protocols.bpmux.events import HalfClosed
from muxkit.protocols.bpmux.frames import (
    ANNOUNCEMENT_MOST,
    Chunk,
    Type,
    encode_chunk,
    find_announcement,
    observe_written,
)
from muxkit.protocols.bpmux.reader import HEAD_MOST, ChunkReader
from muxkit.protocols.bpmux.receive import Receiver
from muxkit.protocols.bpmux.send import Sender
from muxkit.protocols.bpmux.state import State

CHANNEL_PRICE: Final = 5 * 1024  # bytes of memory for a duplex, its session objects and the task of its handler
# Seconds until the first pong to a peer that has ended its direction of the stream. Each later pause is twice as long,
# up to `Config.keepalive`, or to PROOF_SECONDS (the default of that setting) if the keepalive is off.
FIRST_PROOF_SECONDS: Final = 0.05
PROOF_SECONDS: Final = 20.0


class Engine(StreamMuxEngine):
    """One side of a bpmux connection. It implements the interface `muxkit.core.StreamEngine`.

    The engine's own commands open entities and return them as `Sender` and `Receiver` objects, which have all further
    commands. A command that raises `LocalProtocolError` has changed nothing.

    The caller must call `Receiver.consumed` for every message that the application has taken. Otherwise, the engine
    grants no new credit, and the peer has to stop sending.
    """

    def __init__(
        self, config: Config | None = None, *, limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        self.config: Config = config or Config()
        limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self._state = State(self.config, limits, observer)
        super().__init__(self._state, keepalive=self.config.keepalive, keepalive_timeout=self.config.keepalive_timeout)
        self._reader = ChunkReader(self._state)
        # The peer's first bytes, until we know whether they announce a first credit. Then None.
        self._first_bytes: bytes | None = b""
        # How many pongs and bytes were waiting to be written when `_prove_peer` was called last.
        self._unwritten: tuple[int, int] | None = None
        self._answerable: list[Entity] = []  # for `_first_answerable`
        self._next_id = self.config.first_id
        self.is_half_closed: bool = False
        """True once the peer has ended its direction of the stream, so that nothing can arrive any more."""
        self.top_sink: Sender = self._state.top_sink
        """The entity for sending top-level messages."""
        self.top_stream: Receiver = self._state.top_stream
        """The entity for receiving top-level messages."""

    # --- state

    def entities(self, kind: Kind) -> dict[int, Entity]:
        """Return all entities of a kind by their ids. The caller must not change the dict."""
        return self._state.maps[kind]

    @property
    def channels(self) -> int:
        """The number of open channels and requests of both sides, without the top level. A duplex counts as one."""
        return self._state.ours + self._state.theirs

    @property
    def places(self) -> int:
        """The number of channels that this side may still open, according to `Limits.channels`."""
        return self.limits.channels - self._state.ours

    @property
    def peer_credit(self) -> int:
        """The first credit that the peer has announced, or 0 if it has announced none."""
        return self._state.peer_first_credit

    @property
    def peer_takes_no_channels(self) -> bool:
        return self.top_sink.gone

    @property
    def unread(self) -> int:
        """The number of ended channels of the peer with messages that the application hasn't consumed."""
        return len(self._state.unread)

    @property
    def live(self) -> int:
        """The number of entities, including the top level. A duplex counts as two."""
        return sum(map(len, self._state.maps))

    def repeat_announcement(self, credit: int) -> None:
        """Act as if this engine had announced a first credit. Only the decoders of recordings call this."""
        self._state.repeat_announcement(credit)

    # --- the stream

    def may_peer_continue(self) -> bool:
        return self._state.can_peer_continue()

    def parse(self, data: bytes, position: int) -> int:
        reader = self._reader
        if self._first_bytes is not None:
            self._look_for_announcement(self._first_bytes, data)
        reader.left = self.frames_at_once
        if self.is_mid_frame:
            position = reader.resume(data, position, self.data_offset)
        if len(data) - position > HEAD_MOST and not reader.rules.announced:
            position = reader.parse_payloads(data, position)
        if position < len(data):
            position = reader.parse(data, position, self.data_offset)
        self.unparsed: int = len(data) - position  # the reader keeps the beginning of a chunk itself
        self.is_mid_frame: bool = reader.held.size > 0 or reader.receiver is not None or reader.rules.announced > 0
        return position

    def measure_round_trip(self, now: float) -> None:
        if (entity := self._pingable_entity()) is not None:
            self._state.budget.round_trip.asked(now)
            self._state.control.measure(entity)
            self._state.events.append(Probed(entity))

    def _look_for_announcement(self, first: bytes, data: bytes) -> None:
        """Look for an announcement in the first bytes of the connection. They are parsed as ordinary chunks as well."""
        first += data[len(first) - self.data_offset : ANNOUNCEMENT_MOST - self.data_offset]
        credit = find_announcement(first)
        self._first_bytes = first if credit is None else None
        if credit is not None:
            self._state.peer_announced(credit)

    def receive_half_close(self, now: float, is_writing: bool) -> bool:
        """Handle the end of the peer's direction of the stream. Return True if we still have something to send.

        The specification says nothing about this case. We support clients that send a request, shut down their
        direction of the socket and read the response. We can answer as far as the credit goes that the peer has granted
        before.

        Args:
            now: The current time.
            is_writing: True if the link is still writing bytes that it has taken from the engine.
        """
        if self._state.over or self.is_mid_frame or not (is_writing or self.owes_peer()):
            return False
        self.is_half_closed = True
        self._stall.stop()
        self._state.deadlines.stop(Vital.ANSWER)
        # The pump doesn't read any more, so it wouldn't notice that the peer has closed its socket altogether, and the
        # handlers would work for nobody. So we write a pong now and then, which fails in that case. The first pongs are
        # written soon, because most peers that end their direction have closed the socket.
        self._keepalive.interval = FIRST_PROOF_SECONDS
        self._keepalive.start(now)
        self._state.events.append(HalfClosed())
        return True

    def owes_peer(self) -> bool:
        """Return True while there is something to write, or the peer expects an answer on some entity.

        The pump asks after each write once the peer has ended its direction of the stream. When this returns False, the
        connection ends.
        """
        if self._state.over:
            return False
        if self._state.outbox.used > 0 or self._state.control.ends:
            return True
        return self._first_answerable() is not None

    def _first_answerable(self) -> Entity | None:
        """Return an entity on which the peer expects an answer, or None if there is none.

        The pump asks after each write, so this must not visit all entities each time. Entities that we have ended
        remain in the maps, because the peer can't acknowledge the ends any more. So we collect the matching entities
        once, remove those that don't match any more, and only look at all entities again when none is left.
        """
        while True:
            while self._answerable:
                if self.expects_answer(self._answerable[-1]):
                    return self._answerable[-1]
                self._answerable.pop()
            self._answerable = [*filter(self.expects_answer, self._sending())]
            if not self._answerable:
                return None
            self._answerable.reverse()  # we test the last one first, and the oldest entities are usually served first

    def expects_answer(self, entity: Entity) -> bool:
        """Return True if the peer may wait for messages on this entity, although it has ended its direction.

        That is the case for requests without a response, for streams that the peer opened, and for duplexes whose other
        half it has finished. It isn't the case if the next message needs more credit, because none can arrive.
        """
        if entity.ending or entity.receives or entity.is_top:
            return False
        outgoing = entity.outgoing
        if outgoing is not None and outgoing.queue and not outgoing.is_ready():
            return False
        if entity.kind is Kind.SINK_OUT:
            return entity.orderly
        return entity.kind is Kind.REQUEST_IN or (entity.twin is None and not entity.is_rest_of_reset)

    def _prove_peer(self, now: float) -> Silent | None:
        """Find out whether a peer that has ended its direction still reads, by sending a pong.

        If the peer has closed its socket altogether, a later write fails. Returns a `Silent` event, which ends the
        connection, if nothing could be written since the last call. With `Config(keepalive=None)`, the peer may be as
        slow as it likes.
        """
        control, outbox = self._state.control, self._state.outbox
        entity = self._first_answerable()
        usual = PROOF_SECONDS if self.config.keepalive is None else self.config.keepalive
        interval = FIRST_PROOF_SECONDS if self._keepalive.interval is None else self._keepalive.interval
        if interval < usual:  # a slow peer may not have had enough time to read
            if entity is not None and not control.pongs_queued:
                control.queue(entity, pongs=1)
            self._unwritten = (control.pongs_queued, outbox.used)
            self._keepalive.interval = min(usual, 2 * interval)
            self._keepalive.postpone(now)
            return None
        unwritten = (control.pongs_queued, outbox.used)
        if unwritten == self._unwritten and (any(unwritten) or entity is None):
            if self.config.keepalive is not None:
                return Silent(self._keepalive.silence(now))
            self._keepalive.postpone(now)
            return None
        if entity is not None and not control.pongs_queued:
            control.queue(entity, pongs=1)
        self._unwritten = (control.pongs_queued, outbox.used)
        self._keepalive.postpone(now)
        return None

    def _sending(self) -> Iterator[Entity]:
        """Iterate over the entities that this side sends on, including the peer's requests."""
        senders = (Kind.REQUEST_IN, Kind.SINK_IN, Kind.SINK_OUT)
        return chain.from_iterable(self._state.maps[kind].values() for kind in senders)

    def has_output(self) -> bool:
        """Return True if there is something to write."""
        control = self._state.control
        return not self._state.over and bool(
            self._state.scheduler.line or control.dirty or control.acks or control.ends or control.bare_openings
        )

    def write(self, limit: int, out: list[Buffer]) -> None:
        control = self._state.control
        written = 0
        if control.dirty or control.acks or control.ends or control.bare_openings:
            written = control.write(limit, out)
        if written < limit:
            self._state.scheduler.pull(limit - written, out)

    def observe(self, out: Sequence[Buffer]) -> None:
        if self._state.observer is not None:
            observe_written(self._state.observer, out)

    # --- time

    def probe(self, now: float) -> Silent | None:
        if self.is_half_closed:
            return self._prove_peer(now)
        entity = self._pingable_entity()
        if entity is None:
            self._keepalive.postpone(now)
        else:
            self._state.control.queue(entity, pings=1)
            self._state.events.append(Probed(entity))
            self._keepalive.asked(now)
        return None

    def _pingable_entity(self) -> Entity | None:
        """Return an entity to send a ping about, or None if there is none. The top level is preferred."""
        entities = chain((self.top_stream, self.top_sink), *[entities.values() for entities in self._state.maps])
        return next((one for one in entities if one.life is not UNANNOUNCED and not one.ending), None)

    # --- opening

    def open_sink(self, payload: bytes = b"", *, id: int | None = None) -> Sender:
        """Open a sink, on which this side sends messages.

        Args:
            payload: Sent with the opening.
            id: The id of the entity. By default, the engine chooses one.

        Raises:
            LocalProtocolError: If the top level was ended, the limit for channels is reached, or the payload is too
                large or not covered by credit of the top level.
        """
        self._check_opening(payload, None)
        sink = self._add_sink(self._take_id(id, Kind.SINK_OUT))
        self._announce(sink, Type.OUT_SINK, payload)
        return sink

    def open_stream(self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None) -> Receiver:
        """Open a stream, on which the peer sends messages.

        Args:
            payload: Sent with the opening.
            id: The id of the entity. By default, the engine chooses one.
            credit: The first grant. If it is given, the engine makes no grants automatically, and the application must
                grant all further credit.

        Raises:
            LocalProtocolError: As for `open_sink`.
        """
        self._check_opening(payload, credit)
        stream = self._add_receiving(Kind.STREAM_OUT, self._take_id(id, Kind.STREAM_OUT), credit)
        self._announce(stream, Type.OUT_STREAM, payload)
        return stream

    def open_duplex(
        self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None
    ) -> tuple[Sender, Receiver]:
        """Open a duplex, which is a sink and a stream with the same id. The arguments are those of `open_stream`."""
        self._check_opening(payload, credit)
        id = self._take_id(id, Kind.SINK_OUT, Kind.STREAM_OUT)
        sink = self._add_sink(id)
        stream = self._add_receiving(Kind.STREAM_OUT, id, credit)
        sink.twin, stream.twin = stream, sink
        self._announce(sink, Type.DUPLEX, payload)
        return sink, stream

    def open_channel(self, opening: bytes) -> Halves:
        return Halves(*self.open_duplex(opening))

    def open_request(self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None) -> Receiver:
        """Send a request, which the peer answers with one message.

        The arguments are those of `open_stream`, except that `credit` is the size of the largest possible response.
        """
        self._check_opening(payload, credit)
        request = self._add_receiving(Kind.REQUEST_OUT, self._take_id(id, Kind.REQUEST_OUT, lowest=0), credit)
        self._announce(request, Type.OUT_REQUEST, payload)
        return request

    def _check_opening(self, payload: bytes, credit: int | None) -> None:
        self._state.check_alive()
        state = self._state
        if state.top_sink.ending:
            raise LocalProtocolError("can't open a channel: the top level was closed")
        if state.ours >= state.limits.channels:
            raise LocalProtocolError(
                f"too many channels: {state.ours} are open; "
                f"close one, or raise Limits({state.limits.bound_of_channels}=…) on both sides"
            )
        if payload:
            size = len(payload)
            if self.config.letter:
                raise LocalProtocolError(f"opening payload too large: expected none with letter=True, got {size} bytes")
            self._state.check_size(size, "an opening payload")
            if not state.outgoing(state.top_sink).admits(size):
                raise LocalProtocolError(
                    f"opening payload too large: {size} bytes to send, {state.top_sink.credit_out} granted"
                )
        if credit is not None and not 0 <= credit <= U64_MAX:
            raise LocalProtocolError(f"invalid credit {credit}: expected 0 to 2^64-1")

    def _take_id(self, id: int | None, *kinds: Kind, lowest: int = 1) -> int:
        maps = [self._state.maps[kind] for kind in kinds]
        if id is not None:
            if not lowest <= id <= U64_MAX or any(id in ids for ids in maps):
                raise LocalProtocolError(f"invalid id {id}: expected an unused one from {lowest} to 2^64-1")
            return id
        id = self._next_id
        while id in maps[0] or id in maps[-1]:
            id = id + 1 if id < U64_MAX else 1
        self._next_id = id + 1 if id < U64_MAX else 1
        return id

    def _add_sink(self, id: int) -> Sender:
        sink = self._state.add_sender(Kind.SINK_OUT, id)
        sink.credit.available = self._state.first_credit_out
        return sink

    def _add_receiving(self, kind: Kind, id: int, credit: int | None) -> Receiver:
        entity = self._state.add_receiver(kind, id, by_hand=credit is not None)
        if credit is None:
            credit = entity.window.start(self._state.now)
        else:
            entity.window.grant(credit)
        entity.life = UNANNOUNCED  # so that the grant is written in the same chunk as the opening
        self._state.grant(entity, credit)
        return entity

    def _announce(self, entity: Entity, type: Type, payload: bytes) -> None:
        self._state.count_channel(entity)
        entity.life = UNANNOUNCED
        if payload:
            self._state.outgoing(entity).open(type, payload)
            self._state.opening_queued(entity)
        else:
            self._state.control.bare_openings.append((entity, type))

    # --- refusing

    def refuse(self, channel: Halves, reason: Reason = NO_REASON) -> None:
        """End both halves of a channel that the peer has just opened.

        The peer gets the reason if it has granted credit with the opening. If this is called too often, the connection
        ends, because the peer ignores the limit for channels. Does nothing if the channel or the connection has ended.
        """
        if self._state.over:
            return
        if not self._state.refusals.take(self._state.now):
            self._stop(Failed(RemoteProtocolError("too many channels opened to be refused", limit="backlog")))
            return
        self.decline(channel, reason)

    def decline(self, channel: Halves, reason: Reason = NO_REASON) -> None:
        """Like `refuse`, but don't count the refusal, because the peer couldn't know better."""
        sender, receiver = channel.sender, channel.receiver
        if isinstance(sender, Sender) and not (self._state.over or sender.ending):
            # Without credit, an abort would wait for it, and a peer could make us keep any number of refused channels.
            if reason and sender.credit_out > 0:
                sender.abort(reason)
            else:
                sender.end()
        if isinstance(receiver, Receiver) and not (self._state.over or receiver.ending):
            receiver.end()

    # --- the end

    def farewell(self, reason: Reason) -> bytes:
        """Return the last bytes to write on a connection that ends early: the end of the top level, with the reason.

        The result is b"" if an end was queued before, or if the peer hasn't granted credit for the reason.
        """
        sink, outgoing = self.top_sink, self.top_sink.outgoing
        if sink.ending or sink.life is UNANNOUNCED or (outgoing is not None and outgoing.is_mid_message):
            return b""
        told = reason.encode(sink.credit_out)
        return encode_chunk(Chunk(sink.type, sink.id, end=told)) if told else b""

    def cancellations(self) -> bytes:
        """Return the last bytes to write on a connection that ends because of an exception in the session's block.

        After the end of our direction, the peer may go on to answer (see `expects_answer`). These bytes prevent that:
        they cancel our requests, the streams that we have opened, and the duplexes whose other half we have finished.
        """
        receivers = (Kind.REQUEST_OUT, Kind.STREAM_OUT, Kind.STREAM_IN)
        entities = chain.from_iterable(self._state.maps[kind].values() for kind in receivers)
        return b"".join(
            encode_chunk(Chunk(entity.type, entity.id, end=b""))
            for entity in entities
            if entity.life is not UNANNOUNCED and not entity.ending and not entity.is_top
            if entity.twin is None or entity.twin.ending
        )

    # --- the common form

    def consumed_opening(self, size: int) -> None:
        """Count the payload of an opening as consumed by the application."""
        self._state.consume(self.top_stream, size)

    def ping(self, key: object) -> None:
        """Send a ping about the entity `key`. If `key` is None, the engine chooses an entity.

        Raises:
            LocalProtocolError: If there is no such entity, or it has ended.
        """
        entity = self._pingable_entity() if key is None else key
        if not isinstance(entity, Entity):
            raise LocalProtocolError("can't send a ping: expected an open entity, and none is open")
        entity.ping()

    def go_away(self, reason: Reason) -> None:
        """Accept no new channels from now on. This ends the top-level stream, which the peer understands that way.

        The reason isn't sent.
        """
        if not self.top_stream.ending:
            self.top_stream.end()
