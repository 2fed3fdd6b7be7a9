"""muxkit's common channels over Relink, as an engine on top of the link's engine.

A channel of Relink has one direction, begins with a message, and can be closed. `muxkit.Channel` promises more: two
directions, an opening with a name, an end of each direction that the peer confirms, and reasons. So a common channel
with number n consists of our channel n and the peer's channel n. Relink has no packets for the other features, so we
use messages with a different number of parts than those of the application:

    a message of one part       belongs to the application
    a message without parts     announces a direction on which nothing else was sent (BEGIN)
    a message of two parts      is a marker: the first part names its kind, and the second part may be empty

      open             opens the channel; the second part has the name or the payload of the opening
      end              ends the direction; no messages follow
      cancel           ends the direction, and some messages are missing; the second part may have the reason
      stop             asks the peer to send nothing more; the second part may have the reason
      muxkit.goodbye   announces the end of the link; the second part has the reason; it has a channel of its own

The connector opens common channels with even numbers, and the listener those with odd numbers. Each side sees a common
channel in these states:

    open       messages flow; our first message announces the channel to the peer        -> ending
    ending     we have sent `end` or `cancel`, or the peer has sent `stop`               -> closing
    closing    the peer's direction has ended or we sent `stop`; we close our direction  -> over
    over       our close is confirmed, and the peer's direction is closed and consumed

If neither side has sent anything, closing the channel ends it immediately, and the peer is never notified of it.

We reserve a few bytes of each window (`RESERVE`), so that a marker can be sent when the window is full of messages. A
marker counts as consumed when all messages before it are consumed.
"""

from __future__ import annotations

import sys
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

# The set of part counts in a run of messages that all belong to the application.
ONE_PART: Final = {1}
# The highest number of payload bytes in a marker without a reason.
MARKER: Final = 16
# How many bytes of each window are reserved for markers. Three markers fit.
RESERVE: Final = 3 * (OVERHEAD + PART_OVERHEAD + 48)
# The application may take this many bytes before the engine is notified that they are consumed.
LAG: Final = 16 * 1024
# How many bytes the link writes at a time, until the goodbye was written.
LAST_WORDS: Final = 64 * 1024
# How many buffers may be written before the goodbye. If the goodbye isn't among them, it isn't sent.
LAST_PULLS: Final = 64


# --- one channel


class CommonSender(Sender):
    """The sending half of a common channel."""

    __slots__ = ("_common", "_end", "_is_confirmed", "_markers", "is_finished", "is_unannounced", "out", "owner")

    def __init__(self, common: CommonChannels, out: ChannelSender) -> None:
        self.owner: object | None = None
        self.out: Final = out
        """The sender of the underlying channel of Relink."""
        out.report_from = sys.maxsize  # until END or CANCEL is sent
        self._common = common
        # Markers that couldn't be sent yet, because the window had no room.
        self._markers: deque[Parts] = NO_QUEUE
        # The number of the message that is the END or CANCEL.
        self._end: int | None = None
        self._is_confirmed = False
        self.is_unannounced: bool = False
        """True if the channel was closed before either side used it. The peer then isn't notified of the channel."""
        self.is_finished: bool = False
        """True once END or CANCEL is queued, or the peer's STOP has arrived."""

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
        """True if neither messages nor markers are left to send."""
        return self.is_finished and not self._markers

    # --- messages

    def check_size(self, size: int) -> None:
        if size > self._common.limits.message:
            raise LocalProtocolError(
                f"message too large: {size} bytes against Limits(message={self._common.limits.message})"
            )

    def has_room(self, size: int) -> bool:
        return self.out.admits(size + RESERVE)

    def notify_when_room(self, size: int) -> None:
        self.out.watch(size + RESERVE)

    def send(self, message: bytes) -> None:
        self._send((message,), overdraw=True)

    def try_send(self, message: bytes) -> bool | None:
        was_scheduled = self.out.scheduled
        number = self.out.try_push(message, RESERVE)
        if number is None:
            return super().try_send(message)
        if self._common.out_transactions:
            self.out.commit(number)
        return not was_scheduled

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
            raise LocalProtocolError(
                "Relink can't send a payload with the end of a channel; send it as a message before"
            )
        self.send_marker(END)

    def cancel(self, reason: Reason) -> None:
        if END in self._markers:
            self._markers.remove(END)
        if self._end is None:
            self.send_marker(_with_reason(CANCEL, reason))

    def send_marker(self, marker: Parts) -> None:
        """Send a marker after all earlier messages, as soon as the window has room for the marker."""
        if _is_end(marker):
            self.is_finished = True
        if not self.is_unannounced:
            self._markers = queue_of(self._markers)
            self._markers.append(marker)
            self.send_markers()

    def send_markers(self) -> None:
        """Send the waiting markers for which the window has room."""
        while self._markers:
            marker = self._markers[0]
            size = max(MARKER, sum(map(len, marker)))
            if size > MARKER and not self.out.admits(size, 2) and marker[0] != OPEN:
                marker, size = (marker[0], b""), MARKER  # drop the reason, because the window has no room for it
            if not self.out.admits(size, len(marker)):
                self.out.watch(size, len(marker))
                break
            self._markers.popleft()
            try:
                number = self._send(marker)
            except LocalProtocolError:
                # The marker would have opened the channel, but no channel can be opened any more. Our shutdown tells
                # the peer that there will be no such channel.
                self._markers.clear()
                break
            if _is_end(marker):
                self._end = self.out.report_from = number

    def heard(self, through: int) -> bool:
        """Return True if the END or CANCEL of this half is among the messages up to number `through`."""
        return self._end is not None and through >= self._end

    def confirm(self) -> None:
        """Report `Confirmed`, once, because the peer has received our end or confirmed our close."""
        if not self._is_confirmed:
            self._is_confirmed = True
            self._common.events.append(Confirmed(self))


