"""The channels of one connection: how they are made and end, what is due when, and how many messages may be unread."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import count
from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, ChannelTable, Deadlines, Ids, StartPace, StreamId, TokenBucket, queue_of
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.engine import halves
from muxkit.protocols.aqueduct.engine.events import Acked, Ended, Event, Nacked, Unclaimed, Writable
from muxkit.protocols.aqueduct.engine.streams import OutStream, StreamScheduler

MESSAGE_COST: Final = 256  # bytes that a message takes beside its own, about


class Timer(Enum):
    FLUSH = "flush"
    """When to announce datagrams sent, and to ack what came in streams."""
    REPORT = "report"
    """When to ack or nack datagrams."""
    STRAY = "stray"
    """When to drop a receiver that only datagrams have mentioned."""
    HANDSHAKE = "handshake"
    """When the connection headers of the peer must have come."""
    STALL = "stall"
    """When more of an unfinished frame must have come."""


class UnreadLimit:
    """Bounds the messages from streams that were not consumed; above the bounds their streams are not parsed on.

    What is not parsed is bytes, and their credit bounds those. The bounds are `Limits.short_window` for one
    receiver and `Limits.connection_bytes` for all, with 256 bytes for each message. A receiver without unread
    messages may always have one more, so receivers that are not read never block those that are.
    """

    def __init__(self, limits: Limits) -> None:
        self.unread: int = 0
        self.most: int = max(1, limits.connection_bytes // MESSAGE_COST)
        self.most_of_one: int = max(1, limits.short_window // MESSAGE_COST)
        # Streams that are not parsed on, with what resumes each.
        self._held: dict[halves.ReceiverMachine, OrderedDict[StreamId, Callable[[], None]]] = {}
        # Receivers whose streams wait because of messages of other receivers.
        self._waiting: OrderedDict[halves.ReceiverMachine, None] = OrderedDict()

    def add(self, receiver: halves.ReceiverMachine) -> None:
        """Count one more unread message."""
        receiver.unread_messages += 1
        self.unread += 1

    def remove(self, receiver: halves.ReceiverMachine) -> bool:
        """Count one message less; True if `resume` is to follow, since a stream may wait for it."""
        receiver.unread_messages -= 1
        self.unread -= 1
        return bool(self._waiting) or receiver in self._held

    def is_full(self, receiver: halves.ReceiverMachine) -> bool:
        """Whether the receiver may have no more messages now; then `hold_back` is to follow."""
        unread = receiver.unread_messages
        return unread > 0 and (unread >= self.most_of_one or self.unread >= self.most)

    def hold_back(self, receiver: halves.ReceiverMachine, stream: StreamId, resume: Callable[[], None]) -> None:
        """Call `resume` when the receiver may have one more message."""
        self._held.setdefault(receiver, OrderedDict())[stream] = resume
        if receiver.unread_messages < self.most_of_one:
            self._waiting.setdefault(receiver)

    def resume(self, receiver: halves.ReceiverMachine) -> None:
        """Resume the streams that may go on: those of this receiver, then those of others that waited for it."""
        if 2 * receiver.unread_messages <= self.most_of_one:
            self._resume(receiver)
        while self._waiting and self.unread < self.most:
            first, _ = self._waiting.popitem(last=False)
            self._resume(first)

    def drop(self, receiver: halves.ReceiverMachine) -> None:
        """Resume all streams of a receiver that has ended: what they bring is ignored."""
        self._waiting.pop(receiver, None)
        for resume in self._held.pop(receiver, {}).values():
            resume()

    def _resume(self, receiver: halves.ReceiverMachine) -> None:
        while (held := self._held.get(receiver)) and not self.is_full(receiver):
            _, resume = held.popitem(last=False)
            if not held:
                del self._held[receiver]
            resume()


class Registry:
    """All halves of one connection and what is due for them."""

    def __init__(self, role: frames.Role, config: Config, limits: Limits, observer: Observer | None) -> None:
        self.role: frames.Role = role
        self.config: Config = config
        self.limits: Limits = limits
        self.observer: Observer | None = observer
        self.events: list[Event] = []
        self.streams: StreamScheduler = StreamScheduler(2 + role, frames.VERSION)
        self.connection: halves.ConnectionState = halves.ConnectionState(
            config, limits, observer, self.streams, lambda sender: self.events.append(Writable(sender))
        )
        self.table: ChannelTable[halves.Half] = ChannelTable(limits, Ids(0, 0))
        self.closing: dict[int, OutStream] = {}  # receivers that are gone, whose CLOSE_RECEIVER is not written
        self.unread_limit: UnreadLimit = UnreadLimit(limits)
        self.deadlines: Deadlines[Timer] = Deadlines()
        self._counters = frames.id_counters(role)
        self._ended: OrderedDict[int, halves.Half] = OrderedDict()  # made by the peer, gone before they were attached
        self._forgets: dict[int, OutStream] = {}  # FORGET_CHANNEL to be written
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        """Paces what the peer opens by what it breaks off; being out of tokens ends nothing."""
        self._misses = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self._empty_streams = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.datagram_senders: OrderedDict[halves.SenderMachine, None] = OrderedDict()  # in turn
        self._flushing: dict[halves.Half, None] = {}
        self._reports: list[tuple[float, int, halves.ReceiverMachine]] = []
        self._report_order = count()
        # A late datagram may bring back a channel that has long ended, and no frame would ever end it again.
        self._strays: OrderedDict[halves.ReceiverMachine, float] = OrderedDict()
        self.entrypoint: halves.Half = self._make_entrypoint()

    def _make_entrypoint(self) -> halves.Half:
        transit = halves.Transit(frames.ENTRYPOINT, ours=self.role is frames.Role.CLIENT, fate=halves.Fate.ACCESSIBLE)
        entrypoint = self._make(
            frames.ENTRYPOINT, oneshot=False, sends=self.role is frames.Role.CLIENT, transit=transit
        )
        entrypoint.attached = True
        if self.role is frames.Role.CLIENT:
            self.table.add_ours(frames.ENTRYPOINT, entrypoint)
        else:
            self.table.add_theirs(frames.ENTRYPOINT, entrypoint)
            self.table.accept(frames.ENTRYPOINT)
        return entrypoint

    def _make(self, id: int | None, *, oneshot: bool, sends: bool, transit: halves.Transit) -> halves.Half:
        kind = halves.SenderMachine if sends else halves.ReceiverMachine
        return kind(self.connection, oneshot=oneshot, id=id, transit=transit)

    # --- making

    def make_ticket(self, *, sends: bool, oneshot: bool, headers: bytes) -> halves.Ticket:
        return halves.Ticket(
            self._make(None, oneshot=oneshot, sends=sends, transit=halves.Transit(None, ours=True)), headers
        )

    def check_tickets(self, tickets: Sequence[halves.Ticket]) -> None:
        if any(ticket.half.connection is not self.connection for ticket in tickets):
            raise LocalProtocolError("a channel can be sent on the connection that it was made for")
        if any(ticket.spent for ticket in tickets) or len(set(map(id, tickets))) != len(tickets):
            raise LocalProtocolError("a channel can be sent once")
        most = min(self.limits.channels - self.table.census.ours, self.config.attachments)
        if len(tickets) > most:
            raise LocalProtocolError(f"{len(tickets)} channels attached where {most} more are allowed")

    def hand_over(self, tickets: Iterable[halves.Ticket]) -> list[tuple[int, bytes]]:
        """Open the channels whose other halves go with a message; give their ids and encoded headers."""
        attached: list[tuple[int, bytes]] = []
        for ticket in tickets:
            half, ticket.spent = ticket.half, True
            sender = self.role if isinstance(half, halves.SenderMachine) else self.role.peer
            id = self._counters[half.oneshot << 2 | sender << 1 | self.role].allocate(())
            half.id = half.transit.channel = id
            half.attached = True
            self.table.add_ours(id, half)
            self._state_changed(id, "open")
            attached.append((id, ticket.headers))
        return attached

    def check_room(self, new: int) -> None:
        """Raise `RemoteProtocolError` if the peer may not make so many more; unwritten closes count as channels."""
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

    def make_theirs(self, id: int) -> halves.Half:
        """Make our half of a channel that the peer made; it is not in the table yet."""
        sends = frames.sender_of(id) == self.role
        return self._make(id, oneshot=frames.is_oneshot(id), sends=sends, transit=halves.Transit(id, ours=False))

    def add_theirs(self, id: int, half: halves.Half) -> None:
        """Add a half for which there is room."""
        self.table.add_theirs(id, half)
        self._state_changed(id, "open")

    def was_attached(self, id: int) -> bool:
        """Return True if a message has brought this channel, and it is still alive."""
        half = self.table.get(id)
        return half is not None and half.attached

    def attach(self, id: int, carrier: halves.Transit) -> halves.Half | None:
        """Give the half that a message on `carrier` brings; None if it has ended since an earlier message."""
        half = self.table.get(id) or self._ended.get(id)
        if half is None and not self.table.is_buried(id, self.connection.now):
            half = self.make_theirs(id)
            self.add_theirs(id, half)
        if half is None or half.attached:
            return None
        half.attached = True
        if isinstance(half, halves.ReceiverMachine):
            self._strays.pop(half, None)
        self.forget_lost(half.transit.carried_by(carrier))
        return half

    def is_new(self, id: int) -> bool:
        return id not in self.table and id not in self._ended

    @property
    def ended_unattached(self) -> int:
        """How many channels of the peer ended before the messages that attach them have come."""
        return len(self._ended)

    # --- ending

    def end(self, half: halves.Half, outcome: halves.Outcome, *, bury: bool = True) -> None:
        """End a half, and lose the channels that were on their way over it."""
        self.forget_lost(self._end(half, outcome, bury=bury))

    def _end(self, half: halves.Half, outcome: halves.Outcome, *, bury: bool) -> list[halves.Transit]:
        """End a half; give what else is lost because of it."""
        assert half.id is not None  # only what was handed over is known to the connection
        half.outcome = outcome
        lost: list[halves.Transit] = []
        if isinstance(half, halves.SenderMachine):
            half.drop_streams()
            self.datagram_senders.pop(half, None)
            unanswered = [*half.reliable.clear(), *half.unreliable.clear(), *half.take_unsent()]
            lost += self._nacked(unanswered)
        else:
            if outcome in (halves.Outcome.LOST_IN_TRANSIT, halves.Outcome.FORGOTTEN) and half.main is not None:
                self.streams.drop(half.main)
            self.unread_limit.drop(half)
        self._stop_timers(half)
        if outcome is halves.Outcome.FORGOTTEN and bury:
            lost += halves.lose([half.transit])
        half.transit.ended()
        self.table.remove(half.id)
        if bury:
            self._bury(half.id)
            if frames.creator_of(half.id) != self.role and not half.attached:
                self._remember_ended(half.id, half)
        self._state_changed(half.id, outcome.value)
        if isinstance(half, halves.ReceiverMachine):
            is_news = outcome is not halves.Outcome.NO_RECEIVER  # the application closed that one itself
        else:
            is_news = half.attached and half.outcome_told is None
        if is_news:
            half.is_told = True
            self.events.append(Ended(half, outcome))
        elif half.taken and not (isinstance(half, halves.SenderMachine) and half.is_report_unread):
            half.owner = None
        return lost

    def _bury(self, id: int) -> None:
        self.table.bury(id, self.connection.now, self.config.tombstone)

    def _remember_ended(self, id: int, half: halves.Half) -> None:
        """Keep a half whose attachment may still come, so that the application can see how it ended."""
        self._ended[id] = half
        if len(self._ended) > self.limits.tombstones:
            _, oldest = self._ended.popitem(last=False)
            if isinstance(oldest, halves.ReceiverMachine) and (oldest.unread_messages or oldest.unread):
                self.events.append(Unclaimed(oldest))

    def cancel(
        self, sender: halves.SenderMachine, outcome: halves.Outcome | None = None, *, reason: bytes = b""
    ) -> None:
        """Cancel a sender; with an outcome the application is told before the peer has confirmed."""
        sender.outcome_told = outcome
        sender.cancel(reason)
        self.datagram_senders.pop(sender, None)
        self._stop_timers(sender)
        # What was written may have arrived: only the peer can say. What was not written is lost.
        self.nack(sender.take_unsent())
        if outcome is halves.Outcome.NO_RECEIVER:
            sender.is_told = True
            # The peer may close the receiver before the session reads this, and the session looks for the owner then.
            sender.is_report_unread = True
            self.events.append(Ended(sender, outcome))

    def sender_stopped(self, sender: halves.SenderMachine) -> None:
        """End a sender of which the peer stopped a stream: to the application its receiver is gone."""
        if sender.gone or sender.cancelling:
            return
        if sender.finish_written:  # no CANCEL_SENDER may follow
            self.end(sender, halves.Outcome.NO_RECEIVER)
        else:
            self.cancel(sender, halves.Outcome.NO_RECEIVER)

    def close(self, receiver: halves.ReceiverMachine, outcome: halves.Outcome) -> None:
        """Write CLOSE_RECEIVER and end the receiver."""
        assert receiver.id is not None  # only what was handed over can be closed
        id, stream = receiver.id, receiver.close()
        if stream is not None:
            self.closing[id] = stream
            stream.on_end = lambda: self.closing.pop(id, None) if self.closing.get(id) is stream else None
            self.streams.add(stream)
        self.end(receiver, outcome)

    def forgotten(self, id: int) -> None:
        """End a channel that the peer, which made it, has forgotten."""
        stream = self.closing.pop(id, None)
        if stream is not None:
            self.streams.drop(stream)
        half = self.table.get(id)
        if half is not None:
            self.end(half, halves.Outcome.FORGOTTEN)
            return
        self._bury(id)
        if id not in self._ended:
            # If the attachment comes after this, the application gets a half that has ended.
            half = self.make_theirs(id)
            half.outcome = halves.Outcome.FORGOTTEN
            self._remember_ended(id, half)

    # --- answers, and channels lost in transit

    def messages_acked(self, outgoings: Iterable[halves.Outgoing], carrier: halves.Transit) -> None:
        """Report messages as acked; the channels attached to them have arrived on `carrier`."""
        lost: list[halves.Transit] = []
        for outgoing in outgoings:
            if outgoing.receipt is not None:
                outgoing.receipt.arrived = True
                self.events.append(Acked(outgoing.receipt))
            for node in outgoing.nodes:
                lost += node.carried_by(carrier)
        self.forget_lost(lost)

    def nack(self, outgoings: Iterable[halves.Outgoing]) -> None:
        """Report messages as nacked; the channels attached to them are lost."""
        self.forget_lost(self._nacked(outgoings))

    def _nacked(self, outgoings: Iterable[halves.Outgoing]) -> list[halves.Transit]:
        lost: list[halves.Transit] = []
        for outgoing in outgoings:
            if outgoing.receipt is not None:
                outgoing.receipt.arrived = False
                self.events.append(Nacked(outgoing.receipt))
            lost += halves.lose(outgoing.nodes)
        return lost

    def forget_lost(self, lost: list[halves.Transit]) -> None:
        """End channels of ours that did not arrive, tell the peer, and go on with the channels sent on them."""
        for node in lost:  # grows while it is read
            id = node.channel
            assert id is not None  # it was attached, so it has one
            half = self.table.get(id)
            if half is not None and half.transit is node:
                lost += self._end(half, halves.Outcome.LOST_IN_TRANSIT, bury=True)
            self.send_forget(id)

    def forget_unknown(self, id: int) -> None:
        """Answer a frame for a channel of ours that has no state."""
        if id in self._forgets:
            return
        # What crosses the end of a channel may come when its tombstone has given way to others.
        if not self._counters[id & 7].was_allocated(id):
            self._charge(self._misses, f"a channel was routed to that there is not ({frames.label(id)})")
            if len(self._forgets) >= self.limits.tombstones:
                raise RemoteProtocolError(f"{len(self._forgets)} channels to forget are owed", limit="tombstones")
        elif len(self._forgets) >= self.limits.tombstones:
            return  # the peer hears of its end from what ended it
        self.send_forget(id)
        self._bury(id)

    def send_forget(self, id: int) -> None:
        if id in self._forgets:
            return
        routed: list[Buffer] = [frames.encode_frame(frames.RouteTo(id)), frames.encode_frame(frames.ForgetChannel())]
        stream = OutStream(routed, urgent=True, on_end=lambda: self._forgets.pop(id, None))
        self._forgets[id] = stream
        closing = self.closing.pop(id, None)
        if closing is not None:
            self.streams.drop(closing)
        self.streams.add(stream)
        self.connection.frame_written("FORGET_CHANNEL", id)

    def count_reset(self) -> None:
        """Count a channel or a stream that the peer broke off."""
        self.starts.broken_off(self.connection.now)

    def check_empty_stream(self) -> None:
        """Charge the peer for a stream that it ended with nothing in it; raise above the limit."""
        self._charge(self._empty_streams, "a stream was opened for nothing")

    def _charge(self, bucket: TokenBucket, what: str) -> None:
        if not bucket.take(self.connection.now):
            raise RemoteProtocolError(
                f"{what}, more often than {self.limits.resets_per_second} times a second", limit="resets_per_second"
            )

    # --- datagrams to send

    def queue_datagram(self, sender: halves.SenderMachine, outgoing: halves.Outgoing) -> None:
        """Queue an unreliable message; in a full queue the oldest, which has no number yet, is nacked."""
        queue = sender.datagrams = queue_of(sender.datagrams)
        sender.datagram_bytes += outgoing.size
        while queue and (
            len(queue) >= self.config.unreliable_queue or sender.datagram_bytes > self.limits.short_window
        ):
            oldest = sender.take_datagram()
            self.nack([oldest])
        queue.append(outgoing)
        self.schedule_datagrams(sender)

    def schedule_datagrams(self, sender: halves.SenderMachine) -> None:
        """Give the sender a turn if it has a datagram to send, and none otherwise."""
        if sender.has_datagram:
            self.datagram_senders.setdefault(sender)
        else:
            self.datagram_senders.pop(sender, None)

    def next_datagram(self, limit: int) -> bytes | None:
        """Give the next datagram of at most `limit` bytes; a larger message goes in a stream, or is nacked."""
        while self.datagram_senders:
            sender, _ = self.datagram_senders.popitem(last=False)
            outgoing = sender.take_datagram()
            data = self.streams.prefix + sender.encode_datagram(outgoing)
            fits = len(data) <= limit
            if fits:
                sender.datagram_sent(outgoing)
                self.flush_soon(sender)
            elif sender.admits(outgoing.size):
                sender.count_queued(outgoing.size)
                sender.send_alone(outgoing)
            else:
                self.nack([outgoing])
            self.schedule_datagrams(sender)
            sender.message_numbered()
            if fits:
                return data
        return None

    # --- timers

    def _stop_timers(self, half: halves.Half) -> None:
        self._flushing.pop(half, None)
        self.confirm(half)

    def flush_soon(self, half: halves.Half) -> None:
        """Write acks or counts of this half after `Config.flush_delay`."""
        self._flushing.setdefault(half)
        if Timer.FLUSH not in self.deadlines:
            self.deadlines.set(Timer.FLUSH, self.connection.now + self.config.flush_delay)

    def flush(self) -> None:
        flushing, self._flushing = self._flushing, {}
        for half in flushing:
            half.flush = True
            self.streams.add(half.stream())

    def report_at(self, due: float, receiver: halves.ReceiverMachine) -> None:
        """Report on the datagrams of a receiver without an earlier report; `report` schedules the later ones."""
        heapq.heappush(self._reports, (due, next(self._report_order), receiver))
        self.deadlines.set(Timer.REPORT, self._reports[0][0])

    def report(self, now: float) -> None:
        while self._reports and self._reports[0][0] <= now:
            _, _, receiver = heapq.heappop(self._reports)
            if receiver.gone:
                continue
            is_due = receiver.report_due(now)
            if receiver.next_report is not None:
                heapq.heappush(self._reports, (receiver.next_report, next(self._report_order), receiver))
            if not is_due:
                continue
            if receiver.is_complete:
                self.close(receiver, halves.Outcome.FINISHED)
            else:
                self.streams.add(receiver.stream())
        if self._reports:
            self.deadlines.set(Timer.REPORT, self._reports[0][0])

    def add_stray(self, receiver: halves.ReceiverMachine) -> None:
        """Drop the receiver unless a stream mentions it within `receipt_deadline`."""
        self._strays[receiver] = self.connection.now + self.connection.receipt_deadline
        if Timer.STRAY not in self.deadlines:
            self.deadlines.set(Timer.STRAY, self._strays[receiver])

    def confirm(self, half: halves.Half) -> None:
        """Keep a half that a stream has mentioned."""
        if self._strays and isinstance(half, halves.ReceiverMachine):
            self._strays.pop(half, None)

    def drop_strays(self, now: float) -> None:
        while self._strays:
            receiver, due = next(iter(self._strays.items()))
            if due > now:
                self.deadlines.set(Timer.STRAY, due)
                return
            del self._strays[receiver]
            # Not buried: if the channel is alive after all, its streams must find a new machine.
            self.end(receiver, halves.Outcome.FORGOTTEN, bury=False)

    # --- observation

    def _state_changed(self, id: int, state: str) -> None:
        if self.observer is not None:
            self.observer.state(frames.label(id), state)
