"""May the peer do that, and what follows? The rules of "Receiving Chunks" and "Partial Mode", check first, then act."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import U64_MAX, ReceiveWindow
from muxkit.protocols.bpmux._engine.entities import ADDRESSED, Entity, Kind, Parts
from muxkit.protocols.bpmux._engine.events import Confirmed, Ended, Message, Opened, Pinged, Ponged, Responded
from muxkit.protocols.bpmux._engine.tracing import observe_chunk
from muxkit.protocols.bpmux._frames import ACK_END, END, PAYLOAD, PING, Chunk, Partial, Type

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._engine.state import State

CREATING = frozenset({Type.OUT_REQUEST, Type.OUT_SINK, Type.OUT_STREAM, Type.DUPLEX})
PAYLOAD_TYPES = frozenset({Type.IN_REQUEST, Type.IN_SINK, Type.OUT_SINK})

BREAKABLE = frozenset({Kind.REQUEST_IN, Kind.SINK_IN})  # made by the peer, answered by us


class Receiving:
    """One chunk at a time: the checks run while it is parsed, `apply` once it is whole and legal."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._maps = state.maps
        self.announced = 0  # by a Partial chunk, for the entity of the next one
        # About the chunk that is being parsed.
        self._entity: Entity | None = None
        self._payer = state.top_stream  # whose credit its payload takes
        self._left = 0  # of a message in parts, before this chunk; 0 when it is not in parts
        self._charged = 0  # by this chunk's payload, on the entity's own window

    # --- checks: they raise, and change nothing but the notes above

    def partial(self, total_size: int) -> None:
        if self.announced:
            raise RemoteProtocolError("a Partial chunk after a Partial chunk", rule="bpmux-P07")
        if total_size > self._state.limits.message:
            raise RemoteProtocolError(
                f"a message of {total_size} bytes in parts against {self._state.limits.message} allowed",
                rule="bpmux-P17",
                limit="message",
            )

    def header(self, type: Type, id: int, flags: int) -> None:
        entity = self._maps[ADDRESSED[type]].get(id)
        self._entity = entity
        self._charged = 0
        if flags & ACK_END and flags != ACK_END:
            rule = "bpmux-R20" if entity is None else "bpmux-R32"
            raise RemoteProtocolError(f"{type.label} {id}: ack-end together with flags {flags:#04x}", rule=rule)
        if entity is None:
            self._check_new(type, id, flags)
            self._payer, self._left = self._state.top_stream, self.announced
        else:
            self._check_known(entity, type, id, flags)
            self._payer = self._state.payer(entity)
            self._left = self.announced or entity.partial
        if flags & PAYLOAD and flags & END and self._left:
            raise RemoteProtocolError(
                f"{type.label} {id}: payload and end payload in one chunk in partial mode", rule="bpmux-P14"
            )
        if self.announced:
            self._check_loan(self._payer.window, type, id)
        if flags & PING and self._state.control.pongs_owed >= self._state.limits.pongs:
            raise RemoteProtocolError(
                f"{type.label} {id}: {self._state.control.pongs_owed} pings not answered yet because nobody reads",
                limit="pongs",
            )

    def _check_new(self, type: Type, id: int, flags: int) -> None:
        state = self._state
        if id == 0 and type is not Type.OUT_REQUEST and type is not Type.IN_REQUEST:
            rule = "bpmux-S05" if type in (Type.OUT_SINK, Type.OUT_STREAM) else "bpmux-R09"
            raise RemoteProtocolError(f"{type.label} {id}: the top level cannot be opened again", rule=rule)
        if type is Type.IN_REQUEST:
            raise RemoteProtocolError(f"{type.label} {id}: there is no such request", rule="bpmux-R10")
        if type not in CREATING:
            raise RemoteProtocolError(
                f"{type.label} {id}: there is no such entity, and only we could make it", rule="bpmux-R11"
            )
        if type is Type.DUPLEX and id in self._maps[Kind.STREAM_IN]:
            raise RemoteProtocolError(f"{type.label} {id}: there is a stream-in with this id", rule="bpmux-R12")
        if flags & ACK_END:
            raise RemoteProtocolError(f"{type.label} {id}: ack-end for an entity that does not exist", rule="bpmux-R20")
        if not flags & PAYLOAD:
            raise RemoteProtocolError(f"{type.label} {id}: an opening without a payload", rule="bpmux-R14")
        if self.announced and state.config.letter:
            raise RemoteProtocolError(
                f"{type.label} {id}: an opening payload of {self.announced} bytes in parts against a credit of 0",
                rule="bpmux-P18",
            )
        live = state.theirs + state.control.leaving
        if live >= state.limits.channels:
            raise RemoteProtocolError(
                f"{type.label} {id}: opened beside {live} live channels", limit=state.limits.bound_of_channels
            )
        if flags & END and type is not Type.OUT_SINK:
            self._check_reset(type, id)

    def _check_known(self, entity: Entity, type: Type, id: int, flags: int) -> None:
        if type is Type.DUPLEX and not (entity.opening and entity.twin is not None and flags & PAYLOAD):
            rule = "bpmux-R21" if entity.twin is not None else "bpmux-R12"
            raise RemoteProtocolError(f"{type.label} {id}: there is an entity with this id", rule=rule)
        if entity.opening and entity.twin is not None and type is not Type.DUPLEX and flags & PAYLOAD:
            raise RemoteProtocolError(
                f"{type.label} {id}: parts of a duplex's opening travel as duplex chunks", rule="bpmux-P06"
            )
        if flags & (PAYLOAD | END) and entity.twin is not None and entity.twin.opening:
            raise RemoteProtocolError(
                f"{type.label} {id}: the opening of this duplex has not come as a whole", rule="bpmux-P06"
            )
        if flags & PAYLOAD and type not in PAYLOAD_TYPES and not entity.opening:
            raise RemoteProtocolError(
                f"{type.label} {id}: payload in a chunk of a type that carries none", rule="bpmux-R22"
            )
        if flags & PAYLOAD and flags & END and type is Type.IN_REQUEST:
            raise RemoteProtocolError(f"{type.label} {id}: a response together with an end", rule="bpmux-R27")
        if flags & ACK_END and not entity.end_out:
            raise RemoteProtocolError(f"{type.label} {id}: ack-end for an end that was not sent", rule="bpmux-R33")
        if entity.parts is not None:
            if self.announced:
                raise RemoteProtocolError(
                    f"{type.label} {id}: a Partial with {entity.partial} bytes of the last one to come",
                    rule="bpmux-P08",
                )
            ends = entity.parts.ends
            if (flags & END and ends is False) or (flags & PAYLOAD and ends is True):
                raise RemoteProtocolError(
                    f"{type.label} {id}: payload and end payload mixed in partial mode", rule="bpmux-P14"
                )
        if flags & END and self._is_reset(entity):
            self._check_reset(type, id)

    def _is_reset(self, entity: Entity) -> bool:
        """Would an end break off what we do for the peer? Legal, but not without bound.

        Its goodbye does not count, nor that it wants no answer on a duplex whose own half it has ended in order.
        """
        is_goodbye = self._state.top_stream.gone and not entity.late
        return entity.kind in BREAKABLE and not entity.ending and not entity.orderly and not is_goodbye

    def _check_loan(self, window: ReceiveWindow, type: Type, id: int) -> None:
        """Could what the peer has begun on this window ever be lent? Otherwise it would wait for ever."""
        need, total = window.unfinished + self.announced - window.credit, self._state.limits.reassembly
        if need > total:
            raise RemoteProtocolError(
                f"{type.label} {id}: {need} bytes in parts beyond the window against {total} that may be lent",
                limit="reassembly",
            )

    def _check_reset(self, type: Type, id: int) -> None:
        state = self._state
        if not state.resets.has_token(state.now):
            limits = state.limits
            raise RemoteProtocolError(
                f"{type.label} {id}: more than {limits.resets_burst} channels cancelled at once "
                f"and {limits.resets_per_second} a second",
                limit="resets_per_second",
            )

    def payload(self, size: int) -> None:
        entity, payer = self._entity, self._payer
        opening = entity is None or entity.opening
        if opening and size and self._state.config.letter:
            raise RemoteProtocolError(f"an opening payload of {size} bytes against a credit of 0", rule="bpmux-R15")
        available = payer.window.credit
        if size > available:
            rule = "bpmux-R15" if opening else "bpmux-R23"
            name = "new entity" if entity is None else entity.label
            raise RemoteProtocolError(f"{name}: {size} bytes sent against {available} granted", rule=rule)
        self._check_message(size)
        if payer is entity:
            self._charged = size

    def _check_message(self, size: int) -> None:
        """A payload or an end payload, after its credit."""
        if self._left and size > self._left:
            raise RemoteProtocolError(f"{size} bytes in parts with {self._left} of the total to come", rule="bpmux-P11")
        if size > self._state.limits.message:
            raise RemoteProtocolError(
                f"a message of {size} bytes against {self._state.limits.message} allowed", limit="message"
            )

    def credit(self, amount: int) -> None:
        available = 0 if self._entity is None else self._entity.credit.available
        if available + amount > U64_MAX:
            raise RemoteProtocolError(f"credit of {amount} on top of {available} is above 2^64-1", rule="bpmux-R25")

    def end(self, size: int) -> None:
        entity = self._entity
        available = 0 if entity is None else entity.window.credit - self._charged
        if size > available:
            rule = "bpmux-R18" if entity is None else "bpmux-R29"
            name = "new entity" if entity is None else entity.label
            raise RemoteProtocolError(f"{name}: end payload of {size} bytes against {available} granted", rule=rule)
        self._check_message(size)

    # --- what follows

    def apply(self, chunk: Chunk | Partial) -> None:
        if isinstance(chunk, Partial):
            self.announced = chunk.total_size
            return
        state = self._state
        entity = self._entity or self._create(chunk)
        payer = state.payer(entity)
        if state.observer is not None:
            observe_chunk(state.observer, "in", entity.label, chunk, in_parts=self.announced > 0)
        if self.announced:
            total, self.announced = self.announced, 0
            state.begin_parts(entity, total)
        if chunk.payload is not None:
            self._take_payload(entity, chunk.payload)
        if chunk.credit:
            self._take_credit(entity, chunk.credit)
        if chunk.ping:
            self._take_ping(entity)
        if chunk.end is not None:
            self._take_end(entity, chunk.end)
        if chunk.ack_end:
            state.remove(entity)
            state.events.append(Confirmed(entity))
        elif chunk.payload is None and chunk.credit is None and not chunk.ping and chunk.end is None:
            self._take_pong(entity)
        if payer.window.unfinished:
            state.top_up(payer)

    def _create(self, chunk: Chunk) -> Entity:
        state = self._state
        entity = state.add(ADDRESSED[chunk.type], chunk.id)
        if chunk.type is Type.DUPLEX:
            entity.twin = state.add(Kind.STREAM_IN, chunk.id)
            entity.twin.twin = entity
        entity.opening = True
        entity.late = state.top_stream.gone
        state.refresh(entity)
        state.count_channel(entity)
        return entity

    def _take_payload(self, entity: Entity, payload: bytes) -> None:
        state = self._state
        state.payer(entity).window.arrived(len(payload))
        parts = entity.parts
        if parts is not None:
            parts.ends = False
            whole = state.add_part(entity, parts, payload)
            if whole is None:
                return
            payload = whole
        if entity.opening:
            self._opened(entity, payload, parts)
        elif entity.kind is Kind.REQUEST_OUT:
            self._take_response(entity, payload)
        elif entity.live:
            state.events.append(Message(entity, payload))
        else:
            state.consume(entity, len(payload))

    def _opened(self, entity: Entity, payload: bytes, parts: Parts | None) -> None:
        state = self._state
        entity.opening = False
        state.refresh(entity)
        receiving = entity if entity.receives else entity.twin
        if receiving is not None:
            state.renew(receiving, receiving.window.start(self._state.now))
        source = receiving if receiving is not entity else None
        state.events.append(Opened(entity, payload, source))
        if parts is not None:
            state.events.extend(Pinged(half) for half in (entity, source) if half in parts.pinged)

    def _take_response(self, entity: Entity, payload: bytes) -> None:
        state = self._state
        if not entity.live:
            state.consume(entity, len(payload))
        if not entity.end_out:
            state.acknowledge(entity)
        state.remove(entity)
        state.events.append(Responded(entity, payload) if entity.live else Ended(entity, b""))

    def _take_credit(self, entity: Entity, amount: int) -> None:
        state = self._state
        entity.own_credit().grant(amount)
        if state.observer is not None:
            state.observer.credit("in", entity.label, amount)
        outgoing = entity.outgoing
        if outgoing is None:
            return
        if entity is state.top_sink:
            state.top_credit_came()
        state.schedule(entity)
        state.writable(outgoing)

    def _take_ping(self, entity: Entity) -> None:
        if self._state.config.pongs and not entity.end_out:
            self._state.control.owe_pong(entity)
        parts = _opening_of(entity)
        if parts is None:
            self._state.events.append(Pinged(entity))
        elif entity not in parts.pinged:
            parts.pinged.append(entity)

    def _take_pong(self, entity: Entity) -> None:
        if _opening_of(entity) is None:
            self._state.events.append(Ponged(entity))

    def _take_end(self, entity: Entity, payload: bytes) -> None:
        state = self._state
        entity.window.arrived(len(payload))
        size = len(payload)
        if entity.parts is not None:
            entity.parts.ends = True
            whole = state.add_part(entity, entity.parts, payload)
            if whole is None:
                return
            payload, size = whole, len(whole)
        if self._is_reset(entity):
            state.resets.take(state.now)
        if entity.twin is not None:
            entity.twin.orderly = not payload
        state.consume(entity, size)
        entity.end_in = True
        if not entity.end_out:
            state.acknowledge(entity)
        state.remove(entity)
        state.events.append(Ended(entity, payload))
        if entity is state.top_sink:
            state.decline(begun=True)


def _opening_of(entity: Entity) -> Parts | None:
    """Its opening, or its twin's, if that still comes in parts, so that the application does not know it."""
    if entity.opening:
        return entity.parts
    return entity.twin.parts if entity.twin is not None and entity.twin.opening else None