class CommonChannel(Receiver[bytes]):
    """A common channel. The object is also the channel's receiving half, and `sender` is its sending half.

    The sending half has no reference to the channel. That avoids a reference cycle, so the memory of a channel is freed
    as soon as the channel has ended.
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
        """The payload of the opening. It is empty until the peer's `open` marker has arrived."""
        self.is_taken: bool = is_ours
        """True once the application has the channel."""
        self.sender: Final = CommonSender(common, out)
        self.incoming: Final = incoming
        """The receiver of the underlying channel of Relink."""
        self._common = common
        # True if the peer has sent anything in its direction.
        self._is_open_there = not is_ours
        # The number of the last message that the link has delivered, and of the last one that was consumed.
        self._came = -1
        self._done = -1
        # Messages that the application hasn't taken, and markers after the oldest of these messages.
        self._unread = 0
        self._unread_markers = 0
        # True once the peer's END, CANCEL or close has arrived.
        self._peer_is_done = False
        # True once we have sent STOP.
        self._sent_stop = False
        # True once the peer's close has arrived.
        self._has_ended = False
        # True once we have closed our direction.
        self._is_closed = False
        # True once the peer has confirmed the close of our direction.
        self._is_over_here = False
        # True if messages are consumed as soon as they arrive, because the application doesn't want them.
        self._is_absorbing = False
        # True once the channel has ended or its link was lost.
        self._is_gone = False
        out.owner = incoming.owner = self

    @property
    def label(self) -> str:
        return self.incoming.label

    @property
    def held(self) -> int:
        return self.incoming.held

    @property
    def lag(self) -> int:
        # The unread messages already occupy the application, so the peer doesn't have to send more right now. That
        # leaves time to combine acknowledgements.
        return LAG

    @property
    def is_idle(self) -> bool:
        """True if neither side has sent anything on the channel."""
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
        """Prepare for the end of both directions. If the channel was never used, the peer isn't notified of it."""
        self.sender.is_unannounced = self.is_idle

    def announce(self) -> None:
        """Announce an unused channel with BEGIN. After our shutdown that would be too late."""
        if not self.sender.has_sent and not self.sender.is_finished:
            self.sender.send_marker(BEGIN)

    def say_goodbye(self, reason: Reason) -> None:
        """Cancel our direction and stop the peer's direction with a reason, before the link ends."""
        if not self.sender.is_finished:
            self.sender.send_marker(_with_reason(CANCEL, reason))
        if not self._peer_is_done and not self._sent_stop:
            self.sender.send_marker(_with_reason(STOP, reason))

    def _consume(self) -> bool:
        """Consume the messages that the application has taken, and all markers that no unread message precedes.

        Returns True if there may be events to handle or packets to write.
        """
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

    # --- events of the link about our direction

    def acknowledged(self, event: Acknowledged) -> None:
        """Handle an acknowledgement. Any kind of acknowledgement implies that the messages were received."""
        if self.sender.heard(event.through):
            self.sender.confirm()

    def room_changed(self) -> None:
        """Send waiting markers, because the window may have room now."""
        self.sender.send_markers()
        self._common.events.append(Writable(self.sender))
        self.close_if_done()

    def closed(self) -> None:
        """Handle the peer's confirmation of our close."""
        self._is_over_here = True
        self.sender.confirm()
        self._check_over()

    # --- events of the link about the peer's direction

    def opened(self) -> None:
        """Note that the peer's first message has arrived."""
        self._is_open_there = True

    def arrived(self, first: int, messages: list[Parts]) -> list[bytes]:
        """Handle messages that have arrived, the first of which has number `first`.

        If all messages belong to the application, which is the usual case, returns them. Otherwise returns an empty
        list, and reports the application's messages and the meaning of the markers in `CommonChannels.events`.
        """
        if first <= self._came:
            # When this channel was accepted, the session requested all stored messages (`ChannelReceiver.rewind`).
            # These messages were among them, and the event about their arrival follows only now.
            return []
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
        """Report the application's messages, and handle the markers between them."""
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
        """Handle the peer's close of its direction."""
        self._has_ended = True
        self._peer_sends_no_more(Finished(self))  # for a peer that has sent no END, because it doesn't know markers
        self._consume()
        self.close_if_done()
        self._check_over()

    def peer_shut_down(self) -> None:
        """Handle the peer's shutdown. If the peer hasn't used its direction, it has refused our channel."""
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
        """Consume unread messages immediately if the peer has shut down and its direction has ended.

        The application may still read these messages, but the peer doesn't have to wait for that.
        """
        if self._peer_is_done and self._common.peer_takes_no_channels:
            self._is_absorbing = True
            self._consume()

    # --- the end

    def close_if_done(self) -> None:
        """Close our direction if nothing is left to send, and the peer's direction has ended or was stopped."""
        if self._is_closed or self._is_gone or not self.sender.may_close:
            return
        if not (self._peer_is_done or self._sent_stop) or self._common.link.over:
            # If the link has ended, an event in the same read did that, and the channel is about to be notified.
            return
        self._is_closed = True
        if not self.sender.has_sent and self._is_open_there:
            # Only an open channel can be closed, and the peer waits for the close of our direction.
            self.sender.send_marker(BEGIN)
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
        """Release the underlying channels, because the channel or its link has ended."""
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
    """Return the reason in a `muxkit.goodbye` message, or None for any other message."""
    return Reason.decode(bytes(parts[1])) if len(parts) == 2 and parts[0] == GOODBYE else None


