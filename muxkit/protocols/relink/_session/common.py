"""The common channels over Relink: one id in both directions, and a few marker messages.

A message of one part is the application's. One without parts says that the direction is in use. One of two parts is a
marker: the first part says which, the second is empty, or says more. Relink itself can only close a channel; the
markers add what `muxkit.Channel` promises beside that.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Final

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import NO_QUEUE, Headers, Ids, Reason, Sending, decode_headers, opening_refusal, queue_of, without_name
from muxkit.protocols.relink._session.core import Core, cancelled, refused, stopped
from muxkit.protocols.relink._session.native import Receiver
from muxkit.protocols.relink.engine.events import Acknowledged, Arrived
from muxkit.protocols.relink.frames import OVERHEAD, PART_OVERHEAD, Parts
from muxkit.runtime import (
    Backlog,
    ByteStream,
    ChannelStats,
    ErrorMaker,
    Mailbox,
    Reading,
    ReceiveHalf,
    SendHalf,
    SlotQueue,
    StartPace,
    Unclaimed,
    Unsupported,
    turns,
)
from muxkit.runtime import Channel as CommonChannel
from muxkit.runtime import Session as CommonSession

BEGIN: Final[Parts] = ()
OPEN: Final = b"open"
"""The channel was opened with a name or a payload, which the second part has."""
END: Final[Parts] = (b"end", b"")
"""No more messages follow."""
CANCEL: Final[Parts] = (b"cancel", b"")
"""No more follow, and some are missing; the second part may say why."""
STOP: Final[Parts] = (b"stop", b"")
"""No more are wanted in the other direction; the second part may say why."""
GOODBYE: Final = b"muxkit.goodbye"
"""The link ends, for the reason in the second part; the only message of a channel that is opened for it."""

RESERVE: Final = 3 * (OVERHEAD + PART_OVERHEAD + 48)  # bytes kept free in each window, so that markers can always go
TOLD_CALLS: Final = 16  # messages that are taken before the engine is told of them
TOLD_BYTES: Final = 16 * 1024
CLOSED_A_TURN: Final = 32  # channels, when a link with many of them ends


class Sink(SendHalf):
    """The sending half of a common channel."""

    __slots__ = ("_core", "_end", "_engine", "_has_sent", "_id", "_is_finished", "_is_unannounced", "_markers")

    def __init__(self, core: Core, id: int) -> None:
        super().__init__(core.budget, core.request_write)
        self._core = core
        self._engine = core.engine
        self._id = id
        self._markers: deque[Parts] = NO_QUEUE  # markers for which there was no room yet
        self._end: int | None = None  # number of the message that holds END or CANCEL
        self._has_sent: bool = False
        self._is_unannounced: bool = False  # the peer never heard of the channel, and need not
        self._is_finished: bool = False  # END or CANCEL is queued, or the peer sent STOP

    @property
    def _may_close(self) -> bool:
        return self._is_finished and not self._markers

    def has_room(self, size: int) -> bool:
        return self._engine.admits(self._id, size + RESERVE)

    def _watch(self, size: int) -> None:
        self._engine.watch(self._id, size + RESERVE)

    def _check_size(self, size: int) -> None:
        most = self._core.limits.message
        if size > most:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={most})")

    def _try_push(self, message: bytes) -> bool | None:
        number = self._engine.try_send(self._id, message, RESERVE)
        if number is None:
            return super()._try_push(message)
        self._core.messages_sent += 1
        if self._engine.out_transactions:
            self._engine.commit(self._id, through=number)
        return True

    def _try_push_all(self, messages: list[bytes]) -> bool:
        last = self._engine.try_send_all(self._id, messages, RESERVE)
        if last is None:
            return False
        self._core.messages_sent += len(messages)
        if self._engine.out_transactions:
            self._engine.commit(self._id, through=last)
        return True

    def _push(self, message: bytes) -> None:
        self._send_now((message,), overdraw=True)

    def _send_now(self, parts: Parts, *, overdraw: bool = False) -> int:
        number = self._engine.send(self._id, parts, overdraw=overdraw)
        self._core.messages_sent += 1
        self._has_sent = True
        if self._engine.out_transactions:
            self._engine.commit(self._id, through=number)
        return number

    def _finish(self, payload: bytes) -> None:
        self._send_marker(END)

    def _abort(self, reason: Reason) -> None:
        if END in self._markers:
            self._markers.remove(END)
        if self._end is None:
            self._send_marker(_with_reason(CANCEL, reason))

    def _send_marker(self, marker: Parts) -> None:
        """Send a marker behind everything that was sent, as soon as there is room; the caller requests the write."""
        if _is_end(marker):
            self._is_finished = True
        if not self._is_unannounced:
            self._markers = queue_of(self._markers)
            self._markers.append(marker)
            self._send_markers()

    def _send_markers(self) -> None:
        while self._markers:
            marker = self._markers[0]
            size = max(16, sum(map(len, marker)))
            if size > 16 and not self._engine.admits(self._id, size, 2) and marker[0] != OPEN:
                marker, size = (marker[0], b""), 16  # for a reason there is no room in the window
            if not self._engine.admits(self._id, size, len(marker)):
                self._engine.watch(self._id, size, len(marker))
                break
            self._markers.popleft()
            try:
                number = self._send_now(marker)
            except LocalProtocolError:
                # No channel can be opened any more, so the peer learns from our shutdown that there is none.
                self._markers.clear()
                break
            if _is_end(marker):
                self._end = number

    def _window_changed(self) -> None:
        self._send_markers()
        super()._window_changed()

    def _heard(self, through: int) -> None:
        """The peer has the messages through this one."""
        if self._end is not None and through >= self._end:
            self._gone()

    def _gone(self) -> None:
        """Confirm the end: the peer has it, or the channel is closed on both sides of the wire."""
        if self.state is Sending.FINISHING:
            self._confirmed()

    def __repr__(self) -> str:
        return f"<relink.Sink {self._id} {self._state_text()}>"

    def unread_beside(self) -> int:
        channel = self._core.ins.get(self._id)
        return channel.unread if isinstance(channel, Channel) else 0


def _with_reason(marker: Parts, reason: Reason) -> Parts:
    return (marker[0], reason.encode()) if reason else marker


def goodbye_in(parts: Parts) -> Reason | None:
    """Return why the peer ends the link, if this message says so."""
    return Reason.decode(bytes(parts[1])) if len(parts) == 2 and parts[0] == GOODBYE else None


def _is_end(marker: Parts) -> bool:
    return marker[:1] in (END[:1], CANCEL[:1])


class Channel(ReceiveHalf[bytes], CommonChannel):
    """A common channel: our channel n with the peer's channel n. Connectors open even numbers, listeners odd ones.

    It is the receiving half, and has the sending one. The two form no circle of references, so that a channel is freed
    as soon as it is over.
    """

    __slots__ = (
        "_came",
        "_core",
        "_done",
        "_forgotten",
        "_has_ended",
        "_is_absorbing",
        "_is_closed",
        "_is_open_there",
        "_opening",
        "_out_is_over",
        "_peer_is_done",
        "_sent_stop",
        "_sink",
        "_told",
        "_unread_markers",
        "id",
    )

    _new_storage = Mailbox
    _portion_most = TOLD_CALLS

    def __init__(
        self, core: Core, id: int, forgotten: Callable[[Channel], None], *, is_ours: bool, opening: bytes = b""
    ) -> None:
        super().__init__(core.request_write)
        self.id: int = id
        self._opening = opening
        self._told: Reason | None = None  # why we abort it
        self._sink: Sink = Sink(core, id)
        self._core = core
        self._forgotten = forgotten
        self._is_open_there: bool = not is_ours  # the peer's direction is in use
        self._came = -1  # the last message that the engine gave
        self._done = -1  # the last that was consumed
        self._unread_markers = 0  # behind the oldest message that is unread
        self._peer_is_done = False  # END or CANCEL came, or the peer's direction is closed
        self._sent_stop = False
        self._has_ended = False  # the peer's direction is closed
        self._is_closed = False  # and ours, by us
        self._out_is_over = False  # and the peer has confirmed it
        self._is_absorbing = False
        core.outs[id] = self
        core.ins[id] = self

    # --- what it is

    @property
    def session(self) -> CommonSession:
        return self._core.session

    @property
    def name(self) -> str:
        return without_name(self._opening).name

    @property
    def opening(self) -> bytes:
        return without_name(self._opening).payload

    @property
    def headers(self) -> Headers:
        return decode_headers(without_name(self._opening).headers)

    def stats(self) -> ChannelStats:
        """Credit is None: Relink bounds what is kept of all channels together."""
        return ChannelStats(
            queued=self._core.engine.queued(self.id),
            unread=self.unread,
            credit_out=None,
            credit_in=None,
            waiting_since=self._sink.waiting_since,
        )

    # --- for the application; these give the half's own coroutine, since they are called for each message

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self._sink.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self._sink.send_many(messages)

    def _cancel_when_stopped(self, scope: trio.CancelScope) -> None:
        self._sink.cancel_when_over(scope)

    def _try_send(self, message: bytes) -> bool:
        return self._sink._try_send(message)

    async def finish(self) -> None:
        await self._sink.finish()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self._leave(self._sink.close)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        self._told = Reason(reason, code)
        self._leave(partial(self._sink.abort, reason, code=code))

    def _say_goodbye(self, reason: Reason) -> None:
        """Tell the peer why both directions end, before the link does."""
        if not self._sink._is_finished:
            self._sink._send_marker(_with_reason(CANCEL, reason))
        if not self._peer_is_done and not self._sent_stop:
            self._sink._send_marker(_with_reason(STOP, reason))

    def _leave(self, end_sending: Callable[[], None]) -> None:
        self._core.budget.owner.check()
        with self._core.written_together():
            self._sink._is_unannounced = self._is_idle
            end_sending()  # first: a peer counts the other order as breaking off
            super().close()
            self._close_if_done()

    def as_stream(self) -> ByteStream:
        """Return the channel as a `trio.abc.HalfCloseableStream`; use the stream or the channel, not both."""
        return ByteStream(self._sink, self)

    def __repr__(self) -> str:
        return f"<relink.Channel {self._sink!r}, {self.state.value}, {self.unread} unread>"

    # --- for the link: what we send

    def _acknowledged(self, event: Acknowledged) -> None:
        self._sink._heard(event.through)

    def _window_changed(self) -> None:
        self._sink._window_changed()
        self._close_if_done()

    def _closed(self) -> None:
        self._out_is_over = True
        self._sink._gone()
        self._check_over()

    def _lost(self, error: ErrorMaker) -> None:
        self._sink._lost(error)
        self._ended(error)
        self._forgotten(self)

    # --- for the link: what we receive

    def _opened(self) -> bool:
        was_open, self._is_open_there = self._is_open_there, True
        return not was_open

    def _arrived(self, event: Arrived) -> None:
        core = self._core
        if event.first <= self._came:
            return  # a channel that was accepted late has asked for everything, and got this before the event came
        self._came = event.first - 1  # a half that is closed consumes at once what it is given
        if len(event.messages) > 1 and set(map(len, event.messages)) == {1}:  # no marker among them
            self._came += len(event.messages)
            core.messages_received += len(event.messages)
            self._deliver_all([message for (message,) in event.messages])
        else:
            for parts in event.messages:
                self._came += 1
                if len(parts) == 1:
                    core.messages_received += 1
                    self._deliver(parts[0])
                else:
                    self._unread_markers += 1
                    self._on_marker(parts)
        if self._unread_markers:
            self._consume()
            self._close_if_done()
        if self._peer_is_done:
            self._absorb_if_shut_down()

    def _peer_closed(self) -> None:
        self._has_ended = True
        self._peer_sends_no_more(trio.EndOfChannel)  # without a marker, from a peer that sends none
        self._consume()
        self._close_if_done()
        self._check_over()

    def _on_marker(self, parts: Parts) -> None:
        match bytes(parts[0]) if parts else None:
            case b"open":
                self._opening = bytes(parts[1])
                if (refusal := opening_refusal(self._opening, self._core.limits.headers)) is not None:
                    self.abort(refusal.text, code=refusal.code)
                    self._core.on_cancelled(self)  # keeps it from the application, which has not taken it yet
            case b"end":
                self._peer_sends_no_more(trio.EndOfChannel)
            case b"cancel":
                self._peer_sends_no_more(partial(cancelled, Reason.decode(bytes(parts[1]))))
                self._core.on_cancelled(self)
            case b"stop":
                self._stopped(partial(stopped, Reason.decode(bytes(parts[1]))))
            case b"muxkit.goodbye":
                self._core.on_goodbye(Reason.decode(bytes(parts[1])), self)

    def _peer_sends_no_more(self, error: ErrorMaker) -> None:
        if not self._peer_is_done:
            self._peer_is_done = True
            self._ended(error)

    def _stopped(self, error: ErrorMaker) -> None:
        self._sink._is_finished = True
        self._sink._stopped(error)

    def _stop(self) -> None:
        if not self._peer_is_done and not self._sent_stop:
            self._sent_stop = True
            self._sink._send_marker(STOP if self._told is None else _with_reason(STOP, self._told))

    def _reading(self) -> Reading | None:
        return self._core.reading()

    def _taken(self, messages: Sequence[bytes], size: int) -> bool:
        self._consume()
        return False  # the core wakes the writer, if it has to

    def _may_wait_untold(self) -> int:
        # What is unread comes before anything that the peer could be waiting to send, so the ack can wait for more.
        return TOLD_BYTES

    def _consume(self) -> None:
        """Tell the engine what the application has taken."""
        unread = 0 if self._is_absorbing else self._stored.count + len(self._portion)
        if not unread:
            self._unread_markers = 0
        through = self._came - unread - self._unread_markers
        if through > self._done and self._core.ins.get(self.id) is self:
            core, engine = self._core, self._core.engine
            self._done = through
            tell = engine.committed if core.engine.in_transactions else engine.consume
            tell(self.id, through=through, now=trio.current_time())
            core.after_consuming()
            if self._out_is_over:
                self._check_over()

    # --- the end

    @property
    def _is_idle(self) -> bool:
        """True if neither side has sent anything on it."""
        return not (self._is_open_there or self._sink._has_sent)

    @property
    def _is_unheard(self) -> bool:
        """True if something was sent that the peer may not have received."""
        return self._sink._has_sent and self._sink._is_unheard

    def _announce(self) -> None:
        """Open the channel with BEGIN before our shutdown, after which none can be opened."""
        if not self._sink._has_sent and self._sink.state is Sending.OPEN:
            self._sink._send_marker(BEGIN)

    def _peer_shut_down(self) -> None:
        """The peer opens no more channels: one that it has not used was refused."""
        if not self._is_open_there:
            self._peer_is_done = self._has_ended = True
            self._stopped(refused)
            self._ended(refused)
            self._close_if_done()
            self._check_over()
        self._absorb_if_shut_down()

    def _absorb_if_shut_down(self) -> None:
        """Consume at once what the application has not read, if the peer shuts down and sends no more."""
        if self._peer_is_done and self._core.engine.has_peer_shut_down:
            self._is_absorbing = True
            self._consume()

    def _close_if_done(self) -> None:
        """Close our direction once its end, or the peer's STOP, leaves nothing to send."""
        if self._is_closed or not self._sink._may_close or not (self._peer_is_done or self._sent_stop):
            return
        if self._core.engine.over:
            return  # the peer ended the link in the same read, and the channel is about to hear of it
        self._is_closed = True
        if not self._sink._has_sent and self._is_open_there:
            self._sink._send_marker(BEGIN)  # or the peer would wait for an end that never comes
        if self._sink._has_sent and self._core.error is None:
            self._core.engine.close(self.id)
            self._core.after_command()
        else:
            self._out_is_over = True
            self._sink._gone()
        self._check_over()

    def _check_over(self) -> None:
        is_in_over = self._has_ended and self._done >= self._came
        if self._out_is_over and (is_in_over or self._is_idle):
            self._forgotten(self)


