"""The bpmux/rel engine: received bytes and commands go in, events and bytes to send come out."""

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

CHANNEL_PRICE: Final = 5 * 1024  # bytes of memory for a duplex, its session objects and a task that handles it
FIRST_PROOF_SECONDS: Final = 0.05  # until the first pong to a half-closed peer; each later pause is twice as long
PROOF_SECONDS: Final = 20.0  # between pongs to a half-closed peer without `Config.keepalive`: that setting's default


class Engine(StreamMuxEngine):
    """One end of a bpmux/rel connection; a `StreamEngine`.

    It opens entities, and what is done with one is a method of that `Sender` or `Receiver`. A command either does all
    of its work, or raises `LocalProtocolError` and changes nothing. Call `Receiver.consumed` for every message that the
    application has taken, or the peer's credit is never renewed.
    """

    def __init__(
        self, config: Config | None = None, *, limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        self.config: Config = config or Config()
        limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self._state = State(self.config, limits, observer)
        super().__init__(self._state, keepalive=self.config.keepalive, keepalive_timeout=self.config.keepalive_timeout)
        self._reader = ChunkReader(self._state)
        self._first_bytes: bytes | None = b""  # the peer's first bytes may announce a first credit
        self._unwritten: tuple[int, int] | None = None  # pongs and bytes that waited when `_prove_peer` looked last
        self._owed: list[Entity] = []  # of these, `_first_owed` drops those that are owed nothing any more
        self._next_id = self.config.first_id
        self.is_half_closed: bool = False
        """True once the peer has ended its direction of the stream: no credit, answer or acknowledgement can come."""
        self.top_sink: Sender = self._state.top_sink
        """The entity for top-level messages to the peer."""
        self.top_stream: Receiver = self._state.top_stream
        """The entity for top-level messages of the peer."""

    # --- state

    def entities(self, kind: Kind) -> dict[int, Entity]:
        """One of the six maps of the document, read-only."""
        return self._state.maps[kind]

    @property
    def channels(self) -> int:
        """Number of live channels of both sides, with requests and without the top level."""
        return self._state.ours + self._state.theirs

    @property
    def places(self) -> int:
        """Number of channels that this side may still open under its limit."""
        return self.limits.channels - self._state.ours

    @property
    def peer_credit(self) -> int:
        """The first credit that the peer has announced, 0 if none."""
        return self._state.promised

    @property
    def peer_takes_no_channels(self) -> bool:
        return self.top_sink.gone

    @property
    def unread(self) -> int:
        """Number of channels that the peer opened, that are gone, and whose messages were not all consumed."""
        return len(self._state.unread)

    @property
    def live(self) -> int:
        """Number of live entities, with those of the top level and both halves of duplexes."""
        return sum(map(len, self._state.maps))

    def repeat_announcement(self, credit: int) -> None:
        """Act as if this engine had announced a first credit, for decoders that repeat what was recorded."""
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
        """Look at the first bytes of the connection, which are parsed in the usual way as well."""
        first += data[len(first) - self.data_offset : ANNOUNCEMENT_MOST - self.data_offset]
        credit = find_announcement(first)
        self._first_bytes = first if credit is None else None
        if credit is not None:
            self._state.peer_announced(credit)

    def receive_half_close(self, now: float, is_writing: bool) -> bool:
        """Note that the peer sends nothing more; return True if it is still owed something that it may read.

        The document knows the end of entities, and not of one direction of the byte stream below them. A client that
        sends a request and shuts down its side of the socket can be answered within the credit that it gave. The last
        message may have left the engine already, while the link is still writing it.
        """
        if self._state.over or self.is_mid_frame or not (is_writing or self.owes_peer()):
            return False
        self.is_half_closed = True
        self._stall.stop()
        self._state.deadlines.stop(Vital.ANSWER)
        # The pump reads no more, so it can't notice a reset by itself. Without a pong now and then, the session of a
        # peer that has closed its socket would stay for as long as a handler works for it. Most peers that end their
        # direction have closed it, so the first pongs come quickly.
        self._keepalive.interval = FIRST_PROOF_SECONDS
        self._keepalive.start(now)
        self._state.events.append(HalfClosed())
        return True

    def owes_peer(self) -> bool:
        """Return True while messages or ends wait to be written, or an entity is owed something."""
        if self._state.over:
            return False
        if self._state.outbox.used > 0 or self._state.control.ends:
            return True
        return self._first_owed() is not None

    def _first_owed(self) -> Entity | None:
        """Return an entity that is owed something.

        The pump asks after each write. Ended entities stay until the peer confirms their ends, which it can't any more,
        so we keep a list of those that were owed something, and only look at all of them when it is empty.
        """
        while True:
            while self._owed:
                if self.owes(self._owed[-1]):
                    return self._owed[-1]
                self._owed.pop()
            self._owed = [*filter(self.owes, self._sending())]
            if not self._owed:
                return None
            self._owed.reverse()  # the oldest are usually served first

    def owes(self, entity: Entity) -> bool:
        """Return True if the peer waits for messages on this entity and needs to send nothing more about it.

        These are requests without a response, streams that the peer opened, and duplexes that it has finished. One
        whose next message needs credit is not among them, because no credit can come any more.
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
        """Send a pong to a peer that can answer nothing: if it has left altogether, writing fails soon after.

        Returns the last event if nothing was written since the last time, because the peer takes no bytes. Without
        `Config.keepalive` such a peer may take its time, and a reset makes the write fail that waits for it.
        """
        control, outbox = self._state.control, self._state.outbox
        owed = self._first_owed()
        usual = PROOF_SECONDS if self.config.keepalive is None else self.config.keepalive
        interval = FIRST_PROOF_SECONDS if self._keepalive.interval is None else self._keepalive.interval
        if interval < usual:  # too early to judge by what the peer has read
            if owed is not None and not control.pongs_owed:
                control.owe(owed, pongs=1)
            self._unwritten = (control.pongs_owed, outbox.used)
            self._keepalive.interval = min(usual, 2 * interval)
            self._keepalive.postpone(now)
            return None
        unwritten = (control.pongs_owed, outbox.used)
        if unwritten == self._unwritten and (any(unwritten) or owed is None):
            if self.config.keepalive is not None:
                return Silent(self._keepalive.silence(now))
            self._keepalive.postpone(now)
            return None
        if owed is not None and not control.pongs_owed:
            control.owe(owed, pongs=1)
        self._unwritten = (control.pongs_owed, outbox.used)
        self._keepalive.postpone(now)
        return None

    def _sending(self) -> Iterator[Entity]:
        """Iterate over the live entities that this side sends on, with the peer's requests."""
        senders = (Kind.REQUEST_IN, Kind.SINK_IN, Kind.SINK_OUT)
        return chain.from_iterable(self._state.maps[kind].values() for kind in senders)

    def has_output(self) -> bool:
        """Whether there is something to write."""
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
            self._state.control.owe(entity, pings=1)
            self._state.events.append(Probed(entity))
            self._keepalive.asked(now)
        return None

    def _pingable_entity(self) -> Entity | None:
        """Return an entity to send a ping about: the top level while there is one."""
        entities = chain((self.top_stream, self.top_sink), *[entities.values() for entities in self._state.maps])
        return next((one for one in entities if one.life is not UNANNOUNCED and not one.ending), None)

    # --- opening

    def open_sink(self, payload: bytes = b"", *, id: int | None = None) -> Sender:
        """Open an entity that this side sends messages on. The opening is queued at once."""
        self._check_opening(payload, None)
        sink = self._add_sink(self._take_id(id, Kind.SINK_OUT))
        self._announce(sink, Type.OUT_SINK, payload)
        return sink

    def open_stream(self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None) -> Receiver:
        """Open an entity that the peer sends messages on. With `credit` all further grants are made by hand."""
        self._check_opening(payload, credit)
        stream = self._add_receiving(Kind.STREAM_OUT, self._take_id(id, Kind.STREAM_OUT), credit)
        self._announce(stream, Type.OUT_STREAM, payload)
        return stream

    def open_duplex(
        self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None
    ) -> tuple[Sender, Receiver]:
        """Open a sink and a stream with one id."""
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
        """Send a request that the peer answers once. `credit` is the largest response, in bytes."""
        self._check_opening(payload, credit)
        request = self._add_receiving(Kind.REQUEST_OUT, self._take_id(id, Kind.REQUEST_OUT, lowest=0), credit)
        self._announce(request, Type.OUT_REQUEST, payload)
        return request

    def _check_opening(self, payload: bytes, credit: int | None) -> None:
        self._state.check_alive()
        state = self._state
        if state.top_sink.ending:
            raise LocalProtocolError("nothing can be opened after the top level was closed")
        if state.ours >= state.limits.channels:
            raise LocalProtocolError(
                f"{state.ours} channels are open; raise Limits({state.limits.bound_of_channels}=…) on both sides"
            )
        if payload:
            size = len(payload)
            if self.config.letter:
                raise LocalProtocolError(f"an opening payload of {size} bytes; with letter=True it must be empty")
            self._state.check_size(size, "an opening payload")
            if not state.outgoing(state.top_sink).admits(size):
                raise LocalProtocolError(
                    f"an opening payload of {size} bytes against {state.top_sink.credit_out} of top-level credit"
                )
        if credit is not None and not 0 <= credit <= U64_MAX:
            raise LocalProtocolError(f"credit of {credit} is outside 0..2^64-1")

    def _take_id(self, id: int | None, *kinds: Kind, lowest: int = 1) -> int:
        maps = [self._state.maps[kind] for kind in kinds]
        if id is not None:
            if not lowest <= id <= U64_MAX or any(id in ids for ids in maps):
                raise LocalProtocolError(f"id {id} is in use, reserved, or not in {lowest}..2^64-1")
            return id
        id = self._next_id
        while id in maps[0] or id in maps[-1]:
            id = id + 1 if id < U64_MAX else 1
        self._next_id = id + 1 if id < U64_MAX else 1
        return id

    def _add_sink(self, id: int) -> Sender:
        sink = self._state.add_sender(Kind.SINK_OUT, id)
        sink.credit.available = self._state.got
        return sink

    def _add_receiving(self, kind: Kind, id: int, credit: int | None) -> Receiver:
        entity = self._state.add_receiver(kind, id, by_hand=credit is not None)
        if credit is None:
            credit = entity.window.start(self._state.now)
        else:
            entity.window.grant(credit)
        entity.life = UNANNOUNCED  # so the grant is written with the opening
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
        """End both halves of a channel that the peer has just opened; too many of these end the connection.

        The peer reads the reason if it gave credit for one with the opening. Harmless when the channel, or the
        connection, is over already.
        """
        if self._state.over:
            return
        if not self._state.refusals.take(self._state.now):
            self._stop(Failed(RemoteProtocolError("too many channels opened to be refused", limit="backlog")))
            return
        self.decline(channel, reason)

    def decline(self, channel: Halves, reason: Reason = NO_REASON) -> None:
        """`refuse` for an opening that is no fault of the peer, so it is not counted."""
        sender, receiver = channel.sender, channel.receiver
        if isinstance(sender, Sender) and not (self._state.over or sender.ending):
            # An abort would wait for credit, and what was refused must not stay.
            if reason and sender.credit_out > 0:
                sender.abort(reason)
            else:
                sender.end()
        if isinstance(receiver, Receiver) and not (self._state.over or receiver.ending):
            receiver.end()

    # --- the end

    def farewell(self, reason: Reason) -> bytes:
        """Return the last bytes to write on a connection that ends early: the end of the top level, with the reason.

        Nothing if the end was queued before, or if the peer gave no credit for it.
        """
        sink, outgoing = self.top_sink, self.top_sink.outgoing
        if sink.ending or sink.life is UNANNOUNCED or (outgoing is not None and outgoing.is_mid_message):
            return b""
        told = reason.encode(sink.credit_out)
        return encode_chunk(Chunk(sink.type, sink.id, end=told)) if told else b""

    def cancellations(self) -> bytes:
        """Return the last bytes to write on a connection that is given up without a reason.

        They cancel what the peer could otherwise go on with after the end of this direction, see `owes`: responses,
        and messages on streams that this side opened and on duplexes that it has finished.
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
        """Count an opening payload as taken by the application."""
        self._state.consume(self.top_stream, size)

    def ping(self, key: object) -> None:
        """Send a ping about an entity, or about the top level while there is one."""
        entity = self._pingable_entity() if key is None else key
        if not isinstance(entity, Entity):
            raise LocalProtocolError("nothing is open that a ping could be about")
        entity.ping()

    def go_away(self, reason: Reason) -> None:
        """Take no new channels: end the stream of the top level, which tells the peer so."""
        if not self.top_stream.ending:
            self.top_stream.end()
