"""The sending half of a channel, `ChannelSender`: it queues messages, writes them, and enforces the channel's window.

A message is queued, then written, then received by the peer, and finally consumed or answered by the peer's
application. The message occupies the window until that last step. The sender keeps the message for as long, because
the next connection has to repeat every message that the peer hasn't received.

In Relink the receiver grants no credit, so the sender limits its own window. The window starts with
`Limits.short_window` bytes, which is enough on a path with a short round trip. On a longer path the window grows by the
algorithm in `core.receive_windows`. The algorithm needs two inputs: the acknowledgements say how many bytes the peer
has consumed, and pings measure the round trip. When the windows of a link hold `LONG_SHARE` of the link's byte budget,
every channel goes back to a short window. Otherwise a few channels that the peer doesn't read could take the whole
budget from the other channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, repeat
from typing import Final, cast

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE, Buffer, Reason, ReceiveWindow, counted
from muxkit.core.halves import Sender
from muxkit.protocols.relink import events, frames
from muxkit.protocols.relink.numbers import Run, advance, extend, resolve
from muxkit.protocols.relink.state import SendTable, State

# Up to this payload size in bytes, head, payload and padding are copied into one `bytes` object when a message is
# queued. Larger payloads stay in a buffer of their own, which saves the copy.
JOIN_MOST: Final = 2048


# --- queued messages


@attrs.define(eq=False)
class Large:
    """A queued message with several parts, or with one part that is too large to copy."""

    buffers: list[Buffer]
    size: int
    """Total size of `buffers` in bytes."""
    cost: int
    """Bytes of the window that the message takes."""

    def __len__(self) -> int:
        return self.size


@attrs.define(eq=False)
class Multicast:
    """A message that is queued on several channels.

    One packet carries the message to all of its channels, so the packet is written when the message has become the
    next one in every channel.
    """

    counts: dict[ChannelSender, int]
    """How often each channel gets the message. The caller may name a channel more than once."""
    parts: tuple[bytes, ...]
    size: int
    """Size in bytes of a packet that carries the message to one channel."""
    cost: int
    """Bytes of the window that the message takes in each channel."""
    waiting: int
    """Number of channels in which other messages are still queued before this one."""
    written: bool = False
    """True once the packet to all channels was written.

    After a reconnection the message is then repeated only on the channels whose receivers lack it, in a packet for each
    channel.
    """

    def __len__(self) -> int:
        return self.size


# An entry of a queue. A `bytes` object is a whole packet with one small part. Its cost is its length plus `OVERHEAD`.
Item = bytes | Large | Multicast


class ChannelSender(Sender):
    """One channel that this side sends on, from its first message until the peer has confirmed its close.

    The first message opens the channel and enters the sender in `SendTable`. After the peer has confirmed the close,
    the channel's number may be used again. Each such use of a number is called a life of the channel, and every life
    has its own `ChannelSender`.

    A command either does all of its work, or it raises `LocalProtocolError` and changes nothing. The sender numbers its
    messages from `Config.first_sequence`. Inside the engine these numbers don't wrap, unlike those on the wire.

    The scheduler decides in which order the senders of a link write. It uses `scheduled`, `deficit`, `is_ready` and
    `write`.
    """

    __slots__ = (
        "_again",
        "_meter",
        "_told_last",
        "_unmetered",
        "answered",
        "bytes",
        "channel",
        "close_told",
        "close_written",
        "closing",
        "confirmed",
        "consumed",
        "consumed_told",
        "decided",
        "decisions",
        "deficit",
        "first",
        "free",
        "grown",
        "head",
        "head_size",
        "heard",
        "journal",
        "kept",
        "last_answer",
        "next",
        "owner",
        "received",
        "received_told",
        "released",
        "report_from",
        "scheduled",
        "sent",
        "stalled",
        "state",
        "table",
        "told",
        "unsent",
        "window",
    )

    def __init__(self, channel: int, state: State) -> None:
        self.owner: object | None = None
        self.state: State = state
        self.table: SendTable = state.ours
        self.channel: int = channel
        first = state.config.first_sequence
        self.first: int = first
        """The number of the channel's first message."""
        self.next: int = first
        """The number that the next message will get."""
        # Messages pass through stages in the order of their numbers, so one number describes a stage: the last message
        # that has reached the stage. It is `first - 1` while no message has.
        none = first - 1
        self.sent: int = none
        """The last message that was written on this connection, or that the peer is known to have received before."""
        self.received: int = none
        """The last message that the peer is known to have received. Any kind of acknowledgement shows that."""
        self.consumed: int = none
        """The last message that the peer's application has consumed."""
        self.answered: int = none
        """The last message that the peer's application has answered with `committed` or `uncommitted`."""
        self.released: int = none
        """The last message that has left the window."""
        self.decided: int = none
        """The last message that our application has committed or rolled back."""
        self.told: int = none
        """The last message for which a commit or a rollback was written."""
        self.received_told: int = none
        """The last message for which the peer has sent `received`.

        A `received` without a number refers to the message after it.
        """
        self.consumed_told: int = none
        """The last message for which the peer has sent `consumed`.

        A `consumed` without a number refers to the message after it.
        """
        self.report_from: int = first
        """Acknowledgements of messages before this number aren't reported, because nobody asks for them."""
        self.last_answer: frames.Ack | None = None
        """The kind of the answer to message `answered`."""
        self.bytes: int = 0
        """How many bytes the messages in the window take."""
        self.window: int = self.table.short_window
        """How many bytes the messages in the window may take, as far as the link's budget allows."""
        # Calculates `window`. It is created when the peer has consumed so many bytes that the calculation is worth it.
        self._meter: ReceiveWindow | None = None
        # Bytes that left the window since `_meter` was last updated.
        self._unmetered = 0
        self.unsent: deque[Item] = deque()
        """Messages that are still to be written on this connection."""
        self.kept: deque[Item] = deque()
        """Written messages that are still in the window: those from `released + 1` to `sent`."""
        self.grown: int = 0
        """Number of `Large` and `Multicast` items in `unsent` and `kept`. If it is 0, all items are `bytes`."""
        self.journal: deque[Run] = deque() if state.out_transactions else NO_QUEUE
        """Decisions that may have to be repeated on another connection, oldest first.

        They are all decisions that are newer than the last commit that the peer has answered. The peer doesn't answer a
        rollback, so a rollback stays here until a later commit is answered.
        """
        self.decisions: deque[Run] = deque() if state.out_transactions else NO_QUEUE
        """Decisions that are still to be written on this connection."""
        # The kind of the last decision that was written.
        self._told_last: frames.Operation | frames.Ack | None = None
        # True if the next decision must be written with its number, because the peer may have missed earlier decisions.
        self._again = False
        self.free: bool = False
        """True if messages may be written on this connection. On a resumed link that is after the peer's resume."""
        self.heard: bool = False
        """True if the peer has acknowledged anything on this channel since the connection was made."""
        self.confirmed: bool = False
        """True if the peer is known to have received a message of this life of the channel."""
        self.stalled: bool = False
        """True if the next message is a multicast that has to wait for its other channels."""
        self.closing: bool = False
        """True once the application has closed the channel."""
        self.close_written: bool = False
        """True if the close was written on this connection."""
        self.close_told: bool = False
        """True if the close was written on any connection and the peer may have received it."""
        self.head: bytes = b""
        """The encoded head of the last message with one part. The next message of the same size uses it again."""
        self.head_size: int = -1
        """The size of the part that `head` was encoded for."""
        self.deficit: int = 0
        """The scheduler's account of how many bytes this sender may write (deficit round robin)."""
        self.scheduled: bool = False
        """True while this sender is in the scheduler's queue."""

    @property
    def label(self) -> str:
        return f"channel {self.channel}"

    @property
    def queued(self) -> int:
        return sum(map(len, self.unsent))

    @property
    def has_sent(self) -> bool:
        return self.next > self.first

    @property
    def outstanding(self) -> int:
        """Number of messages in the window."""
        return self.next - 1 - self.released

    # --- room

    @property
    def room(self) -> int:
        """How many more messages the window allows by their number alone. `admits` also checks the bytes."""
        return 0 if self.closing else self.state.config.window - self.outstanding

    def check_size(self, size: int) -> None:
        """Do nothing. `State.check_parts` checks the payload against the limit, and `size` also includes overhead."""

    def has_room(self, size: int) -> bool:
        return self.admits(size)

    def admits(self, size: int, parts: int = 1) -> bool:
        """Return True if a message with `size` bytes of payload in `parts` parts can be sent now.

        The window must have room for one more message and for its bytes. An empty window admits a message of any size.
        In addition, the link must have budget left. Every channel may use its first `Limits.channel_floor` bytes even
        if the link has none left. If this sender is for the channel's next life, it has no room until the current life
        has ended.
        """
        is_mine = self.next > self.first or self.table.is_free_for(self)
        return is_mine and self.has_room_for(self._cost(size, parts))

    def notify_when_room(self, size: int) -> None:
        self.watch(size)

    def watch(self, size: int = 1, parts: int = 1) -> None:
        """Report `Writable` once a message of this size fits, or once the link was replaced by a new one."""
        self.table.watchers[self.channel] = self, self._cost(size, parts)
        self.table.wake(self.channel)

    def has_room_for(self, cost: int, *, queued: int = 0, messages: int = 0, overdraw: bool = False) -> bool:
        """Return True if the window and the link's budget have room for a message that costs `cost` bytes.

        Args:
            cost: Bytes of the window that the message takes.
            queued: Bytes of the link's budget to treat as used already, for a multicast to several channels.
            messages: Number of messages of the same cost to treat as queued in this channel already.
            overdraw: Ignore that the link's budget is used up.
        """
        if self.closing:
            return False
        state, table = self.state, self.table
        kept, messages = self.bytes + messages * cost, self.outstanding + messages
        if messages >= state.config.window:
            return False
        if kept + cost <= state.floor:
            return True
        if table.retained_over + queued > state.limits.connection_bytes and not overdraw:
            return False
        return kept + cost <= table.short_window or messages == 0 or self._fits_long_window(kept + cost, queued)

    def _fits_long_window(self, size: int, queued: int = 0) -> bool:
        """Return True if the window may hold `size` bytes in total and the link's budget still allows long windows."""
        table = self.table
        return size <= self.window and table.retained_over + queued <= table.long_bytes

    def _cost(self, size: int, parts: int) -> int:
        """Return how many bytes of the window a message takes at most, without knowing the size of each part."""
        if parts == 1:
            if size <= frames.SMALL_MOST:
                return self.table.small + (size + 7 & -8)
            return frames.message_cost((size,), self.state.out_id_size)
        return 32 + 16 * parts + size + frames.OVERHEAD + frames.PART_OVERHEAD * parts

    def over_floor(self, cost: int, before: int = 0) -> int:
        """Return how many of `cost` additional bytes the link's budget is charged for.

        The channel's first bytes, up to its floor, are not charged. `before` is the number of bytes to treat as queued
        already.
        """
        return max(0, min(self.bytes + before + cost - self.state.floor, cost))

    # --- commands

    def send(self, message: bytes) -> None:
        self.send_parts((message,))

    def send_parts(self, parts: Sequence[bytes], *, overdraw: bool = False) -> int:
        """Queue a message and return its number. The first message opens the channel.

        Args:
            parts: The parts of the message.
            overdraw: Queue the message even if the link's budget is used up. This is for a caller that was notified of
                room, but found that other channels had used that room in the meantime. A peer with the same limits
                accepts up to `Limits.outbox` bytes beyond the budget.

        Raises:
            LocalProtocolError: The message can't be sent now, or can never be sent.
        """
        if self.next == self.first or self.closing or self.state.over:  # an open channel needs no further checks
            self.check_sending()
        self.state.check_parts(parts)
        item = self._pack(parts)
        cost = len(item) + frames.OVERHEAD if isinstance(item, bytes) else item.cost
        if not self.has_room_for(cost, overdraw=overdraw):
            raise self.full(parts, cost)
        return self.push((item,), cost, grown=not isinstance(item, bytes))

    def try_push(self, payload: bytes, reserve: int = 0) -> int | None:
        """Queue a message of one part if the channel is open and at least `reserve` bytes of the window remain.

        This is the fast path of `send_parts`. Returns the number of the message. In every other case it changes nothing
        and returns None, and the caller has to use `send_parts`.
        """
        size = len(payload)
        state, table = self.state, self.table
        if self.next == self.first or size > table.largest or self.closing or state.over:
            return None
        # The code below repeats `_pack`, `has_room_for` and `push` inline, because it runs for each message and the
        # calls would take a considerable part of its time.
        if size != self.head_size:
            self._shape_head(size)
        item = self.head + payload + frames.PADDING[size & 7] if size <= JOIN_MOST else self._pack((payload,))
        length = len(item)
        cost = length + frames.OVERHEAD
        number, kept = self.next, self.bytes
        if (
            (kept + cost + reserve > table.short_window and not self._fits_long_window(kept + cost + reserve))
            or number - self.released > table.window
            or table.retained_over > table.connection_bytes
        ):
            return None
        self.unsent.append(item)
        if size > JOIN_MOST:
            self.grown += 1
        self.bytes = kept + cost
        table.retained += cost
        floor = table.floor
        if kept >= floor:
            table.retained_over += cost
        elif kept + cost > floor:
            table.retained_over += kept + cost - floor
        table.outbox.used += length
        table.messages += 1
        self.next = number + 1
        if not self.scheduled and self.free and not self.stalled:
            table.scheduler.add(self)
        return number

    def try_push_all(self, payloads: Sequence[bytes], reserve: int = 0) -> int | None:
        """Queue several short messages of one part each, or none of them.

        Returns the number of the last message. Like `try_push`, returns None and changes nothing if the general path
        has to decide.
        """
        count = len(payloads)
        if self.next == self.first or self.closing or self.state.over or not count:
            return None
        if max(map(len, payloads)) > JOIN_MOST:
            return None
        items = [self._pack((payload,)) for payload in payloads]
        cost = sum(map(len, items)) + count * frames.OVERHEAD
        needed = self.bytes + cost + reserve
        if (
            (needed > self.table.short_window and not self._fits_long_window(needed))
            or self.outstanding + count > self.state.config.window
            or self.table.retained_over + self.over_floor(cost) > self.state.limits.connection_bytes
        ):
            return None
        return self.push(items, cost, grown=False)

    def commit(self, through: int | None = None) -> None:
        """Commit the undecided messages up to number `through`, or all of them: the peer may now process them."""
        self._decide(frames.Operation.COMMIT, through)

    def rollback(self, through: int | None = None) -> None:
        """Roll back the undecided messages up to number `through`, or all of them: the peer drops them."""
        self._decide(frames.Operation.ROLLBACK, through)

    def close(self) -> None:
        """Close the channel. The close is written after all queued messages.

        `ChannelClosed` is reported when the peer has confirmed that its application has consumed every message.

        Raises:
            LocalProtocolError: The channel isn't open, or some of its messages are neither committed nor rolled back.
        """
        self._check_open()
        undecided = self.next - 1 - self.decided
        if self.state.out_transactions and undecided:
            raise LocalProtocolError(
                f"channel {self.channel}: {counted(undecided, 'message')} neither committed nor rolled back"
            )
        self.closing = True
        self.table.closing += 1
        self.schedule()
        self._confirm()

    def finish(self, payload: bytes = b"") -> None:
        """Roll back undecided messages and close the channel. Does nothing if no message was sent.

        `payload` is ignored, because a close of Relink has no payload.
        """
        if self.has_sent:
            if self.state.out_transactions and self.decided < self.next - 1:
                self.rollback()
            self.close()

    def cancel(self, reason: Reason) -> None:
        """Do the same as `finish`.

        Relink has no reset: messages that were sent can't be taken back, and no packet could carry `reason`.
        """
        if not self.closing:
            self.finish()

    # --- checks

    def _check_open(self) -> None:
        self.state.check_alive()
        if not self.has_sent or self.closing:
            raise LocalProtocolError(f"channel {self.channel} is {'closed' if self.closing else 'not open'}")

    def check_sending(self, new: int = 0) -> None:
        """Raise `LocalProtocolError` if the channel is closed, or if it isn't open and can't be opened.

        `new` is the number of other channels that the same multicast is going to open.
        """
        state, channel = self.state, self.channel
        state.check_alive()
        if self.closing or not self.table.is_free_for(self):
            raise LocalProtocolError(
                f"channel {channel} is closed; it can be opened anew when the peer has confirmed it"
            )
        if self.has_sent:
            return
        if state.is_shutting_down:
            raise LocalProtocolError(f"channel {channel} is not open, and none can be opened after the shutdown")
        state.check_number(channel)
        live = len(self.table.live) + new
        if live >= state.limits.channels:
            name = state.limits.bound_of_channels
            raise LocalProtocolError(
                f"too many channels: {live} are open; close one, or raise Limits({name}=…) on both sides"
            )

    def full(self, parts: Sequence[bytes], cost: int, messages: int = 0) -> LocalProtocolError:
        """Return the error for a message that doesn't fit in the window after `messages` others of the same cost."""
        size, limits = sum(map(len, parts)), self.state.limits
        return LocalProtocolError(
            f"channel {self.channel}: no room for a message of {size} bytes: {self.outstanding + messages} messages of "
            f"{self.bytes + messages * cost} bytes aren't answered, and {self.state.config.window} messages of "
            f"{self.window} bytes are allowed, {limits.connection_bytes} bytes on all channels"
        )

    # --- queueing

    def _shape_head(self, size: int) -> None:
        """Encode and cache the head of a message of `size` bytes. Most messages are as long as the one before."""
        self.head_size, self.head = size, frames.message_head((self.channel,), (size,), self.state.out_id_size)

    def _pack(self, parts: Sequence[bytes]) -> Item:
        """Encode a message for the queue. Only small payloads are copied."""
        if len(parts) != 1:
            buffers = frames.message_buffers((self.channel,), parts, self.state.out_id_size)
            size = sum(map(len, buffers))
            cost = size + frames.OVERHEAD + frames.PART_OVERHEAD * max(0, len(parts) - 1)
            return Large(buffers if cost > JOIN_MOST else [b"".join(buffers)], size, cost)
        payload = parts[0]
        size = len(payload)
        if size != self.head_size:
            self._shape_head(size)
        padding = frames.PADDING[size & 7]
        if size <= JOIN_MOST:
            return self.head + payload + padding
        size += len(self.head) + len(padding)
        return Large([self.head, payload, padding] if padding else [self.head, payload], size, size + frames.OVERHEAD)

    def push(self, items: Sequence[Item], cost: int, *, grown: bool) -> int:
        """Queue messages and return the number of the last one. The caller has checked that the window has room.

        Args:
            items: The encoded messages.
            cost: Bytes of the window that all of them take together.
            grown: True if the items are `Large` or `Multicast`, False if they are `bytes`.
        """
        table = self.table
        if self.next == self.first:
            table.enter(self)
        self.unsent.extend(items)
        if grown:
            self.grown += len(items)
        table.retained_over += self.over_floor(cost)
        self.bytes += cost
        table.retained += cost
        table.outbox.used += sum(map(len, items))
        table.messages += len(items)
        self.next += len(items)
        if not self.scheduled and self.free and not self.stalled:
            table.scheduler.add(self)
        return self.next - 1

    def _decide(self, operation: frames.Operation, through: int | None) -> None:
        self._check_open()
        if not self.state.out_transactions:
            raise LocalProtocolError(f"channel {self.channel} has no transactions")
        last = self.next - 1
        through = last if through is None else through
        if not self.decided < through <= last:
            raise LocalProtocolError(
                f"channel {self.channel}: {operation.name.lower()} through {through}; "
                f"{self.decided + 1} to {last} are not decided yet"
            )
        self.decided = through
        for decisions in (self.journal, self.decisions):
            extend(decisions, operation, through)
        self.schedule()

    # --- writing

    def schedule(self) -> None:
        """Add this sender to the scheduler's queue if it has anything to write now."""
        if not self.scheduled and self.is_ready():
            self.table.scheduler.add(self)

    def is_ready(self) -> bool:
        if not self.free:
            return False
        if self.decisions and self.decisions[0].through <= self.sent:
            return True
        if self.unsent:
            return not self.stalled
        # The close must wait until `confirmed`. A peer forgets a closed channel immediately, so its next resume leaves
        # the channel out. A resume also leaves out a channel of which the peer never received a message. Without the
        # wait we couldn't tell whether the messages were consumed or lost.
        return self.closing and not self.close_written and not self.decisions and self.confirmed

    def _confirm(self) -> None:
        """Ask for a ping if the close waits only for proof that the peer has received the channel's first message."""
        if self.closing and not self.confirmed and self.free and not self.unsent and not self.decisions:
            self.state.probes.prove(self, at_once=True)

    @property
    def proof(self) -> int:
        """The last message that the peer must have received when it answers a ping that is written now."""
        return self.sent

    def proven(self, through: int) -> None:
        """Record that the peer has received all messages up to number `through`."""
        if through >= self.first:
            self.confirmed = True
        self.schedule()

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        unsent = self.unsent
        if unsent and not (self.grown or self.decisions) and self.free:
            size = sum(map(len, cast("deque[bytes]", unsent)))
            if size <= budget and not self.closing and self.sent >= self.first:
                # Fast path for the usual queue, which has only `bytes` items and no decisions: write all items without
                # a loop. The first message of a channel and a closing channel need the bookkeeping in `_wrote`.
                out.extend(cast("deque[bytes]", unsent))
                self.kept.extend(unsent)
                self.sent += len(unsent)
                unsent.clear()
                self.table.outbox.used -= size
                return size
        written = 0
        while self.free and written < budget:
            if self.decisions and self.decisions[0].through <= self.sent:
                written += self._write_decision(out)
            elif unsent:
                size = self._write_messages(budget - written, out)
                if not size:
                    break
                written += size
            else:
                if self.is_ready():
                    written += self._write_close(out)
                break
        return written

    def _write_messages(self, budget: int, out: list[Buffer]) -> int:
        """Write messages within the budget, but none after the next decision or after a multicast that must wait."""
        unsent = self.unsent
        most = self.decisions[0].through - self.sent if self.decisions else self.next
        written = count = 0
        while unsent and written < budget and count < most:
            item = unsent[0]
            if isinstance(item, bytes):
                out.append(item)
            elif isinstance(item, Large):
                out.extend(item.buffers)
            elif item.written:
                out.extend(frames.message_buffers((self.channel,), item.parts, self.state.out_id_size))
            elif count:
                break
            else:
                return self._write_multicast(item, out)
            self.kept.append(unsent.popleft())
            written += len(item)
            count += 1
        self._wrote(count, written)
        return written

    def _wrote(self, count: int, size: int) -> None:
        if self.sent < self.first:
            self.table.unannounced.pop(self, None)
        self.sent += count
        self.table.outbox.used -= size
        if self.closing:
            # The last message may have been written now, so that only the proof for the close is missing. `write` can't
            # check that. Another channel may have written our last message, as a multicast. And `write` returns
            # directly after the last message if its budget is used up.
            self._confirm()

    def _write_multicast(self, item: Multicast, out: list[Buffer]) -> int:
        if not self.stalled:
            self.stalled = True
            item.waiting -= 1
        if item.waiting:
            return 0
        channels = [one.channel for one, count in item.counts.items() for _ in range(count)]
        buffers = frames.message_buffers(channels, item.parts, self.state.out_id_size, multicast=True)
        out.extend(buffers)
        item.written = True
        for one, count in item.counts.items():
            one.stalled = False
            one.kept.extend(islice(one.unsent, count))
            for _ in range(count):
                one.unsent.popleft()
            one._wrote(count, count * item.size)
            if one is not self:
                one.schedule()
        return sum(map(len, buffers))

    def _write_decision(self, out: list[Buffer]) -> int:
        decision = self.decisions.popleft()
        operation, through = decision.kind, decision.through
        is_next = not self._again and through == self.told + 1 and self._told_last in (None, operation)
        packet = frames.encode_notice(operation, (self.channel,), self.state.out_id_size, None if is_next else through)
        self.told, self._told_last, self._again = max(self.told, through), operation, False
        out.append(packet)
        if self.closing:
            self._confirm()
        return len(packet)

    def _write_close(self, out: list[Buffer]) -> int:
        packet = frames.encode_notice(frames.Operation.CLOSE, (self.channel,), self.state.out_id_size)
        self.close_written = self.close_told = True
        out.append(packet)
        return len(packet)

    # --- connections

    def connect(self) -> None:
        """Prepare for a new connection. On a resumed link nothing is written before the peer's resume."""
        self.free = self.state.is_resumed
        self.heard = self.stalled = self.scheduled = self.close_written = False
        self.deficit = 0
        self._again = self.state.resumes

    def disconnect(self) -> None:
        if self.stalled and isinstance(item := self.unsent[0], Multicast):
            item.waiting += 1
        self.stalled = self.free = self.scheduled = False

    @property
    def has_unanswered_commits(self) -> bool:
        return any(run.kind is frames.Operation.COMMIT for run in self.journal)

    def release_to_write(self) -> None:
        """Allow writing after the peer's resume.

        The messages after `received` were lost with the last connection, so they are queued again. All decisions in
        `journal` are queued again as well, because the peer may have missed them.
        """
        if self.sent > self.received:
            # The close was written after the messages that the peer lacks, so the peer lacks the close, too.
            self.close_told = False
        if self.state.observer is not None and self.sent > self.received:
            # An observer is notified which messages are repetitions. If an earlier connection was lost before it had
            # repeated all of them, the remaining repetitions are still queued, after the messages queued here.
            left = self.state.repeats.get(self.channel, 0)
            self.state.repeats[self.channel] = left + self.sent - self.received
        if self.received < self.first:
            # The peer has no message of this life, even if `confirmed` was set on an earlier connection.
            self.confirmed = False
        for _ in range(self.sent - self.received):
            item = self.kept.pop()
            self.unsent.appendleft(item)
            self.table.outbox.used += len(item)
        self.sent = self.received
        self.told = min(self.told, self.received)
        if self.journal or self.decisions:
            self.decisions = deque(Run(one.kind, one.through) for one in self.journal)
        self.free = True
        self.schedule()
        self._confirm()

    # --- acknowledgements of the peer
    #
    # A packet is checked as a whole before any of it is applied. So `meant` checks an acknowledgement, and may raise,
    # and `take` applies it after the packet's other channels were checked, too.

    def meant(self, ack: frames.Ack, sequence: int | None, count: int) -> int | None:
        """Return the message number up to which an acknowledgement applies.

        Returns None if the acknowledgement repeats an earlier one, which is allowed in a resume.

        Args:
            ack: The kind of the acknowledgement.
            sequence: The number on the wire. None means that the acknowledgement applies to the next message.
            count: How often the packet names this channel.

        Raises:
            RemoteProtocolError: The acknowledgement breaks a rule.
        """
        state = self.state
        what = f"{ack.name.lower()} on channel {self.channel}"
        if ack is frames.Ack.RECEIVED or ack is frames.Ack.CONSUMED:
            done = self.received_told if ack is frames.Ack.RECEIVED else self.consumed_told
            if sequence is None:
                return advance(what, count, done=done, last=self.sent)
            number = resolve(what, sequence, done=done, last=self.sent)
            if ack is frames.Ack.RECEIVED and number is not None and not self.free and number < self.received:
                known = f"{self.received} was acknowledged before"
                raise RemoteProtocolError(f"{what}: {number}, though {known}", rule="relink-R03")
            return number
        if not state.out_transactions:
            raise RemoteProtocolError(f"{what}, which has no transactions", rule="relink-T06")
        if sequence is None:
            number = advance(what, count, done=self.answered, last=self.told)
        else:
            behind = state.config.window if state.is_resuming else 0
            found = resolve(what, sequence, done=self.answered, last=self.told, behind=behind)
            if found is None:
                return None
            number = found
            if number == self.answered:
                if state.is_resuming or ack is self.last_answer:
                    return None
                raise RemoteProtocolError(f"{what}: {sequence} was answered otherwise before", rule="relink-Q11")
        run = next(run for run in self.journal if run.through >= number)
        if run.kind is not frames.Operation.COMMIT:
            rule = "relink-T04" if sequence is None else "relink-T03"
            raise RemoteProtocolError(f"{what}: message {number} was rolled back", rule=rule)
        return number

    def take(self, ack: frames.Ack, number: int) -> None:
        """Apply an acknowledgement of all messages up to `number`."""
        if number >= self.first:
            self.confirmed = True
        self.table.unannounced.pop(self, None)
        if ack is frames.Ack.RECEIVED:
            self.received_told = number
            if number > self.received:
                self.received = number
                self._report(events.Received, number)
            if not self.free:
                self.release_to_write()
        elif ack is frames.Ack.CONSUMED:
            self.consumed_told = number
            if number > self.consumed:
                self.consumed = number
                self._report(events.Consumed, number)
                self.received = max(self.received, number)
                self._release(self._resolved() if self.state.out_transactions else number)
        else:
            first, self.answered, self.last_answer = self.answered + 1, number, ack
            event = events.Committed if ack is frames.Ack.COMMITTED else events.Uncommitted
            self.state.report(event(self, first, number))
            self.received = max(self.received, number)
            while self.journal and self.journal[0].through <= number:
                self.journal.popleft()
            self._release(self._resolved())
        self.schedule()

    def _report(self, kind: type[events.Received | events.Consumed], number: int) -> None:
        self.state.progress += 1
        if number >= self.report_from:
            self.state.events.append(kind(self, number))

    def _resolved(self) -> int:
        """Return the number up to which every message was answered, or was rolled back and then consumed."""
        resolved = max(self.answered, self.released)
        if self.journal and self.journal[0].kind is frames.Operation.ROLLBACK:
            resolved = max(resolved, min(self.journal[0].through, self.consumed))
        return resolved

    def _release(self, through: int) -> None:
        """Remove the messages up to number `through` from the window."""
        count = through - self.released
        if count <= 0:
            return
        self.released = through
        kept = self.kept
        size = sum(map(len, islice(kept, count))) + count * frames.OVERHEAD
        if self.grown:
            left = [item for item in islice(kept, count) if not isinstance(item, bytes)]
            size += sum(item.cost - len(item) - frames.OVERHEAD for item in left)
            self.grown -= len(left)
        if count == len(kept):
            kept.clear()
        else:
            for _ in repeat(None, count):
                kept.popleft()
        over = max(0, min(self.bytes - self.state.floor, size))
        self.bytes -= size
        self._unmetered += size
        if self._unmetered >= self.table.metered_bytes:
            self._size_window()
        self.table.freed(self, size, over)

    def _size_window(self) -> None:
        """Adapt the window to the round trip and the peer's speed.

        `_release` calls this each time the peer has consumed `SendTable.metered_bytes`.
        """
        table, state = self.table, self.state
        meter = self._meter
        if meter is None:
            meter = self._meter = ReceiveWindow(state.limits.channel_bytes, table.budget)
            meter.start(state.now)
        size = min(self._unmetered, meter.credit)
        self._unmetered = 0
        meter.arrived(size)
        meter.consumed(size, state.now)
        self.window = max(table.short_window, meter.target)
        state.probes.measure(table.budget.round_trip, state.now)

    def check_closed(self) -> bool:
        """Check a `closed` of the peer.

        Returns True if it ends this channel. Returns False if it is part of a resume and ends an earlier life of the
        channel.

        Raises:
            RemoteProtocolError: We didn't close the channel, or some of its messages aren't acknowledged.
        """
        what = f"closed on channel {self.channel}"
        if not self.close_told:
            if self.state.is_resuming and not self.heard:
                return False
            raise RemoteProtocolError(f"{what}, which was not closed", rule="relink-K02")
        if self.unsent or self.has_unanswered_commits:
            open_ends = f"{len(self.unsent)} messages not received, {self.decided - self.answered} not answered"
            raise RemoteProtocolError(f"{what}: {open_ends}", rule="relink-K02")
        return True

    def closed(self) -> None:
        """Finish the channel after the peer's `closed`, which implies all acknowledgements that haven't arrived."""
        if self.consumed < self.next - 1:
            self.consumed = self.next - 1
            self.state.report(events.Consumed(self, self.consumed))
        self._release(self.next - 1)
        if self._meter is not None:
            self._meter.retire()
        self.state.report(events.ChannelClosed(self))
        self.free = False
        self.table.forget(self)
