"""What does one end of a connection know? Its maps, budgets and queues, and the steps that both directions share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.core import Outbox, Reassembly, ReceiveBudget, ReceiveWindow, Scheduler, TokenBucket
from muxkit.protocols.bpmux._control import Control
from muxkit.protocols.bpmux._entities import OURS, RECEIVERS, Entity, Kind, Parts
from muxkit.protocols.bpmux._events import Declined, Event, Writable
from muxkit.protocols.bpmux._outgoing import OVERHEAD, Outgoing

if TYPE_CHECKING:
    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.bpmux._config import Config


class State:
    """Everything that receiving and sending both change."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None) -> None:
        self.config = config
        self.limits = limits
        self.observer = observer
        self.events: list[Event] = []
        self.maps: tuple[dict[int, Entity], ...] = tuple({} for _ in Kind)
        self.control = Control()
        self.scheduler = Scheduler()
        self.budget = ReceiveBudget(limits.connection_bytes, limits.channel_floor, limits.channel_first)
        self.reassembly: Reassembly[Entity] = Reassembly(limits.reassembly)
        self.resets = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.outbox = Outbox()
        self.messages_sent = 0
        self.ours = 0  # live channels that we opened
        self.theirs = 0  # live channels that the peer opened
        self.unread: set[Entity] = set()  # those that it ended, and of which the application has not taken everything
        self.unfinished = 0  # messages in parts that somebody waits for
        self.now = 0.0
        self._openings: dict[Entity, None] = {}
        self._starved: dict[Entity, None] = {}  # of these, the ones that wait for top-level credit
        self.top_sink = self._top(Kind.SINK_OUT)
        self.top_stream = self._top(Kind.STREAM_OUT)
        self.renew(self.top_stream, self.top_stream.window.start(self.now))

    def _top(self, kind: Kind) -> Entity:
        size = self.limits.channel_bytes if self.config.grants and kind is Kind.STREAM_OUT else 0
        entity = Entity(kind, 0, ReceiveWindow(size, self.budget))
        self.maps[kind][0] = entity
        return entity

    # --- life and death of entities

    def add(self, kind: Kind, id: int, *, window: int | None = None) -> Entity:
        """A new entity in its map. `window` None means the automatic one, 0 grants by hand."""
        size = self.limits.channel_bytes if window is None and self.config.grants else window or 0
        entity = Entity(kind, id, ReceiveWindow(size, self.budget) if kind in RECEIVERS else None)
        self.maps[kind][id] = entity
        return entity

    def acknowledge(self, entity: Entity) -> None:
        """The peer ended it: say so. It is to be removed at once."""
        self.control.acknowledge(entity)
        if entity.kind not in OURS and entity.twin is None:
            self.control.leaving += 1

    def remove(self, entity: Entity) -> None:
        """The entity is gone: nothing may be sent or received on it any more."""
        if entity is self.top_stream:
            self._drop_half_opened()
        del self.maps[entity.kind][entity.id]
        entity.gone = True
        self.control.forget(entity)
        self._drop_parts(entity)
        repaid = entity.window.retire()
        if repaid or self.reassembly.waiting:
            self._repay(repaid)
        if entity.window.held and entity.kind not in OURS:
            self.unread.add(entity)
        if entity.outgoing is not None:
            entity.outgoing.accepts = False
            self._forget_outgoing(entity.outgoing)
            if not entity.is_top:
                entity.outgoing = None  # or only a full garbage collection would free the two
        if entity.twin is not None:
            entity.twin.twin = None
            entity.twin = None
        elif not entity.is_top:
            self._count_channel(entity, -1)
        if self.observer is not None:
            self.observer.state(entity.label, "gone")

    def remove_channel(self, entity: Entity) -> None:
        """Both halves, if there are two."""
        twin = entity.twin
        self.remove(entity)
        if twin is not None:
            self.remove(twin)

    def _drop_half_opened(self) -> None:
        """Nobody pays for the rest of openings in parts once the top level is gone; the application never saw them."""
        half_opened = [entity for entities in self.maps for entity in entities.values() if entity.opening]
        for entity in half_opened:
            self.remove_channel(entity)

    def count_channel(self, entity: Entity) -> None:
        """One more live channel, a duplex is one."""
        self._count_channel(entity, 1)
        if self.observer is not None:
            self.observer.state(entity.label, "open")

    def _count_channel(self, entity: Entity, change: int) -> None:
        if entity.kind in OURS:
            self.ours += change
        else:
            self.theirs += change

    # --- credit that we give

    def renew(self, entity: Entity, amount: int) -> None:
        """Tell the peer of credit that its window has counted already."""
        if amount:
            self.control.owe_grant(entity, amount)
            if self.observer is not None:
                self.observer.credit("out", entity.label, amount)

    def consume(self, entity: Entity, size: int) -> bool:
        """The application, or the waste bin, has taken `size` bytes that came for this entity's window.

        Gives whether there is something to grant because of it.
        """
        window = entity.window
        grant, repaid = window.consumed(size, self.now)
        if not (grant or repaid or window.unfinished or (self.unread and entity in self.unread)):
            return False
        self.renew(entity, grant)
        if not window.held:
            self.unread.discard(entity)
        if repaid:
            self._repay(repaid)
        if window.unfinished:
            self.top_up(entity)
        return True

    # --- messages in parts

    def payer(self, entity: Entity) -> Entity:
        """Whose window pays for what comes: its own, or the top level's while it is being opened."""
        return self.top_stream if entity.opening else entity

    def begin_parts(self, entity: Entity, total: int) -> None:
        """The entity enters partial mode."""
        entity.parts = Parts(total, is_wanted=entity.live)
        if entity.live:
            self.unfinished += 1
            self.payer(entity).own_window().unfinished += total
        self.refresh(entity)

    def add_part(self, entity: Entity, parts: Parts, data: bytes) -> bytes | None:
        """One more part, already charged; the whole message once it is complete."""
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
        self.refresh(entity)
        return parts.pieces.join()

    def _drop_parts(self, entity: Entity) -> None:
        """Throw away what came of an unfinished message."""
        parts = entity.parts
        if parts is None or parts.pieces is None:
            return
        payer, size = self.payer(entity), parts.pieces.size
        payer.window.unfinished -= parts.left
        parts.pieces = None
        self.unfinished -= 1
        self.refresh(entity)
        self.consume(payer, size)
        self.top_up(payer)

    def refresh(self, entity: Entity) -> None:
        """May payloads take the short way? Not beside a message in parts, whose loan they might use up."""
        for one in (entity, self.payer(entity)):
            one.direct = one.live and not one.opening and one.parts is None and not one.window.unfinished

    def silence(self, entity: Entity) -> None:
        """The application wants nothing more of what comes: what is on its way goes to the waste bin."""
        entity.live = entity.direct = False
        entity.window.quiet()
        self._drop_parts(entity)

    # --- loans

    def top_up(self, entity: Entity) -> None:
        """Lend what begun messages need beyond the credit that is out; wait in line for it; or leave the line."""
        need = 0 if entity.end_out else entity.window.shortfall()
        if self.reassembly.waits(entity):
            if need == 0:
                self.reassembly.leave(entity)
            self._serve()  # also when he only needs less than before
        elif need and self.reassembly.borrow(entity, need):
            self._lend(entity, need)

    def is_peer_to_go_on(self) -> bool:
        """Is there a message in parts whose rest the peer has the credit for?"""
        return self.unfinished > 0 and any(
            entity.parts is not None and entity.parts.pieces is not None and not self.payer(entity).window.shortfall()
            for entities in self.maps
            for entity in entities.values()
        )

    def _repay(self, amount: int) -> None:
        """Loans came back: serve those who wait, in order."""
        self.reassembly.repay(amount)
        self._serve()

    def _serve(self) -> None:
        while (borrower := self.reassembly.next_waiting()) is not None:
            need = borrower.window.shortfall()
            if not self.reassembly.serve(borrower, need):
                return
            self._lend(borrower, need)

    def _lend(self, entity: Entity, amount: int) -> None:
        entity.window.lend(amount)
        self.renew(entity, amount)

    # --- what we send

    def outgoing(self, entity: Entity) -> Outgoing:
        """The queue of an entity, made when it is first needed."""
        if entity.outgoing is None:
            entity.outgoing = Outgoing(entity, self.top_sink.credit, self)
        return entity.outgoing

    def schedule(self, entity: Entity) -> None:
        """The entity may have something to write."""
        if entity.outgoing is not None and entity.outgoing.is_ready():
            self.scheduler.add(entity.outgoing)

    def push(self, outgoing: Outgoing, payload: bytes) -> None:
        """Queue a message that was admitted."""
        counted = outgoing.counted
        outgoing.push(payload)
        self.outbox.used += outgoing.counted - counted
        self.messages_sent += 1

    def push_covered(self, outgoing: Outgoing, payloads: list[bytes], size: int) -> None:
        """The same for some that credit covers as a whole; they may be written as soon as it is their turn."""
        count = len(payloads)
        counted = size + OVERHEAD * count
        outgoing.ready_queue().extend(payloads)
        outgoing.queued += size
        outgoing.counted += counted
        self.outbox.used += counted
        self.messages_sent += count
        if not outgoing.scheduled and outgoing.is_ready():
            self.scheduler.add(outgoing)

    def ending(self, entity: Entity) -> None:
        """We have queued our last word on the entity. Until it is out, grants and pongs go on."""
        if entity.receives:
            self.silence(entity)
        self.schedule(entity)

    def count(self, outgoing: Outgoing, counted: int) -> None:
        """Keep the outbox right when what is queued has changed."""
        self.outbox.used += counted - outgoing.counted
        outgoing.counted = counted

    def writable(self, outgoing: Outgoing) -> None:
        """Wake who watches, if there is room by now."""
        if outgoing.watched and outgoing.admits(outgoing.wanted):
            outgoing.watched = False
            self.events.append(Writable(outgoing.entity))

    # --- openings: those that are not out yet, or only in part

    def claim(self, entity: Entity) -> None:
        """An opening was queued; it may have to wait for top-level credit."""
        opening, top = self.outgoing(entity), self.outgoing(self.top_sink)
        top.claimed += opening.opening_left
        top.openings += 1
        self._openings[entity] = None
        self.scheduler.add(opening)  # it was admitted, so there is credit for its first part

    def top_credit_came(self) -> None:
        starved, self._starved = self._starved, {}
        for entity in starved:
            self.schedule(entity)

    def decline(self, *, begun: bool) -> None:
        """The openings will not be; those that the peer has a part of only if `begun`."""
        for entity in [*self._openings]:
            if begun or (entity.outgoing is not None and entity.outgoing.is_untold):
                twin = entity.twin
                self.remove_channel(entity)
                self.events.append(Declined(entity, twin))

    def _forget_outgoing(self, outgoing: Outgoing) -> None:
        self.count(outgoing, 0)
        if outgoing.entity in self._openings:
            self.paid(outgoing.opening_left)
            self._opening_over(outgoing.entity)

    def _opening_over(self, entity: Entity) -> None:
        del self._openings[entity]
        self._starved.pop(entity, None)
        top = self.outgoing(self.top_sink)
        top.openings -= 1
        self.schedule(self.top_sink)

    # --- what the queues report (their `Owner`)

    def wrote(self, outgoing: Outgoing) -> None:
        entity = outgoing.entity
        if entity.end_out:
            self.control.forget(entity)
            self.top_up(entity)
        if not entity.announced and outgoing.opening_left and not outgoing.is_ready():
            self._starved[entity] = None
        if outgoing.queue:
            self.count(outgoing, outgoing.waits_for_transport())
        else:
            self.outbox.used -= outgoing.counted
            outgoing.counted = 0
        if outgoing.watched:
            self.writable(outgoing)

    def first_grant(self, entity: Entity) -> int:
        receiving = entity if entity.receives else entity.twin
        if receiving is None:
            return 0
        amount, receiving.grant = receiving.grant, 0
        return amount

    def paid(self, amount: int) -> None:
        if amount:
            top = self.outgoing(self.top_sink)
            top.claimed -= amount
            self.writable(top)

    def announced(self, entity: Entity) -> None:
        self._opening_over(entity)
        for half in (entity, entity.twin):
            if half is not None:
                half.announced = True
                if half.outgoing is not None and half.outgoing.is_idle:
                    half.outgoing = None  # made again if anything is ever sent
                self.control.touch(half)
                self.schedule(half)