class _Channels(Backlog[Channel]):
    """The common channels that the peer opened, with those that no task has asked for yet."""

    __slots__ = ("_common",)

    def __init__(self, common: CommonChannels, pace: StartPace) -> None:
        super().__init__(lambda channel: None, pace)
        self._common = common

    def __len__(self) -> int:
        return super().__len__() + len(self._common.unclaimed_channels())

    def drop_all(self) -> list[Channel]:
        return [*super().drop_all(), *self._common.accept_unclaimed()]


class CommonChannels:
    """Opens common channels, and hands the peer's unclaimed channels to `incoming` or `receivers`."""

    def __init__(self, core: Core, on_idle: Callable[[], None]) -> None:
        self._core = core
        self._on_idle = on_idle
        self._unclaimed: dict[int, None] = {}
        limits = core.limits
        self._starts = StartPace(limits.resets_per_second, limits.resets_burst)
        self._channels: Backlog[Channel] = _Channels(self, self._starts)
        self._receivers: Backlog[Receiver] = Backlog(lambda receiver: None)
        self.unclaimed: Unclaimed = Unclaimed([self._channels], self._decline, peer="")
        core.on_cancelled = self._cancelled
        self._iterated: Backlog[Channel] | Backlog[Receiver] | None = None  # the one that is taken from
        self._parity = 0 if core.engine.is_connector else 1
        self._space = 1 << 8 * min(core.engine.out_id_size, core.engine.in_id_size)
        self._ids = Ids(self._parity, self._space - 1, step=2, wraps=True)
        self._openers = SlotQueue(self._free_slots)
        self._ours = 0
        self.is_common = False
        self.live: dict[int, Channel] = {}

    # --- iterating

    def incoming(self) -> AsyncIterator[Channel]:
        self._use_common()
        self._channels.claim()
        self._claim_all(self._channels)
        return self._channels

    def receivers(self) -> AsyncIterator[Receiver]:
        if self.is_common:
            raise LocalProtocolError("this link carries common channels: they come from incoming()")
        self._claim_all(self._receivers)
        return self._receivers

    def _use_common(self) -> None:
        """Treat the peer's channels as common ones from now on."""
        if self.is_common:
            return
        if self._iterated is self._receivers:
            raise LocalProtocolError("the channels of this link are taken by receivers()")
        if self._space == 1:
            raise Unsupported("channel ids of 0 bytes name one channel: use sender(0) and receiver(0)")
        self.is_common = True

    def _claim_all(self, backlog: Backlog[Channel] | Backlog[Receiver]) -> None:
        if self._iterated is None:
            self._iterated = backlog
            for id in [*self._unclaimed]:
                if self._claim(id):
                    self.replay(id)
                    taker = self._core.ins.get(id)
                    if taker is not None and self._core.error is not None:
                        taker._lost(self._core.error)  # the link ended before anything iterated over its channels

    def ended(self, error: ErrorMaker | None) -> None:
        """End `incoming` and `receivers`, and let those who wait to open find out."""
        self._channels.ended(error)
        self._receivers.ended(error)
        self.wake_openers()

    def wake_openers(self) -> None:
        """Let tasks that wait to open a channel look again: there is room for one, or there will be none any more."""
        self._openers.wake_waiters()

    def _cancelled(self, channel: Channel) -> None:
        """Count a channel that the peer gave up; one that the application did not take yet is closed for it."""
        dropped = self._channels.drop(channel)
        if dropped is None:
            self._starts.broken_off(trio.current_time())
        else:
            dropped.abort()

    def drop(self, channel: Channel) -> None:
        """Keep a channel that the peer opened from the application, which has not taken it yet."""
        self._channels.drop(channel)

    def taken(self) -> list[Channel]:
        """Return the live channels that the application has."""
        return [channel for channel in self.live.values() if channel not in self._channels]

    # --- what the peer opens

    def opened(self, channel: int) -> None:
        self._unclaimed[channel] = None
        if self._claim(channel) or not (self.is_common and self._is_theirs(channel)):
            return
        if (refusal := self.unclaimed.refusal(self._channels)) is not None:
            self._decline(self._accept_replayed(channel), refusal)
        else:
            self.unclaimed.arrived()

    def unclaimed_channels(self) -> list[int]:
        """Return the numbers of the channels that can only be common ones, and that no task has asked for."""
        return [id for id in self._unclaimed if self._is_theirs(id)] if self.is_common else []

    def accept_unclaimed(self) -> list[Channel]:
        """Accept all of these channels, so that they can be aborted."""
        return [self._accept_replayed(id) for id in self.unclaimed_channels()]

    def _decline(self, channel: Channel, reason: Reason) -> None:
        channel.abort(reason.text, code=reason.code)

    def check_free(self, channel: int) -> None:
        if channel in self.live:
            raise LocalProtocolError(f"channel {channel} is a common one")

    def receiver(self, channel: int) -> Receiver:
        """Make the receiver of a channel that a caller asked for by number."""
        receiver = self._make_receiver(channel)
        self.replay(channel)
        if self._core.engine.has_peer_shut_down:
            receiver._peer_shut_down()
        return receiver

    def _make_receiver(self, channel: int) -> Receiver:
        self._unclaimed.pop(channel, None)
        receiver = self._core.ins[channel] = Receiver(self._core, channel)
        return receiver

    def forget_unclaimed(self) -> None:
        self._unclaimed.clear()

    def _claim(self, id: int) -> bool:
        """Hand a channel that is not claimed to the iterator, if there is one that takes it."""
        if self._iterated is self._receivers:
            self._receivers.put(self._make_receiver(id))
        elif self._iterated is not None and self._is_theirs(id):
            self._channels.put(self._accept(id))
        return id not in self._unclaimed

    def _is_theirs(self, id: int) -> bool:
        """Return True if the peer may open a common channel with this number."""
        return id % 2 != self._parity and id < self._space

    def _accept(self, id: int) -> Channel:
        del self._unclaimed[id]
        channel = self.live[id] = Channel(self._core, id, self._forgotten, is_ours=False)
        return channel

    def _accept_replayed(self, id: int) -> Channel:
        channel = self._accept(id)
        self.replay(id)
        return channel

    def replay(self, id: int) -> None:
        """Have what came on a channel before it was claimed given to its receiver."""
        core = self._core
        core.engine.rewind(id)
        core.dispatch_events()
        taker = core.ins.get(id)
        if taker is not None and core.peer_channels.get(id, False):
            taker._peer_closed()

    # --- what we open

    async def open(self, opening: bytes) -> Channel:
        """A common channel; the peer hears of it with the first message, or at once if it has something to be told."""
        self._core.budget.owner.check()
        self._use_common()
        limits = self._core.limits
        if limits.channels < 2:  # half of them are for the peer, so waiting for a slot would never end
            raise Unsupported(
                f"no channel can be opened: expected room for at least 2, of which the peer gets half, "
                f"got {limits.channels}; raise Limits({limits.bound_of_channels}=…)"
            )
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._openers.wait_for_slot()
        error = self._closed()
        if error is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise error
        id = self._ids.allocate(self.live)
        self._ours += 1
        channel = self.live[id] = Channel(self._core, id, self._forgotten, is_ours=True, opening=opening)
        if opening:
            channel._sink._send_marker((OPEN, opening))
            self._core.after_command()
        self._openers.wake_waiters()
        return channel

    def _free_slots(self) -> int:
        """Return how many channels may be opened now; once none ever may, more than wait, so that all wake."""
        if self._closed() is not None:
            return sys.maxsize
        # Each needs a channel of ours, and those of the peer do as well.
        return min(self._core.limits.channels, self._space) // 2 - self._ours

    def _closed(self) -> Exception | None:
        """Return why no channel can be opened any more, or None."""
        core = self._core
        if core.error is not None:
            return core.error()
        if core.engine.has_peer_shut_down:
            return refused()
        if core.engine.is_shutting_down:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the link")
        return None

    def _forgotten(self, channel: Channel) -> None:
        core, id = self._core, channel.id
        if self.live.get(id) is not channel:
            return
        del self.live[id]
        if id % 2 == self._parity:
            self._ours -= 1
        if core.outs.get(id) is channel:
            del core.outs[id]
        if core.ins.get(id) is channel:
            del core.ins[id]
        core.peer_channels.pop(id, None)
        self._openers.wake_waiters()
        if core.moved:
            core.moved.unpark_all()
        self._on_idle()

    # --- the end

    def say_goodbye(self, reason: Reason) -> int | None:
        """Tell the peer why the link ends; return the channel on which that is said, None if it cannot be said.

        A link that is used without common channels has no place for it: each message is the application's.
        """
        core, engine = self._core, self._core.engine
        is_native = self._iterated is self._receivers or (core.outs and not self.is_common)
        if is_native or self._space == 1:
            return None
        last = self._space - 2 + self._parity  # at the end, where no program has a receiver of its own
        id = next(each for each in range(last, -1, -2) if each not in core.outs)
        try:
            number = engine.send(id, (GOODBYE, reason.encode()), overdraw=True)
            if engine.out_transactions:
                engine.commit(id, through=number)
        except LocalProtocolError:  # no channel can be opened any more
            return None
        for channel in self.taken():
            channel._say_goodbye(reason)  # for peers that know no goodbye
        return id

    def refuse_unclaimed(self) -> None:
        """Abort common channels that no task has taken, so that the link can end."""
        for channel in self.accept_unclaimed():
            channel.abort()

    def announce_all(self) -> None:
        for channel in [*self.live.values()]:
            channel._announce()

    async def close_all(self, *, abort: bool = False) -> None:
        """Close or abort all channels, in turns of processor time."""
        for number, channel in enumerate([*self.live.values()], 1):
            (channel.abort if abort else channel.close)()
            if not number % CLOSED_A_TURN:
                await turns().wait()

    def peer_shut_down(self) -> None:
        self.ended(None)
        for taker in dict.fromkeys([*self.live.values(), *self._core.ins.values()]):
            taker._peer_shut_down()
        self._on_idle()
