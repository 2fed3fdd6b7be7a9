"""One channel of ours: what is still to be written on it, and what may have to be written again.

Messages stay until they leave the window, and with them a journal of commits and rollbacks: after a resume both are
told again from where the peer stopped, in the order in which they were first told.
"""

from __future__ import annotations

from collections import deque
from itertools import islice, repeat
from typing import TYPE_CHECKING, cast

from muxkit.core import NO_QUEUE
from muxkit.protocols.relink._events import ChannelClosed, Committed, Consumed, Received, Uncommitted
from muxkit.protocols.relink._items import JOIN_MOST, Decision, Item, Large, Multicast
from muxkit.protocols.relink._packets import (
    OVERHEAD,
    PADDING,
    Ack,
    Operation,
    encode_operation,
    message_buffers,
    message_head,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.core import Buffer
    from muxkit.protocols.relink._state import Link


class Outgoing:
    """One channel of ours from its first message to the confirmation of its end; a source for the scheduler.

    What happens to a message: it is queued, written, received by the peer, consumed or answered there, and only
    then released from the window.
    """

    __slots__ = (
        "_again",
        "_head",
        "_head_size",
        "_told_last",
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
        "heard",
        "journal",
        "kept",
        "last_answer",
        "link",
        "next",
        "received",
        "received_told",
        "released",
        "scheduled",
        "sent",
        "stalled",
        "told",
        "unsent",
    )

    def __init__(self, channel: int, link: Link) -> None:
        self.link = link
        self.channel = channel
        first = link.config.first_sequence
        self.first = first
        self.next = first
        # Each of these is the last of its kind; before the first message it is one less than its number.
        none = first - 1
        self.sent = none  # written on this connection, or known to have arrived
        self.received = none
        self.consumed = none
        self.answered = none
        self.released = none
        self.decided = none  # committed or rolled back here
        self.told = none  # the same, and told to the peer
        self.received_told = none  # as named by the peer's acks of just this kind
        self.consumed_told = none
        self.last_answer: Ack | None = None
        self.bytes = 0  # in the window
        self.unsent: deque[Item] = deque()
        self.kept: deque[Item] = deque()  # `released` + 1 to `sent`
        self.grown = 0  # items in both that are more than a packet put together
        # Not answered yet, and the rollbacks before.
        self.journal: deque[Decision] = deque() if link.out_transactions else NO_QUEUE
        self.decisions: deque[Decision] = deque() if link.out_transactions else NO_QUEUE  # to be written
        self._told_last: Operation | None = None
        self._again = False  # the next decision is told with its number, since the peer may have missed one
        # Life.
        self.free = link.is_free  # messages may go out on this connection
        self.heard = False  # the peer spoke of it on this connection
        self.confirmed = False  # the peer is known to have had a message of this life
        self.stalled = False  # the next message is a multicast that waits for its other channels
        self.closing = False
        self.close_written = False  # on this connection
        self.close_told = False  # on any, and the peer may have it
        self._head = b""  # of a message with one part of so many bytes
        self._head_size = -1
        self.deficit = 0
        self.scheduled = False

    @property
    def outstanding(self) -> int:
        """Messages in the window."""
        return self.next - 1 - self.released

    # --- queueing

    def pack(self, parts: Sequence[bytes]) -> Item:
        """A message as it will be written, copied only if it is small."""
        if len(parts) != 1:
            return Large.of_parts(self.channel, parts, self.link.out_id_size)
        payload = parts[0]
        if len(payload) <= JOIN_MOST:
            return self.pack_small(payload)
        self._shape_head(len(payload))
        return Large.of_one(self._head, payload)

    def pack_small(self, payload: bytes) -> bytes:
        size = len(payload)
        if size != self._head_size:
            self._shape_head(size)
        return self._head + payload + PADDING[size & 7]

    def _shape_head(self, size: int) -> None:
        """Most messages of a channel are as long as the one before."""
        if size != self._head_size:
            self._head_size, self._head = size, message_head((self.channel,), (size,), self.link.out_id_size)

    def push(self, item: Item, cost: int) -> int:
        """Queue a message that was admitted; gives its number."""
        size = len(item)
        link = self.link
        self.unsent.append(item)
        self.grown += not isinstance(item, bytes)
        over = self.bytes + cost - link.floor
        self.bytes += cost
        link.retained += cost
        if over > 0:
            link.retained_over += min(over, cost)
        link.outbox.used += size
        number = self.next
        self.next = number + 1
        if not self.scheduled and self.free and not self.stalled:
            link.scheduler.add(self)
        return number

    def decide(self, operation: Operation, through: int) -> None:
        self.decided = through
        for decisions in (self.journal, self.decisions):
            if decisions and decisions[-1].operation is operation:
                decisions[-1].through = through
            else:
                decisions.append(Decision(operation, through))
        self.link.schedule(self)

    def close(self) -> None:
        self.closing = True
        self.link.closing += 1
        self.link.schedule(self)
        self._confirm()

    # --- writing

    def is_ready(self) -> bool:
        if not self.free:
            return False
        if self.decisions and self.decisions[0].through <= self.sent:
            return True
        if self.unsent:
            return not self.stalled
        return self.closing and not self.close_written and self._may_close

    @property
    def _may_close(self) -> bool:
        # A peer forgets a closed channel at once, and its next resume is silent about it, as about a channel of which
        # it never had a message. The two could not be told apart.
        return not self.decisions and self.confirmed

    def _confirm(self) -> None:
        """Ask for a pong if that is all that a close waits for: it shows that the peer has read what was written."""
        if self.closing and not self.confirmed and self.free and not self.unsent and not self.decisions:
            self.link.control.ask_proof(self)

    @property
    def proof(self) -> int:
        """What a pong to a ping that is written now will show: the peer has the messages through this one."""
        return self.sent

    def proven(self, through: int) -> None:
        """The peer has read everything through this message."""
        if through >= self.first:
            self.confirmed = True
        self.link.schedule(self)

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        written = 0
        while self.free and written < budget:
            if self.decisions and self.decisions[0].through <= self.sent:
                written += self._write_decision(out)
            elif self.unsent:
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
        """As many as the budget has room for, up to the next decision or to a multicast that must wait."""
        unsent, kept, append = self.unsent, self.kept, out.append
        if not (self.grown or self.decisions) and (size := sum(map(len, cast("deque[bytes]", unsent)))) <= budget:
            # What most queues are, all at once.
            out.extend(cast("deque[bytes]", unsent))
            kept.extend(unsent)
            count = len(unsent)
            unsent.clear()
            self._wrote(count, size)
            return size
        most = self.decisions[0].through - self.sent if self.decisions else self.next
        written = count = 0
        while unsent and written < budget and count < most:
            item = unsent[0]
            if isinstance(item, bytes):
                append(item)
            elif isinstance(item, Multicast) and not item.written:
                if count:
                    break
                return self._write_multicast(item, out)
            elif isinstance(item, Multicast):
                out.extend(message_buffers((self.channel,), item.parts, self.link.out_id_size))
            else:
                out.extend(item.buffers)
            kept.append(unsent.popleft())
            written += len(item)
            count += 1
        self._wrote(count, written)
        return written

    def _wrote(self, count: int, size: int) -> None:
        if self.sent < self.first:
            self.link.unannounced.pop(self, None)
        self.sent += count
        self.link.outbox.used -= size
        if self.closing:
            self._confirm()  # here, since it may have been another channel's turn, or the last bytes of our own

    def _write_multicast(self, item: Multicast, out: list[Buffer]) -> int:
        if not self.stalled:
            self.stalled = True
            item.waiting -= 1
        if item.waiting:
            return 0
        channels = [one.channel for one, count in item.counts.items() for _ in range(count)]
        buffers = message_buffers(channels, item.parts, self.link.out_id_size, multicast=True)
        out.extend(buffers)
        item.written = True
        for one, count in item.counts.items():
            one.stalled = False
            one.kept.extend(islice(one.unsent, count))
            for _ in range(count):
                one.unsent.popleft()
            one._wrote(count, count * item.size)
            if one is not self:
                self.link.schedule(one)
        return sum(map(len, buffers))

    def _write_decision(self, out: list[Buffer]) -> int:
        decision = self.decisions.popleft()
        operation, through = decision.operation, decision.through
        is_next = not self._again and through == self.told + 1 and self._told_last in (None, operation)
        sequence = None if is_next else through
        packet = encode_operation(operation, (self.channel,), self.link.out_id_size, sequence)
        self.told, self._told_last, self._again = max(self.told, through), operation, False
        out.append(packet)
        if self.closing:
            self._confirm()
        return len(packet)

    def _write_close(self, out: list[Buffer]) -> int:
        packet = encode_operation(Operation.CLOSE, (self.channel,), self.link.out_id_size)
        self.close_written = self.close_told = True
        out.append(packet)
        return len(packet)

    # --- connections

    def connect(self) -> None:
        """A new connection: wait until the peer has said what it has."""
        self.free = self.link.is_free
        self.heard = self.stalled = self.scheduled = self.close_written = False
        self.deficit = 0
        self._again = self.link.resumed

    def disconnect(self) -> None:
        if self.stalled and isinstance(item := self.unsent[0], Multicast):
            item.waiting += 1
        self.stalled = self.free = self.scheduled = False

    def release_to_write(self) -> None:
        """The peer has everything through `received`: write what it lacks, before it what it may not have heard."""
        if self.sent > self.received:
            self.close_told = False  # it lacks messages, so it cannot have the close behind them
        if self.received < self.first:
            self.confirmed = False  # whatever was known before: it has nothing of this life now
        for _ in range(self.sent - self.received):
            item = self.kept.pop()
            self.unsent.appendleft(item)
            self.link.outbox.used += len(item)
        self.sent = self.received
        self.told = min(self.told, self.received)
        if self.journal or self.decisions:
            self.decisions = deque(Decision(one.operation, one.through) for one in self.journal)
        self.free = True
        self.link.schedule(self)
        self._confirm()

    # --- what the peer acknowledges

    def take(self, ack: Ack, number: int) -> None:
        """All through this number, as `_acknowledged.meant` has it."""
        link = self.link
        if number >= self.first:
            self.confirmed = True
        link.unannounced.pop(self, None)
        if ack is Ack.RECEIVED:
            self.received_told = number
            if number > self.received:
                self.received = number
                link.events.append(Received(self.channel, number))
            if not self.free:
                self.release_to_write()
        elif ack is Ack.CONSUMED:
            self.consumed_told = number
            if number > self.consumed:
                self.consumed = number
                link.events.append(Consumed(self.channel, number))
                self.received = max(self.received, number)
                self._release(self._settled() if link.out_transactions else number)
        else:
            first, self.answered, self.last_answer = self.answered + 1, number, ack
            event = Committed if ack is Ack.COMMITTED else Uncommitted
            link.events.append(event(self.channel, first, number))
            self.received = max(self.received, number)
            while self.journal and self.journal[0].through <= number:
                self.journal.popleft()
            self._release(self._settled())
        link.schedule(self)

    def _settled(self) -> int:
        """Answered, or rolled back and consumed; `released` never goes back."""
        settled = max(self.answered, self.released)
        if self.journal and self.journal[0].operation is Operation.ROLLBACK:
            settled = max(settled, min(self.journal[0].through, self.consumed))
        return settled

    def _release(self, through: int) -> None:
        count = through - self.released
        if count <= 0:
            return
        self.released = through
        kept = self.kept
        if self.grown:
            left = [item.cost for item in islice(kept, count) if not isinstance(item, bytes)]
            size = sum(left) + sum(len(item) + OVERHEAD for item in islice(kept, count) if isinstance(item, bytes))
            self.grown -= len(left)
        else:
            size = sum(map(len, islice(kept, count))) + count * OVERHEAD
        if count == len(kept):
            kept.clear()
        else:
            for _ in repeat(None, count):
                kept.popleft()
        over = self.bytes - self.link.floor
        self.bytes -= size
        self.link.freed(self, size, max(0, min(over, size)))

    def closed(self) -> None:
        """The peer confirmed the end: whatever it did not acknowledge has come to its end with the channel."""
        if self.consumed < self.next - 1:
            self.consumed = self.next - 1
            self.link.events.append(Consumed(self.channel, self.consumed))
        self._release(self.next - 1)
        self.link.events.append(ChannelClosed(self.channel))
        self.link.forget_outgoing(self)
