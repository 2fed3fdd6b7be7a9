"""The state of a link that its channels and its connections share: the theory of operation of Relink.

A link and its connections
==========================

A link outlives its connections. The engine has one `State` for the whole life of the link, and the link is:

    ABSENT     there is no connection; messages may be queued        `connection_made`           -> RESUMING, OPEN
    RESUMING   both sides say what they have (`resume`)              the peer's resume came      -> OPEN, ABSENT, OVER
    OPEN       messages flow                                         `connection_lost`           -> ABSENT, OVER
    OVER       both have shut down, or the peer broke a rule         (final)

The handshake, which is a small engine of its own (`handshake`), tells on which link a connection goes on. On the
first connection of a link there is nothing to resume, so it is OPEN at once. If the listener names another link than
ours, everything about ours is gone (`LinkReplaced`): the tables are emptied, and the state begins anew.

A resume is a list of all channels of the peer, with what we have received, consumed and answered of each. No message
may go out on a channel before the peer has spoken of it (`ChannelSender.free`), because only then we know what has
arrived. A channel that the peer leaves out is one of which it never had a message, or one that is closed.

Channels
========

The wire knows no opening: a channel begins with its first message. The channels of the two sides are apart from each
other, and each has one half at each end. What we send on is a `ChannelSender` in `SendTable`:

    new        not in the table; nothing was sent                    the first message           -> open
    open       messages go out, as far as the windows allow          `close`                     -> closing
    closing    everything is written, then the close                 `closed` came               -> over
    over       not in the table; the number may be used anew         (final)

A close goes out only when the peer is known to have had a message of this life of the channel, which an
acknowledgement or the pong of a probe shows (`probes`). Otherwise the silence of its next resume could mean two things.

What we receive from is a `ChannelReceiver` in `ReceiveTable`:

    expected   not in the table; the application waits for it        the first message           -> open
    open       messages come                                         the peer's close came       -> ended
    ended      the application has not consumed everything           all is consumed, answered   -> done
    done       the peer is to be told `closed`                       that is written             -> over

Under transactions a message waits in `ChannelReceiver.held` until its sender has decided: a commit gives it to the
application, whose answer the peer must get exactly once. So an answer is kept until a pong proves that the peer has
read it, and a channel that has such answers is not over yet.

Invariants
==========

- A message stays in its window from `send_parts` until the peer's application has consumed or answered it. The window
  is bounded in messages (`Config.window`) and in bytes (`Limits.short_window`, on a long path up to
  `Limits.channel_bytes`).
- All windows together are bounded by `Limits.connection_bytes`, but each channel's first bytes up to `floor` are free.
  So a channel that nobody reads cannot stop the others. The sum over the floors doesn't depend on the order in which
  messages come, so both sides count the same.
- A packet is checked as a whole before any of it is applied. An error changes nothing.
- What we owe to the peer is merged by channel (acknowledgements), or bounded (pongs, closes of unknown channels), so a
  peer that doesn't read costs a bounded amount of memory.
- Before our resume nothing but pings and pongs goes out; everything that the last connection owed is covered by it.
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
OUTCOMES_MOST: Final = 2**20  # answers that a peer may leave without a sign that it has read them
COUNTED_ACKS: Final = 4  # acknowledgements for each window of messages, at least
SIZED_ACKS: Final = 2  # the same for each short window of bytes
METERED_PARTS: Final = 4  # of a short window, after each of which the size of the window is looked at
LONG_SHARE: Final = 0.75  # of the link's budget; above it no window is longer than a short one
LARGE_LEAST: Final = frames.SMALL_MOST + 1  # bytes of a part whose size takes eight bytes


class Timer(Enum):
    """The deadlines of a connection."""

    ACKS = "acks"
    """When to tell what was received and consumed."""
    KEEPALIVE = "keepalive"
    """When to ping because nothing came for a while."""
    ANSWER = "answer"
    """When to give up on a connection that is silent after that ping."""
    STALL = "stall"
    """When to look whether an unfinished packet made progress."""


# The hash of an enum is a call, and these are looked up with each read.
Timer.__hash__ = object.__hash__  # type: ignore[method-assign]


class State:
    """The settings and phases of a link, its events, timers and pings, and the channels of both sides."""

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
        # A peer with the same limits stops when it is over them, so by one message more at most, and by those that
        # its outbox had admitted.
        extra = limits.message + limits.outbox + (16 + frames.PART_OVERHEAD) * config.parts + 128
        self.held_most: int = limits.connection_bytes + extra
        self.outcomes_most: int = OUTCOMES_MOST
        self.events: list[Event] = []
        """What happened since the events were taken the last time."""
        self.progress: int = 0
        """Grows with everything that brings the application's work forward: messages, acknowledgements, ends."""
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.has_new_deadline: bool = False
        """True if a command has set a deadline, of which the pump's clock may not know."""
        self.now: float = 0.0
        """The time of the last call that told it."""
        self.over: bool = False
        """True once the link has finished or failed. Then each command raises."""
        self.epoch: int = 0
        """The listener's epoch, to be sent with the next request; 0 before there is a link."""
        self.link_id: int = 0
        """The id of the link; 0 before there is one."""
        self.is_shutting_down: bool = False
        self.probes: Probes = Probes()
        self.repeats: dict[int, int] = {}
        """Messages by channel that are to be written again, for the observer; empty without one."""
        self.ours: SendTable = SendTable(self)
        self.theirs: ReceiveTable = ReceiveTable(self)
        self.reset()

    def reset(self) -> None:
        """Forget everything that belongs to one link."""
        self.is_connected: bool = False
        self.resumes: bool = False  # the connection goes on with a link that had one
        self.peer_resumed: bool = False  # the peer has told what it has, or need not
        self.told_resume: bool = False  # and so have we
        self.shutdown_written: bool = False
        self.has_peer_shut_down: bool = False
        self.probes.outcomes = 0
        self.probes.reset()
        self.repeats.clear()
        self.ours.reset()
        self.theirs.reset()

    def report(self, event: Event) -> None:
        """Report something that brings the application's work forward."""
        self.progress += 1
        self.events.append(event)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self.events = self.events, []
        return events

    @property
    def is_resumed(self) -> bool:
        """True if there is a connection and, on a resumed link, the peer's resume has come."""
        return self.is_connected and self.peer_resumed

    @property
    def is_resuming(self) -> bool:
        """True if there is a connection and the peer's resume has not come."""
        return self.is_connected and not self.peer_resumed

    @property
    def owes_control(self) -> bool:
        """True if pings, pongs, acknowledgements or a resume wait to be written."""
        theirs, probes = self.theirs, self.probes
        if probes.pongs or probes.pings or theirs.dirty or theirs.resume_left or theirs.unopened:
            return True
        return bool(probes.unproven) and probes.may_ask

    @property
    def has_unconfirmed_messages(self) -> bool:
        """True while one of the two applications may still have to process a message of this link."""
        return bool(self.ours.retained or self.theirs.bytes or self.theirs.unanswered)

    # --- checks of commands

    def check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the link is over")

    def check_number(self, channel: int) -> None:
        """Raise `LocalProtocolError` if this cannot be the number of a channel of ours."""
        if not 0 <= channel < 1 << 8 * self.out_id_size:
            raise LocalProtocolError(f"channel {channel} does not fit an id of {self.out_id_size} bytes")

    def check_parts(self, parts: Sequence[bytes]) -> None:
        """Raise `LocalProtocolError` if a message with these parts can never be sent."""
        most = self.config.parts
        if len(parts) > most:
            raise LocalProtocolError(f"{len(parts)} parts against Config(parts={most})")
        size = sum(map(len, parts))
        if size > self.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self.limits.message})")

    def observe_state(self, channel: str, state: str) -> None:
        if self.observer is not None:
            self.observer.state(channel, state)


