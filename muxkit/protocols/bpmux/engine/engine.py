"""The bpmux/rel engine: received bytes and commands go in, events and bytes to send come out."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import NO_QUEUE, U64_MAX, Buffer, Deadlines, Keepalive, Outbox, Reason, StallWatch, StartPace
from muxkit.protocols.bpmux.config import Config
from muxkit.protocols.bpmux.engine.entities import OURS, OVERHEAD, Entity, Kind
from muxkit.protocols.bpmux.engine.events import Event, Failed, HalfClosed, HungUp, Probed, Silent
from muxkit.protocols.bpmux.engine.receiving import HEAD_MOST, ChunkReader
from muxkit.protocols.bpmux.engine.state import State
from muxkit.protocols.bpmux.frames import (
    ANNOUNCEMENT_MOST,
    Chunk,
    Type,
    encode_chunk,
    find_announcement,
    observe_written,
)

CHANNEL_PRICE = 5 * 1024  # bytes of memory for a duplex, its session objects and a task that handles it
NO_REASON = Reason()
FIRST_PROOF_SECONDS = 0.05  # until the first pong to a half-closed peer; each later pause is twice as long
PROOF_SECONDS = 20.0  # between pongs to a half-closed peer without `Config.keepalive`: that setting's default
ABORTED = b"\x01"  # end payload of an abort: any payload but an empty one means that messages are missing


class Timer(Enum):
    """The deadlines of a connection."""

    KEEPALIVE = "keepalive"  # to ping because nothing was received
    ANSWER = "answer"  # to end the connection because nothing was received after that ping
    STALL = "stall"  # to check that an incomplete message made progress


class Engine:
    """One end of a bpmux/rel connection; a `StreamEngine`.

    Commands take and return `Entity` objects. A command either does all of its work, or raises `LocalProtocolError`
    and changes nothing. Call `consumed` for every `Message` that the application has taken, or the peer's credit is
    never renewed. With `joins_messages` those that came one behind the other for an entity are one `Messages` event.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        limits: Limits | None = None,
        observer: Observer | None = None,
        joins_messages: bool = False,
    ) -> None:
        self.config: Config = config or Config()
        self.limits: Limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self._observer = observer
        largest = min(self.limits.channel_floor, self.limits.channel_first)
        if self.config.initial_credit > largest:
            raise ValueError(
                f"Config(initial_credit={self.config.initial_credit}) is above {largest}, the lower of "
                f"Limits(channel_floor={self.limits.channel_floor}, channel_first={self.limits.channel_first})"
            )
        self._state = State(self.config, self.limits, observer)
        self._reader = ChunkReader(self._state, joins_messages=joins_messages)
        self._deadlines: Deadlines[Timer] = Deadlines()
        self._keepalive = Keepalive(
            self._deadlines,
            Timer.KEEPALIVE,
            Timer.ANSWER,
            interval=self.config.keepalive,
            timeout=self.config.keepalive_timeout,
        )
        self._stall = StallWatch(self._deadlines, Timer.STALL, seconds=self.limits.stall, least=self.limits.stall_bytes)
        self._first_bytes: bytes | None = b"" if self.config.initial_credit else None  # they may announce one
        self._is_started = False
        self._rest = b""  # received and not parsed from `_at` on, because `frames_at_once` chunks were parsed
        self._at = 0
        self._is_mid_chunk = False
        self._unwritten: tuple[int, int] | None = None  # pongs and bytes that waited when `_prove_peer` looked last
        self._owed: list[Entity] = []  # of these, `_first_owed` drops those that are owed nothing any more
        self._is_unfinished = False  # a chunk or a message was, when bytes came the last time
        self._next_id = self.config.first_id
        self._largest = self.limits.message
        self.frames_at_once: int = sys.maxsize
        """The most chunks that one call of `receive_bytes` parses."""
        self.unparsed: int = 0
        """Received bytes behind the first `frames_at_once` chunks; `receive_bytes(b"", now)` parses more of them."""
        self.bytes_received: int = 0
        self.over: bool = False
        self.is_half_closed: bool = False
        """True once the peer has ended its direction of the stream: no credit, answer or acknowledgement can come."""
        self.hung_up_cleanly: bool = False
        self.top_sink: Entity = self._state.top_sink
        """The entity for top-level messages to the peer."""
        self.top_stream: Entity = self._state.top_stream
        """The entity for top-level messages of the peer."""
        self.starts: StartPace = self._state.starts
        """Says when work on the next channel of the peer may begin; to be told what began, and what need not."""
        self.waiting: Outbox = self._state.outbox
        """The counter behind `outbox`, for frequent reads."""
        self.consumed: Final = self._state.consume
        """Count bytes of an entity's messages as taken by the application; harmless after the entity is gone.

        Returns whether there may be something to write because of it.
        """

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
    def outbox(self) -> int:
        """Queued bytes that wait only for the transport."""
        return self._state.outbox.used

    @property
    def messages_sent(self) -> int:
        return self._state.messages_sent

    @property
    def unread(self) -> int:
        """Number of channels that the peer opened, that are gone, and whose messages were not all consumed."""
        return len(self._state.unread)

    @property
    def live(self) -> int:
        """Number of live entities, with those of the top level and both halves of duplexes."""
        return sum(map(len, self._state.maps))

    # --- the stream

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Parse and apply received bytes; never raises."""
        if self.over:
            return
        state, reader = self._state, self._reader
        state.now = now
        if self._observer is not None and data:
            self._observer.transport("in", data)
        if self._first_bytes is not None:
            self._look_for_announcement(self._first_bytes, data)
        start = 0
        if self.unparsed:
            if data:
                data = self._rest[self._at :] + data
            else:  # keep the position, because each step of a turn would copy the rest
                data, start = self._rest, self._at
            self._rest = b""
        reader.left = self.frames_at_once
        base = self.bytes_received - start
        try:
            position = reader.resume(data, start, base) if self._is_mid_chunk else start
            if len(data) - position > HEAD_MOST and not reader.rules.announced:
                position = reader.parse_payloads(data, position)
            if position < len(data):
                position = reader.parse(data, position, base)
        except RemoteProtocolError as error:
            self._stop(Failed(error))
            return
        self.bytes_received = base + position
        self.unparsed = len(data) - position
        if self.unparsed:
            self._rest, self._at = data, position
        self._is_mid_chunk = reader.held.size > 0 or reader.owner is not None or reader.rules.announced > 0
        was_unfinished, self._is_unfinished = self._is_unfinished, self._is_mid_chunk or state.unfinished > 0
        self._keepalive.heard(now)
        if self._is_unfinished:
            self._watch_progress(now)
        elif was_unfinished:
            self._stall.stop()

    def _look_for_announcement(self, first: bytes, data: bytes) -> None:
        """Look at the first bytes of the connection, which are parsed in the usual way as well."""
        first += data[: ANNOUNCEMENT_MOST - len(first)]
        credit = find_announcement(first)
        self._first_bytes = first if credit is None else None
        if credit:
            self._state.peer_announced(credit)

    def receive_eof(self, now: float) -> None:
        """End the connection: the peer closed its direction of the stream."""
        if not self.over:
            self.hung_up_cleanly = not self._is_mid_chunk and self.channels == 0
            self._stop(HungUp(self.hung_up_cleanly))

    def receive_half_close(self, now: float) -> bool:
        """Note that the peer sends nothing more; return True if it is still owed something that it may read.

        The document knows the end of entities, and not of one direction of the byte stream below them. A client that
        sends a request and shuts down its side of the socket can be answered within the credit that it gave.
        """
        if self.over or self._is_mid_chunk or not self.owes_peer():
            return False
        self.is_half_closed = True
        self._stall.stop()
        self._deadlines.stop(Timer.ANSWER)
        # The pump reads no more, so it can't notice a reset by itself. Without a pong now and then, the session of a
        # peer that has closed its socket would stay for as long as a handler works for it. Most peers that end their
        # direction have closed it, so the first pongs come quickly.
        self._keepalive.interval = FIRST_PROOF_SECONDS
        self._keepalive.start(now)
        self._state.events.append(HalfClosed())
        return True

    def owes_peer(self) -> bool:
        """Return True while messages or ends wait to be written, or an entity is owed something."""
        if self.over:
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
        if entity.gone or entity.ending or entity.receives or entity.is_top:
            return False
        outgoing = entity.outgoing
        if outgoing is not None and outgoing.queue and not outgoing.is_ready():
            return False
        if entity.kind is Kind.SINK_OUT:
            return entity.orderly
        return entity.kind is Kind.REQUEST_IN or (entity.twin is None and not entity.is_rest_of_reset)

    def _prove_peer(self, now: float) -> Event | None:
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

    def events(self) -> Sequence[Event]:
        """Take the events since the last call, oldest first."""
        events = self._state.events
        if not events:
            return ()
        self._state.events = []
        return events

    def has_output(self) -> bool:
        """Whether there is something to write."""
        control = self._state.control
        return not self.over and bool(
            self._state.scheduler.line or control.dirty or control.acks or control.ends or control.openings
        )

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        """Take about `limit` bytes to write now."""
        out: list[Buffer] = []
        if not self.over:
            control = self._state.control
            written = 0
            if control.dirty or control.acks or control.ends or control.openings:
                written = control.write(limit, out)
            if written < limit:
                self._state.scheduler.pull(limit - written, out)
            if self._observer is not None:
                observe_written(self._observer, out)
        return out

    # --- time

    def next_deadline(self) -> float | None:
        """When to call `handle_deadline`: at once until the first call, which tells the time; None if no timer runs."""
        if self.over:
            return None
        return self._deadlines.next if self._is_started else float("-inf")

    def handle_deadline(self, now: float) -> None:
        """Act on the timers that are due."""
        if self.over:
            return
        if not self._is_started:
            self._is_started = True
            self._keepalive.start(now)
        for timer in self._deadlines.expired(now):
            if self._observer is not None:
                self._observer.timer(timer.value)
            if (last := self._timer_expired(timer, now)) is not None:
                self._stop(last)
                return

    def _timer_expired(self, timer: Timer, now: float) -> Event | None:
        """Act on a timer; return the last event if the connection is over."""
        if timer is Timer.ANSWER:
            return Silent(self._keepalive.silence(now))
        if timer is Timer.STALL:
            return self._check_progress(now)
        if self._keepalive.is_due(now) and self.is_half_closed:
            return self._prove_peer(now)
        if self._keepalive.is_due(now):
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
        return next((one for one in entities if one.announced and not one.gone and not one.ending), None)

    def _watch_progress(self, now: float) -> None:
        self._stall.watch(now, self.bytes_received, self._state.reassembly.served)

    def _check_progress(self, now: float) -> Event | None:
        state = self._state
        came = self._stall.shortfall(self.bytes_received, state.reassembly.served)
        is_due_from_peer = self._is_mid_chunk or state.can_peer_continue()
        if is_due_from_peer and came is not None:
            if not came:  # a broken network looks the same, so this is no violation
                return Silent(self._keepalive.silence(now))
            return Failed(self._stall.error(came, "message", self.bytes_received))
        if is_due_from_peer or state.unfinished:
            self._watch_progress(now)
        return None

    def _stop(self, last: Event) -> None:
        self._state.events.append(last)
        if self._observer is not None and isinstance(last, Failed):
            self._observer.error(last.error)
        self.over = True
        self.unparsed = 0

    # --- opening

    def open_sink(self, payload: bytes = b"", *, id: int | None = None) -> Entity:
        """Open an entity that this side sends messages on. The opening is queued at once."""
        self._check_opening(payload, None)
        sink = self._add_sink(self._take_id(id, Kind.SINK_OUT))
        return self._announce(sink, Type.OUT_SINK, payload)

    def open_stream(self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None) -> Entity:
        """Open an entity that the peer sends messages on. With `credit` all further grants are made by hand."""
        self._check_opening(payload, credit)
        stream = self._add_receiving(Kind.STREAM_OUT, self._take_id(id, Kind.STREAM_OUT), credit)
        return self._announce(stream, Type.OUT_STREAM, payload)

    def open_duplex(
        self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None
    ) -> tuple[Entity, Entity]:
        """Open a sink and a stream with one id."""
        self._check_opening(payload, credit)
        id = self._take_id(id, Kind.SINK_OUT, Kind.STREAM_OUT)
        sink = self._add_sink(id)
        stream = self._add_receiving(Kind.STREAM_OUT, id, credit)
        sink.twin, stream.twin = stream, sink
        return self._announce(sink, Type.DUPLEX, payload), stream

    def open_request(self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None) -> Entity:
        """Send a request that the peer answers once. `credit` is the largest response, in bytes."""
        self._check_opening(payload, credit)
        request = self._add_receiving(Kind.REQUEST_OUT, self._take_id(id, Kind.REQUEST_OUT, lowest=0), credit)
        return self._announce(request, Type.OUT_REQUEST, payload)

    def _check_opening(self, payload: bytes, credit: int | None) -> None:
        self._check_alive()
        state = self._state
        if state.top_sink.gone or state.top_sink.ending:
            raise LocalProtocolError("nothing can be opened after the top level was closed")
        if state.ours >= state.limits.channels:
            raise LocalProtocolError(
                f"{state.ours} channels are open; raise Limits({state.limits.bound_of_channels}=…) on both sides"
            )
        if payload:
            size = len(payload)
            if self.config.letter:
                raise LocalProtocolError(f"an opening payload of {size} bytes; with letter=True it must be empty")
            self._check_size(size, "an opening payload")
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

    def _add_sink(self, id: int) -> Entity:
        sink = self._state.add(Kind.SINK_OUT, id)
        sink.credit.available = self._state.got
        return sink

    def _add_receiving(self, kind: Kind, id: int, credit: int | None) -> Entity:
        entity = self._state.add(kind, id, window=None if credit is None else 0)
        if credit is None:
            credit = entity.window.start(self._state.now)
        else:
            entity.window.grant(credit)
        entity.announced = False  # so the grant is written with the opening
        self._state.grant(entity, credit)
        return entity

    def _announce(self, entity: Entity, type: Type, payload: bytes) -> Entity:
        self._state.count_channel(entity)
        entity.announced = False
        if payload:
            self._state.outgoing(entity).open(type, payload)
            self._state.opening_queued(entity)
        else:
            self._state.control.openings.append((entity, type))
        return entity

    # --- sending

    def admits(self, entity: Entity, size: int) -> bool:
        """Whether a message of `size` bytes may be sent now.

        It may if credit covers it beside what is queued, or if nothing is queued and there is some credit: then the
        engine keeps the rest and sends it in parts as credit arrives.
        """
        outgoing = entity.outgoing
        if outgoing is None:
            return entity.credit.available > 0 or size == 0
        return outgoing.admits(size)

    def watch(self, entity: Entity, size: int = 1) -> None:
        """Report `Writable` when a message of `size` bytes may fit; an empty one needs no credit."""
        self._state.outgoing(entity).watch(size)

    def send(self, entity: Entity, payload: bytes, *, end: bytes | None = None) -> None:
        """Queue a message, and with `end` also the end of the entity; both or nothing."""
        self._check_sending(entity, "send on")
        answers = entity.kind is Kind.REQUEST_IN
        if answers and end is not None:
            raise LocalProtocolError(f"{entity.label}: an answer is the end of its request, and has no other")
        if entity.receives:
            raise LocalProtocolError(f"{entity.label}: messages on it come from the peer")
        size = len(payload)
        if size > self.limits.message:
            self._check_size(size, entity.label)
        if not self.admits(entity, size):
            raise LocalProtocolError(f"{entity.label}: {size} bytes to send against {entity.credit_out} of credit")
        outgoing = self._state.outgoing(entity)
        if end:
            self._check_size(len(end), entity.label)
            if outgoing.queued + outgoing.claimed + size + len(end) > entity.credit_out:
                raise LocalProtocolError(
                    f"{entity.label}: {size} + {len(end)} bytes to send against {entity.credit_out} of credit"
                )
        outgoing.push(payload)
        self._state.messages_sent += 1
        if end is not None:
            outgoing.close(end)
        if answers or end is not None:
            self._state.end_queued(entity)
        else:
            self._state.schedule(entity)

    def try_send(self, entity: Entity, payload: bytes) -> bool | None:
        """Queue a message that credit covers as a whole; otherwise do nothing and return None. Faster than `send`.

        Returns True if the entity was not in line for writing before.
        """
        outgoing, size = entity.outgoing, len(payload)
        if outgoing is None:
            if entity.gone or size > entity.credit.available:
                return None
            outgoing = self._state.outgoing(entity)
        if not outgoing.accepts or size > self._largest or self.over:
            return None
        if size > entity.credit.available - outgoing.queued - outgoing.claimed:
            return None
        state, queue = self._state, outgoing.queue  # `Outgoing.push_covered` inlined: this runs for each message
        if not queue:
            outgoing.has_sent = True
            if queue is NO_QUEUE:
                queue = outgoing.queue = deque()
        queue.append(payload)
        outgoing.queued += size
        outgoing.counted += size + OVERHEAD
        state.outbox.used += size + OVERHEAD
        state.messages_sent += 1
        if outgoing.scheduled or not (entity.announced or outgoing.is_ready()):
            return False
        state.scheduler.add(outgoing)
        return True

    def try_send_all(self, entity: Entity, payloads: list[bytes]) -> bool:
        """Queue messages that credit covers as a whole; otherwise do nothing and return False."""
        outgoing = entity.outgoing
        if outgoing is None or not outgoing.accepts or self.over:
            return False
        sizes = [*map(len, payloads)]
        size = sum(sizes)
        if size > entity.credit.available - outgoing.queued - outgoing.claimed or max(sizes) > self._largest:
            return False
        outgoing.push_covered(payloads, size)
        self._state.messages_sent += len(payloads)
        self._state.schedule(entity)
        return True

    def send_many(self, entity: Entity, payloads: Iterable[bytes]) -> int:
        """Queue messages as long as they are admitted; return their number. Raises only if the first is illegal."""
        self._check_sending(entity, "send on")
        count = 0
        for payload in payloads:
            if not self.admits(entity, len(payload)):
                break
            if count and (entity.ending or len(payload) > self.limits.message):
                break
            self.send(entity, payload)
            count += 1
        return count

    def end(self, entity: Entity, payload: bytes = b"") -> None:
        """End an entity: close one that this side sends on, or cancel one that the peer sends on.

        A payload uses the entity's credit. Messages queued before are sent first, and before the end of the top level
        all openings.
        """
        self._check_sending(entity, "end")
        if payload:
            self._check_size(len(payload), entity.label)
        if payload and not self.admits(entity, len(payload)):
            raise LocalProtocolError(
                f"{entity.label}: an end payload of {len(payload)} bytes against {entity.credit_out} of credit"
            )
        if payload or not self._state.end_at_once(entity):
            self._state.outgoing(entity).close(payload)
            self._state.end_queued(entity)

    def abort(self, entity: Entity, reason: Reason = NO_REASON) -> None:
        """Drop the messages of which nothing was written, then end the entity; harmless once the end was written.

        On a sink, and for a request without a response, the end has a payload, which by convention means an error: as
        much of the reason as credit covers. It may wait for a byte of credit, because without it the peer would take
        the messages for complete.
        """
        self._check_alive()
        if entity.gone:
            raise LocalProtocolError(f"{entity.label}: cannot abort an entity that is gone")
        if entity.end_out:
            return
        if entity is self.top_sink:
            self._state.decline_openings(begun=False)
        outgoing = self._state.outgoing(entity)
        outgoing.drop_unbegun()
        if not entity.ending:
            # The end of a request cannot be taken for a response, so it need not wait for credit.
            can_explain = entity.kind is not Kind.REQUEST_IN or entity.credit_out > 0
            told = reason.encode(max(1, entity.credit_out - outgoing.queued)) or ABORTED
            outgoing.close(b"" if entity.receives or not can_explain else told)
        outgoing.count(outgoing.waits_for_transport())
        self._state.end_queued(entity)

    def refuse(self, entity: Entity, reason: Reason = NO_REASON) -> None:
        """End both halves of an entity that the peer has just opened; too many of these end the connection.

        The peer reads the reason if it gave credit for one with the opening. Harmless when the entity, or the
        connection, is over already.
        """
        if self.over:
            return
        if not self._state.refusals.take(self._state.now):
            self._stop(Failed(RemoteProtocolError("too many channels opened to be refused", limit="backlog")))
            return
        self.decline(entity, reason)

    def decline(self, entity: Entity, reason: Reason = NO_REASON) -> None:
        """`refuse` for an opening that is no fault of the peer, so it is not counted."""
        for half in (entity, entity.twin):
            if half is not None and not self.over and not half.gone and not half.ending:
                # An abort would wait for credit, and what was refused must not stay.
                if reason and not half.receives and half.credit_out > 0:
                    self.abort(half, reason)
                else:
                    self.end(half)

    def blame(self, entity: Entity) -> None:
        """Count a failure of local work on a channel that the peer opened, as if the peer had cancelled it."""
        if entity.kind not in OURS:
            self._state.starts.broken_off(self._state.now)

    def farewell(self, reason: Reason) -> bytes:
        """Return the last bytes to write on a connection that ends early: the end of the top level, with the reason.

        Nothing if the end was queued before, or if the peer gave no credit for it.
        """
        sink, outgoing = self.top_sink, self.top_sink.outgoing
        if sink.gone or sink.ending or not sink.announced or (outgoing is not None and outgoing.is_mid_message):
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
            if entity.announced and not entity.ending and not entity.is_top
            if entity.twin is None or entity.twin.ending
        )

    def _check_sending(self, entity: Entity, what: str) -> None:
        self._check_alive()
        if entity.gone:
            raise LocalProtocolError(f"{entity.label}: cannot {what} an entity that is gone")
        if entity.ending:
            raise LocalProtocolError(f"{entity.label}: cannot {what} it, it was ended")

    def _check_size(self, size: int, what: str) -> None:
        if size > self.limits.message:
            raise LocalProtocolError(f"{what}: {size} bytes against Limits(message={self.limits.message})")

    def _check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the connection is over")

    # --- control

    def give_credit(self, entity: Entity, amount: int) -> None:
        """Grant credit beside the automatic grants."""
        self._check_sending(entity, "give credit for")
        entity.own_window().grant(amount)
        self._state.grant(entity, amount)
        self._state.lend_shortfall(entity)

    def consumed_opening(self, size: int) -> None:
        """Count an opening payload as taken by the application."""
        self._state.consume(self.top_stream, size)

    def ping(self, entity: Entity) -> None:
        """Send a ping; the pong is reported as `Ponged`."""
        self._check_sending(entity, "ping")
        self._state.control.owe(entity, pings=1)

    def pong(self, entity: Entity) -> None:
        """Send a pong, for `Config(pongs=False)`."""
        self._check_sending(entity, "pong")
        self._state.control.owe(entity, pongs=1)
