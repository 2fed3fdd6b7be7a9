"""The state of a link that its channels and its connections share: the theory of operation of Relink.

A link and its connections
==========================

A link outlives its connections. The engine keeps one `State` for all connections of a link. A link has four states. The
third column has the event that usually ends a state:

    ABSENT     there is no connection; messages may be queued        `connection_made`           -> RESUMING, OPEN
    RESUMING   each side reports what it has received (`resume`)     the peer's resume arrives   -> OPEN, ABSENT, OVER
    OPEN       messages flow                                         `connection_lost`           -> ABSENT, OVER
    OVER       both have shut down, or the peer broke a rule         (final)

The handshake is a small engine of its own (`handshake`). It decides which link a new connection continues. The first
connection of a link has nothing to resume, so the link is OPEN immediately. If the listener names a link other than
ours, our link is lost: we report `LinkReplaced`, empty both tables, and start again with the new link.

A resume lists all channels that the peer has opened. For each channel it says up to which message we have received,
consumed and answered. We may not write on a channel of ours before the peer's resume has covered it
(`ChannelSender.free`), because until then we don't know which messages were lost with the last connection. If the
resume leaves a channel out, then either the peer never received a message on it, or the channel is closed.

Channels
========

A channel carries messages in one direction. No packet opens a channel; its first message does. Each side numbers the
channels that it sends on, so channel 1 of one side has nothing to do with channel 1 of the other side. For each channel
that we send on, `SendTable` has a `ChannelSender`:

    new        not in the table; nothing was sent                    the first message           -> open
    open       messages are written, as far as the windows allow     `close`                     -> closing
    closing    the queued messages are written, then the close       `closed` arrives            -> over
    over       not in the table; the number may be used again        (final)

Every use of a channel number, from new to over, is one life of the channel. We write a close only when the peer is
known to have received a message of the channel's current life. An acknowledgement shows that, or the pong that answers
a probe (`probes`). If we closed earlier and the peer's next resume left the channel out, we couldn't tell whether the
peer has closed the channel or has never received a message on it.

For each channel that we receive from, `ReceiveTable` has a `ChannelReceiver`:

    expected   not in the table; the application waits for it        the first message           -> open
    open       messages arrive                                       the peer's close arrives    -> ended
    ended      the application has not consumed everything           all is consumed, answered   -> done
    done       `closed` is still to be written                       `closed` is written         -> over

With transactions a message waits in `ChannelReceiver.undecided` until the peer commits it or rolls it back. A commit
delivers the message to the application, and the peer must get the application's answer exactly once. So we keep an
answer until a pong proves that the peer has read it, and a channel doesn't end while it has such answers.

Invariants
==========

- A message occupies its channel's window from `send_parts` until the peer's application has consumed or answered it.
  The window limits messages (`Config.window`) and bytes (`Limits.short_window`, or on a path with a long round trip up
  to `Limits.channel_bytes`).
- `Limits.connection_bytes` is the budget of the link: it limits the bytes in all windows together. The first `floor`
  bytes in each channel's window are not charged to the budget, so a channel that nobody reads can't block the other
  channels. The charge depends only on how many bytes each window holds and not on their order, so both sides calculate
  the same charge.
- A packet is checked as a whole before any of it is applied. A packet with an error changes nothing.
- A peer that doesn't read costs a bounded amount of memory. The acknowledgements that are still to be written are
  merged by channel, and the number of waiting pongs and of waiting closes of unknown channels is limited.
- Before our resume is complete, we write nothing but pings and pongs. The resume replaces all acknowledgements that
  were still to be written when the last connection was lost.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, Deadlines, Outbox, ReceiveBudget, Scheduler
from muxkit.core.events import Writable
from muxkit.protocols.relink import frames
from muxkit.protocols.relink.config import Config
from muxkit.protocols.relink.probes import Probes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.relink.events import Event
    from muxkit.protocols.relink.receive import ChannelReceiver
    from muxkit.protocols.relink.send import ChannelSender

RESUME: Final = frames.encode_general(frames.General.RESUME)
OUTCOMES_MOST: Final = 2**20
"""How many runs of equal answers to commits we keep for a peer that doesn't prove that it has read them.

