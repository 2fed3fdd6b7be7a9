"""The connection of a session, which joins its channels, its engine and its pump. All protocols share this code.

Applications use a session (`MuxSession`), which has only the public methods and delegates to a `MuxConnection`. The
pump passes the engine's events to the connection, and the halves of the channels ask it to write. Each protocol derives
its own `Connection` from this class, creates an engine and a pump, and overrides the steps in which it differs from
other protocols. A protocol inherits these steps:

    open      A task waits for a free slot under the limits (`SlotQueue`), and then the engine opens the channel.
    accept    When the peer opens a channel, the connection refuses it (because the session is closing, the backlog is
              full, or no task takes this kind of channel) or puts it into a backlog. It stays there until the
              application takes it, or until the peer cancels it.
    events    The connection passes each event of the engine to the half that the event names, or handles it itself.
    leave     The connection finishes all halves, waits until the peer has confirmed that, says goodbye and hangs up.
              All of that takes at most `linger` seconds.
    shut down The connection takes no new channels, lets the live channels end for up to `grace` seconds, and then
              aborts them.
    lose      The connection raises its error in every half, every ping and every task that waits to open a channel.

A message passes through these functions:

    a message out                              a message in
    MuxChannel.send                            Reading (waits on the link, and reads)
    SendHalf.send                              StreamPump.handle_bytes
    Sender.try_send (the engine's half)        Engine.receive_bytes (parses, applies, returns events)
    MuxConnection.request_write                MuxConnection.handle_events
    StreamPump.request_write                   ReceiveHalf.deliver (wakes the task that waits)
    Engine.buffers_to_send                     MuxChannel.receive, ReceiveHalf.receive
    Scheduler.pull, Sender.write (frames)
    NowaitLink.send_nowait

A task that waits in `receive` may read the link instead of the reader task (`muxkit.runtime.pumps.reading`). The path
from `StreamPump.handle_bytes` on is the same.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

import trio

from muxkit import _spans
from muxkit._info import SessionInfo
from muxkit._limits import Limits
from muxkit._observer import Facts, Observer, facts_of, frames_of, tell_limit
from muxkit._spans import ChannelSpan
from muxkit.core import Queued, Reason, counted, opening_refusal
from muxkit.core.events import (
    Cancelled,
    ChannelFailed,
    Confirmed,
    Failed,
    Finished,
    GoingAway,
    Halves,
    HungUp,
    LimitReached,
    MayOpen,
    Opened,
    Pong,
    Probed,
    Received,
    Refused,
    Silent,
    Stopped,
    Writable,
)
from muxkit.core.halves import Receiver, Sender
from muxkit.core.mux_engine import MuxEngine
from muxkit.runtime._errors import ChannelCancelled, ChannelStopped, Side
from muxkit.runtime._log_pace import may_log
from muxkit.runtime._session import Pings, Session, SessionStats, describe
from muxkit.runtime.channel import MuxChannel
from muxkit.runtime.halves.budget import ErrorMaker, OutboxBudget
from muxkit.runtime.halves.opening import Backlog, SlotQueue, Unclaimed
from muxkit.runtime.halves.owner import HalfOwner
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf
from muxkit.runtime.pumps.clock import Reminder
from muxkit.runtime.pumps.owner import PumpOwner
from muxkit.runtime.pumps.pump import Pump
from muxkit.runtime.pumps.reading import Reading
from muxkit.runtime.pumps.stream import StreamPump
from muxkit.runtime.pumps.turns import turns

MAX_REASON: Final = 4096  # maximum number of bytes of the peer's reason that an error contains
LEFT_BY_ERROR: Final = Reason("the other side left the session by an error", 500)
CLOSING: Final = Reason("no channel can be opened any more: the other side is closing the session", 503)
TOO_MANY_WAIT: Final = Reason("too many channels are waiting to be accepted", 503)
PEER_BROKE_A_RULE: Final = 400  # the code that the peer gets if the connection ends because the peer broke a rule
YIELD_CLOSINGS: Final = 16  # after this many closed channels, closing lets other tasks run

EngineT = TypeVar("EngineT", bound=MuxEngine)
ChannelT = TypeVar("ChannelT", bound=MuxChannel)

_log = logging.getLogger("muxkit")


class MuxConnection(PumpOwner[Any], HalfOwner, Generic[EngineT, ChannelT]):
    """Base class of the connections of all protocols. A subclass passes the engine to `__init__` and sets `pump`."""

    pump: Pump[Any]
    session: Session
    """The session that the application uses."""
    channel_type: type[ChannelT]
    """The class of two-way channels, which `new_channel` instantiates."""

    reason_of_error: ClassVar[Reason] = LEFT_BY_ERROR
    """The reason that the peer gets if the application leaves the session because of an exception."""
    refusal_while_closing: ClassVar[Reason] = CLOSING
    """The reason that the peer gets if it opens a channel while this side takes no new channels."""
    refusal_of_too_many: ClassVar[Reason] = TOO_MANY_WAIT
    """The reason that the peer gets if it opens a channel while the backlog is full."""

    def __init__(
        self,
        engine: EngineT,
        link: object,
        protocol: str,
        limits: Limits,
        observer: Observer | None,
        *,
        outbox: Queued | None = None,
    ) -> None:
        self.engine: EngineT = engine
        self.facts: Facts | None = facts_of(observer)
        self.observer: Observer | None = frames_of(observer)
        self.budget: OutboxBudget = OutboxBudget(
            sys.maxsize if outbox is None else limits.outbox, outbox, facts=self.facts
        )
        self.reminder: Reminder | None = self.budget.watchdog
        self.pings: Pings[Any] = Pings(self.facts)
        self.openers: SlotQueue = SlotQueue(self.free_slots)
        self.gone: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()
        """Tasks that wait until certain halves have ended. They wake up whenever any half ends."""
        self.reading: Reading | None = None
        self.is_holding: bool = False
        """True between `hold_writes` and `release_writes`."""
        self.is_draining: bool = False
        """True once this side takes no new channels."""
        self.messages_received: int = 0
        self._closings = 0  # number of closed channels since `yield_after_closing` last let other tasks run
        self.limits: Limits = limits
        self.open_spans: set[ChannelSpan] = set()
        """The open spans of channels. They end with the connection, even if nobody closes the channels."""
        self.info: SessionInfo = describe(link, protocol)
        self._backlogs: list[Backlog[Any]] = []
        self._unclaimed: Unclaimed = Unclaimed(self._backlogs, self.decline, peer=self.info.peer)
        self.incoming: Backlog[ChannelT] = self.new_backlog()
        """The two-way channels that the peer opened and the application hasn't taken."""

    def new_backlog(self, kind: str = "channels") -> Backlog[Any]:
        """Create a backlog for one kind of items that the peer opens. `kind` is the users' name for the items."""
        backlog: Backlog[Any] = Backlog(self.item_taken, self.engine.starts, kind=kind)
        self._backlogs.append(backlog)
        return backlog

    def start(self, nursery: trio.Nursery) -> None:
        """Start the session's background tasks, which end with its block."""
        if isinstance(self.pump, StreamPump):
            self.reading = self.pump.reading
        nursery.start_soon(self.pump.run)
        self._unclaimed.nursery = nursery

    # --- the pump

    def request_write(self) -> None:
        if not self.is_holding:
            self.pump.request_write()

    def request_write_soon(self) -> None:
        if not self.is_holding:
            self.pump.request_write_soon()

    def hold_writes(self) -> None:
        """Delay writes, so that the output of several commands is written together. The caller must not wait."""
        self.is_holding = True

    def release_writes(self) -> None:
        """Write the output of all commands since `hold_writes`."""
        self.is_holding = False
        self.request_write()

    def dispatch_events(self) -> None:
        self.pump.dispatch_events()

    @property
    def loss(self) -> ErrorMaker | None:
        return self.pump.loss if self.pump.is_lost else None

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None, told: Reason | None = None) -> None:
        """End the connection. The peer gets the reason `told` if the protocol or the link can transmit a reason."""
        farewell = self.engine.farewell(told) if told else b""
        self.pump.lose(reason, by=by, cause=cause, parting=[farewell] if farewell else (), farewell=told)

    def abandon(self) -> None:
        """End the connection without a reason."""
        self.lose("an error ended the session's block", by="local")

    # --- channels that this side opens

    async def wait_to_open(self) -> None:
        """Wait until this side may open a channel.

        The caller must open the channel before its next checkpoint, and then call `opened`. If no channel can be opened
        any more, this raises the error that `closed` returns.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            await self.openers.wait_for_slot()
            if (error := self.closed()) is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                raise error
        except BaseException:
            self.openers.wake_waiters()
            raise

    def opened(self) -> None:
        """Write the opening of a channel and wake the next waiting opener. Also call this if opening has failed."""
        self.request_write_soon()
        self.openers.wake_waiters()

    def free_slots(self) -> int:
        """Return the number of channels that may be opened now.

        If no channel can be opened any more, return a huge number, so that all waiting openers wake up and raise.
        """
        return self.engine.places if self.closed() is None else sys.maxsize

    def closed(self) -> Exception | None:
        """Return an error if no channel can be opened any more, else None."""
        if (loss := self.loss) is not None:
            return loss()
        if self.engine.peer_takes_no_channels:
            return ChannelStopped("no channel can be opened any more: the peer is closing the session")
        if self.is_draining:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the session")
        return None

    async def open_channel(self, opening: bytes) -> ChannelT:
        """Wait for a free slot, then open a two-way channel."""
        await self.wait_to_open()
        try:
            return self.new_channel(self.engine.open_channel(opening), opening)
        finally:
            self.opened()

    def new_channel(self, channel: Any, opening: bytes) -> ChannelT:  # noqa: ANN401 - see `Opened.channel`
        """Create the application's channel for a two-way channel of the engine."""
        return self.channel_type(self, SendHalf(self, channel.sender), ReceiveHalf(self, channel.receiver), opening)

    async def yield_after_closing(self) -> None:
        """Check for cancellation after a channel was closed. Every 16th call also lets other tasks run.

        A program that makes one call after the other closes a channel and opens the next one. If closing always let
        other tasks run, the end of the old channel and the opening of the new one would be written separately.
        """
        self._closings = (self._closings + 1) % YIELD_CLOSINGS
        if self._closings:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()

    # --- channels that the peer opens

    def refusal_of(self, backlog: Backlog[Any], opening: bytes) -> Reason | None:
        """Return the reason for refusing a channel that the peer has just opened, or None if the backlog takes it."""
        if self.is_draining:
            return self.refusal_while_closing
        limit = self.full_limit()
        if limit is not None:
            if self.facts is not None:
                self.facts.limit(limit)
            return self.refusal_of_too_many
        refusal = None if backlog.is_claimed else self._unclaimed.refusal(backlog)
        if refusal is None and (refusal := opening_refusal(opening, self.limits.headers)) is not None:
            self.headers_refused()
        return refusal

    def headers_refused(self) -> None:
        """Count a channel that is refused for its headers."""
        if self.facts is not None:
            self.facts.limit("headers")

    def full_limit(self) -> str | None:
        """Return the name of the limit that the waiting channels have reached, or None while there is room."""
        return "backlog" if sum(map(len, self._backlogs)) >= self.limits.backlog else None

    def offer(self, backlog: Backlog[Any], item: object, key: object = None, *, is_complete: bool = True) -> None:
        """Put a channel that the peer opened into a backlog. The arguments are those of `Backlog.put`."""
        backlog.put(item, key, is_complete=is_complete)
        if not backlog.is_claimed:
            self._unclaimed.arrived()

    def item_taken(self, item: Any) -> None:  # noqa: ANN401 - as in `took`
        """Called when the application takes an item from a backlog. The span of a channel begins here."""
        self.took(item)
        if _spans.maker is not None and isinstance(item, MuxChannel):
            item._span = _spans.maker.taken(item)
            if item._span is not None:
                item._span.join(self.open_spans)
                item._observe_span(item._span.ids())

    def took(self, item: Any) -> None:  # noqa: ANN401 - what a protocol puts into its backlogs
        """Called when the application takes an item from a backlog. Protocols return the credit of the opening here."""

    def decline(self, item: Any, reason: Reason) -> None:  # noqa: ANN401 - as above
        """Refuse an item that has waited in a backlog. Protocols whose items aren't two-way channels override this."""
        item.sending.abort(reason.text, code=reason.code)
        item.receiving.close()

    def drop_waiting(self, key: object) -> Any:  # noqa: ANN401 - as above
        """Remove an item from its backlog, because the peer has cancelled it. Return the item, or None if not found.

        No handler has started for the item, so it doesn't count as a cancelled channel of the peer (`StartPace`).
        """
        for backlog in self._backlogs:
            if (item := backlog.drop(key)) is not None:
                self.engine.starts.spared()
                return item
        return None

    def channel_aborted(self, channel: MuxChannel) -> None:
        """Called when the application aborts a channel. Protocols count it against the peer if the peer opened it."""

    def take_only(self, kinds: Sequence[str]) -> None:
        """Refuse all other kinds of items that the peer opens, unless a task of the application takes them."""
        self._unclaimed.take_only(kinds)

    def stop_opening(self, error: ErrorMaker | None) -> None:
        """Stop taking and opening channels. Iterators over new channels end, and waiting openers raise.

        If `error` isn't None, the iterators raise it instead of ending normally.
        """
        self.is_draining = True
        for backlog in self._backlogs:
            backlog.ended(error)
        self.openers.wake_waiters()

    # --- events

    def handle_written(self) -> None:
        if self.budget.line:
            self.budget.wake_waiting()

    def queued_bytes(self) -> int:
        return self.engine.outbox

    def handle_events(self, events: Sequence[Any]) -> None:
        for event in events:
            if type(event) is Received:
                half = event.receiver.owner
                items = event.items
                self.messages_received += len(items)
                if not isinstance(half, ReceiveHalf):
                    half = self.receiver_half(event.receiver)
                if half is None:
                    event.receiver.consumed(items, sum(map(len, items)))
                elif len(items) == 1:
                    half.deliver(items[0])
                else:
                    half.deliver_all(items)
            else:
                self.handle_event(event)

    def receiver_half(self, receiver: Receiver[Any]) -> ReceiveHalf[Any] | None:
        """Return a half for a receiver that has none, or None to drop the messages.

        A protocol overrides this if the messages of a channel can arrive before the message that contains the channel.
        """
        return None

    def handle_event(self, event: object) -> None:
        """Handle an event other than `Received`."""
        # The patterns don't match fields. For each positional field, CPython would create a string and put it into the
        # attribute cache, where it would evict an entry that the next call needs.
        half: object
        match event:
            case Writable():
                if isinstance(half := event.sender.owner, SendHalf):
                    half.window_changed()
            case Opened():
                self.handle_opened(event)
            case Finished():
                self.handle_finished(event.receiver)
            case Cancelled():
                self.handle_cancelled(event)
            case Stopped():
                if isinstance(half := event.sender.owner, SendHalf):
                    # The error refers to the other half and not to the channel, to avoid a reference cycle.
                    beside = None if half.channel is None else half.channel.receiving
                    half.stopped(partial(stopped_by_peer, beside, event.payload[:MAX_REASON]))
                if event.breaks_off:
                    self.drop_broken_off(event.sender)
                self.half_ended(event.sender)
            case Confirmed():
                if isinstance(half := event.half.owner, SendHalf):
                    half.confirmed()
                self.half_ended(event.half)
            case Refused():
                self.handle_refused(event.half)
            case Pong():
                self.pings.answered(event.key)
            case Probed():
                self.pings.sent(event.key)
            case GoingAway():
                self.handle_going_away(event)
            case MayOpen():
                self.openers.wake_waiters()
            case ChannelFailed():
                self.handle_channel_failed(event)
            case LimitReached():
                if self.facts is not None:
                    self.facts.limit(event.limit)
            case HungUp():
                self.handle_hung_up(event)
            case Silent():
                self.lose(f"no data from the peer for {event.seconds:.0f} s", by="network")
            case Failed():
                error = event.error
                what = f"{error}{self.pump.foreign}"
                if may_log("peers that broke a rule"):
                    # log: The peer, or something that is no peer of this protocol, sent what the rules forbid or more
                    # than a limit allows; the text names the rule, the byte and the field of `Limits`.
                    _log.warning("%s broke a rule, the session was closed: %s", self.info.peer or "a peer", what)
                told = Reason(str(error), PEER_BROKE_A_RULE)
                self.lose(str(error), by="peer", cause=error, told=told)
            case _:
                self.handle_own_event(event)

    def handle_own_event(self, event: object) -> None:
        """Handle an event that only one protocol has. Protocols with such events override this."""
        raise AssertionError(f"an event that no session handles: {event!r}")

    def handle_finished(self, receiver: Receiver[Any]) -> None:
        """End a receiving half normally, because the peer has finished sending on it."""
        if isinstance(half := receiver.owner, ReceiveHalf):
            half.ended(trio.EndOfChannel)
        self.half_ended(receiver)

    def handle_cancelled(self, event: Cancelled) -> None:
        """End a receiving half with an error, because the peer has cancelled sending on it."""
        if isinstance(half := event.receiver.owner, ReceiveHalf):
            half.reason = event.payload[:MAX_REASON]  # truncated, because the half keeps it in memory
            half.ended(partial(cancelled_by_peer, half.reason))
        if event.breaks_off:  # only after `ended`, or dropping the channel would send a stop for an ended half
            self.drop_broken_off(event.receiver)
        self.half_ended(event.receiver)

    def handle_refused(self, end: Sender | Receiver[Any]) -> None:
        """End a half that the peer has refused, because the peer takes no new channels."""
        half = end.owner
        if isinstance(half, SendHalf):
            half.stopped(refused_by_peer)
        elif isinstance(half, ReceiveHalf):
            half.ended(refused_by_peer)
        self.half_ended(end)

    def handle_opened(self, event: Opened) -> None:
        """Refuse a channel that the peer has opened, or put it into a backlog.

        Protocols with several kinds of channels override this to choose the backlog.
        """
        if (reason := self.refusal_of(self.incoming, event.opening)) is not None:
            self.engine.refuse(event.channel, reason)
        else:
            self.offer(self.incoming, self.new_channel(event.channel, event.opening))

    def handle_going_away(self, event: GoingAway) -> None:
        """Stop opening and accepting channels, because the peer is closing the session.

        If the event has a reason, the peer ends the connection immediately.
        """
        if event.reason:
            self.pump.told(event.reason)
            self.lose("the peer ended the session", by="peer")
            return
        for backlog in self._backlogs:
            backlog.ended()
        self.openers.wake_waiters()

    def handle_channel_failed(self, event: ChannelFailed) -> None:
        """End the halves of a channel on which the peer has broken a rule. The other channels go on."""
        tell_limit(self.facts, event.error)
        reason = str(event.error).encode()
        if (receiver := event.channel.receiver) is not None:
            self.handle_event(Cancelled(receiver, reason))
        if (sender := event.channel.sender) is not None:
            self.handle_event(Stopped(sender, reason))

    def handle_hung_up(self, event: HungUp) -> None:
        """End the connection, because the peer has ended its direction of it."""
        live = counted(self.live_channels, "channel", were=True)
        what = "" if event.is_clean else f" while {live} open" if self.live_channels else " in mid-message"
        self.pump.lose(f"the peer hung up{what}", by="peer")

    def drop_broken_off(self, half: Sender | Receiver[Any]) -> None:
        """Remove a channel that the peer has cancelled from its backlog, if the application hasn't taken it yet.

        A two-way channel is its own key in the backlog. The key of any other channel is the engine's half.
        """
        owner = half.owner
        channel = owner.channel if isinstance(owner, (SendHalf, ReceiveHalf)) else None
        if (item := self.drop_waiting(half if channel is None else channel)) is not None:
            item.receiving.close()

    def half_ended(self, half: Sender | Receiver[Any]) -> None:
        """Forget a half that has ended, and wake tasks that wait for its slot, for room in the outbox, or a pong."""
        owner = half.owner
        # Break the reference cycles, so that the objects don't stay in memory until the next garbage collection.
        half.owner = None
        if isinstance(owner, (SendHalf, ReceiveHalf)):
            owner.channel = None
        self.budget.wake_waiting()  # the bytes that were queued on the half don't count any more
        if half in self.pings:
            self.pings.ended(ended_before_the_pong, half)
        if self.gone:
            self.gone.unpark_all()
        self.openers.wake_waiters()

    def handle_lost(self) -> None:
        loss = self.pump.loss
        with turns().spreading():
            for half in [*self.live_halves()]:
                channel = half.channel
                if channel is not None and channel._span is not None:
                    channel._span.failed(loss())
                if isinstance(half, SendHalf):
                    half.lost(loss)
                else:
                    half.ended(loss)
        self.end_spans()
        self.pings.ended(loss)
        self.stop_opening(None if self.ends_in_order() else loss)
        self.gone.unpark_all()

    def keep_span(self, span: ChannelSpan) -> None:
        """Keep the span of a channel that this side has just opened, and end it with the connection at the latest."""
        span.join(self.open_spans)
        if (loss := self.loss) is not None:  # lost while the task that opens the channel was waking up
            span.failed(loss())
            span.end()

    def end_spans(self) -> None:
        """End the spans of all channels, including channels that have ended before and that nobody has closed."""
        for span in [*self.open_spans]:
            span.end()

    def ends_in_order(self) -> bool:
        """Return True if iterators over new channels should end normally, although the connection is lost."""
        return False

    def taken_channels(self) -> Sequence[ChannelT]:
        """Return the live channels that the application has opened or has taken from a backlog."""
        live: dict[Any, None] = dict.fromkeys(half.channel for half in self.live_halves() if half.channel is not None)
        return [channel for channel in live if not any(channel in backlog for backlog in self._backlogs)]

    # --- closing the session

    @abstractmethod
    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        """Iterate over the live halves in the order in which they must be closed: sending halves come first."""

    def halves_of(self, channels: Sequence[Halves]) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        """Iterate over the halves of these channels in the order of `live_halves`."""
        for half in [*(each.sender for each in channels), *(each.receiver for each in channels)]:
            if half is not None and isinstance(half.owner, SendHalf | ReceiveHalf):
                yield half.owner

    async def leave(self, linger: float) -> None:
        """Close all channels, wait until the peer has confirmed that, say goodbye and hang up.

        All of that takes at most `linger` seconds. Raises `LinkLost` if the peer may not have received every message.
        Also raises the loss of the connection if the peer has broken a rule or has refused this side (for example with
        401), because the application may not have made another call that raised the error.
        """
        pump = self.pump
        pump.phase = "leave"
        told = [half for half in self.live_halves() if isinstance(half, SendHalf) and half.sender.has_sent]
        with trio.move_on_after(linger) as scope:
            self.close_all()
            await self.wait_until_heard(told)
            await pump.flushed()
            await self.say_goodbye()
            await pump.hang_up()
        if scope.cancelled_caught:
            self.lose(
                f"the peer didn't close the session within {linger} s",
                by="peer",
                told=self.reason_for_late_leaving(linger),
            )
        if pump.is_violated or pump.is_refusal or any(half.is_unheard for half in told):
            raise pump.loss()

    async def wait_until_heard(self, told: Sequence[SendHalf]) -> None:
        """Wait until the peer has confirmed the ends of all halves that weren't aborted."""
        while not self.pump.is_lost and self.awaits_confirmation():
            await self.gone.park()

    def awaits_confirmation(self) -> bool:
        """Return True while there is a live half that wasn't aborted. This usually checks only the first half."""
        return any(not (isinstance(half, SendHalf) and half.was_given_up) for half in self.live_halves())

    def reason_for_late_leaving(self, linger: float) -> Reason | None:
        """Return the reason that the peer gets if closing takes longer than `linger`. Most protocols send none."""
        return None

    async def say_goodbye(self) -> None:
        """Notify the peer that this side leaves in order, if the protocol has a frame for that. Most have none."""

    def close_all(self) -> None:
        """Take no new channels, finish all sending halves and close all receiving halves."""
        if self.pump.is_lost:
            return
        self.stop_opening(None)
        for half in [*self.live_halves()]:
            half.close()
        self.openers.wake_waiters()  # some protocols open channels on a half, which is closed now
        self.request_write()

    def abort_all(self) -> None:
        """Abort every live channel."""
        for half in [*self.live_halves()]:
            if isinstance(half, SendHalf):
                half.abort()
            else:
                half.close()
        self.request_write()

    async def shutdown(self, *, grace: float) -> None:
        """See `MuxSession.shutdown`."""
        self.budget.thread.check()
        await trio.lowlevel.checkpoint()
        if not self.pump.is_lost:
            self.stop_opening(None)
            self.announce_shutdown()
        with trio.move_on_after(grace):
            while self.live_channels and not self.pump.is_lost:
                await self.gone.park()
        if not self.pump.is_lost:
            self.abort_all()

    def announce_shutdown(self) -> None:
        """Notify the peer that this side takes no more channels, if the protocol has a frame for that."""
        self.engine.go_away(Reason())
        self.request_write()

    # --- pings and statistics

    async def ping(self) -> float:
        """Ping the connection as a whole, wait for the answer, and return the round-trip time in seconds."""
        return await self.ping_about(None)

    async def ping_about(self, key: object) -> float:
        """Send a ping, wait for the answer, and return the round-trip time in seconds.

        In protocols that have pings for a single half, `key` may be a half.
        """
        self.budget.thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        if (loss := self.loss) is not None:
            await trio.lowlevel.checkpoint()
            raise loss()
        self.engine.ping(key)
        ping = self.pings.sent(key)
        self.request_write()
        return await ping.wait()

    @property
    def live_channels(self) -> int:
        """Number of live channels, whichever side opened them. Channels that the session itself uses don't count."""
        return self.engine.channels

    def stats(self) -> SessionStats:
        """Return counters since the beginning of the session, and current gauges."""
        return SessionStats(
            bytes_received=self.engine.bytes_received,
            bytes_sent=self.pump.bytes_sent,
            messages_received=self.messages_received,
            messages_sent=self.engine.messages_sent,
            channels=self.live_channels,
            queued=self.engine.outbox + self.pump.unsent,
            round_trip=self.pings.round_trip,
        )

    def state_text(self) -> str:
        """Return a description of the connection's state for the `repr` of its session."""
        return "lost" if self.pump.is_lost else counted(self.live_channels, "channel")


# --- the errors that halves raise


def cancelled_by_peer(reason: bytes) -> Exception:
    """Return the error for a channel on which the peer has cancelled sending."""
    return ChannelCancelled("the peer cancelled this channel", payload=reason)


def stopped_by_peer(beside: ReceiveHalf[Any] | None, payload: bytes) -> Exception:
    """Return the error for a channel on which the peer has stopped receiving.

    If the peer has aborted the whole channel, it may have sent the reason on the receiving half `beside` only. That
    half may end later than the sending half, because its end waits for earlier messages. So the reason is read when the
    error is raised.
    """
    told = payload or (b"" if beside is None else beside.reason)
    return ChannelStopped("the peer stopped receiving on this channel", payload=told)


def refused_by_peer() -> Exception:
    """Return the error for a channel that the peer has refused, because the peer is closing the session."""
    return ChannelStopped("no channel can be opened any more: the peer is closing the session")


def ended_before_the_pong() -> Exception:
    """Return the error for a ping whose channel ended before the answer arrived."""
    return ChannelStopped("the channel ended before the answer to the ping arrived")
