"""What this end owes the peer beside messages, merged until it is written: acknowledgements, grants, pongs and ends."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from muxkit.core import Buffer, encode_varu64
from muxkit.protocols.bpmux.entities import END_DUE, ENDED, GONE, OURS, UNANNOUNCED, Entity
from muxkit.protocols.bpmux.frames import ACK_END, CREDIT, END, PAYLOAD, PING, Type, encode_announcement, head

if TYPE_CHECKING:
    from muxkit.protocols.bpmux.state import State

NOTHING = b"\x00"  # the size of an empty payload


class Control:
    """The control chunks to write before any payload: acknowledgements, openings, grants, pings, pongs and ends.

    They are merged until they are written: a grant is one integer an entity, pings and pongs are counters, an
    acknowledgement is the two to ten bytes of its chunk. So reading never waits for writing, whatever the peer sends.
    Openings and ends are here if they have no payload and nothing has to be written before them. When one was written,
    `State.announced` or `State.ended` is called. `announces` is written before anything else. There is something to
    write while `acks`, `bare_openings`, `dirty` or `ends` hold anything.
    """

    __slots__ = (
        "_state",
        "acks",
        "announces",
        "bare_openings",
        "dirty",
        "ends",
        "leaving",
        "pongs_owed",
        "round_trip",
        "unanswered",
    )

    def __init__(self, state: State) -> None:
        self._state = state
        self.announces: tuple[Entity, int] | None = None  # the top level, and the first credit of channels
        self.bare_openings: deque[tuple[Entity, Type]] = deque()  # those of entities that are gone are not written
        self.ends: deque[Entity] = deque()  # the same
        self.dirty: dict[Entity, None] = {}  # announced entities with something to write
        self.acks: bytearray = bytearray()
        self.leaving: int = 0  # channels of the peer that ended and whose acknowledgement was not written yet
        self.pongs_owed: int = 0  # pongs to write, on all entities
        self.unanswered: dict[Entity, int] = {}  # pings about an entity that no pong has come for
        self.round_trip: tuple[Entity, int] | None = None  # the ping that measures it is the n-th of these

    def acknowledge(self, entity: Entity) -> None:
        """Queue the acknowledgement of the peer's end, the last chunk about that entity."""
        self.acks += head(entity.type, entity.id, ACK_END)
        if entity.kind not in OURS and entity.twin is None:
            self.leaving += 1

    def owe(self, entity: Entity, *, grant: int = 0, pings: int = 0, pongs: int = 0) -> None:
        """Queue a grant of credit, pings or pongs about an entity."""
        entity.grant += grant
        entity.pings += pings
        entity.pongs += pongs
        self.pongs_owed += pongs
        if pings:
            self.unanswered[entity] = self.unanswered.get(entity, 0) + pings
        self.touch(entity)

    def measure(self, entity: Entity) -> None:
        """Queue a ping about an entity that measures the round trip."""
        self.owe(entity, pings=1)
        self.round_trip = (entity, self.unanswered[entity])

    def answered(self, entity: Entity) -> bool:
        """Count a pong about an entity; return True if it is for the ping that measures the round trip."""
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
        """Put an entity with control chunks in line, once its opening is written."""
        if entity.life is not UNANNOUNCED and (entity.grant or entity.pings or entity.pongs):
            self.dirty.setdefault(entity)

    def forget(self, entity: Entity) -> None:
        """Drop the control chunks of an entity."""
        self.pongs_owed -= entity.pongs
        if self.unanswered.pop(entity, 0) and self.round_trip is not None and self.round_trip[0] is entity:
            self.round_trip = None
            self._state.budget.round_trip.gave_up()
        entity.grant = entity.pings = entity.pongs = 0

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Append control chunks to `out`, about `limit` bytes; return their size."""
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
        while self.ends and written < limit:  # behind what was to be written about these entities
            entity = self.ends.popleft()
            if entity.life is END_DUE:
                chunk = head(entity.type, entity.id, END) + NOTHING
                out.append(chunk)
                written += len(chunk)
                entity.step(ENDED)
                self._state.ended(entity)
        return written

    def _write_announcement(self, top: Entity, credit: int, out: list[Buffer]) -> int:
        """Write a part of the first top-level grant in the form that announces the first credit of channels."""
        top.grant -= credit
        if not top.grant and not (top.pings or top.pongs):
            del self.dirty[top]
        chunk = self._announcement(credit)
        out.append(chunk)
        return len(chunk)

    def announce_late(self) -> None:
        """Put the announcement before all acknowledgements, if the peer ends its top level before it was written.

        To the peer this looks as if it had been written before the end was read. Its channels may count on it.
        """
        if self.announces is not None:
            self.acks[:0] = self._announcement(self.announces[1])

    def _announcement(self, credit: int) -> bytes:
        self.announces = None
        if self._state.promised:
            self._state.use_promised()
        return encode_announcement(credit)

    def _write_opening(self, entity: Entity, type: Type, out: list[Buffer]) -> int:
        """Write the chunk that opens an entity, with the first grant."""
        receiver, grant = entity.receiving, 0
        if receiver is not None:
            grant, receiver.grant = receiver.grant, 0
        if grant:
            chunk = head(type, entity.id, PAYLOAD | CREDIT) + NOTHING + encode_varu64(grant)
        else:
            chunk = head(type, entity.id, PAYLOAD) + NOTHING
        out.append(chunk)
        self._state.announced(entity)
        return len(chunk)

    def _write_entity(self, entity: Entity, limit: int, out: list[Buffer]) -> int:
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
            self.pongs_owed -= pongs
            out.append(ping * pings + pong * pongs)
            written += len(ping) * pings + len(pong) * pongs
        return written
