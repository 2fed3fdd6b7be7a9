"""The state of one side of a bpmux connection, and the operations that receiving and sending share.

Most other modules of the engine work on this state. `reader` and `rules` apply the chunks that the peer has sent,
`control` and `send` write our chunks, and the methods of `Engine`, `Sender` and `Receiver` are the commands of the
session.

Theory of operation
===================

bpmux sends *chunks*, which are its frames. Each chunk is about an *entity*. An entity is a request, or one direction of
a channel. A side sends messages on a *sink* and receives them from a *stream*, so our sink is a stream of the peer. A
two-way channel is a *duplex*: a sink and a stream with the same id, each of which is the `twin` of the other while both
exist.

The side that opens an entity chooses its id, so both sides may use the same number. That is why the specification has
six maps from ids to entities: for requests, sinks and streams, each for those that we opened and for those that the
peer opened. `State.maps` has these maps, and `Kind` numbers them.

Each side may only send as many bytes about an entity as the other side has granted, which is the entity's *credit*. A
new entity has no credit. So if the chunk that opens an entity has a payload, the payload uses the credit of the *top
level*. The top level is a sink and a stream with id 0 that exist from the beginning. It also carries messages that
belong to no channel. A side that ends its top-level sink opens no more entities, and a side that ends its top-level
stream accepts no more.

An entity is in one of the states of `Life`, and `entities.NEXT` is the table of legal steps:

- HALF_OPENED: The peer is opening the entity with a message in several parts, and some of the parts are missing. The
  application doesn't know the entity yet. Of a duplex, only the half that we send on has this state.
- UNANNOUNCED: We are opening the entity, and its opening isn't written completely. If it has a payload, it may have to
  wait for credit of the top level.
- OPEN: Messages go in the entity's direction. Credit, pings and pongs go in both directions.
- END_DUE: We have ended the entity with a chunk without payload. The chunk will be written with the next control
  chunks. An end that has a payload, or that must follow queued messages, is in the entity's own queue instead. The
  entity then stays OPEN until the end is written.
- ENDED: Our end was written. We wait for the peer's acknowledgement.
- GONE: The entity was removed from its map.

When the peer ends an entity, the entity is GONE immediately. We acknowledge the peer's end, except if we have already
written our own end: then the two ends crossed, and each serves as the acknowledgement of the other. An entity is also
removed if its opening can't be completed, because a side has ended the top level.

A new channel without credit would have to wait for the peer's first grant, which takes a round trip. Two muxkit sides
avoid that. Each announces a *first credit*, which every sink and duplex that the peer opens has from the start. The
announcement is at the beginning of the connection, in chunks that other implementations take for ordinary grants. See
`Config.initial_credit`.

Invariants:

- An entity is in its map until it is GONE. After that, nothing is written about it except the acknowledgement of the
  peer's end.
- An entity's `window` counts the credit that we have granted and the peer hasn't used, and the bytes that have arrived
  and the application hasn't consumed. All windows of the connection share `budget`, which limits their sizes.
- A message that is larger than its window arrives in parts. To let the peer send them all, we *lend* the entity the
  missing credit. `reassembly` limits the loans of the whole connection. A loan always covers the rest of the message,
  because two messages with half of a loan each would wait for each other forever. If there isn't enough left, the
  entity waits for its turn.
- `outbox` counts the queued bytes that only wait for the transport. Bytes that wait for the peer's credit don't count.
- Acknowledgements, grants and pongs are merged until they are written (`control`). So a peer that sends without reading
  costs a bounded amount of memory, and we can always read without waiting for a write.
"""

from __future__ import annotations

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import U64_MAX, ReceiveWindow, TokenBucket
from muxkit.core.events import Refused, Writable
from muxkit.core.mux_state import MuxState
from muxkit.protocols.bpmux.config import Config
from muxkit.protocols.bpmux.control import Control
from muxkit.protocols.bpmux.entities import (
    END_DUE,
    ENDED,
    GONE,
    HALF_OPENED,
    NO_WINDOW,
    OPEN,
    OURS,
    RECEIVERS,
    UNANNOUNCED,
    Entity,
    Kind,
    Parts,
)
from muxkit.protocols.bpmux.receive import Receiver
from muxkit.protocols.bpmux.send import Outgoing, Sender


