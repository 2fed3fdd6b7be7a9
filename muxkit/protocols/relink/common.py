"""Common channels over Relink: the channels of muxkit, as an engine on top of the link's engine.

Relink itself knows channels in one direction, which begin with a message and can be closed. `muxkit.Channel` promises
more: two directions, an opening with a name, an end of each direction that the peer confirms, and reasons. So a common
channel is our channel n with the peer's channel n, and what Relink cannot say is said by a few messages:

    a message of one part       belongs to the application
    a message without parts     says that the direction is in use (BEGIN)
    a message of two parts      is a marker: the first part says which, the second is empty or says more

      open             the channel was opened with a name or a payload, which the second part has
      end              no more messages follow
      cancel           no more follow, and some are missing; the second part may say why
      stop             no more are wanted in the other direction; the second part may say why
      muxkit.goodbye   the link ends, and the second part says why; it has a channel of its own

Connectors open even numbers, and listeners open odd ones. How a common channel lives, on each side:

    open       messages go both ways; the peer hears of the channel with the first one   -> ending
    ending     our direction has said `end` or `cancel`, or the peer said `stop`         -> closing
    closing    the peer is done as well, or was told to stop: our direction is closed    -> over
    over       our close is confirmed, and the peer's direction is closed and consumed

A channel on which neither side has sent anything is over as soon as it is closed here, and the peer never hears of it.

A few bytes of each window are kept free (`RESERVE`), so that a marker can go although the window is full of messages.
A marker counts as consumed when everything in front of it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import attrs

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.core import NO_QUEUE, Buffer, Clock, Ids, Reason, StartPace, opening_refusal, queue_of
from muxkit.core.events import Cancelled, Confirmed, Finished, Halves, Received, Refused, Stopped, Writable
from muxkit.core.halves import Receiver, Sender
from muxkit.core.mux_engine import MuxEngine
from muxkit.protocols.relink.engine import Engine
from muxkit.protocols.relink.events import Acknowledged
from muxkit.protocols.relink.frames import OVERHEAD, PART_OVERHEAD, Parts
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender

BEGIN: Final[Parts] = ()
OPEN: Final = b"open"
END: Final[Parts] = (b"end", b"")
CANCEL: Final[Parts] = (b"cancel", b"")
STOP: Final[Parts] = (b"stop", b"")
GOODBYE: Final = b"muxkit.goodbye"

ONE_PART: Final = {1}  # the number of parts of the application's messages
MARKER: Final = 16  # bytes of payload that a marker without a reason has at most
RESERVE: Final = 3 * (OVERHEAD + PART_OVERHEAD + 48)  # bytes of each window, enough for three markers
LAG: Final = 16 * 1024  # bytes that the application may take before the engine hears of them
LAST_WORDS: Final = 64 * 1024  # bytes to pull at a time until the reason for the end is among them
LAST_PULLS: Final = 64  # buffers that may stand before it


# --- one channel


class CommonSender(Sender):
    """The sending half of a common channel."""

    __slots__ = ("_common", "_end", "_is_confirmed", "_markers", "is_finished", "is_unannounced", "out", "owner")

    def __init__(self, common: CommonChannels, out: ChannelSender) -> None:
        self.owner: object | None = None
        self.out: Final = out
        """The link's half below."""
        self._common = common
        self._markers: deque[Parts] = NO_QUEUE  # markers for which there was no room yet
        self._end: int | None = None  # the number of the message that holds END or CANCEL
        self._is_confirmed = False
        self.is_unannounced: bool = False
        """True if the peer never heard of the channel and need not, because it was closed before it was used."""
        self.is_finished: bool = False
        """True once END or CANCEL is queued, or STOP came."""

    @property
    def label(self) -> str:
        return self.out.label

    @property
    def queued(self) -> int:
        return self.out.queued

    @property
    def has_sent(self) -> bool:
        return self.out.has_sent

    @property
    def may_close(self) -> bool:
        """True if nothing is left to send."""
        return self.is_finished and not self._markers

    # --- messages

    def check_size(self, size: int) -> None:
        if size > self._common.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self._common.limits.message})")

    def has_room(self, size: int) -> bool:
        return self.out.admits(size + RESERVE)

    def notify_when_room(self, size: int) -> None:
        self.out.watch(size + RESERVE)

    def send(self, message: bytes) -> None:
        self._send((message,), overdraw=True)

    def try_send(self, message: bytes) -> bool | None:
        number = self.out.try_push(message, RESERVE)
        if number is None:
            return super().try_send(message)
        if self._common.out_transactions:
            self.out.commit(number)
        return True

    def try_send_all(self, messages: list[bytes]) -> bool:
        last = self.out.try_push_all(messages, RESERVE)
        if last is None:
            return False
        if self._common.out_transactions:
            self.out.commit(last)
        return True

    def _send(self, parts: Parts, *, overdraw: bool = False) -> int:
        number = self.out.send_parts(parts, overdraw=overdraw)
        if self._common.out_transactions:
            self.out.commit(number)
        return number

    # --- markers

    def finish(self, payload: bytes = b"") -> None:
        if payload:
            raise LocalProtocolError("the end of a channel carries no payload in Relink; send it as a message before")
        self.send_marker(END)

    def cancel(self, reason: Reason) -> None:
        if END in self._markers:
            self._markers.remove(END)
        if self._end is None:
            self.send_marker(_with_reason(CANCEL, reason))

    def send_marker(self, marker: Parts) -> None:
        """Send a marker behind everything that was sent, as soon as there is room."""
        if _is_end(marker):
            self.is_finished = True
        if not self.is_unannounced:
            self._markers = queue_of(self._markers)
            self._markers.append(marker)
            self.send_markers()

    def send_markers(self) -> None:
        """Send the markers that wait, as far as there is room."""
        while self._markers:
            marker = self._markers[0]
            size = max(MARKER, sum(map(len, marker)))
            if size > MARKER and not self.out.admits(size, 2) and marker[0] != OPEN:
                marker, size = (marker[0], b""), MARKER  # for a reason there is no room in the window
            if not self.out.admits(size, len(marker)):
                self.out.watch(size, len(marker))
                break
            self._markers.popleft()
            try:
                number = self._send(marker)
            except LocalProtocolError:
                # No channel can be opened any more, so the peer learns from our shutdown that there is none.
                self._markers.clear()
                break
            if _is_end(marker):
                self._end = number

    def heard(self, through: int) -> bool:
        """Return True if the peer has heard the end of this half, now that it has the messages through this one."""
        return self._end is not None and through >= self._end

    def confirm(self) -> None:
        """Report once that the peer knows the end, or that the direction is closed."""
        if not self._is_confirmed:
            self._is_confirmed = True
            self._common.events.append(Confirmed(self))


