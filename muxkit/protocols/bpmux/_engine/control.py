"""What do I owe the peer beside payload? Grants, pings, pongs and acknowledgements, merged until they are written.

A grant is one integer an entity, pongs and pings are counters, and an acknowledgement is the two to ten bytes
that it takes on the wire. So the reader never has to wait for the writer, however much the peer asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.core import Buffer, encode_varu64
from muxkit.protocols.bpmux._frames import ACK_END, CREDIT, PING, head

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._engine.entities import Entity


class Control:
    """The lane that goes first; there is something to write while `acks` or `dirty` hold anything."""

    __slots__ = ("acks", "dirty", "leaving", "pongs_owed")

    def __init__(self) -> None:
        self.dirty: dict[Entity, None] = {}  # whoever owes something, and may say it
        self.acks = bytearray()
        self.leaving = 0  # channels of the peer that are gone here and that it has not been told of yet
        self.pongs_owed = 0

    def acknowledge(self, entity: Entity) -> None:
        """Owe the acknowledgement of the peer's end, our last chunk for that entity."""
        self.acks += head(entity.type, entity.id, ACK_END)

    def owe_grant(self, entity: Entity, amount: int) -> None:
        """Owe credit that the entity's window has counted; windows of entities that we have ended grant nothing."""
        entity.grant += amount
        self.touch(entity)

    def owe_pong(self, entity: Entity) -> None:
        entity.pongs += 1
        self.pongs_owed += 1
        self.touch(entity)

    def owe_ping(self, entity: Entity) -> None:
        entity.pings += 1
        self.touch(entity)

    def touch(self, entity: Entity) -> None:
        """The entity owes something; it waits until its opening is out."""
        if entity.announced and (entity.grant or entity.pings or entity.pongs):
            self.dirty.setdefault(entity)

    def forget(self, entity: Entity) -> None:
        """Nothing more may be said about this entity."""
        self.pongs_owed -= entity.pongs
        entity.grant = entity.pings = entity.pongs = 0

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Append what is owed, about `limit` bytes at most."""
        written = self._write_acks(out)
        while self.dirty and written < limit:
            entity = next(iter(self.dirty))
            written += self._write_entity(entity, limit - written, out)
            if not (entity.grant or entity.pings or entity.pongs):
                del self.dirty[entity]
        return written

    def _write_acks(self, out: list[Buffer]) -> int:
        if not self.acks:
            return 0
        size = len(self.acks)
        out.append(bytes(self.acks))
        self.acks.clear()
        self.leaving = 0
        return size

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
