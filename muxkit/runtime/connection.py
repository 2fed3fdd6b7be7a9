"""The machinery of a session: everything between its channels, its engine and its pump. All protocols share it.

Applications hold a session (`MuxSession`), which shows only what they call, and below it stands one `MuxConnection`.
The pump reports to it what happens on the link, and the halves of the channels ask it to write. A protocol derives its
own `Connection` from it, makes an engine and a pump, and adds what only its document says. This is what it inherits:

    open      a task waits for a free place under the limits (`SlotQueue`), then the engine opens the channel
    accept    what the peer opens is refused (the session drains, the backlog is full, nobody takes its kind), or waits
              in a backlog until the application takes it, or is dropped because the peer breaks it off before that
    events    each event of the engine goes to the half that it names, or to a method of the session
    leave     finish everything, wait until the peer has heard it, say goodbye, hang up, all within `linger`
    shut down take no new channels, let the live ones end for up to `grace` seconds, then abort them
    lose      every half, every ping and every task that waits to open hears why the connection is over

    a message out                              a message in
    MuxChannel.send                            Reading (waits on the link, and reads)
    SendHalf.send                              StreamPump.handle_bytes
    Sender.try_send (the engine's half)        Engine.receive_bytes (parses, applies, returns events)
    MuxConnection.request_write                MuxConnection.handle_events
    StreamPump.request_write                   ReceiveHalf.deliver (wakes the task that waits)
    Engine.buffers_to_send                     MuxChannel.receive, ReceiveHalf.receive
    Scheduler.pull, Sender.write (frames)
    NowaitLink.send_nowait

A task that waits in `receive` may read in the place of the reader's task (`muxkit.runtime.pumps.reading`); the way from
there on is the same.

Where protocols differ in a step, the step is one method, which a protocol overrides.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

import trio

from muxkit._info import SessionInfo
from muxkit._limits import Limits
from muxkit._observer import Facts, Observer, facts_of, frames_of, tell_limit
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

MAX_REASON: Final = 4096  # bytes of the peer's reason that are kept for the errors that hold it
LEFT_BY_ERROR: Final = Reason("the other side left the session by an error", 500)
CLOSING: Final = Reason("no channel can be opened any more: the other side is closing the session", 503)
TOO_MANY_WAIT: Final = Reason("too many channels wait here", 503)
PEER_BROKE_A_RULE: Final = 400  # the code of a connection that ends because its peer broke a rule

EngineT = TypeVar("EngineT", bound=MuxEngine)
ChannelT = TypeVar("ChannelT", bound=MuxChannel)

_log = logging.getLogger("muxkit")


class MuxConnection(PumpOwner[Any], HalfOwner, Generic[EngineT, ChannelT]):
    """What a session is made of; a protocol's connection derives from it, gives it the engine, and sets `pump`."""

    pump: Pump[Any]
    session: Session
    """What applications hold of it."""
    channel_type: type[ChannelT]
    """What applications hold of a two-way channel; for the default of `new_channel`."""

    reason_of_error: ClassVar[Reason] = LEFT_BY_ERROR
    """What the peer is told if the session is left by an error."""
    refusal_while_closing: ClassVar[Reason] = CLOSING
    """What the peer is told of a channel that it opens while this side takes no new ones."""
    refusal_of_too_many: ClassVar[Reason] = TOO_MANY_WAIT
    """What the peer is told of a channel that it opens while the backlog is full."""

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
        """Tasks that wait until halves have ended."""
        self.is_draining: bool = False
        """True once this side takes no new channels."""
        self.messages_received: int = 0
        self.limits: Limits = limits
        self.info: SessionInfo = describe(link, protocol)
        self._backlogs: list[Backlog[Any]] = []
        self._unclaimed: Unclaimed = Unclaimed(self._backlogs, self.decline, peer=self.info.peer)
        self.incoming: Backlog[ChannelT] = self.new_backlog()
        """The two-way channels that the peer opened and the application hasn't taken."""

    def new_backlog(self, kind: str = "channels") -> Backlog[Any]:
        """Make a backlog for what the peer opens; `kind` is what users call it."""
        backlog: Backlog[Any] = Backlog(self.took, self.engine.starts, kind=kind)
        self._backlogs.append(backlog)
        return backlog

    def start(self, nursery: trio.Nursery) -> None:
        """Start the session's background tasks, which end with its block."""
        nursery.start_soon(self.pump.run)
        self._unclaimed.nursery = nursery

    # --- what carries the session

    def request_write(self) -> None:
        self.pump.request_write()

    def dispatch_events(self) -> None:
        self.pump.dispatch_events()

    def reading(self) -> Reading | None:
        return self.pump.reading if isinstance(self.pump, StreamPump) else None

    @property
    def loss(self) -> ErrorMaker | None:
        return self.pump.loss if self.pump.is_lost else None

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None, told: Reason | None = None) -> None:
        """End the connection, and tell the peer why if `told` says so and the protocol or the link can carry it."""
        farewell = self.engine.farewell(told) if told else b""
        self.pump.lose(reason, by=by, cause=cause, parting=[farewell] if farewell else (), farewell=told)

    def abandon(self) -> None:
        """End the connection without a reason."""
        self.lose("the session was left by an error", by="local")

    # --- channels that this side opens

    async def wait_to_open(self) -> None:
        """Wait until a channel may be opened; the caller opens it before its next checkpoint, then `opened`.

        Raises why no channel can be opened any more.
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
        """A channel was opened, or its opener gave up: write the opening, and let the next opener look."""
        self.request_write()
        self.openers.wake_waiters()

    def free_slots(self) -> int:
        """Return how many channels may be opened now; once none ever may, more than wait, so that all wake."""
        return self.engine.places if self.closed() is None else sys.maxsize

    def closed(self) -> Exception | None:
        """Return why no channel can be opened any more, or None."""
        if (loss := self.loss) is not None:
            return loss()
        if self.engine.peer_takes_no_channels:
            return ChannelStopped("no channel can be opened any more: the peer is closing the session")
        if self.is_draining:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the session")
        return None

    async def open_channel(self, opening: bytes) -> ChannelT:
        """Open a two-way channel once there is a place for it."""
        await self.wait_to_open()
        try:
            return self.new_channel(self.engine.open_channel(opening), opening)
        finally:
            self.opened()

    def new_channel(self, channel: Any, opening: bytes) -> ChannelT:  # noqa: ANN401 - see `Opened.channel`
        """Make the application's channel for a two-way channel of the engine."""
        return self.channel_type(self, SendHalf(self, channel.sender), ReceiveHalf(self, channel.receiver), opening)

    # --- channels that the peer opens

    def refusal_of(self, backlog: Backlog[Any], opening: bytes) -> Reason | None:
        """Return why what the peer has just opened must be refused, or None if the backlog takes it."""
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
        """Return the limit that what waits for the application has reached, None while there is room."""
        return "backlog" if sum(map(len, self._backlogs)) >= self.limits.backlog else None

    def offer(self, backlog: Backlog[Any], item: object, key: object = None) -> None:
        """Let something that the peer opened wait until the application takes it; `key` finds it again."""
        backlog.put(item, key)
        if not backlog.is_claimed:
            self._unclaimed.arrived()

    def took(self, item: Any) -> None:  # noqa: ANN401 - what a protocol puts into its backlogs
        """The application has taken something that the peer opened; protocols renew the credit of its opening."""

    def decline(self, item: Any, reason: Reason) -> None:  # noqa: ANN401 - as above
        """End something that the peer opened and the application hasn't taken. This is right for two-way channels."""
        item.sending.abort(reason.text, code=reason.code)
        item.receiving.close()

    def drop_waiting(self, key: object) -> Any:  # noqa: ANN401 - as above
        """Forget what the peer broke off before the application took it, and return it: it needs no work."""
        for backlog in self._backlogs:
            if (item := backlog.drop(key)) is not None:
                self.engine.starts.spared()
                return item
        return None

    def channel_aborted(self, channel: MuxChannel) -> None:
        """The application aborted a channel; protocols count it against the peer if that opened the channel."""

    def take_only(self, kinds: Sequence[str]) -> None:
        """Refuse what the peer opens if it is of none of these kinds and no task takes it."""
        self._unclaimed.take_only(kinds)

    def stop_opening(self, error: ErrorMaker | None) -> None:
        """End the iterators over new channels and fail the waiting openers; `error` is None if that is in order."""
        self.is_draining = True
        for backlog in self._backlogs:
            backlog.ended(error)
        self.openers.wake_waiters()

    # --- events

    def handle_written(self) -> None:
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
        """Return a half for messages on a receiver that has none, or None, the usual answer, to drop the messages.

        A protocol makes one if messages of a channel may come before the message that brings the channel itself.
        """
        return None

    def handle_event(self, event: object) -> None:
        """Act on any other event than `Received`."""
        # The patterns name no fields: for a positional one, CPython makes a string and puts it into the cache of
        # attributes, so each event would evict an entry that the next call needs.
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
                    # The error holds the other half and not the channel, which would be a cycle of references.
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
                self.lose(f"nothing was heard for {event.seconds:.0f} s", by="network")
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
        """Act on an event that only the protocol of this session has."""
        raise AssertionError(f"an event that no session handles: {event!r}")

    def handle_finished(self, receiver: Receiver[Any]) -> None:
        """The peer has ended a half in order."""
        if isinstance(half := receiver.owner, ReceiveHalf):
            half.ended(trio.EndOfChannel)
        self.half_ended(receiver)

    def handle_cancelled(self, event: Cancelled) -> None:
        """The peer gave up sending on a half."""
        if isinstance(half := event.receiver.owner, ReceiveHalf):
            half.reason = event.payload[:MAX_REASON]  # kept as long as the half, so its size is bounded
            half.ended(partial(cancelled_by_peer, half.reason))
        if event.breaks_off:  # behind the end, or dropping the channel would stop a half that is gone
            self.drop_broken_off(event.receiver)
        self.half_ended(event.receiver)

    def handle_refused(self, end: Sender | Receiver[Any]) -> None:
        """The peer will never see this half, because it takes no new channels."""
        half = end.owner
        if isinstance(half, SendHalf):
            half.stopped(refused_by_peer)
        elif isinstance(half, ReceiveHalf):
            half.ended(refused_by_peer)
        self.half_ended(end)

    def handle_opened(self, event: Opened) -> None:
        """The peer opened a channel: refuse or offer it. Protocols with several kinds choose the backlog."""
        if (reason := self.refusal_of(self.incoming, event.opening)) is not None:
            self.engine.refuse(event.channel, reason)
        else:
            self.offer(self.incoming, self.new_channel(event.channel, event.opening))

    def handle_going_away(self, event: GoingAway) -> None:
        """The peer opens no more channels and takes none; with a reason it ends the connection now."""
        if event.reason:
            self.pump.told(event.reason)
            self.lose("the peer ended the session", by="peer")
            return
        for backlog in self._backlogs:
            backlog.ended()
        self.openers.wake_waiters()

    def handle_channel_failed(self, event: ChannelFailed) -> None:
        """The engine gave a channel up because of what the peer sent on it: only its halves hear of it."""
        tell_limit(self.facts, event.error)
        reason = str(event.error).encode()
        if (receiver := event.channel.receiver) is not None:
            self.handle_event(Cancelled(receiver, reason))
        if (sender := event.channel.sender) is not None:
            self.handle_event(Stopped(sender, reason))

    def handle_hung_up(self, event: HungUp) -> None:
        """The peer ended its direction of the connection."""
        live = counted(self.live_channels, "channel", were=True)
        what = "" if event.is_clean else f" while {live} open" if self.live_channels else " in mid-message"
        self.pump.lose(f"the peer hung up{what}", by="peer")

    def drop_broken_off(self, half: Sender | Receiver[Any]) -> None:
        """The peer broke a channel off: drop it if the application hasn't taken it, since it needs no work then.

        It is found by itself if it is a two-way channel, and by the half if it was offered with that as its key.
        """
        owner = half.owner
        channel = owner.channel if isinstance(owner, (SendHalf, ReceiveHalf)) else None
        if (item := self.drop_waiting(half if channel is None else channel)) is not None:
            item.receiving.close()

    def half_ended(self, half: Sender | Receiver[Any]) -> None:
        """A half has ended: let go of it, and wake those who wait for its place, its bytes or its pong."""
        owner = half.owner
        half.owner = None  # or only a garbage collection would free both
        if isinstance(owner, (SendHalf, ReceiveHalf)):
            owner.channel = None  # the same
        self.budget.wake_waiting()  # its queue no longer counts
        if half in self.pings:
            self.pings.ended(ended_before_the_pong, half)
        if self.gone:
            self.gone.unpark_all()
        self.openers.wake_waiters()

    def handle_lost(self) -> None:
        loss = self.pump.loss
        with turns().spreading():
            for half in [*self.live_halves()]:
                if isinstance(half, SendHalf):
                    half.lost(loss)
                else:
                    half.ended(loss)
        self.pings.ended(loss)
        self.stop_opening(None if self.ends_in_order() else loss)
        self.gone.unpark_all()

    def ends_in_order(self) -> bool:
        """Return True if the iterators over new channels end without an error when the connection is over."""
        return False

    def taken_channels(self) -> Sequence[ChannelT]:
        """Return the live channels that the application has: those that it opened, and those that it took."""
        live: dict[Any, None] = dict.fromkeys(half.channel for half in self.live_halves() if half.channel is not None)
        return [channel for channel in live if not any(channel in backlog for backlog in self._backlogs)]

    # --- leaving

    @abstractmethod
    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        """Iterate over the live halves, in the order in which they are closed: those to send on come first."""

    def halves_of(self, channels: Sequence[Halves]) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        """Iterate over the halves of these channels in the order of `live_halves`."""
        for half in [*(each.sender for each in channels), *(each.receiver for each in channels)]:
            if half is not None and isinstance(half.owner, SendHalf | ReceiveHalf):
                yield half.owner

    async def leave(self, linger: float) -> None:
        """Close everything, wait until the peer has heard it, say goodbye and hang up; at most `linger` seconds.

        Raises also for a violation by the peer that came after its orderly end, and if the peer sent this side away
        (401 for example), because no other call may have reported them.
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
                f"the peer did not take leave within {linger} s", by="peer", told=self.reason_for_late_leaving(linger)
            )
        if pump.is_violated or pump.is_refusal or any(half.is_unheard for half in told):
            raise pump.loss()

    async def wait_until_heard(self, told: Sequence[SendHalf]) -> None:
        """Wait until the peer has confirmed the ends of all halves that were not given up."""
        while not self.pump.is_lost and self.awaits_confirmation():
            await self.gone.park()

    def awaits_confirmation(self) -> bool:
        """Return True while a half lives that was not given up. Looks at the first of them, not at all."""
        return any(not (isinstance(half, SendHalf) and half.was_given_up) for half in self.live_halves())

    def reason_for_late_leaving(self, linger: float) -> Reason | None:
        """Return what to tell a peer that this side leaves because `linger` is over; most tell nothing."""
        return None

    async def say_goodbye(self) -> None:
        """Tell the peer in the protocol's own words that this side leaves in order; most say nothing."""

    def close_all(self) -> None:
        """Take no new channels, finish all halves to send on and close all those to receive from."""
        if self.pump.is_lost:
            return
        self.stop_opening(None)
        for half in [*self.live_halves()]:
            half.close()
        self.openers.wake_waiters()  # now that nothing may be opened on a half that was closed here
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
        """Tell the peer that this side takes no more channels, if the protocol can say so."""
        self.engine.go_away(Reason())
        self.request_write()

    # --- pings, limits, numbers

    async def ping(self) -> float:
        """Send a ping about the connection as a whole, and wait for the answer; return its seconds."""
        return await self.ping_about(None)

    async def ping_about(self, key: object) -> float:
        """Send a ping, about a half if the protocol has such pings, and wait for the answer; return its seconds."""
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
        """How many channels of both sides live; without those that are the session's own, if a protocol has such."""
        return self.engine.channels

    def stats(self) -> SessionStats:
        """Return the counters since the session began, and the gauges of now."""
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
        """Return the state of the connection in words, for the `repr` of its session."""
        return "lost" if self.pump.is_lost else counted(self.live_channels, "channel")


# --- the errors that halves raise


def cancelled_by_peer(reason: bytes) -> Exception:
    """Make the error for a channel on which the peer gave up sending, with its reason."""
    return ChannelCancelled("the peer gave up on this channel before it was done", payload=reason)


def stopped_by_peer(beside: ReceiveHalf[Any] | None, payload: bytes) -> Exception:
    """Make the error for a channel on which the peer wants no more, with its reason.

    An abort of a whole channel tells the reason to the half `beside` it, which receives. The end of that half may come
    later, since it waits for what was sent before it.
    """
    told = payload or (b"" if beside is None else beside.reason)
    return ChannelStopped("the peer does not receive on this channel any more", payload=told)


def refused_by_peer() -> Exception:
    """Make the error for a channel that the peer will never see."""
    return ChannelStopped("no channel can be opened any more: the peer is closing the session")


def ended_before_the_pong() -> Exception:
    """Make the error for a ping about a channel that ended before the answer came."""
    return ChannelStopped("the channel ended before the answer to the ping came")
