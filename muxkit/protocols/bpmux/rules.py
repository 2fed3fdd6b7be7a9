"""Checks each chunk that the peer has sent, and applies it to the state.

This module implements the sections "Receiving Chunks" and "Partial Mode" of the specification. A chunk that breaks a
rule raises `RemoteProtocolError`, which ends the connection. The error's `rule` is the number of the rule in
docs/conformance.md, and its `limit` is the limit of muxkit that was exceeded.

A message in parts is announced by a *Partial* chunk with its total size. The next chunks about the same entity contain
the parts.
"""

from __future__ import annotations

from muxkit._errors import RemoteProtocolError
from muxkit.core import U64_MAX, ReceiveWindow
from muxkit.core.events import Cancelled, Confirmed, Finished, Halves, Opened, Pong, Received, Stopped
from muxkit.protocols.bpmux.entities import ADDRESSED, ENDED, HALF_OPENED, OPEN, RECEIVERS, Entity, Kind, Parts
from muxkit.protocols.bpmux.events import Event, Pinged, Requested, Responded
from muxkit.protocols.bpmux.frames import ACK_END, END, PAYLOAD, PING, Checks, Chunk, Partial, Type, observe_chunk
from muxkit.protocols.bpmux.receive import Receiver
from muxkit.protocols.bpmux.send import Sender
from muxkit.protocols.bpmux.state import State

CREATING = frozenset({Type.OUT_REQUEST, Type.OUT_SINK, Type.OUT_STREAM, Type.DUPLEX})  # these may open an entity
PAYLOAD_TYPES = frozenset({Type.IN_REQUEST, Type.IN_SINK, Type.OUT_SINK})  # these may have a payload after the opening
# Entities that the peer opens and that this side sends on. If the peer ends one early, our handler has worked in vain.
CANCELLABLE = frozenset({Kind.REQUEST_IN, Kind.SINK_IN})


