"""The control chunks that wait to be written: acknowledgements, openings, grants, pings, pongs and ends."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from muxkit.core import Buffer, encode_varu64
from muxkit.protocols.bpmux.entities import END_DUE, ENDED, GONE, OURS, UNANNOUNCED, Entity
from muxkit.protocols.bpmux.frames import ACK_END, CREDIT, END, PAYLOAD, PING, Type, encode_announcement, head

if TYPE_CHECKING:
    from muxkit.protocols.bpmux.state import State

NO_PAYLOAD = b"\x00"  # an encoded payload of 0 bytes


class Control:
    """The queue of the control chunks of one connection, which are written before any message.

    Chunks are merged until they are written. The grants of an entity are one integer, its pings and pongs are counters,
    and an acknowledgement is the two to ten bytes of its chunk. So the queue stays small, whatever the peer sends, and
    the engine can always read without waiting for a write.

    Openings and ends are control chunks if they have no payload and nothing has to be written before them. All other
    openings and ends are in the entity's `Outgoing`.
    """

    __slots__ = (
        "_state",
        "acks",
        "announces",
        "bare_openings",
        "dirty",
        "ends",
        "leaving",
        "pongs_queued",
        "round_trip",
        "unanswered",
    )

    def __init__(self, state: State) -> None:
        self._state = state
        # The top level and the first credit to announce. The announcement must be the first thing that we write.
        self.announces: tuple[Entity, int] | None = None
        # Openings and ends without payload. Those of entities that have been removed in the meantime are skipped.
        self.bare_openings: deque[tuple[Entity, Type]] = deque()
        self.ends: deque[Entity] = deque()
        self.dirty: dict[Entity, None] = {}  # entities with grants, pings or pongs to write, oldest first
        self.acks: bytearray = bytearray()  # encoded acknowledgements
        self.leaving: int = 0  # number of channels of the peer that have ended, with the acknowledgement in `acks`
        self.pongs_queued: int = 0  # number of pongs to write, for all entities
        self.unanswered: dict[Entity, int] = {}  # number of our pings that the peer hasn't answered, by entity
        # The ping that measures the round trip: its entity, and how many more pongs about the entity answer it.
        self.round_trip: tuple[Entity, int] | None = None

    def acknowledge(self, entity: Entity) -> None:
        """Queue the acknowledgement of the peer's end. It is the last chunk about the entity."""
        self.acks += head(entity.type, entity.id, ACK_END)
        if entity.kind not in OURS and entity.twin is None:
            self.leaving += 1

    def queue(self, entity: Entity, *, grant: int = 0, pings: int = 0, pongs: int = 0) -> None:
        """Queue a grant of `grant` bytes and numbers of pings and pongs about an entity."""
        entity.grant += grant
        entity.pings += pings
        entity.pongs += pongs
        self.pongs_queued += pongs
        if pings:
            self.unanswered[entity] = self.unanswered.get(entity, 0) + pings
        self.touch(entity)

    def measure(self, entity: Entity) -> None:
        """Queue a ping about an entity to measure the round-trip time."""
        self.queue(entity, pings=1)
        self.round_trip = (entity, self.unanswered[entity])

    def answered(self, entity: Entity) -> bool:
        """Count a pong about an entity. Return True if it answers the ping that `measure` has queued."""
        if entity not in self.unanswered:
            return False
        self.unanswered[entity] -= 1
        if not self.unanswered[entity]:
            del self.unanswered[entity]
        if self.round_trip is None or self.round_trip[0] is not entity:
            return False
        left = self.round_trip[1] - 1
        self.round_trip = (entity, left) if left else None
        return not left

    def touch(self, entity: Entity) -> None:
        """Add an entity to `dirty` if it has grants, pings or pongs to write and its opening is written."""
        if entity.life is not UNANNOUNCED and (entity.grant or entity.pings or entity.pongs):
            self.dirty.setdefault(entity)

    def forget(self, entity: Entity) -> None:
        """Drop the grants, pings and pongs of an entity that has ended."""
        self.pongs_queued -= entity.pongs
        if self.unanswered.pop(entity, 0) and self.round_trip is not None and self.round_trip[0] is entity:
            self.round_trip = None
            self._state.budget.round_trip.gave_up()
        entity.grant = entity.pings = entity.pongs = 0

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Append about `limit` bytes of control chunks to `out`. Return the number of bytes."""
        written = 0 if self.announces is None else self._write_announcement(*self.announces, out)
        if self.acks:
            written += len(self.acks)
            out.append(bytes(self.acks))
            self.acks.clear()
            self.leaving = 0
        while self.dirty and written < limit:
            entity = next(iter(self.dirty))
            written += self._write_entity(entity, limit - written, out)
            if not (entity.grant or entity.pings or entity.pongs):
                del self.dirty[entity]
        while self.bare_openings and written < limit:
            entity, type = self.bare_openings.popleft()
            if entity.life is not GONE:
                written += self._write_opening(entity, type, out)
        while self.ends and written < limit:  # only now, because nothing may follow an entity's end
            entity = self.ends.popleft()
            if entity.life is END_DUE:
                chunk = head(entity.type, entity.id, END) + NO_PAYLOAD
                out.append(chunk)
                written += len(chunk)
                entity.step(ENDED)
                self._state.ended(entity)
        return written

    def _write_announcement(self, top: Entity, credit: int, out: list[Buffer]) -> int:
        """Write the announcement of the first credit.

        The announcement also grants the same amount of top-level credit, so we take it from the queued grant.
        """
        top.grant -= credit
        if not top.grant and not (top.pings or top.pongs):
            del self.dirty[top]
        chunk = self._announcement(credit)
        out.append(chunk)
        return len(chunk)

    def announce_late(self) -> None:
        """Queue the announcement before all acknowledgements, because the peer has ended its top level.

        Normally, `write` announces with the first top-level grant, and there will be none any more. But the peer's
        channels may already use our first credit. To the peer, it looks as if we had announced before we read the end.
        """
        if self.announces is not None:
            self.acks[:0] = self._announcement(self.announces[1])

    def _announcement(self, credit: int) -> bytes:
        """Return the chunks of the announcement. From now on, our channels may use the peer's first credit."""
        self.announces = None
        if self._state.peer_first_credit:
            self._state.use_peer_first_credit()
        return encode_announcement(credit)

    def _write_opening(self, entity: Entity, type: Type, out: list[Buffer]) -> int:
        """Write the chunk that opens an entity, together with its first grant."""
        receiver, grant = entity.receiving, 0
        if receiver is not None:
            grant, receiver.grant = receiver.grant, 0
        if grant:
            chunk = head(type, entity.id, PAYLOAD | CREDIT) + NO_PAYLOAD + encode_varu64(grant)
        else:
            chunk = head(type, entity.id, PAYLOAD) + NO_PAYLOAD
        out.append(chunk)
        self._state.announced(entity)
        return len(chunk)

    def _write_entity(self, entity: Entity, limit: int, out: list[Buffer]) -> int:
        """Write the grant of an entity, and as many of its pings and pongs as fit into the limit."""
        written = 0
        if entity.grant:
            flags = CREDIT | PING if entity.pings else CREDIT
            chunk = head(entity.type, entity.id, flags) + encode_varu64(entity.grant)
            entity.grant = 0
            entity.pings -= 1 if entity.pings else 0
            out.append(chunk)
            written += len(chunk)
        if entity.pings or entity.pongs:
            ping, pong = head(entity.type, entity.id, PING), head(entity.type, entity.id, 0)
            pings = min(entity.pings, limit // len(ping) + 1)
            pongs = min(entity.pongs, limit // len(pong) + 1)
            entity.pings -= pings
            entity.pongs -= pongs
            self.pongs_queued -= pongs
            out.append(ping * pings + pong * pongs)
            written += len(ping) * pings + len(pong) * pongs
        return written