If there are more, the peer doesn't answer our probes, and the link fails.
"""
# A receiver acknowledges without waiting for the timer when a fraction of the window was used since its last
# acknowledgement. The sender then learns in time that it may continue.
COUNTED_ACKS: Final = 4
"""At least this many acknowledgements for each window of messages."""
SIZED_ACKS: Final = 2
"""At least this many acknowledgements for each short window of bytes."""
EARLY_ACKS: Final = 1 / 2
"""The fraction of `ack_delay` for which acknowledgements wait for the timer in any case.

If the last acknowledgements were written earlier than that, the next ones are written together with the next message.
So a link that answers a message now and then needs no wake-up for acknowledgements alone. A link that answers thousands
of messages per second still writes only a few acknowledgements.
"""
METERED_PARTS: Final = 4
"""A sender recalculates its window each time the peer has consumed this fraction of a short window: 4 is a quarter."""
LONG_SHARE: Final = 0.75
"""When this share of the link's budget is used, no window may be longer than a short one."""
LARGE_LEAST: Final = frames.SMALL_MOST + 1
"""The smallest part in bytes that makes a message large: its sizes take 8 bytes each instead of 2."""


class Timer(Enum):
    """The deadlines of a connection."""

    ACKS = "acks"
    """When to write the `received` and `consumed` that wait for more of them."""
    KEEPALIVE = "keepalive"
    """When to ping because nothing has arrived for `Config.keepalive` seconds."""
    ANSWER = "answer"
    """When to give up the connection because nothing has arrived since the keepalive ping."""
    STALL = "stall"
    """When to check whether an incomplete packet has made progress."""


# `Enum.__hash__` is a Python function, and every read looks up timers in a dictionary. The default hash is faster.
Timer.__hash__ = object.__hash__  # type: ignore[method-assign]