# --- events that only common channels have


@attrs.define(eq=False)
class OpeningRefused:
    """Reports that the peer opened a channel with an invalid opening. The session aborts the channel."""

    channel: CommonChannel
    reason: Reason


@attrs.define(eq=False)
class ChannelOver:
    """Reports that a channel has ended on both sides, so its number may be used again."""

    channel: CommonChannel


@attrs.define(eq=False)
class GoodbyeCame:
    """Reports that the peer ends the link for a reason."""

    reason: Reason
    channel: CommonChannel | None
    """The channel that carried the goodbye, if it was offered to the application as a common channel."""


# --- all channels


class CommonChannels(MuxEngine):
    """The engine of a link's common channels.

    This engine neither parses nor writes bytes. It sends messages on channels of the link's engine. The session passes
    the link's events about a common channel to the `CommonChannel`, and then handles the events in `events`.
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
        """Events since the last call of `take_events`."""
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
        # Every common channel needs one of our channels, whichever side opened it. So half of our channels are for
        # those that we open, and the other half are for those that the peer opens.
        return min(self.limits.channels, self._space) // 2 - self._ours

    @property
    def outbox(self) -> int:
        return self.link.outbox

    @property
    def peer_takes_no_channels(self) -> bool:
        return self.link.state.has_peer_shut_down

    @property
    def has_numbers(self) -> bool:
        """True if there is more than one channel in each direction. With channel ids of 0 bytes there is only one."""
        return self._space > 1

    @property
    def has_news(self) -> bool:
        """True if the session has to act after a command.

        There may be events to handle or packets to write. The pump's clock may have to be set. Without a connection,
        the listener has to be notified that the link takes more or less memory.
        """
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
        """Create a common channel for a channel that the peer has opened."""
        return self._add(incoming.channel, incoming, is_ours=False, opening=b"")

    def _add(self, id: int, incoming: ChannelReceiver, *, is_ours: bool, opening: bytes) -> CommonChannel:
        out = self.link.next_sender(id)  # the number's previous life may still wait for the peer's `closed`
        channel = self.live[id] = CommonChannel(self, out, incoming, is_ours=is_ours, opening=opening)
        return channel

    def forget(self, channel: CommonChannel) -> None:
        """Remove a channel that has ended or whose link was lost."""
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
        """Return the last bytes of a link that ends for a reason, also if the peer broke a rule.

        The reason is sent as a goodbye, and again on each channel for peers that don't know the goodbye.
        """
        parting: list[Buffer] = []
        with self.link.last_words():
            goodbye = self._say_goodbye(reason)
            while goodbye is not None and goodbye.unsent and len(parting) < LAST_PULLS:
                pulled = self.link.buffers_to_send(LAST_WORDS)
                if not pulled:  # an earlier message can't be written yet, so the goodbye can't be written either
                    break
                parting += pulled
            parting += self.link.buffers_to_send(LAST_WORDS)
        return b"".join(parting)

    def last_words(self) -> bytes:
        """Return the last bytes of a link that can't send a reason."""
        with self.link.last_words():
            return b"".join(self.link.buffers_to_send(LAST_WORDS))

    def _say_goodbye(self, reason: Reason) -> ChannelSender | None:
        """Queue a goodbye and return the sender of its channel, or None if no channel can be opened any more."""
        taken = self.link.state.ours.live
        last = self._space - 2 + self._parity  # the highest number, for which hardly any program has a receiver
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
                channel.say_goodbye(reason)  # for peers that don't know the goodbye
        return goodbye