class CommonChannel(Receiver[bytes]):
    """A common channel: its receiving half, which has the sending one.

    The sending half doesn't know the channel, so the two form no circle of references, and a channel is freed as soon
    as it is over.
    """

    __slots__ = (
        "_came",
        "_common",
        "_done",
        "_has_ended",
        "_is_absorbing",
        "_is_closed",
        "_is_gone",
        "_is_open_there",
        "_is_over_here",
        "_peer_is_done",
        "_sent_stop",
        "_unread",
        "_unread_markers",
        "id",
        "incoming",
        "is_taken",
        "opening",
        "owner",
        "sender",
    )

    def __init__(
        self, common: CommonChannels, out: ChannelSender, incoming: ChannelReceiver, *, is_ours: bool, opening: bytes
    ) -> None:
        self.owner: object | None = None
        self.id: int = out.channel
        self.opening: bytes = opening
        """What the channel was opened with; b"" until the peer has said it."""
        self.is_taken: bool = is_ours
        """True once the application has the channel."""
        self.sender: Final = CommonSender(common, out)
        self.incoming: Final = incoming
        """The link's half below."""
        self._common = common
        self._is_open_there = not is_ours  # the peer's direction is in use
        self._came = -1  # the last message that the link gave
        self._done = -1  # the last that was consumed
        self._unread = 0  # messages that the application has not taken
        self._unread_markers = 0  # behind the oldest message that is unread
        self._peer_is_done = False  # END or CANCEL came, or the peer's direction is closed
        self._sent_stop = False
        self._has_ended = False  # the peer's direction is closed
        self._is_closed = False  # and ours, by us
        self._is_over_here = False  # and the peer has confirmed it
        self._is_absorbing = False  # what comes is consumed at once
        self._is_gone = False  # over, or lost
        out.owner = incoming.owner = self

    @property
    def label(self) -> str:
        return self.incoming.label

    @property
    def held(self) -> int:
        return self.incoming.held

    @property
    def lag(self) -> int:
        # What is unread comes before anything that the peer could be waiting to send, so the ack can wait for more.
        return LAG

    @property
    def is_idle(self) -> bool:
        """True if neither side has sent anything on it."""
        return not (self._is_open_there or self.sender.has_sent)

    # --- what the application does

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        self._unread = self._unread - len(items) if items else 0
        return self._consume()

    def consumed_portion(self, count: int, size: int) -> bool:
        self._unread -= count
        return self._consume()

    def stop(self, reason: Reason) -> None:
        if not self._peer_is_done and not self._sent_stop:
            self._sent_stop = True
            self.sender.send_marker(_with_reason(STOP, reason))
        self._is_absorbing = True
        self._consume()

    def leave(self) -> None:
        """The application is about to end both directions."""
        self.sender.is_unannounced = self.is_idle

    def announce(self) -> None:
        """Open the channel with BEGIN before our shutdown, after which none can be opened."""
        if not self.sender.has_sent and not self.sender.is_finished:
            self.sender.send_marker(BEGIN)

    def say_goodbye(self, reason: Reason) -> None:
        """Tell the peer why both directions end, before the link does."""
        if not self.sender.is_finished:
            self.sender.send_marker(_with_reason(CANCEL, reason))
        if not self._peer_is_done and not self._sent_stop:
            self.sender.send_marker(_with_reason(STOP, reason))

    def _consume(self) -> bool:
        """Tell the link what the application has taken. Return True if that leaves something to do."""
        unread = 0 if self._is_absorbing else self._unread
        if not unread:
            self._unread_markers = 0
        through = self._came - unread - self._unread_markers
        if through <= self._done or self._is_gone:
            return False
        self._done = through
        common = self._common
        now = common.clock.current_time()
        if common.in_transactions:
            self.incoming.committed(through, now)
        else:
            self.incoming.consume(through, now)
        if self._is_over_here:
            self._check_over()
        return common.has_news

    # --- what the link reports about our direction

    def acknowledged(self, event: Acknowledged) -> None:
        """The peer has the messages through one, or has done more with them."""
        if self.sender.heard(event.through):
            self.sender.confirm()

    def room_changed(self) -> None:
        """There may be room in the window."""
        self.sender.send_markers()
        self._common.events.append(Writable(self.sender))
        self.close_if_done()

    def closed(self) -> None:
        """The peer confirmed the end of our direction."""
        self._is_over_here = True
        self.sender.confirm()
        self._check_over()

    # --- what the link reports about the peer's direction

    def opened(self) -> None:
        """The first message of the peer came."""
        self._is_open_there = True

    def arrived(self, first: int, messages: list[Parts]) -> list[bytes]:
        """Take messages that came, and return them if all are the application's, as usual.

        Otherwise the application's messages are in `events`, with what the markers between them mean.
        """
        if first <= self._came:
            return []  # a channel that was accepted late has asked for everything, and got this before the event came
        self._came = first - 1 + len(messages)
        if not self._peer_is_done and set(map(len, messages)) == ONE_PART:
            self._unread += len(messages)
            return [message for (message,) in messages]
        self._sort(messages)
        self._consume()
        self.close_if_done()
        if self._peer_is_done:
            self._absorb_if_shut_down()
        return []

    def _sort(self, messages: list[Parts]) -> None:
        """Report the application's messages, and act on the markers between them."""
        items: list[bytes] = []
        for parts in messages:
            if len(parts) == 1:
                items.append(parts[0])
                continue
            self._give(items)
            items = []
            self._unread_markers += 1
            self._act_on(bytes(parts[0]) if parts else b"", bytes(parts[1]) if len(parts) > 1 else b"")
        self._give(items)

    def _give(self, items: list[bytes]) -> None:
        if items:
            self._unread += len(items)
            self._common.events.append(Received(self, items))

    def _act_on(self, marker: bytes, payload: bytes) -> None:
        events = self._common.events
        match marker:
            case b"open":
                self.opening = payload
                if (refusal := opening_refusal(payload, self._common.limits.headers)) is not None:
                    events.append(OpeningRefused(self, refusal))
            case b"end":
                self._peer_sends_no_more(Finished(self))
            case b"cancel":
                self._peer_is_done = True
                events.append(Cancelled(self, payload, breaks_off=True))
            case b"stop":
                self.sender.is_finished = True
                events.append(Stopped(self.sender, payload))
            case b"muxkit.goodbye":
                events.append(GoodbyeCame(Reason.decode(payload), self))

    def peer_closed(self) -> None:
        """The peer closed its direction."""
        self._has_ended = True
        self._peer_sends_no_more(Finished(self))  # without a marker, from a peer that sends none
        self._consume()
        self.close_if_done()
        self._check_over()

    def peer_shut_down(self) -> None:
        """The peer opens no more channels, so one that it has not used was refused."""
        if not self._is_open_there:
            self._peer_is_done = self._has_ended = True
            self.sender.is_finished = True
            self._common.events += [Refused(self.sender), Refused(self)]
            self.close_if_done()
            self._check_over()
        self._absorb_if_shut_down()

    def _peer_sends_no_more(self, event: Finished) -> None:
        if not self._peer_is_done:
            self._peer_is_done = True
            self._common.events.append(event)

    def _absorb_if_shut_down(self) -> None:
        """Consume at once what the application has not read, if the peer shuts down and sends no more."""
        if self._peer_is_done and self._common.peer_takes_no_channels:
            self._is_absorbing = True
            self._consume()

    # --- the end

    def close_if_done(self) -> None:
        """Close our direction once its end, or the peer's STOP, leaves nothing to send."""
        if self._is_closed or self._is_gone or not self.sender.may_close:
            return
        if not (self._peer_is_done or self._sent_stop) or self._common.link.over:
            return  # if the link is over, the peer ended it in the same read, and the channel is about to hear of it
        self._is_closed = True
        if not self.sender.has_sent and self._is_open_there:
            self.sender.send_marker(BEGIN)  # or the peer would wait for an end that never comes
        if self.sender.has_sent:
            self.sender.out.close()
        else:
            self._is_over_here = True
            self.sender.confirm()
        self._check_over()

    def _check_over(self) -> None:
        is_over_there = self._has_ended and self._done >= self._came
        if self._is_over_here and (is_over_there or self.is_idle):
            self._common.forget(self)

    def let_go(self) -> None:
        """The channel is over, or the link that it belonged to is."""
        self._is_gone = True
        for half in (self.sender.out, self.incoming):
            if half.owner is self:
                half.owner = None
        self._common.link.forget_expected(self.incoming)