class State(MuxState):
    """The maps of entities, and everything else that both receiving and sending change."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None) -> None:
        super().__init__(limits, observer, floor=limits.channel_floor, first=limits.channel_first)
        self.config = config
        self.maps: tuple[dict[int, Entity], ...] = tuple({} for _ in Kind)
        self.control: Control = Control(self)
        self.refusals: TokenBucket = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.largest: int = limits.message
        """The largest message, looked up for each one that is sent."""
        self.ours: int = 0  # number of live channels that this side opened
        self.theirs: int = 0  # number of live channels that the peer opened
        # Removed entities that the peer opened, and whose messages the application hasn't consumed.
        self.unread: set[Entity] = set()
        # Entities whose opening has a payload and isn't written completely, with the top-level credit that each needs.
        self._claims: dict[Entity, int] = {}
        self._starved: dict[Entity, None] = {}  # those of `_claims` that wait because the top level has no credit
        self.top_sink: Sender = self.add_sender(Kind.SINK_OUT, 0)
        self.top_stream: Receiver = self.add_receiver(Kind.STREAM_OUT, 0)
        self.grant(self.top_stream, self.top_stream.window.start(self.now))
        # Numbers of bytes for the first credit, each of which is 0 until it takes effect.
        self.first_credit_in: int = 0  # credit of the channels that the peer opens
        self.first_credit_out: int = 0  # credit of the channels that this side opens
        self.peer_first_credit: int = 0  # credit that the peer has announced
        # Top-level credit that we use although the peer hasn't granted it yet. The peer's first grants repay it.
        self.advance: int = config.peer_credit
        if self.advance:
            self.first_credit_out = self.advance
            self.top_sink.credit.grant(self.advance)
        self.initial_credit: int = config.first_credit(limits)
        if self.initial_credit:
            self.control.announces = (self.top_stream, self.initial_credit)

    # --- entities

    def add(self, kind: Kind, id: int) -> Entity:
        """Add an entity to its map."""
        return self.add_receiver(kind, id) if kind in RECEIVERS else self.add_sender(kind, id)

    def add_sender(self, kind: Kind, id: int) -> Sender:
        """Add an entity that we send on."""
        sender = Sender(self, kind, id, None)
        self.maps[kind][id] = sender
        return sender

    def add_receiver(self, kind: Kind, id: int, *, by_hand: bool = False) -> Receiver:
        """Add an entity that the peer sends on. With `by_hand`, the application grants its credit."""
        size = self.limits.channel_bytes if self.config.grants and not by_hand else 0
        receiver = Receiver(self, kind, id, ReceiveWindow(size, self.budget))
        self.maps[kind][id] = receiver
        return receiver

    # --- checks of commands

    def check_alive(self) -> None:
        """Raise `LocalProtocolError` if the connection has ended."""
        if self.over:
            raise LocalProtocolError("the connection has ended")

    def check_size(self, size: int, what: str) -> None:
        """Raise `LocalProtocolError` if a payload of this size is larger than `Limits.message`."""
        if size > self.limits.message:
            raise LocalProtocolError(f"{what}: {size} bytes against Limits(message={self.limits.message})")

    def peer_ended(self, entity: Entity) -> None:
        """Remove an entity that the peer has ended. Acknowledge the end, unless our own end was written before."""
        if entity.life is not ENDED:
            self.control.acknowledge(entity)
        self.remove(entity)

    def remove(self, entity: Entity) -> None:
        """Remove an entity from its map, with everything that is queued for it and its loans."""
        if entity is self.top_stream:
            self._drop_half_opened()
            self.control.announce_late()
        del self.maps[entity.kind][entity.id]
        self.control.forget(entity)
        if entity.parts is not None:
            self._drop_parts(entity)
        entity.step(GONE)
        window = entity.window
        repaid = 0 if window is NO_WINDOW else window.retire()
        if repaid or self.reassembly.waiting:
            self._repay(repaid)
        if window.held and entity.kind not in OURS:
            self.unread.add(entity)
        if entity.outgoing is not None:
            entity.outgoing.accepts = False
            entity.outgoing.count(0)
            if entity in self._claims:
                self._remove_opening(entity)
            if not entity.is_top:
                entity.outgoing = None  # break the reference cycle, which only a full garbage collection would free
        if entity.twin is not None:
            entity.twin.twin = None
            entity.twin = None
        elif not entity.is_top:
            self._count_channel(entity, -1)
        if self.observer is not None:
            self.observer.state(entity.label, "gone")

    def remove_channel(self, entity: Entity) -> None:
        """Remove an entity and its twin, if it has one."""
        twin = entity.twin
        self.remove(entity)
        if twin is not None:
            self.remove(twin)

    def _drop_half_opened(self) -> None:
        """Remove the entities whose opening is incomplete, because the peer has ended the top level.

        No more parts can arrive, because they use the top level's window. The application doesn't know these entities.
        """
        half_opened = [entity for entities in self.maps for entity in entities.values() if entity.life is HALF_OPENED]
        for entity in half_opened:
            self.remove_channel(entity)

    def count_channel(self, entity: Entity) -> None:
        """Count a new live channel. A duplex counts as one."""
        self._count_channel(entity, 1)
        if self.observer is not None:
            self.observer.state(entity.label, "open")

    def _count_channel(self, entity: Entity, change: int) -> None:
        if entity.kind in OURS:
            self.ours += change
        else:
            self.theirs += change

    # --- grants

    def grant(self, entity: Entity, amount: int) -> None:
        """Queue a grant of credit. The entity's window must have counted it already."""
        if amount:
            self.control.queue(entity, grant=amount)
            if self.observer is not None:
                self.observer.credit("out", entity.label, amount)

    def consume(self, entity: Entity, size: int) -> bool:
        """Count `size` bytes of an entity's messages as consumed by the application, or as discarded.

        Does nothing harmful if the entity was removed. Returns True if there may be something to write now.
        """
        window = entity.window
        grant, repaid = window.consumed(size, self.now)
        if not (grant or repaid or window.unfinished or (self.unread and entity in self.unread)):
            return False
        self.grant(entity, grant)
        if not window.held:
            self.unread.discard(entity)
        if repaid:
            self._repay(repaid)
        if window.unfinished:
            self.lend_shortfall(entity)
        return True

    # --- the first credit of channels

    def peer_announced(self, credit: int) -> None:
        """Store the first credit that the peer has announced, or 0 if it has announced none.

        Called once, for the first bytes of the connection. A peer that has announced a first credit reads our own
        announcement before it opens a channel, so from now on its channels have our first credit as well.

        Raises:
            RemoteProtocolError: If the peer announces less than `Config.peer_credit`, which we may have used already.
        """
        if credit < self.config.peer_credit:
            raise RemoteProtocolError(
                f"first credit too small: expected at least Config(peer_credit={self.config.peer_credit}), "
                f"the peer announces {credit}"
            )
        if not credit:
            return
        self.peer_first_credit = credit
        if not self.initial_credit:
            return
        self.first_credit_in = self.initial_credit
        if self.control.announces is None:
            self.use_peer_first_credit()

    def repeat_announcement(self, credit: int) -> None:
        """Act as if this side had announced a first credit of `credit` bytes.

        Only the decoders of recordings call this, which learn the announcement from the recording.
        """
        self.initial_credit = credit
        if self.peer_first_credit:
            self.first_credit_in = credit
            for stream in self.maps[Kind.STREAM_IN].values():
                if not stream.is_top and stream.life is not HALF_OPENED:
                    stream.window.grant(credit)
            self.use_peer_first_credit()

    def use_peer_first_credit(self) -> None:
        """Give the peer's first credit to our future channels, and to those that we have already opened."""
        more, self.first_credit_out = self.peer_first_credit - self.first_credit_out, self.peer_first_credit
        for sink in [*self.maps[Kind.SINK_OUT].values()] if more else ():
            if not sink.is_top and sink.credit.available + more <= U64_MAX:
                self.add_credit(sink, more)

    def receive_grant(self, entity: Entity, amount: int) -> None:
        """Apply a grant of the peer. Observers are notified about grants, but not about the first credit."""
        if self.observer is not None:
            self.observer.credit("in", entity.label, amount)
        self.add_credit(entity, amount)

    def add_credit(self, entity: Entity, amount: int) -> None:
        """Add `amount` bytes to an entity's credit, and schedule it for writing if it has waited for them."""
        if self.advance and entity is self.top_sink:
            repaid = min(amount, self.advance)
            self.advance -= repaid
            amount -= repaid
            if not amount:
                return
        entity.own_credit().grant(amount)
        outgoing = entity.outgoing
        if outgoing is None:
            return
        if entity is self.top_sink:
            self.top_credit_arrived()
        self.schedule(entity)
        self.report_writable(outgoing)

    # --- messages in parts

    def payer(self, entity: Entity) -> Entity:
        """Return the entity whose window the payloads of `entity` use.

        That is the top level while the peer is opening `entity`, and afterwards `entity` itself.
        """
        return self.top_stream if entity.life is HALF_OPENED else entity

    def begin_parts(self, entity: Entity, total: int) -> None:
        """Begin to receive a message in parts, of `total` bytes."""
        entity.parts = Parts(total, is_wanted=entity.is_wanted)
        if entity.is_wanted:
            self.unfinished: int = self.unfinished + 1
            self.payer(entity).own_window().unfinished += total
        self.update_direct(entity)

    def add_part(self, entity: Entity, parts: Parts, data: bytes) -> bytes | None:
        """Add a part of a message. The window must have counted its bytes already.

        Returns:
            The whole message if it is complete, b"" if a complete message was discarded because the application doesn't
            want it, and None while parts are missing.
        """
        payer = self.payer(entity)
        parts.left -= len(data)
        if not parts.left:
            entity.parts = None
        if parts.pieces is None:
            self.consume(payer, len(data))
            return None if parts.left else b""
        payer.window.unfinished -= len(data)
        parts.pieces.append(data)
        if parts.left:
            return None
        self.unfinished -= 1
        self.update_direct(entity)
        return parts.pieces.join()

    def _drop_parts(self, entity: Entity) -> None:
        """Discard the parts of an incomplete message, and count their bytes as consumed."""
        parts = entity.parts
        if parts is None or parts.pieces is None:
            return
        payer, size = self.payer(entity), parts.pieces.size
        payer.window.unfinished -= parts.left
        parts.pieces = None
        self.unfinished -= 1
        self.update_direct(entity)
        self.consume(payer, size)
        self.lend_shortfall(payer)

    def update_direct(self, entity: Entity) -> None:
        """Update `direct`, which lets the reader's fast path deliver payloads without further checks.

        It is False while a message in parts uses the window, because another payload could use up its loan.
        """
        for one in (entity, self.payer(entity)):
            is_idle = one.parts is None and not one.window.unfinished
            one.direct = one.is_wanted and is_idle and one.life is not HALF_OPENED

    def discard_incoming(self, entity: Entity) -> None:
        """Discard the payloads that arrive from now on, because this side has ended the entity."""
        entity.is_wanted = entity.direct = False
        entity.window.quiet()
        self._drop_parts(entity)

    # --- loans

    def lend_shortfall(self, entity: Entity) -> None:
        """Lend an entity the credit that the peer needs to complete its messages in parts.

        If not enough is left to lend, the entity waits until other loans have been repaid.
        """
        need = 0 if entity.life >= ENDED else entity.window.shortfall()
        if self.reassembly.waits(entity):
            if need == 0:
                self.reassembly.leave(entity)
            self._serve()  # the entity may need less than before, so that there is enough for it now
        elif need and self.reassembly.borrow(entity, need):
            self._lend(entity, need)

    def can_peer_continue(self) -> bool:
        """Return True if there is a message in parts for whose missing parts the peer has enough credit."""
        return self.unfinished > 0 and any(
            entity.parts is not None and entity.parts.pieces is not None and not self.payer(entity).window.shortfall()
            for entities in self.maps
            for entity in entities.values()
        )

    def _repay(self, amount: int) -> None:
        """Return `amount` bytes of loans to `reassembly`, and lend them to the entities that wait."""
        self.reassembly.repay(amount)
        self._serve()

    def _serve(self) -> None:
        """Lend to the waiting entities in order, until there isn't enough left for the next one."""
        while (borrower := self.reassembly.next_waiting()) is not None:
            need = borrower.window.shortfall()
            if not self.reassembly.serve(borrower, need):
                return
            self._lend(borrower, need)

    def _lend(self, entity: Entity, amount: int) -> None:
        entity.window.lend(amount)
        self.grant(entity, amount)

    # --- sending

    def outgoing(self, entity: Entity) -> Outgoing:
        """Return the queue of messages to send about an entity. It is created when it is first needed."""
        if entity.outgoing is None:
            entity.outgoing = Outgoing(entity, self)
            entity.outgoing.accepts &= not entity.ending
        return entity.outgoing

    def schedule(self, entity: Entity) -> None:
        """Add an entity to the scheduler if it has something to write."""
        if entity.outgoing is not None and entity.outgoing.is_ready():
            self.scheduler.add(entity.outgoing)

    def end_at_once(self, entity: Entity) -> bool:
        """End an entity with a control chunk that has no payload, if nothing has to be written before the end.

        Returns False, without any change, if the end must be queued in the entity's queue instead. That is the case if
        messages are queued for the entity, if it is the top level, or if its opening isn't written. It is also the case
        if it is half of a duplex whose other half has a queued end: the halves must end in the order of the calls,
        because the peer would take the other order for a cancellation.
        """
        outgoing, twin = entity.outgoing, entity.twin
        if entity.is_top or entity.life is UNANNOUNCED or not (outgoing is None or outgoing.is_empty):
            return False
        if twin is not None and twin.outgoing is not None and twin.outgoing.closing:
            return False
        if outgoing is not None:
            outgoing.accepts = False
        if entity.receives:
            self.discard_incoming(entity)
        entity.step(END_DUE)
        self.control.ends.append(entity)
        return True

    def ended(self, entity: Entity) -> None:
        """Update the state after our end of an entity was written."""
        self.control.forget(entity)
        self.lend_shortfall(entity)

    def end_queued(self, entity: Entity) -> None:
        """Update the state after our end was queued in an entity's queue. We go on to write grants and pongs."""
        if entity.receives:
            self.discard_incoming(entity)
        self.schedule(entity)

    def report_writable(self, outgoing: Outgoing) -> None:
        """Report `Writable` if the session has asked for it and the message that it wants to send fits now."""
        if outgoing.watched and outgoing.admits(outgoing.wanted):
            outgoing.watched = False
            if isinstance(outgoing.entity, Sender):
                self.events.append(Writable(outgoing.entity))

    def written(self, outgoing: Outgoing) -> None:
        """Update the state after `Outgoing.write` has written a part of an opening, an end, or awaited messages."""
        entity = outgoing.entity
        if entity in self._claims:
            self._opening_written(entity, outgoing)
        if entity.life is ENDED:
            self.ended(entity)
        self.report_writable(outgoing)

    # --- openings that are not written completely

    def opening_queued(self, entity: Entity) -> None:
        """Reserve top-level credit for a queued opening that has a payload, and add it to the scheduler."""
        opening, top = self.outgoing(entity), self.outgoing(self.top_sink)
        self._claims[entity] = opening.opening_left
        top.claimed += opening.opening_left
        top.openings_before_end += 1
        self.scheduler.add(opening)  # `_check_opening` has made sure that there is credit for its first part

    def top_credit_arrived(self) -> None:
        """Schedule the openings that have waited for top-level credit."""
        starved, self._starved = self._starved, {}
        for entity in starved:
            self.schedule(entity)

    def decline_openings(self, *, begun: bool) -> None:
        """Remove our entities whose opening isn't written completely, and report each as `Refused`.

        Without `begun`, entities are kept if a part of their opening was written.
        """
        declined = [entity for entity, _ in self.control.bare_openings if entity.life is not GONE]
        self.control.bare_openings.clear()
        declined += [
            entity
            for entity in self._claims
            if begun or (entity.outgoing is not None and entity.outgoing.is_opening_unwritten)
        ]
        for entity in declined:
            halves = [half for half in (entity, entity.twin) if isinstance(half, Sender | Receiver)]
            self.remove_channel(entity)
            self.events.extend(map(Refused, halves))

    def _opening_written(self, entity: Entity, outgoing: Outgoing) -> None:
        self._claim(entity, outgoing.opening_left)
        if entity.life is UNANNOUNCED:
            if not outgoing.is_ready():
                self._starved[entity] = None
            return
        self._remove_opening(entity)
        self.announced(entity)

    def announced(self, entity: Entity) -> None:
        """Update the state after an opening was written completely."""
        for half in (entity, entity.twin):
            if half is not None:
                if half.life is UNANNOUNCED:
                    half.step(OPEN)
                if half.outgoing is not None and half.outgoing.is_idle:
                    half.outgoing = None  # saves memory; `outgoing` creates it again when it is needed
                self.control.touch(half)
                self.schedule(half)

    def _claim(self, entity: Entity, amount: int) -> None:
        """Change the amount of top-level credit that is reserved for an opening."""
        top = self.outgoing(self.top_sink)
        top.claimed += amount - self._claims[entity]
        self._claims[entity] = amount
        self.report_writable(top)

    def _remove_opening(self, entity: Entity) -> None:
        self._claim(entity, 0)
        del self._claims[entity]
        self._starved.pop(entity, None)
        self.outgoing(self.top_sink).openings_before_end -= 1
        self.schedule(self.top_sink)