class ChunkRules(Checks):
    """Checks and applies one chunk at a time.

    `parse_chunk` calls the checks (`partial`, `header`, `payload`, `credit` and `end`) while it parses a chunk. They
    change nothing in the state, because an incomplete chunk is parsed again later. The reader then calls `apply` with
    the complete chunk.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._maps = state.maps
        self.announced: int = 0  # the total size in the Partial chunk before the current chunk, or 0
        # These describe the chunk that is being parsed.
        self._entity: Entity | None = None  # None if the chunk opens an entity
        self._payer: Entity = state.top_stream  # the entity whose window the payload uses; see `State.payer`
        self._left = 0  # missing bytes of the message in parts that the chunk continues, or 0
        self._charged = 0  # bytes of the entity's own credit that the payload uses

    # --- checks

    def partial(self, total_size: int) -> None:
        if self.announced:
            raise RemoteProtocolError(
                "a Partial chunk after a Partial chunk: expected the first part of the message", rule="bpmux-P07"
            )
        if total_size > self._state.limits.message:
            raise RemoteProtocolError(
                f"message in parts too large: expected at most {self._state.limits.message} bytes, got {total_size}",
                rule="bpmux-P17",
                limit="message",
            )

    def header(self, type: Type, id: int, flags: int) -> None:
        entity = self._maps[ADDRESSED[type]].get(id)
        self._entity = entity
        self._charged = 0
        if flags & ACK_END and flags != ACK_END:
            rule = "bpmux-R20" if entity is None else "bpmux-R32"
            raise _broken(type, id, f"ack-end with other flags: expected {ACK_END:#04x}, got {flags:#04x}", rule)
        if entity is None:
            self._check_new(type, id, flags)
            self._payer, self._left = self._state.top_stream, self.announced
        else:
            self._check_known(entity, type, id, flags)
            self._payer = self._state.payer(entity)
            self._left = self.announced or entity.partial
        if flags & PAYLOAD and flags & END and self._left:
            raise _broken(
                type,
                id,
                "payload and end payload in one chunk of a message in parts: expected one of them",
                "bpmux-P14",
            )
        if self.announced:
            self._check_loan(self._payer.window, type, id)
        if flags & PING and self._state.control.pongs_queued >= self._state.limits.pongs:
            raise RemoteProtocolError(
                f"{type.label} {id}: too many pings: {self._state.control.pongs_queued} answers are waiting, "
                "because the peer doesn't read them",
                limit="pongs",
            )

    def _check_new(self, type: Type, id: int, flags: int) -> None:
        state = self._state
        if id == 0 and type is not Type.OUT_REQUEST and type is not Type.IN_REQUEST:
            rule = "bpmux-S05" if type in (Type.OUT_SINK, Type.OUT_STREAM) else "bpmux-R09"
            raise _broken(type, id, "the top level is open from the beginning and can't be opened", rule)
        if type is Type.IN_REQUEST:
            raise _broken(type, id, "a response without a request with this id", "bpmux-R10")
        if type not in CREATING:
            raise _broken(type, id, "no entity has this id, and only this side could open it", "bpmux-R11")
        if type is Type.DUPLEX and id in self._maps[Kind.STREAM_IN]:
            raise _broken(type, id, "this id is in use by a stream-in", "bpmux-R12")
        if flags & ACK_END:
            raise _broken(type, id, "ack-end for an entity that doesn't exist", "bpmux-R20")
        if not flags & PAYLOAD:
            raise _broken(type, id, "an opening without a payload: expected one, which may be empty", "bpmux-R14")
        if self.announced and state.config.letter:
            raise _broken(
                type, id, f"opening payload too large: expected 0 bytes, got {self.announced} in parts", "bpmux-P18"
            )
        live = state.theirs + state.control.leaving
        if live >= state.limits.channels:
            raise RemoteProtocolError(
                f"{type.label} {id}: too many channels: expected at most {state.limits.channels}, {live} are open",
                limit=state.limits.bound_of_channels,
            )

    def _check_known(self, entity: Entity, type: Type, id: int, flags: int) -> None:
        if type is Type.DUPLEX and not (entity.life is HALF_OPENED and entity.twin is not None and flags & PAYLOAD):
            rule = "bpmux-R21" if entity.twin is not None else "bpmux-R12"
            raise _broken(type, id, "this id is in use", rule)
        if entity.life is HALF_OPENED and entity.twin is not None and type is not Type.DUPLEX and flags & PAYLOAD:
            raise _broken(type, id, "a part of a duplex's opening: expected a duplex chunk", "bpmux-P06")
        if flags & (PAYLOAD | END) and entity.twin is not None and entity.twin.life is HALF_OPENED:
            raise _broken(type, id, "the opening of this duplex is incomplete: expected the rest of it", "bpmux-P06")
        if flags & PAYLOAD and type not in PAYLOAD_TYPES and entity.life is not HALF_OPENED:
            raise _broken(type, id, "a payload in a chunk of a type that has none", "bpmux-R22")
        if flags & PAYLOAD and flags & END and type is Type.IN_REQUEST:
            raise _broken(type, id, "a response with an end payload: expected one of them", "bpmux-R27")
        if flags & ACK_END and entity.life is not ENDED:
            raise _broken(type, id, "ack-end for an end that wasn't sent", "bpmux-R33")
        if entity.parts is not None:
            if self.announced:
                raise _broken(
                    type, id, f"a second Partial: expected {entity.partial} more bytes of the first", "bpmux-P08"
                )
            is_end = entity.parts.is_end
            if (flags & END and is_end is False) or (flags & PAYLOAD and is_end is True):
                raise _broken(type, id, "payload and end payload mixed in a message in parts", "bpmux-P14")

    def _is_reset(self, entity: Entity) -> bool:
        """Return True if the peer's end cancels work of a handler on this side.

        A peer that opens and cancels channels quickly makes us work in vain (as in HTTP/2's "rapid reset"), so
        `StartPace` slows such a peer down. We don't count ends after the peer has ended its top level, because it is
        leaving, nor the end of a duplex whose other half the peer has ended without an error.
        """
        is_goodbye = self._state.top_stream.gone and not entity.late
        return entity.kind in CANCELLABLE and not entity.ending and not entity.orderly and not is_goodbye

    def _check_loan(self, window: ReceiveWindow, type: Type, id: int) -> None:
        """Check that we could ever lend enough credit for a message in parts. Otherwise it would wait forever."""
        need, total = window.unfinished + self.announced - window.credit, self._state.limits.reassembly
        if need > total:
            raise RemoteProtocolError(
                f"{type.label} {id}: message in parts too large: {need} bytes to lend, at most {total} allowed",
                limit="reassembly",
            )

    def payload(self, size: int) -> None:
        entity, payer = self._entity, self._payer
        is_opening = entity is None or entity.life is HALF_OPENED
        if is_opening and size and self._state.config.letter:
            raise RemoteProtocolError(f"opening payload too large: expected 0 bytes, got {size}", rule="bpmux-R15")
        available = payer.window.credit
        if size > available:
            rule = "bpmux-R15" if is_opening else "bpmux-R23"
            name = "new entity" if entity is None else entity.label
            raise RemoteProtocolError(f"{name}: the peer sent {size} bytes with {available} bytes of credit", rule=rule)
        self._check_message(size)
        if payer is entity:
            self._charged = size

    def _check_message(self, size: int) -> None:
        """Check the size of a payload or an end payload against the message in parts and `Limits.message`."""
        if self._left and size > self._left:
            raise RemoteProtocolError(
                f"part too large: expected at most {self._left} bytes, the rest of the message, got {size}",
                rule="bpmux-P11",
            )
        if size > self._state.limits.message:
            raise RemoteProtocolError(
                f"message too large: expected at most {self._state.limits.message} bytes, got {size}", limit="message"
            )

    def credit(self, amount: int) -> None:
        available = 0 if self._entity is None else self._entity.credit.available
        if available + amount > U64_MAX:
            raise RemoteProtocolError(
                f"too much credit: {amount} on top of {available} is more than 2^64-1", rule="bpmux-R25"
            )

    def end(self, size: int) -> None:
        entity = self._entity
        available = 0 if entity is None else entity.window.credit - self._charged
        if size > available:
            rule = "bpmux-R18" if entity is None else "bpmux-R29"
            name = "new entity" if entity is None else entity.label
            raise RemoteProtocolError(
                f"{name}: the peer sent an end payload of {size} bytes with {available} bytes of credit", rule=rule
            )
        self._check_message(size)

    # --- actions

    def apply(self, chunk: Chunk | Partial) -> None:
        """Apply a complete chunk that has passed the checks. This changes the state and reports events."""
        if isinstance(chunk, Partial):
            self.announced = chunk.total_size
            return
        state = self._state
        entity = self._entity or self._create(chunk)
        self._entity, self._payer = None, state.top_stream  # or we could keep an ended channel in memory
        payer = state.payer(entity)
        if state.observer is not None:
            observe_chunk(state.observer, "in", entity.label, chunk, in_parts=self.announced > 0)
        if self.announced:
            total, self.announced = self.announced, 0
            state.begin_parts(entity, total)
        if chunk.payload is not None:
            self._take_payload(entity, chunk.payload)
        if chunk.credit:
            state.receive_grant(entity, chunk.credit)
        if chunk.ping:
            self._take_ping(entity)
        if chunk.end is not None:
            self.take_end(entity, chunk.end)
        if chunk.ack_end:
            state.remove(entity)
            state.events.append(confirmation_of(entity))
        elif chunk.is_pong and _opening_of(entity) is None:
            if state.control.answered(entity):
                state.budget.round_trip.answered(state.now)
            state.events.append(Pong(entity))
        if payer.window.unfinished:
            state.lend_shortfall(payer)

    def _create(self, chunk: Chunk) -> Entity:
        state = self._state
        entity = state.add(ADDRESSED[chunk.type], chunk.id)
        if chunk.type is Type.DUPLEX:
            entity.twin = state.add_receiver(Kind.STREAM_IN, chunk.id)
            entity.twin.twin = entity
        entity.life = HALF_OPENED
        entity.late = state.top_stream.gone
        state.count_channel(entity)
        return entity

    def _take_payload(self, entity: Entity, payload: bytes) -> None:
        state = self._state
        state.payer(entity).window.arrived(len(payload))
        parts = entity.parts
        if parts is not None:
            parts.is_end = False
            whole = state.add_part(entity, parts, payload)
            if whole is None:
                return
            payload = whole
        if entity.life is HALF_OPENED:
            self._finish_opening(entity, payload, parts)
        elif not isinstance(entity, Receiver):
            raise AssertionError(f"{entity.label}: a payload in the direction in which it has none")
        elif entity.kind is Kind.REQUEST_OUT:
            self._take_response(entity, payload)
        elif entity.is_wanted:
            state.events.append(Received(entity, [payload]))
        else:
            state.consume(entity, len(payload))

    def _finish_opening(self, entity: Entity, payload: bytes, parts: Parts | None) -> None:
        state = self._state
        entity.step(OPEN)
        state.update_direct(entity)
        sender, receiver = _halves_of(entity)
        if receiver is not None:
            if state.config.grants:
                state.grant(receiver, receiver.window.start(state.now) - state.first_credit_in)
            else:  # the decoder of a recording, which knows the first credit from the recording
                receiver.window.grant(state.first_credit_in)
        if sender is not None and sender.kind is Kind.REQUEST_IN:
            state.events.append(Requested(sender, payload))
        else:
            state.events.append(Opened(Halves(sender, receiver), payload))
        if parts is not None:
            state.events.extend(
                Pinged(half) for half in (sender, receiver) if half is not None and half in parts.pinged
            )

    def _take_response(self, request: Receiver, payload: bytes) -> None:
        state = self._state
        if not request.is_wanted:
            state.consume(request, len(payload))
        state.peer_ended(request)
        state.events.append(Responded(request, payload) if request.is_wanted else Cancelled(request))

    def _take_ping(self, entity: Entity) -> None:
        if self._state.config.pongs and entity.life is not ENDED:
            self._state.control.queue(entity, pongs=1)
        parts = _opening_of(entity)
        if parts is None:
            self._state.events.append(Pinged(entity))
        elif entity not in parts.pinged:
            parts.pinged.append(entity)

    def take_end(self, entity: Entity, payload: bytes) -> None:
        state = self._state
        size = len(payload)
        if size:
            entity.window.arrived(size)
        if entity.parts is not None:
            entity.parts.is_end = True
            whole = state.add_part(entity, entity.parts, payload)
            if whole is None:
                return
            payload, size = whole, len(whole)
        is_reset = self._is_reset(entity)
        if is_reset:
            state.starts.broken_off(state.now)
        breaks_off = entity.twin is None and (is_reset or (entity.is_rest_of_reset and payload != b""))
        if entity.twin is not None:
            entity.twin.orderly = not payload
            entity.twin.is_rest_of_reset = is_reset
        if size:
            state.consume(entity, size)
        entity.end_in = True
        state.peer_ended(entity)
        state.events.append(_end_of(entity, payload, breaks_off=breaks_off))
        if entity is state.top_sink:
            state.decline_openings(begun=True)


def _broken(type: Type, id: int, what: str, rule: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{type.label} {id}: {what}", rule=rule)


def _opening_of(entity: Entity) -> Parts | None:
    """Return the parts of the opening of this entity or its twin while it is incomplete, otherwise None."""
    if entity.life is HALF_OPENED:
        return entity.parts
    return entity.twin.parts if entity.twin is not None and entity.twin.life is HALF_OPENED else None


def _end_of(entity: Entity, payload: bytes, *, breaks_off: bool) -> Event:
    """Return the event for the peer's end of an entity. By muxkit's convention, a payload means an error."""
    if entity.kind not in RECEIVERS:
        assert isinstance(entity, Sender)
        return Stopped(entity, payload, breaks_off)
    assert isinstance(entity, Receiver)
    if payload or entity.kind is Kind.REQUEST_OUT:
        return Cancelled(entity, payload, breaks_off)
    return Finished(entity)


def confirmation_of(entity: Entity) -> Confirmed:
    """Return the event for an end of this side that the peer has acknowledged."""
    if entity.kind in RECEIVERS:
        assert isinstance(entity, Receiver)
        return Confirmed(entity)
    assert isinstance(entity, Sender)
    return Confirmed(entity)


# The class of an entity follows from its kind. We test the kind, because `isinstance` is slow if the answer is no: it
# takes 1 µs, as both classes derive from a `typing.Protocol`.


def _halves_of(entity: Entity) -> tuple[Sender | None, Receiver | None]:
    """Return the halves of a channel that the peer has just opened. A duplex is given by its sender."""
    if entity.kind in RECEIVERS:
        assert isinstance(entity, Receiver)
        return None, entity
    assert isinstance(entity, Sender)
    twin = entity.twin
    assert twin is None or isinstance(twin, Receiver)
    return entity, twin
