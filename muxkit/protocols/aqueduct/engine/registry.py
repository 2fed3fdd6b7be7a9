"""Which channels are there, and how do they end? Ids, tombstones, loss in transit, and what all halves share."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import ChannelTable, Ids, Lent, Reassembly, Stop, TokenBucket, queue_of
from muxkit.protocols.aqueduct import _events as events
from muxkit.protocols.aqueduct._crowd import Crowd
from muxkit.protocols.aqueduct._frames import VERSION, ForgetChannel, RouteTo, encode_frame
from muxkit.protocols.aqueduct._ids import ENTRYPOINT, Role, creator_of, is_oneshot, label, sender_of, spaces
from muxkit.protocols.aqueduct._line import Line, OutStream
from muxkit.protocols.aqueduct._receiving import ReceiverMachine
from muxkit.protocols.aqueduct._sending import Outgoing, SenderMachine
from muxkit.protocols.aqueduct._timers import Timers
from muxkit.protocols.aqueduct._transit import Fate, Transit, lose

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.core import StreamId
    from muxkit.protocols.aqueduct._config import Config
    from muxkit.protocols.aqueduct._events import Event, Outcome
    from muxkit.protocols.aqueduct._incoming import Incoming

Half = SenderMachine | ReceiverMachine


@attrs.define(eq=False)
class Ticket:
    """The other half of a channel that we made: to be sent with one message."""

    half: Half
    headers: bytes
    spent: bool = False


class Channels:
    """All halves of one connection and what they share."""

    def __init__(self, role: Role, config: Config, limits: Limits, observer: Observer | None) -> None:
        self.role, self.config, self.limits, self.observer = role, config, limits, observer
        self.now = 0.0
        self.rtt: float | None = None
        self.events: list[Event] = []
        self.line = Line(2 + role, VERSION)
        self.counters = spaces(role)
        self.table: ChannelTable[Half] = ChannelTable(limits, Ids(0, 0))
        self.ended: OrderedDict[int, Half] = OrderedDict()  # made by the peer, gone before they were attached
        self.closing: dict[int, OutStream] = {}  # receivers that are gone, their close is not
        self.forgets: dict[int, OutStream] = {}
        self.churn = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.stream_churn = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.reassembly: Reassembly[Incoming] = Reassembly(limits.reassembly)
        self.consumed: dict[StreamId, int] = {}
        self.lent: list[Lent] = []
        self.stops: dict[StreamId, Stop] = {}
        self.outbox = 0
        self.unread_datagrams = 0
        self.in_order = False  # on this link no datagram is overtaken by what was written after it
        self.crowd = Crowd(limits)
        self.ring: OrderedDict[SenderMachine, None] = OrderedDict()  # those with datagrams to send
        self.timers = Timers(self)
        self.entrypoint = self._make_entrypoint()

    def _make_entrypoint(self) -> Half:
        transit = Transit(ENTRYPOINT, ours=self.role is Role.CLIENT, fate=Fate.ACCESSIBLE)
        entrypoint = self._make(ENTRYPOINT, oneshot=False, sends=self.role is Role.CLIENT, transit=transit)
        entrypoint.attached = True
        if self.role is Role.CLIENT:
            self.table.add_ours(ENTRYPOINT, entrypoint)
        else:
            self.table.add_theirs(ENTRYPOINT, entrypoint)
            self.table.accept(ENTRYPOINT)
        return entrypoint

    def _make(self, id: int | None, *, oneshot: bool, sends: bool, transit: Transit) -> Half:
        kind = SenderMachine if sends else ReceiverMachine
        return kind(self, oneshot=oneshot, id=id, transit=transit)

    @property
    def receipt_deadline(self) -> float:
        """How long to wait for a datagram that has been sent."""
        if self.config.receipt_deadline is not None:
            return self.config.receipt_deadline
        return 1.0 if self.rtt is None else max(2 * self.rtt, self.config.flush_delay)

    @property
    def report_delay(self) -> float:
        """How long after its count a datagram may still come."""
        return self.config.flush_delay if self.in_order else self.receipt_deadline

    def tell(self, event: Event) -> None:
        self.events.append(event)

    # --- making

    def channel(self, *, sends: bool, oneshot: bool, headers: bytes) -> Ticket:
        return Ticket(self._make(None, oneshot=oneshot, sends=sends, transit=Transit(None, ours=True)), headers)

    def check_tickets(self, tickets: Sequence[Ticket]) -> None:
        if any(ticket.half.channels is not self for ticket in tickets):
            raise LocalProtocolError("a channel can be sent on the connection that it was made for")
        if any(ticket.spent for ticket in tickets) or len(set(map(id, tickets))) != len(tickets):
            raise LocalProtocolError("a channel can be sent once")
        most = min(self.limits.channels - self.table.census.ours, self.config.attachments)
        if len(tickets) > most:
            raise LocalProtocolError(f"{len(tickets)} channels attached where {most} more are allowed")

    def hand_over(self, tickets: Iterable[Ticket]) -> list[tuple[int, bytes]]:
        """The other halves go with a message: now they have ids. Gives these with the encoded headers."""
        attached: list[tuple[int, bytes]] = []
        for ticket in tickets:
            half, ticket.spent = ticket.half, True
            sender = self.role if isinstance(half, SenderMachine) else self.role.peer
            id = self.counters[half.oneshot << 2 | sender << 1 | self.role].allocate(())
            half.id = half.transit.channel = id
            half.attached = True
            self.table.add_ours(id, half)
            self.saw(id, "open")
            attached.append((id, ticket.headers))
        return attached

    def check_room(self, new: int) -> None:
        """May the peer make so many more? Those whose close is not out yet count."""
        census, limits = self.table.census, self.limits
        if census.theirs + len(self.closing) + new > limits.channels:
            raise RemoteProtocolError(
                f"{new} channels made beside {census.theirs} live and {len(self.closing)} closing, "
                f"{limits.channels} are allowed",
                limit=limits.bound_of_channels,
            )
        if census.waiting + new > limits.backlog:
            raise RemoteProtocolError(
                f"{new} channels made beside {census.waiting} that wait, {limits.backlog} are allowed", limit="backlog"
            )

    def make_theirs(self, id: int) -> Half:
        """The peer speaks of a channel that it made and we do not know."""
        sends = sender_of(id) == self.role
        return self._make(id, oneshot=is_oneshot(id), sends=sends, transit=Transit(id, ours=False))

    def add_theirs(self, id: int, half: Half) -> None:
        """Room was checked."""
        self.table.add_theirs(id, half)
        self.saw(id, "open")

    def attach(self, id: int, carrier: Transit) -> Half | None:
        """A message that came on `carrier` brings this channel; None if an earlier one did."""
        half = self.table.get(id) or self.ended.get(id)
        if half is None and not self.table.is_buried(id, self.now):
            half = self.make_theirs(id)
            self.add_theirs(id, half)
        if half is None or half.attached:
            return None
        half.attached = True
        if isinstance(half, ReceiverMachine):
            self.timers.confirm(half)
        self.forget_lost(half.transit.carried_by(carrier))
        return half

    def is_new(self, id: int) -> bool:
        return id not in self.table and id not in self.ended

    # --- ending

    def end(self, half: Half, outcome: Outcome, *, bury: bool = True) -> None:
        """The half is gone, and so is what was on its way there."""
        self.forget_lost(self._end(half, outcome, bury=bury))

    def _end(self, half: Half, outcome: Outcome, *, bury: bool) -> list[Transit]:
        """Gives what else is lost because of it."""
        assert half.id is not None  # only what was handed over is known to the connection
        half.outcome = outcome
        lost: list[Transit] = []
        if isinstance(half, SenderMachine):
            half.drop_streams()
            self.ring.pop(half, None)
            unanswered = [*half.reliable.clear(), *half.unreliable.clear(), *half.take_unsent()]
            lost += self._nacked(unanswered)
        elif outcome in (events.Outcome.LOST_IN_TRANSIT, events.Outcome.FORGOTTEN) and half.main is not None:
            self.line.drop(half.main)
        if isinstance(half, ReceiverMachine):
            self.crowd.dismiss(half)
        self.timers.forget(half)
        if outcome is events.Outcome.FORGOTTEN and bury:
            lost += lose([half.transit])
        half.transit.ended()
        self.table.remove(half.id)
        if bury:
            self.table.bury(half.id, self.now, self.config.tombstone)
            if creator_of(half.id) != self.role and not half.attached:
                self._remember_ended(half.id, half)
        self.saw(half.id, outcome.value)
        if isinstance(half, ReceiverMachine):
            is_news = outcome is not events.Outcome.NO_RECEIVER  # that one the application closed itself
        else:
            is_news = half.attached and half.outcome_told is None
        if is_news:
            half.is_told = True
            self.tell(events.Ended(half, outcome))
        return lost

    def _remember_ended(self, id: int, half: Half) -> None:
        """Its attachment may still come, long after: then the application is to see how it ended."""
        self.ended[id] = half
        if len(self.ended) > self.limits.tombstones:
            _, oldest = self.ended.popitem(last=False)
            if isinstance(oldest, ReceiverMachine) and (oldest.unread_messages or oldest.unread):
                self.tell(events.Unclaimed(oldest))

    def cancel(self, sender: SenderMachine, outcome: Outcome | None = None) -> None:
        """Give up a sender, with an outcome for the application before the peer has heard."""
        sender.outcome_told = outcome
        sender.cancel()
        self.ring.pop(sender, None)
        self.timers.forget(sender)
        # What is on its way may have arrived: only the peer can say. What never left is lost for sure.
        self.nack(sender.take_unsent())
        if outcome is events.Outcome.NO_RECEIVER:
            sender.is_told = True
            self.tell(events.Ended(sender, outcome))

    def close(self, receiver: ReceiverMachine, outcome: Outcome) -> None:
        """Tell the peer, and be done."""
        assert receiver.id is not None  # only what was handed over can be closed
        id, stream = receiver.id, receiver.close()
        if stream is not None:
            self.closing[id] = stream
            stream.on_end = lambda: self._closed(id, stream)
            self.line.add(stream)
        self.end(receiver, outcome)

    def _closed(self, id: int, stream: OutStream) -> None:
        if self.closing.get(id) is stream:
            del self.closing[id]

    def forgotten(self, id: int) -> None:
        """The peer, who made it, has let go of it."""
        stream = self.closing.pop(id, None)
        if stream is not None:
            self.line.drop(stream)
        half = self.table.get(id)
        if half is not None:
            self.end(half, events.Outcome.FORGOTTEN)
            return
        self.table.bury(id, self.now, self.config.tombstone)
        if id not in self.ended:
            # Should its attachment come after this, the application gets a half that is over.
            half = self.make_theirs(id)
            half.outcome = events.Outcome.FORGOTTEN
            self._remember_ended(id, half)

    # --- lost in transit

    def settle(self, outgoings: Iterable[Outgoing], carrier: Transit) -> None:
        """These messages were acked."""
        lost: list[Transit] = []
        for outgoing in outgoings:
            if outgoing.receipt is not None:
                outgoing.receipt.arrived = True
                self.tell(events.Acked(outgoing.receipt))
            for node in outgoing.nodes:
                lost += node.carried_by(carrier)
        self.forget_lost(lost)

    def nack(self, outgoings: Iterable[Outgoing]) -> None:
        """These messages did not arrive."""
        self.forget_lost(self._nacked(outgoings))

    def _nacked(self, outgoings: Iterable[Outgoing]) -> list[Transit]:
        lost: list[Transit] = []
        for outgoing in outgoings:
            if outgoing.receipt is not None:
                outgoing.receipt.arrived = False
                self.tell(events.Nacked(outgoing.receipt))
            lost += lose(outgoing.nodes)
        return lost

    def forget_lost(self, lost: list[Transit]) -> None:
        """Channels of ours that did not arrive: gone, the peer is told, and so on for what went on them."""
        for node in lost:  # which grows meanwhile
            id = node.channel
            assert id is not None  # it was attached, so it has one
            half = self.table.get(id)
            if half is not None and half.transit is node:
                lost += self._end(half, events.Outcome.LOST_IN_TRANSIT, bury=True)
            self.tell_forget(id)

    def owe_forget(self, id: int) -> None:
        """The peer speaks of a channel of ours that we have no state for."""
        if id in self.forgets:
            return
        self.check_churn(f"a channel was routed to that there is not ({label(id)})")
        if len(self.forgets) >= self.limits.tombstones:
            raise RemoteProtocolError(f"{len(self.forgets)} channels to forget are owed", limit="tombstones")
        self.tell_forget(id)
        self.table.bury(id, self.now, self.config.tombstone)

    def tell_forget(self, id: int) -> None:
        if id in self.forgets:
            return
        frames = encode_frame(RouteTo(id)), encode_frame(ForgetChannel())
        self.forgets[id] = stream = OutStream(*frames, urgent=True, on_end=lambda: self._forget_told(id))
        closing = self.closing.pop(id, None)
        if closing is not None:
            self.line.drop(closing)
        self.line.add(stream)
        self.wrote("FORGET_CHANNEL", id)

    def _forget_told(self, id: int) -> None:
        self.forgets.pop(id, None)

    def check_churn(self, what: str) -> None:
        self._check(self.churn, what)

    def check_stream_churn(self, what: str) -> None:
        self._check(self.stream_churn, what)

    def _check(self, bucket: TokenBucket, what: str) -> None:
        if not bucket.take(self.now):
            raise RemoteProtocolError(
                f"{what}, more often than {self.limits.resets_per_second} times a second", limit="resets_per_second"
            )

    # --- datagrams

    def queue_datagram(self, sender: SenderMachine, outgoing: Outgoing) -> None:
        """The oldest gives way before it has a number."""
        queue = sender.datagrams = queue_of(sender.datagrams)
        sender.datagram_bytes += outgoing.size
        while queue and (
            len(queue) >= self.config.unreliable_queue or sender.datagram_bytes > self.limits.channel_bytes
        ):
            oldest = sender.take_datagram()
            self.nack([oldest])
        queue.append(outgoing)
        self.ring_up(sender)

    def ring_up(self, sender: SenderMachine) -> None:
        """It may have a datagram to send."""
        if sender.has_datagram:
            self.ring.setdefault(sender)
        else:
            self.ring.pop(sender, None)

    def next_datagram(self, limit: int) -> bytes | None:
        while self.ring:
            sender, _ = self.ring.popitem(last=False)
            outgoing = sender.take_datagram()
            data = self.line.prefix + sender.number_datagram(outgoing)
            if len(data) > limit and sender.admits(outgoing.size):
                sender.count_alone(outgoing)
                sender.send_alone(outgoing)
            elif len(data) > limit:  # as if there were no room for it in the queue
                self.nack([outgoing])
            else:
                sender.datagram_sent(outgoing)
                self.timers.flush_soon(sender)
            self.ring_up(sender)
            sender.resume()
            if len(data) <= limit:
                return data
        return None

    # --- who watches

    def wrote(self, name: str, id: int | None, size: int = 0) -> None:
        if self.observer is not None:
            self.observer.frame("out", "connection" if id is None else label(id), name, size)

    def saw(self, id: int, state: str) -> None:
        if self.observer is not None:
            self.observer.state(label(id), state)