class State:
    """The shared state of a link: its settings, its progress through the states above, and its two tables of channels.

    `Engine` owns the `State`. The halves of channels and the reader change it.
    """

    def __init__(self, config: Config, limits: Limits, observer: Observer | None, *, is_connector: bool) -> None:
        self.config: Config = config
        self.limits: Limits = limits
        self.observer: Observer | None = observer
        self.is_connector: bool = is_connector
        sizes = (config.connector_id_size, config.listener_id_size)
        transactions = (config.connector_transactions, config.listener_transactions)
        out, into = (0, 1) if is_connector else (1, 0)
        self.out_id_size: int = sizes[out]
        self.in_id_size: int = sizes[into]
        self.out_transactions: bool = transactions[out]
        self.in_transactions: bool = transactions[into]
        self.floor: int = min(limits.channel_floor, limits.channel_bytes)
        # How many bytes over the floors we accept before the peer has violated the limit. A peer with the same limits
        # stops sending once it exceeds the budget, so it exceeds the budget by at most one message, and by the messages
        # that `send_parts(overdraw=True)` admitted, which `Limits.outbox` bounds.
        extra = limits.message + limits.outbox + (16 + frames.PART_OVERHEAD) * config.parts + 128
        self.held_most: int = limits.connection_bytes + extra
        self.outcomes_most: int = OUTCOMES_MOST
        self.events: list[Event] = []
        """Events since the last call of `take_events`."""
        self.progress: int = 0
        """A counter that grows with every message, acknowledgement and end of a channel.

        If it hasn't changed during a connection, the connection did nothing for the application.
        """
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.has_new_deadline: bool = False
        """True if a command has set a deadline that the pump may not have seen yet."""
        self.now: float = 0.0
        """The time that was passed to the engine last."""
        self.over: bool = False
        """True once the link has finished or failed. Every further command raises."""
        self.epoch: int = 0
        """The epoch of the listener, which identifies its running instance; 0 without a link."""
        self.link_id: int = 0
        """The id of the link; 0 without a link."""
        self.is_shutting_down: bool = False
        self.probes: Probes = Probes()
        self.repeats: dict[int, int] = {}
        """For each channel, how many queued messages repeat messages of an earlier connection.

        Only an observer needs this number, so the dictionary stays empty without an observer.
        """
        self.ours: SendTable = SendTable(self)
        self.theirs: ReceiveTable = ReceiveTable(self)
        self.reset()

    def reset(self) -> None:
        """Forget everything that belongs to one link."""
        self.is_connected: bool = False
        self.resumes: bool = False
        """True if this connection continues a link that has had an earlier connection."""
        self.peer_resumed: bool = False
        """True if the peer's resume has arrived, or the connection doesn't resume a link."""
        self.told_resume: bool = False
        """True if our resume was written, or the connection doesn't resume a link."""
        self.shutdown_written: bool = False
        self.has_peer_shut_down: bool = False
        self.probes.outcomes = 0
        self.probes.reset()
        self.repeats.clear()
        self.ours.reset()
        self.theirs.reset()

    def report(self, event: Event) -> None:
        """Report an event that counts as progress for the application (see `progress`)."""
        self.progress += 1
        self.events.append(event)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self.events = self.events, []
        return events

    @property
    def is_resumed(self) -> bool:
        """True if there is a connection and, on a resumed link, the peer's resume has arrived."""
        return self.is_connected and self.peer_resumed

    @property
    def is_resuming(self) -> bool:
        """True if there is a connection and the peer's resume hasn't arrived."""
        return self.is_connected and not self.peer_resumed

    @property
    def owes_control(self) -> bool:
        """True if pings, pongs, acknowledgements or a resume are to be written."""
        theirs, probes = self.theirs, self.probes
        if probes.pongs or probes.pings or theirs.dirty or theirs.resume_left or theirs.unopened:
            return True
        return bool(probes.unproven) and probes.may_ask

    @property
    def has_unconfirmed_messages(self) -> bool:
        """True while an application, ours or the peer's, may still have to consume or answer a message of this link."""
        return bool(self.ours.retained or self.theirs.bytes or self.theirs.unanswered)

    # --- checks of commands

    def check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the link has ended")

    def check_number(self, channel: int) -> None:
        """Raise `LocalProtocolError` if the number doesn't fit in the ids of our channels."""
        if not 0 <= channel < 1 << 8 * self.out_id_size:
            raise LocalProtocolError(
                f"invalid channel {channel}: expected an id that fits into {self.out_id_size} bytes"
            )

    def check_parts(self, parts: Sequence[bytes]) -> None:
        """Raise `LocalProtocolError` if a message with these parts can never be sent."""
        most = self.config.parts
        if len(parts) > most:
            raise LocalProtocolError(f"too many parts: {len(parts)} against Config(parts={most})")
        size = sum(map(len, parts))
        if size > self.limits.message:
            raise LocalProtocolError(f"message too large: {size} bytes against Limits(message={self.limits.message})")

    def observe_state(self, channel: str, state: str) -> None:
        if self.observer is not None:
            self.observer.state(channel, state)


