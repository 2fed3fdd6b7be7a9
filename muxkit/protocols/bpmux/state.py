"""The state of one end of a connection, and the steps that receiving and sending share.

Theory of operation
===================

The document has six maps, one for each kind of entity (`Kind`): requests, sinks and streams, each
once for those that we opened and once for those of the peer. A two-way channel, a duplex, is a sink and a stream with
the same id, which are `twin` to each other while both live. Two entities with id 0 are the top level: they carry the
connection's own messages, pay for the payloads of openings, and end when nothing more will be opened.

    HALF_OPENED                  UNANNOUNCED
    the peer opens it, and       we open it; the chunk waits, if it has a payload for credit of the top level
    parts of the opening         |
    are missing                  |
      +---------- OPEN ----------+   messages one way; credit, pings and pongs both ways
                   |  we end it: the end is queued behind our messages, or (END_DUE) among the control chunks
                   |  and is written
                 ENDED               we only wait for the peer's acknowledgement, or for its own end
                   |
                 GONE                also from each of the others: by the peer's end, which we acknowledge unless ours
                                     was written before, or because the opening is declined

`Life` has these names, and `entities.NEXT` the steps. Of a duplex that the peer is opening, the sending half is
HALF_OPENED and stands for both.

The invariants:

- An entity is in its map until it is gone. Nothing is written about an entity that is gone but the acknowledgement.
- What we have granted and what was not consumed is in the entity's window, and all windows share `budget`.
- A message in parts beyond the window borrows the whole rest of its size from `reassembly`, or waits in line for it.
- `outbox` counts the queued bytes that wait for nothing but the transport, so not those that wait for credit.
- Replies that we owe (acknowledgements, grants, pongs) are merged into a bounded state in `control`, so that reading
  never has to wait for writing.
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
    """The maps, and what else both directions change; `reassembly` lends to entities."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None) -> None:
        super().__init__(limits, observer, floor=limits.channel_floor, first=limits.channel_first)
        self.config = config
        self.maps: tuple[dict[int, Entity], ...] = tuple({} for _ in Kind)
        self.control: Control = Control(self)
        self.refusals: TokenBucket = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.largest: int = limits.message
        """The largest message, looked up for each one that is sent."""
        self.ours: int = 0  # live channels that this side opened
        self.theirs: int = 0  # live channels that the peer opened
        self.unread: set[Entity] = set()  # gone, opened by the peer, with messages not consumed
        self._claims: dict[Entity, int] = {}  # the top-level credit that openings with a payload still need
        self._starved: dict[Entity, None] = {}  # of these, the ones without top-level credit
        self.top_sink: Sender = self.add_sender(Kind.SINK_OUT, 0)
        self.top_stream: Receiver = self.add_receiver(Kind.STREAM_OUT, 0)
        self.grant(self.top_stream, self.top_stream.window.start(self.now))
        # The first credit of new channels, see `Config.initial_credit`; each is 0 while it is not agreed.
        self.given: int = 0  # what this side gives those that the peer opens
        self.got: int = 0  # what those that this side opens have
        self.promised: int = 0  # what the peer announced
        self.advance: int = config.peer_credit  # top-level credit that is used before it was granted
        if self.advance:
            self.got = self.advance
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
        """Add an entity that the peer sends on, with an automatic window unless grants are made `by_hand`."""
        size = self.limits.channel_bytes if self.config.grants and not by_hand else 0
        receiver = Receiver(self, kind, id, ReceiveWindow(size, self.budget))
        self.maps[kind][id] = receiver
        return receiver

    # --- checks of commands

    def check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the connection is over")

    def check_size(self, size: int, what: str) -> None:
        """Raise `LocalProtocolError` for a payload of a size that is not allowed."""
        if size > self.limits.message:
            raise LocalProtocolError(f"{what}: {size} bytes against Limits(message={self.limits.message})")

    def peer_ended(self, entity: Entity) -> None:
        """Remove an entity that the peer ended, and acknowledge that unless both ends crossed."""
        if entity.life is not ENDED:
            self.control.acknowledge(entity)
        self.remove(entity)

    def remove(self, entity: Entity) -> None:
        """Remove an entity: nothing is sent or received on it any more."""
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
        """Remove entities whose opening is incomplete, because it used the top level's window; none was reported."""
        half_opened = [entity for entities in self.maps for entity in entities.values() if entity.life is HALF_OPENED]
        for entity in half_opened:
            self.remove_channel(entity)

    def count_channel(self, entity: Entity) -> None:
        """Count a new live channel; a duplex is one."""
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
        """Queue a grant of credit that the window has counted already."""
        if amount:
            self.control.owe(entity, grant=amount)
            if self.observer is not None:
                self.observer.credit("out", entity.label, amount)

    def consume(self, entity: Entity, size: int) -> bool:
        """Count `size` bytes of an entity's messages as taken by the application, or as discarded.

        Harmless after the entity is gone. Returns whether there may be something to write because of it.
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
        """Note what first credit the peer announced, 0 if none.

        It knows about ours before it opens anything, or never will. Raises `RemoteProtocolError` if more than that was
        counted on, see `Config.peer_credit`.
        """
        if credit < self.config.peer_credit:
            raise RemoteProtocolError(
                f"the peer announces a first credit of {credit} bytes, not of at least "
                f"Config(peer_credit={self.config.peer_credit})"
            )
        if not credit:
            return
        self.promised = credit
        if not self.initial_credit:
            return
        self.given = self.initial_credit
        if self.control.announces is None:
            self.use_promised()

    def repeat_announcement(self, credit: int) -> None:
        """Act as if this side had written an announcement of `credit` bytes. Only decoders of recordings call this."""
        self.initial_credit = credit
        if self.promised:
            self.given = credit
            for stream in self.maps[Kind.STREAM_IN].values():
                if not stream.is_top and stream.life is not HALF_OPENED:
                    stream.window.grant(credit)
            self.use_promised()

    def use_promised(self) -> None:
        """Use what the peer announced, on the channels that are open already as well."""
        more, self.got = self.promised - self.got, self.promised
        for sink in [*self.maps[Kind.SINK_OUT].values()] if more else ():
            if not sink.is_top and sink.credit.available + more <= U64_MAX:
                self.add_credit(sink, more)

    def receive_grant(self, entity: Entity, amount: int) -> None:
        """Act on a grant of the peer. Observers are told of grants, and not of the first credit, which isn't one."""
        if self.observer is not None:
            self.observer.credit("in", entity.label, amount)
        self.add_credit(entity, amount)

    def add_credit(self, entity: Entity, amount: int) -> None:
        """Let an entity send `amount` more bytes."""
        if self.advance and entity is self.top_sink:
            repaid = min(amount, self.advance)
            self.advance -= repaid
            amount -= repaid
            if not amount:  # nothing became possible, and openings that wait for credit stay in line
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
        """Return the entity whose window its payload uses: the top level while it is being opened, otherwise itself."""
        return self.top_stream if entity.life is HALF_OPENED else entity

    def begin_parts(self, entity: Entity, total: int) -> None:
        """Begin a message in parts on an entity."""
        entity.parts = Parts(total, is_wanted=entity.is_wanted)
        if entity.is_wanted:
            self.unfinished: int = self.unfinished + 1
            self.payer(entity).own_window().unfinished += total
        self.update_direct(entity)

    def add_part(self, entity: Entity, parts: Parts, data: bytes) -> bytes | None:
        """Add a part that the window has counted; return the message once it is complete, b"" if it was discarded."""
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
        """Discard what arrived of an incomplete message."""
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
        """Set `direct` again; it is False beside a message in parts, whose loan other payloads might use up."""
        for one in (entity, self.payer(entity)):
            is_idle = one.parts is None and not one.window.unfinished
            one.direct = one.is_wanted and is_idle and one.life is not HALF_OPENED

    def discard_incoming(self, entity: Entity) -> None:
        """Discard from now on what arrives on an entity."""
        entity.is_wanted = entity.direct = False
        entity.window.quiet()
        self._drop_parts(entity)

    # --- loans

    def lend_shortfall(self, entity: Entity) -> None:
        """Lend what incomplete messages need beyond the granted credit, or put the entity in line for it."""
        need = 0 if entity.life >= ENDED else entity.window.shortfall()
        if self.reassembly.waits(entity):
            if need == 0:
                self.reassembly.leave(entity)
            self._serve()  # also if it only needs less than before
        elif need and self.reassembly.borrow(entity, need):
            self._lend(entity, need)

    def can_peer_continue(self) -> bool:
        """Whether the peer has credit for the rest of some message in parts."""
        return self.unfinished > 0 and any(
            entity.parts is not None and entity.parts.pieces is not None and not self.payer(entity).window.shortfall()
            for entities in self.maps
            for entity in entities.values()
        )

    def _repay(self, amount: int) -> None:
        """Return loans to the budget and serve the entities in line."""
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
        self.grant(entity, amount)

    # --- sending

    def outgoing(self, entity: Entity) -> Outgoing:
        """Return the queue of an entity, made at the first call."""
        if entity.outgoing is None:
            entity.outgoing = Outgoing(entity, self)
            entity.outgoing.accepts &= not entity.ending
        return entity.outgoing

    def schedule(self, entity: Entity) -> None:
        """Put an entity in line for writing if it has something to write."""
        if entity.outgoing is not None and entity.outgoing.is_ready():
            self.scheduler.add(entity.outgoing)

    def end_at_once(self, entity: Entity) -> bool:
        """Queue an end without payload among the control chunks; return False if something has to be written before.

        That is what is queued for the entity, and an end that is queued behind messages of the other half: the peer
        counts the other order as a cancellation.
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
        """Act on an end that was written."""
        self.control.forget(entity)
        self.lend_shortfall(entity)

    def end_queued(self, entity: Entity) -> None:
        """Act on a queued end. Grants and pongs go on until it is written."""
        if entity.receives:
            self.discard_incoming(entity)
        self.schedule(entity)

    def report_writable(self, outgoing: Outgoing) -> None:
        """Report `Writable` if it was asked for and a message fits."""
        if outgoing.watched and outgoing.admits(outgoing.wanted):
            outgoing.watched = False
            if isinstance(outgoing.entity, Sender):
                self.events.append(Writable(outgoing.entity))

    def written(self, outgoing: Outgoing) -> None:
        """Act on a turn of writing: of an opening, behind an end, or of messages beside which another may fit."""
        entity = outgoing.entity
        if entity in self._claims:
            self._opening_written(entity, outgoing)
        if entity.life is ENDED:
            self.ended(entity)
        self.report_writable(outgoing)

    # --- openings that are not written completely

    def opening_queued(self, entity: Entity) -> None:
        """Claim top-level credit for a queued opening and put it in line."""
        opening, top = self.outgoing(entity), self.outgoing(self.top_sink)
        self._claims[entity] = opening.opening_left
        top.claimed += opening.opening_left
        top.openings_before_end += 1
        self.scheduler.add(opening)  # it was admitted, so there is credit for its first part

    def top_credit_arrived(self) -> None:
        """Put openings that had no top-level credit in line again."""
        starved, self._starved = self._starved, {}
        for entity in starved:
            self.schedule(entity)

    def decline_openings(self, *, begun: bool) -> None:
        """Remove entities whose opening is not written; with `begun` also those whose opening was written in part."""
        declined = [entity for entity, _ in self.control.bare_openings if entity.life is not GONE]
        self.control.bare_openings.clear()
        declined += [
            entity for entity in self._claims if begun or (entity.outgoing is not None and entity.outgoing.is_untold)
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
        """Act on an opening that was written completely."""
        for half in (entity, entity.twin):
            if half is not None:
                if half.life is UNANNOUNCED:
                    half.step(OPEN)
                if half.outgoing is not None and half.outgoing.is_idle:
                    half.outgoing = None  # made again when it is needed
                self.control.touch(half)
                self.schedule(half)

    def _claim(self, entity: Entity, amount: int) -> None:
        """Let an opening claim only so much top-level credit from now on."""
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