class SendTable:
    """Our channels by number, the budget that they share, and who waits for room."""

    def __init__(self, state: State) -> None:
        self.state: State = state
        # Copies of settings, which are looked up for each message.
        self.small: int = frames.message_cost((0,), state.out_id_size)  # cost of a small message without payload
        self.floor: int = state.floor
        self.largest: int = state.limits.message
        self.window: int = state.config.window
        self.short_window: int = state.limits.short_window
        self.connection_bytes: int = state.limits.connection_bytes
        self.metered_bytes: int = max(1, self.short_window // METERED_PARTS)
        self.long_bytes: int = int(LONG_SHARE * self.connection_bytes)
        self.outbox: Outbox = Outbox()
        self.messages: int = 0
        """How many messages were queued, on all links so far."""

    def reset(self) -> None:
        """Forget everything that belongs to one link."""
        self.live: dict[int, ChannelSender] = {}
        self.unannounced: dict[ChannelSender, None] = {}  # the peer has none of their messages, as far as we know
        self.watchers: dict[int, tuple[ChannelSender, int]] = {}  # who waits for room, and for how much
        self.retained: int = 0  # bytes in all windows
        self.retained_over: int = 0  # of them, over the floors
        self.budget: ReceiveBudget = ReceiveBudget(self.connection_bytes, self.floor, self.state.limits.channel_first)
        self.outbox.used = 0
        self.closing: int = 0  # channels that are to be closed
        self.scheduler: Scheduler = Scheduler()

    @property
    def unanswered(self) -> int:
        """Messages of ours that are still in a window."""
        return sum(sender.outstanding for sender in self.live.values())

    def is_free_for(self, sender: ChannelSender) -> bool:
        """Return True if no earlier life of the sender's channel is live."""
        return self.live.get(sender.channel, sender) is sender

    def wake(self, channel: int) -> None:
        """Report `Writable` to the sender that waits for room in a channel, if there is room."""
        waiting = self.watchers.get(channel)
        if waiting is not None and self.is_free_for(waiting[0]) and waiting[0].has_room_for(waiting[1]):
            del self.watchers[channel]
            self.state.events.append(Writable(waiting[0]))

    def freed(self, sender: ChannelSender, size: int, over: int) -> None:
        """Return bytes to the budget, `over` of them from above the floor, and wake who waits for room."""
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
        """Finish the peer's resume. A channel that it left out is unknown to the peer, or closed there."""
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
                # A close goes out only when the peer is known to have had a message: it is over, and not lost.
                sender.closed()
            else:
                sender.release_to_write()


class ReceiveTable:
    """The peer's channels by number, the bytes that they hold, and the acknowledgements to be written.

    Acknowledgements are merged until they are written.
    """

    def __init__(self, state: State) -> None:
        self.state: State = state
        self.floor: int = state.floor
        # What messages of one part cost without their payload.
        self.small: int = frames.message_cost((0,), state.in_id_size)
        self.large: int = frames.message_cost((LARGE_LEAST,), state.in_id_size) - LARGE_LEAST
        self.ack_count: int = max(1, state.config.window // COUNTED_ACKS)
        self.ack_bytes: int = max(1, state.limits.short_window // SIZED_ACKS)

    def reset(self) -> None:
        """Forget everything that belongs to one link."""
        self.live: dict[int, ChannelReceiver] = {}
        self.expected: dict[int, ChannelReceiver] = {}
        """Channels that are not open, and that the application wants to receive from."""
        self.bytes: int = 0  # that the application has not consumed
        self.held_over: int = 0  # of them, over the floors
        self.unanswered: int = 0  # channels with commits that the application has not answered
        self.connect()

    def connect(self) -> None:
        """Drop what the last connection owed. The resume covers it."""
        resumes = self.state.resumes
        self.dirty: deque[ChannelReceiver] = deque()  # in line to write acknowledgements
        self.owing: list[ChannelReceiver] = []  # whose acknowledgements wait for the timer
        self.unopened: dict[int, None] = {}  # closed by the peer without having been opened, and not yet confirmed
        self.resuming: deque[ChannelReceiver] = deque()
        self.resume_left: bool = resumes
        for receiver in self.live.values():
            receiver.connect()
        if resumes:
            self.resuming.extend(self.live.values())

    def disconnect(self) -> None:
        for receiver in [one for one in self.live.values() if one.done]:
            self.forget(receiver)  # the peer closed it, and learns from our resume that it is over

    def forget(self, receiver: ChannelReceiver) -> None:
        """Remove a channel that is over."""
        del self.live[receiver.channel]
        self.state.probes.forget(receiver)
        self.state.observe_state(f"in {receiver.channel}", "closed")

    def receiver(self, channel: int) -> ChannelReceiver | None:
        """Return the half that this channel has, or will have when it is opened; None if nobody expects that."""
        return self.live.get(channel) or self.expected.get(channel)

    # --- acknowledgements

    def owe(self, receiver: ChannelReceiver) -> None:
        """Let the acknowledgements of a channel wait for the timer, unless both sides are shutting down."""
        state = self.state
        if state.is_shutting_down and state.has_peer_shut_down:
            self.make_due(receiver)
            return
        receiver.owing = True
        self.owing.append(receiver)
        if len(self.owing) == 1 and state.is_connected:
            state.deadlines.set(Timer.ACKS, state.now + state.config.ack_delay)
            state.has_new_deadline = True

    def make_due(self, receiver: ChannelReceiver) -> None:
        receiver.due = True
        self.touch(receiver)

    def touch(self, receiver: ChannelReceiver) -> None:
        """Put a channel in line to write acknowledgements."""
        if not receiver.dirty and self.state.is_connected:
            receiver.dirty = True
            self.dirty.append(receiver)

    def make_all_due(self) -> None:
        """Make all waiting acknowledgements due."""
        owing, self.owing = self.owing, []
        for receiver in owing:
            receiver.owing = False
            self.make_due(receiver)

    @property
    def is_clear(self) -> bool:
        """True if no acknowledgement, answer or resume waits to be written."""
        return not (self.dirty or self.owing or self.resume_left or self.unopened)

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Write what is owed, about `limit` bytes at most. The resume comes before all else."""
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