def _with_reason(marker: Parts, reason: Reason) -> Parts:
    return (marker[0], reason.encode()) if reason else marker


def _is_end(marker: Parts) -> bool:
    return marker[:1] in (END[:1], CANCEL[:1])


def goodbye_in(parts: Parts) -> Reason | None:
    """Return why the peer ends the link, if this message says so."""
    return Reason.decode(bytes(parts[1])) if len(parts) == 2 and parts[0] == GOODBYE else None


# --- events that only common channels have


@attrs.define(eq=False)
class OpeningRefused:
    """The peer opened a channel in a way that is not allowed. The session gives it up."""

    channel: CommonChannel
    reason: Reason


@attrs.define(eq=False)
class ChannelOver:
    """Both sides are done with a channel, so its number is free."""

    channel: CommonChannel


@attrs.define(eq=False)
class GoodbyeCame:
    """The peer ends the link, and says why."""

    reason: Reason
    channel: CommonChannel | None
    """The channel on which it said so, if that was taken for one of the application's."""


# --- all channels


class CommonChannels(MuxEngine):
    """The common channels of a link, as an engine without bytes of its own: what it sends are messages of the link.

    The session passes the link's events about a common channel to it, and takes what follows from them out of `events`.
    """

    def __init__(self, link: Engine, clock: Clock) -> None:
        limits = link.limits
        self.link: Final = link
        self.clock: Clock = clock
        self.limits: Limits = limits
        self.out_transactions: bool = link.state.out_transactions
        self.in_transactions: bool = link.state.in_transactions
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        self.events: list[Any] = []
        """What happened since the events were taken the last time."""
        self.live: dict[int, CommonChannel] = {}
        self._parity = 0 if link.state.is_connector else 1
        self._space = 1 << 8 * min(link.state.out_id_size, link.state.in_id_size)
        self._ids = Ids(self._parity, self._space - 1, step=2, wraps=True)
        self._ours = 0

    @property
    def messages_sent(self) -> int:
        return self.link.state.ours.messages

    @property
    def channels(self) -> int:
        return len(self.live)

    @property
    def places(self) -> int:
        # Each needs a channel of ours, and those of the peer do as well.
        return min(self.limits.channels, self._space) // 2 - self._ours

    @property
    def outbox(self) -> int:
        return self.link.outbox

    @property
    def peer_takes_no_channels(self) -> bool:
        return self.link.state.has_peer_shut_down

    @property
    def has_numbers(self) -> bool:
        """False if channel ids have 0 bytes, so that there is only one channel in each direction."""
        return self._space > 1

    @property
    def has_news(self) -> bool:
        """True if a command left something to do: events to handle, a packet to write, a clock or a weight to set."""
        state = self.link.state
        if self.events or state.events or not state.is_connected:
            return True
        return state.has_new_deadline or state.owes_control

    def is_theirs(self, id: int) -> bool:
        """Return True if the peer may open a common channel with this number."""
        return id % 2 != self._parity and id < self._space

    def take_events(self) -> list[Any]:
        """Return the events since the last call, oldest first."""
        events, self.events = self.events, []
        return events

    # --- opening and ending

    def open_channel(self, opening: bytes) -> Halves:
        id = self._ids.allocate(self.live)
        self._ours += 1
        channel = self._add(id, self.link.receiver(id), is_ours=True, opening=opening)
        if opening:
            channel.sender.send_marker((OPEN, opening))
        return Halves(channel.sender, channel)

    def accept(self, incoming: ChannelReceiver) -> CommonChannel:
        """Make a common channel of a channel that the peer opened."""
        return self._add(incoming.channel, incoming, is_ours=False, opening=b"")

    def _add(self, id: int, incoming: ChannelReceiver, *, is_ours: bool, opening: bytes) -> CommonChannel:
        out = self.link.next_sender(id)  # the peer may still have to confirm the end of what had this number before
        channel = self.live[id] = CommonChannel(self, out, incoming, is_ours=is_ours, opening=opening)
        return channel

    def forget(self, channel: CommonChannel) -> None:
        """Remove a channel that is over, or lost."""
        if self.live.get(channel.id) is channel:
            del self.live[channel.id]
            if not self.is_theirs(channel.id):
                self._ours -= 1
            channel.let_go()
            self.events.append(ChannelOver(channel))

    # --- the link

    def ping(self, key: object) -> None:
        self.link.ping()

    def go_away(self, reason: Reason) -> None:
        if not (self.link.state.is_shutting_down or self.link.over):
            self.link.shutdown()

    def farewell(self, reason: Reason) -> bytes:
        """Return the last bytes of a link that ends for a reason: a goodbye, and the same on each channel.

        The goodbye is for peers that know it. It is sent also if the peer broke a rule.
        """
        parting: list[Buffer] = []
        with self.link.last_words():
            goodbye = self._say_goodbye(reason)
            while goodbye is not None and goodbye.unsent and len(parting) < LAST_PULLS:
                pulled = self.link.buffers_to_send(LAST_WORDS)
                if not pulled:  # what stands before it may not be sent yet
                    break
                parting += pulled
            parting += self.link.buffers_to_send(LAST_WORDS)
        return b"".join(parting)

    def last_words(self) -> bytes:
        """Return the last bytes of a link that has no place for a reason."""
        with self.link.last_words():
            return b"".join(self.link.buffers_to_send(LAST_WORDS))

    def _say_goodbye(self, reason: Reason) -> ChannelSender | None:
        """Queue a goodbye, and return the channel on which it is sent; None if no channel can be opened any more."""
        taken = self.link.state.ours.live
        last = self._space - 2 + self._parity  # at the end, where no program has a receiver of its own
        id = next(each for each in range(last, -1, -2) if each not in self.live and each not in taken)
        goodbye = self.link.sender(id)
        try:
            number = goodbye.send_parts((GOODBYE, reason.encode()), overdraw=True)
            if self.out_transactions:
                goodbye.commit(number)
        except LocalProtocolError:
            return None
        for channel in self.live.values():
            if channel.is_taken:
                channel.say_goodbye(reason)  # for peers that know no goodbye
        return goodbye