class SendTable:
    """The channels that we send on, by number, the budget that they share, and the senders that wait for room."""

    def __init__(self, state: State) -> None:
        self.state: State = state
        # Copies of settings and constants that are needed for each message.
        self.small: int = frames.message_cost((0,), state.out_id_size)
        """The cost of a small message without its payload."""
        self.floor: int = state.floor
        self.largest: int = state.limits.message
        self.window: int = state.config.window
        self.short_window: int = state.limits.short_window
        self.connection_bytes: int = state.limits.connection_bytes
        self.metered_bytes: int = max(1, self.short_window // METERED_PARTS)
        self.long_bytes: int = int(LONG_SHARE * self.connection_bytes)
        self.outbox: Outbox = Outbox()
        self.messages: int = 0
        """How many messages were queued so far. The counter continues when the link is replaced."""

    def reset(self) -> None:
        """Forget everything that belongs to one link."""
        self.live: dict[int, ChannelSender] = {}
        self.unannounced: dict[ChannelSender, None] = {}
        """Senders whose first message is still to be written on this connection."""
        self.watchers: dict[int, tuple[ChannelSender, int]] = {}
        """For each channel, the sender that waits for room in its window, and how many bytes it needs."""
        self.retained: int = 0
        """Bytes in all windows."""
        self.retained_over: int = 0
        """Bytes in all windows without each channel's first `floor` bytes. The link's budget limits this number."""
        self.budget: ReceiveBudget = ReceiveBudget(self.connection_bytes, self.floor, self.state.limits.channel_first)
        self.outbox.used = 0
        self.closing: int = 0
        """Number of channels in the state closing."""
        self.scheduler: Scheduler = Scheduler()

    @property
    def unanswered(self) -> int:
        """How many of our messages still occupy a window."""
        return sum(sender.outstanding for sender in self.live.values())

    def is_free_for(self, sender: ChannelSender) -> bool:
        """Return True if no earlier life of the sender's channel is live."""
        return self.live.get(sender.channel, sender) is sender

    def wake(self, channel: int) -> None:
        """Report `Writable` for the sender that waits for room in a channel, if there is room now."""
        waiting = self.watchers.get(channel)
        if waiting is not None and self.is_free_for(waiting[0]) and waiting[0].has_room_for(waiting[1]):
            del self.watchers[channel]
            self.state.events.append(Writable(waiting[0]))

    def freed(self, sender: ChannelSender, size: int, over: int) -> None:
        """Account for `size` bytes that left the sender's window, and wake senders that have room now.

        `over` of these bytes were above the floor, so they return to the link's budget.
        """
        before = self.retained_over
        self.retained -= size
        self.retained_over -= over
        if not self.watchers:
            return
        if any(self.retained_over <= bound < before for bound in (self.connection_bytes, self.long_bytes)):
            for watched in [*self.watchers]:
                self.wake(watched)
        else:
            self.wake(sender.channel)

    # --- lives

    def enter(self, sender: ChannelSender) -> None:
        """Open a channel with its first message."""
        sender.free = self.state.is_resumed
        self.live[sender.channel] = sender
        self.unannounced[sender] = None
        self.state.observe_state(f"out {sender.channel}", "open")

    def forget(self, sender: ChannelSender) -> None:
        """Remove a channel whose close is confirmed."""
        del self.live[sender.channel]
        self.unannounced.pop(sender, None)
        self.closing -= 1
        self.state.probes.forget(sender)
        self.state.observe_state(f"out {sender.channel}", "closed")
        self.wake(sender.channel)

    # --- connections

    def connect(self) -> None:
        self.scheduler = Scheduler()
        for sender in self.live.values():
            sender.connect()
            if sender.received < sender.first:
                self.unannounced[sender] = None
            sender.schedule()

    def disconnect(self) -> None:
        for sender in self.live.values():
            sender.disconnect()
        self.scheduler = Scheduler()
        self.budget.round_trip.gave_up()

    def resume(self) -> None:
        """Act on the end of the peer's resume: check the channels that it left out, and start to write.

        The peer leaves out a channel that it never received a message on, and a channel that is closed.
        """
        for sender in self.live.values():
            if sender.heard or (sender.received < sender.first and not sender.close_told):
                continue
            if not sender.close_told or sender.has_unanswered_commits:
                what = f"the resume left out channel {sender.channel}, where {sender.received} was received"
                raise RemoteProtocolError(what, rule="relink-R02")
        self.state.peer_resumed = True
        for sender in [*self.live.values()]:
            if sender.free:
                sender.schedule()
            elif sender.close_told and not sender.heard:
                # We wrote the close, so the peer had received a message on this channel before. The resume therefore
                # leaves the channel out because it is closed, and not because its messages were lost.
                sender.closed()
            else:
                sender.release_to_write()


class ReceiveTable:
    """The channels that we receive from, by number, the bytes that they hold, and the acknowledgements to write.

    Acknowledgements of the same channel are merged until they are written.
    """

    def __init__(self, state: State) -> None:
        self.state: State = state
        self.floor: int = state.floor
        # The cost of a small and of a large message with one part, without its payload.
        self.small: int = frames.message_cost((0,), state.in_id_size)
        self.large: int = frames.message_cost((LARGE_LEAST,), state.in_id_size) - LARGE_LEAST
        self.ack_count: int = max(1, state.config.window // COUNTED_ACKS)
        self.ack_bytes: int = max(1, state.limits.short_window // SIZED_ACKS)

    def reset(self) -> None:
        """Forget everything that belongs to one link."""
        self.live: dict[int, ChannelReceiver] = {}
        self.expected: dict[int, ChannelReceiver] = {}
        """Channels that the peer hasn't opened, but that the application wants to receive from."""
        self.bytes: int = 0
        """Bytes of the messages that the application hasn't consumed."""
        self.held_over: int = 0
        """The same without each channel's first `floor` bytes. The link's budget limits this number."""
        self.unanswered: int = 0
        """Number of channels with committed messages that the application hasn't answered."""
        self.connect()

    def connect(self) -> None:
        """Drop the acknowledgements that the last connection didn't write. The resume replaces them."""
        resumes = self.state.resumes
        self.dirty: deque[ChannelReceiver] = deque()
        """Receivers with acknowledgements to write now."""
        self.owing: list[ChannelReceiver] = []
        """Receivers whose acknowledgements wait for the timer."""
        self._early_from = 0.0  # from this time on, acknowledgements go with the next message
        self.unopened: dict[int, None] = {}
        """Channels that the peer closed although no message had opened them. `closed` is still to be written."""
        self.resuming: deque[ChannelReceiver] = deque()
        """Receivers whose part of our resume is still to be written."""
        self.resume_left: bool = resumes
        """True until our resume is written completely."""
        for receiver in self.live.values():
            receiver.connect()
        if resumes:
            self.resuming.extend(self.live.values())

    def disconnect(self) -> None:
        for receiver in [one for one in self.live.values() if one.done]:
            # Our next resume leaves the channel out. The peer has closed it, so the peer knows what that means.
            self.forget(receiver)

    def forget(self, receiver: ChannelReceiver) -> None:
        """Remove a channel that has ended."""
        del self.live[receiver.channel]
        self.state.probes.forget(receiver)
        self.state.observe_state(f"in {receiver.channel}", "closed")

    def receiver(self, channel: int) -> ChannelReceiver | None:
        """Return the receiver of a channel that is open or expected. Returns None if it is neither."""
        return self.live.get(channel) or self.expected.get(channel)

    # --- acknowledgements

    def owe(self, receiver: ChannelReceiver) -> None:
        """Let the acknowledgements of a channel wait for the timer.

        If both sides are shutting down, there is nothing worth waiting for, so the acknowledgements are due now.
        """
        state = self.state
        if state.is_shutting_down and state.has_peer_shut_down:
            self.make_due(receiver)
            return
        receiver.owing = True
        self.owing.append(receiver)
        if len(self.owing) == 1 and state.is_connected:
            state.deadlines.set(Timer.ACKS, state.now + state.config.ack_delay)

    def make_due(self, receiver: ChannelReceiver) -> None:
        receiver.due = True
        self.touch(receiver)

    def touch(self, receiver: ChannelReceiver) -> None:
        """Queue a receiver that has something to write."""
        if not receiver.dirty and self.state.is_connected:
            receiver.dirty = True
            self.dirty.append(receiver)

    def make_all_due(self) -> None:
        """Make all acknowledgements due that wait for the timer."""
        owing, self.owing = self.owing, []
        self._early_from = self.state.now + EARLY_ACKS * self.state.config.ack_delay
        for receiver in owing:
            receiver.owing = False
            self.make_due(receiver)

    def make_due_early(self) -> None:
        """Make the waiting acknowledgements due, because a message is about to be written. See `EARLY_ACKS`."""
        if self.owing and self.state.now >= self._early_from:
            self.make_all_due()
            self.state.deadlines.stop(Timer.ACKS)
            self.state.has_new_deadline = False

    @property
    def is_clear(self) -> bool:
        """True if no acknowledgement, answer or resume is to be written."""
        return not (self.dirty or self.owing or self.resume_left or self.unopened)

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Write the resume first, then answers and acknowledgements, up to about `limit` bytes in total."""
        written = self._write_resume(limit, out) if self.resume_left else 0
        if self.resume_left:
            return written
        while self.dirty and written < limit:
            receiver = self.dirty.popleft()
            receiver.dirty = False
            written += receiver.write_acks(out)
        if written < limit:
            for channel in self.unopened:
                packet = frames.encode_notice(frames.Ack.CLOSED, (channel,), self.state.in_id_size)
                out.append(packet)
                written += len(packet)
            self.unopened.clear()
        return written

    def _write_resume(self, limit: int, out: list[Buffer]) -> int:
        written = 0
        while self.resuming and written < limit:
            written += self.resuming.popleft().write_resumption(out)
        if not self.resuming:
            self.resume_left = False
            self.state.told_resume = True
            out.append(RESUME)
            written += len(RESUME)
        return written
