"""The state of a link: both kinds of channels, the acks and pings that are owed, budgets and phases.

A message arrives, waits (under transactions it is held before, until the peer has decided), is taken by the
application, and stays here until it is consumed: a receiver that is opened anew gets the rest again.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from itertools import islice, repeat
from typing import TYPE_CHECKING, Final, cast

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE, Deadlines, Scheduler
from muxkit.protocols.relink.engine.events import (
    Arrived,
    ChannelClosed,
    Committed,
    Consumed,
    Event,
    Received,
    RolledBack,
    Uncommitted,
    Writable,
)
from muxkit.protocols.relink.engine.items import (
    JOIN_MOST,
    Decision,
    Large,
    Run,
    Span,
    Timer,
    advance,
    resolve,
)
from muxkit.protocols.relink.frames import (
    OVERHEAD,
    PADDING,
    PART_OVERHEAD,
    Ack,
    General,
    Operation,
    Parts,
    encode_ack,
    encode_general,
    encode_operation,
    message_buffers,
    message_head,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.core import Buffer
    from muxkit.protocols.relink.config import Config


class Multicast:
    """A message queued on several channels, written once it is the next in all of them."""

    __slots__ = ("cost", "counts", "parts", "size", "waiting", "written")

    def __init__(self, counts: dict[Outgoing, int], parts: tuple[bytes, ...], size: int, cost: int) -> None:
        self.counts = counts  # how often it goes to each channel, which may be named twice
        self.parts = parts
        self.size = size  # as a packet to one channel
        self.cost = cost  # in the window of one
        self.waiting = len(counts)  # channels in which something else is still before it
        self.written = False  # as one packet; again it is written to each channel that lacks it

    def __len__(self) -> int:
        return self.size


Item = bytes | Large | Multicast  # bytes are a packet with one small part, and cost `OVERHEAD` beside it


class Outgoing:
    """One of our channels, from its first message until its close is confirmed; a source of the scheduler.

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
        """Encode a message for the queue, copying only small payloads."""
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
        """Encode the head for this size; kept, since most messages are as long as the one before."""
        if size != self._head_size:
            self._head_size, self._head = size, message_head((self.channel,), (size,), self.link.out_id_size)

    def push(self, item: Item, cost: int) -> int:
        """Queue an admitted message and return its number."""
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
        """Ping if a close waits only for proof that the peer has read the channel's first message."""
        if self.closing and not self.confirmed and self.free and not self.unsent and not self.decisions:
            self.link.control.ask_proof(self)

    @property
    def proof(self) -> int:
        """The last message that the answer to a ping written now would prove received."""
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
        """Write messages within the budget, up to the next decision or a multicast that must wait."""
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
        """Prepare for a new connection: wait for the peer's resume."""
        self.free = self.link.is_free
        self.heard = self.stalled = self.scheduled = self.close_written = False
        self.deficit = 0
        self._again = self.link.resumed

    def disconnect(self) -> None:
        if self.stalled and isinstance(item := self.unsent[0], Multicast):
            item.waiting += 1
        self.stalled = self.free = self.scheduled = False

    def release_to_write(self) -> None:
        """Queue again what the peer lacks behind `received`, with the decisions that it may have missed."""
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
        """Apply an ack of all messages through this number."""
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
                self._release(self._resolved() if link.out_transactions else number)
        else:
            first, self.answered, self.last_answer = self.answered + 1, number, ack
            event = Committed if ack is Ack.COMMITTED else Uncommitted
            link.events.append(event(self.channel, first, number))
            self.received = max(self.received, number)
            while self.journal and self.journal[0].through <= number:
                self.journal.popleft()
            self._release(self._resolved())
        link.schedule(self)

    def _resolved(self) -> int:
        """Return the last message that was answered, or rolled back and consumed."""
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
        """Finish the channel after `closed`, which stands for all acks that are missing."""
        if self.consumed < self.next - 1:
            self.consumed = self.next - 1
            self.link.events.append(Consumed(self.channel, self.consumed))
        self._release(self.next - 1)
        self.link.events.append(ChannelClosed(self.channel))
        self.link.forget_outgoing(self)


class Incoming:
    """One of the peer's channels, from its first message until the peer knows that its close is confirmed."""

    __slots__ = (
        "_again",
        "_told_last",
        "answered",
        "answers",
        "arrived",
        "bytes",
        "channel",
        "close_came",
        "consumed",
        "decided",
        "direct",
        "dirty",
        "done",
        "due",
        "ended",
        "held",
        "known",
        "link",
        "notified",
        "outcomes",
        "owing",
        "put",
        "replaying",
        "room",
        "spans",
        "taken",
        "told_answer",
        "told_consumed",
        "told_received",
        "unacked",
        "waiting",
        "weigh",
        "weights",
    )

    def __init__(self, channel: int, link: Link) -> None:
        self.link = link
        self.channel = channel
        none = link.config.first_sequence - 1
        # Each of these is the last of its kind; before the first message it is one less than its number.
        self.arrived = none
        self.decided = none
        self.consumed = none
        self.answered = none
        self.told_received = none
        self.told_consumed = none
        self.told_answer = none
        self._told_last: Ack | None = None
        self._again = False  # the next answer is told with its number
        # Messages `consumed` + 1 to `arrived`, in this order; None stands for one that was rolled back.
        self.taken: deque[Parts | None] = deque()
        self.waiting: deque[Parts | None] = deque()
        self.held: deque[Parts | None] = deque() if link.in_transactions else NO_QUEUE  # until the peer has decided
        self.weights: deque[int] = deque()
        self.put: Callable[[Parts], None] = (self.held if link.in_transactions else self.waiting).append
        self.weigh = self.weights.append
        self.room = link.config.window
        self.bytes = 0
        self.unacked = 0  # bytes consumed that the peer was not told of
        self.spans: deque[Span] = deque() if link.in_transactions else NO_QUEUE
        self.answers: deque[Run] = deque() if link.in_transactions else NO_QUEUE  # to be told
        self.outcomes: deque[Run] = (
            deque() if link.in_transactions else NO_QUEUE
        )  # told or not, that the peer may not know
        self.notified = False  # the application was told that messages wait
        self.direct = True  # messages may be put here without another question
        self.known = True  # on this connection the peer was told what we have
        self.replaying = False  # the peer may repeat decisions
        self.ended = False
        self.close_came = False  # on this connection
        self.done = False  # the channel is over, and the peer is to be told so
        self.due = False  # acks that can be batched are to be written now
        self.dirty = False  # in line to write acks
        self.owing = False  # acks wait for the timer

    # --- arriving

    def came(self, count: int, weight: int) -> None:
        """Account for messages that the parser stored, and owe an ack for them."""
        link = self.link
        self.arrived += count
        self.room -= count
        over = self.bytes + weight - link.floor
        self.bytes += weight
        link.held += weight
        if over > 0:
            link.held_over += min(over, weight)
        if not self.notified and not link.in_transactions:
            self.notified = True
            link.events.append(Arrived(self.channel))
        if self.arrived - max(self.told_received, self.told_consumed) >= link.ack_count:
            link.control.make_due(self)
        elif not self.owing:
            link.control.owe(self)

    # --- what the sender decides: find out what is meant, which may raise, and later take it

    def meant(self, operation: Operation, sequence: int | None, count: int) -> int | None:
        """Return the number that a decision stands for; None if it repeats a known one."""
        what = f"{operation.name.lower()} on channel {self.channel}"
        if not self.link.in_transactions:
            raise RemoteProtocolError(f"{what}, which has no transactions", rule="relink-T06")
        if self.close_came:
            raise RemoteProtocolError(f"{what}, which was closed", rule="relink-K04")
        if sequence is None:
            return advance(what, count, done=self.decided, last=self.arrived)
        behind = self.link.config.window if self.replaying else 0
        number = resolve(what, sequence, done=self.decided, last=self.arrived, behind=behind)
        if number == self.decided:
            if not self.replaying:
                raise RemoteProtocolError(f"{what}: {sequence} was decided before", rule="relink-Q11")
            return None
        return number

    def decide(self, operation: Operation, through: int) -> None:
        """Apply a decision through the number that `meant` gave: release held messages, or drop them."""
        held = self.held
        first, count = self.decided + 1, through - self.decided
        self.decided = through
        self.replaying = False
        if operation is Operation.ROLLBACK:
            for _ in range(count):
                held.popleft()
            self.waiting.extend(repeat(None, count))
            self.link.events.append(RolledBack(self.channel, through))
            self._pass_rolled_back()
            return
        for _ in range(count):
            self.waiting.append(held.popleft())
        if self.spans and self.spans[-1].last + 1 == first:
            self.spans[-1].last = through
        else:
            self.link.unanswered += not self.spans
            self.spans.append(Span(first, through))
        if not self.notified:
            self.notified = True
            self.link.events.append(Arrived(self.channel))

    def check_close(self) -> None:
        what = f"close on channel {self.channel}"
        if self.close_came:
            raise RemoteProtocolError(f"{what}, which was closed before", rule="relink-K04")
        if self.held:
            left = self.arrived - self.decided
            raise RemoteProtocolError(f"{what}: {left} messages neither committed nor rolled back", rule="relink-K02")

    # --- what the application does

    def receive(self, most: int | None) -> tuple[int, list[Parts]]:
        waiting, taken = self.waiting, self.taken
        self._pass_rolled_back()
        first = self.consumed + len(taken) + 1
        if not self.link.in_transactions and (most is None or most >= len(waiting)):
            # Only what was rolled back is None, and on such a channel nothing is.
            batch = cast("list[Parts]", list(waiting))
            waiting.clear()
        else:
            batch = []
            while waiting and (most is None or len(batch) < most):
                parts = waiting[0]
                if parts is None:
                    break
                batch.append(parts)
                waiting.popleft()
        taken.extend(batch)
        self._pass_rolled_back()
        if not waiting:
            self.notified = False
        return first, batch

    def rewind(self) -> None:
        self.waiting.extendleft(reversed(self.taken))
        self.taken.clear()
        self._pass_rolled_back()
        if self.waiting and not self.notified:
            self.notified = True
            self.link.events.append(Arrived(self.channel))

    def check_taken(self, through: int) -> None:
        last = self.consumed + len(self.taken)
        if through > last:
            raise LocalProtocolError(f"channel {self.channel}: message {through}; {last} is the last that was taken")

    def consume(self, through: int) -> None:
        """Mark taken messages through this one as consumed."""
        count = through - self.consumed
        if count <= 0:
            return
        if count > len(self.taken):
            self.check_taken(through)
        self._drop(count)
        if self.link.in_transactions:
            self._pass_rolled_back()
        link = self.link
        if not self.owing or self.ended or self.unacked >= link.ack_bytes or self._unacked_count >= link.ack_count:
            self._owe_consumed()

    @property
    def _unacked_count(self) -> int:
        return self.consumed - self.told_consumed

    def check_answer(self, through: int) -> None:
        if not self.link.in_transactions:
            raise LocalProtocolError(f"channel {self.channel} has no transactions")
        self.check_taken(through)
        if not any(span.first <= through <= span.last for span in self.spans):
            raise LocalProtocolError(f"channel {self.channel}: no message {through} waits for an answer")

    def answer(self, ack: Ack, through: int) -> None:
        """Answer the messages through this one; they count as consumed."""
        link, spans = self.link, self.spans
        while spans and spans[0].last <= through:
            spans.popleft()
        if spans and spans[0].first <= through:
            spans[0].first = through + 1
        link.unanswered -= not spans
        self.answered = through
        oldest = self.arrived - link.config.window  # what came before it is known, or the window were full
        while self.outcomes and self.outcomes[0].through <= oldest:
            self.outcomes.popleft()
            link.outcomes -= 1
        for runs in (self.answers, self.outcomes):
            if runs and runs[-1].ack is ack:
                runs[-1].through = through
            else:
                runs.append(Run(ack, through))
                link.outcomes += runs is self.outcomes
        link.control.touch(self)
        self.consume(through)
        self.confirm_end()

    # --- consuming

    def _drop(self, count: int) -> None:
        """Remove the first `count` taken messages from the window."""
        taken, weights = self.taken, self.weights
        if count == 1:
            taken.popleft()
            weight = weights.popleft()
        elif count == len(weights):
            weight = self.bytes
            taken.clear()
            weights.clear()
        else:
            weight = 0
            for _ in range(count):
                taken.popleft()
                weight += weights.popleft()
        self.consumed += count
        self.room += count
        over = self.bytes - self.link.floor
        self.bytes -= weight
        self.unacked += weight
        self.link.held -= weight
        if over > 0:
            self.link.held_over -= min(over, weight)

    def _pass_rolled_back(self) -> None:
        """Take and consume rolled-back messages, once everything before them is."""
        waiting, taken = self.waiting, self.taken
        while waiting and waiting[0] is None:
            taken.append(waiting.popleft())
        if taken and taken[0] is None:
            count = 1
            while count < len(taken) and taken[count] is None:
                count += 1
            self._drop(count)
            self._owe_consumed()

    def _owe_consumed(self) -> None:
        link = self.link
        if self._unacked_count >= link.ack_count or self.unacked >= link.ack_bytes:
            link.control.make_due(self)
        elif not self.owing:
            link.control.owe(self)
        self.confirm_end()

    def confirm_end(self) -> None:
        """End the channel once the peer has closed it, all is consumed, and the peer knows all answers.

        A peer that comes back before that repeats the close, and decisions before it: they are waited for. A resume
        does not speak of a channel that is over, so it is not over while an answer could have to be repeated.
        """
        if self.close_came and not self.done and self.consumed == self.arrived and not self.spans:
            control = self.link.control
            self.done = not self.outcomes
            if not self.link.connected:
                if self.done:
                    self.link.forget_incoming(self)
            elif self.done:
                control.touch(self)
            else:
                control.end_when_proven(self)

    # --- telling

    def write_acks(self, out: list[Buffer]) -> int:
        """Write the acks that are due."""
        if not self.known:
            return 0
        written = self._write_answers(self.answers, out) if self.answers else 0
        if self.due or self.done:
            self.due = False
            self.unacked = 0
            if self.arrived > max(self.told_received, self.consumed):
                written += self._write(Ack.RECEIVED, self.arrived, out, is_next=self.arrived == self.told_received + 1)
                self.told_received = self.arrived
            if self.consumed > self.told_consumed:
                is_next = self.consumed == self.told_consumed + 1
                written += self._write(Ack.CONSUMED, self.consumed, out, is_next=is_next)
                self.told_consumed = self.consumed
        if self.done:
            self.known = False
            self.link.forget_incoming(self)
            written += self._write(Ack.CLOSED, 0, out, is_next=True)
        return written

    def _write_answers(self, runs: deque[Run], out: list[Buffer]) -> int:
        written = 0
        while runs:
            run = runs.popleft()
            is_next = not self._again and run.through == self.told_answer + 1 and self._told_last in (None, run.ack)
            written += self._write(run.ack, run.through, out, is_next=is_next)
            self.told_answer, self._told_last, self._again = run.through, run.ack, False
        self.link.control.prove(self)
        return written

    def _write(self, ack: Ack, number: int, out: list[Buffer], *, is_next: bool) -> int:
        packet = encode_ack(ack, (self.channel,), self.link.in_id_size, None if is_next else number)
        out.append(packet)
        return len(packet)

    def write_resumption(self, out: list[Buffer]) -> int:
        """Write the channel's part of our resume: all acks, with numbers."""
        written = self._write(Ack.RECEIVED, self.arrived, out, is_next=False)
        written += self._write(Ack.CONSUMED, self.consumed, out, is_next=False)
        self.told_received, self.told_consumed = self.arrived, self.consumed
        self.due, self.unacked = False, 0
        self._again = True
        if self.answers:
            self.answers.clear()
        if self.outcomes:
            for run in self.outcomes:
                written += self._write(run.ack, run.through, out, is_next=False)
                self.told_answer, self._told_last = run.through, run.ack
            # If it was closed, the pong may then come with the repeated close, and not a round trip later.
            (self.link.control.end_when_proven if self.ended else self.link.control.prove)(self)
        self.known = True
        self.direct = not self.ended
        return written

    # --- connections

    def connect(self) -> None:
        self.known = not self.link.resumed
        self.direct = self.known and not self.ended
        self.replaying = self.link.resumed and self.link.in_transactions
        self.close_came = self.due = self.dirty = self.owing = False

    @property
    def proof(self) -> int:
        """The last answer that the reply to a ping written now would prove read."""
        return self.told_answer

    def proven(self, through: int) -> None:
        """The peer has read all answers through this one."""
        control = self.link.control
        control.proven_to_end(self)
        while self.outcomes and self.outcomes[0].through <= through:
            self.outcomes.popleft()
            self.link.outcomes -= 1
        if self.outcomes:
            control.prove(self)
        self.confirm_end()


PING: Final = encode_general(General.PING)
PONG: Final = encode_general(General.PONG)
RESUME: Final = encode_general(General.RESUME)
SHUTDOWN: Final = encode_general(General.SHUTDOWN)

MOST_OUTCOMES: Final = 1024  # answers to keep before the peer is asked whether it has read them


class Purpose(Enum):
    """The reason for a ping."""

    ASKED = "asked"
    """The application wants to know."""
    ALIVE = "alive"
    """Nothing came for a while."""
    PROOF = "proof"
    """The pong shows that the peer has read what was written before."""


class Control:
    """Queue of acks, pings, pongs and the resume; merged until written, and written before messages."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._dirty: deque[Incoming] = deque()
        self._owing: list[Incoming] = []
        self._resuming: deque[Incoming] = deque()
        self._resume_left = False
        self._pings: deque[Purpose] = deque()
        self._pings_out: deque[Purpose] = deque()
        self._unopened: dict[int, None] = {}  # channels that the peer closed without having opened them
        # Of what was written: what is kept until the peer is known to have read it.
        self._unproven: dict[Incoming | Outgoing, None] = {}
        self._ending: dict[Incoming, None] = {}  # of them, those whose end waits for it
        self._proof: list[tuple[Incoming | Outgoing, int]] | None = None  # what the ping that is out will show
        self.wants_proof = False  # a ping is to be written as soon as none is out
        self.pongs = 0

    def __bool__(self) -> bool:
        if self.pongs or self._pings or self._dirty or self._resume_left or self._unopened:
            return True
        return bool(self._unproven) and self._may_ask()

    @property
    def is_clear(self) -> bool:
        """True if no ack, answer or resume waits to be written or proved read."""
        return not (self._dirty or self._owing or self._resume_left or self._unopened or self._ending)

    # --- owing

    def owe(self, incoming: Incoming) -> None:
        """Note a channel whose acks can wait for the timer."""
        incoming.owing = True
        self._owing.append(incoming)
        self._link.owe_acks()

    def make_due(self, incoming: Incoming) -> None:
        incoming.due = True
        self.touch(incoming)

    def touch(self, incoming: Incoming) -> None:
        if not incoming.dirty and self._link.connected:
            incoming.dirty = True
            self._dirty.append(incoming)

    def make_all_due(self) -> None:
        """Make all waiting acks due."""
        owing, self._owing = self._owing, []
        for incoming in owing:
            incoming.owing = False
            self.make_due(incoming)

    def ping(self, purpose: Purpose) -> None:
        self._pings.append(purpose)

    def pong_came(self) -> Purpose:
        """Return the purpose of the oldest ping; ASKED for a pong without a ping."""
        purpose = self._pings_out.popleft() if self._pings_out else Purpose.ASKED
        if purpose is Purpose.PROOF and self._proof is not None:
            proof, self._proof = self._proof, None
            for one, through in proof:
                self._unproven.pop(one, None)
                one.proven(through)
        return purpose

    def prove(self, one: Incoming | Outgoing) -> None:
        """Keep what was written until a later ping proves that the peer has read it."""
        self._unproven[one] = None

    def ask_proof(self, one: Outgoing) -> None:
        """As `prove`, and ping at once."""
        self._unproven[one] = None
        self.wants_proof = True

    def end_when_proven(self, incoming: Incoming) -> None:
        """Delay the end of the peer's channel until a ping proves that the peer has read all answers."""
        self._unproven[incoming] = self._ending[incoming] = None
        self.wants_proof = True

    def proven_to_end(self, incoming: Incoming) -> None:
        """Stop the wait that `end_when_proven` began."""
        self._ending.pop(incoming, None)

    def forget(self, one: Incoming | Outgoing) -> None:
        self._unproven.pop(one, None)

    def _may_ask(self) -> bool:
        """Return True if a ping for proof is due."""
        if self._proof is not None or not self._unproven:
            return False
        return self.wants_proof or self._link.outcomes > MOST_OUTCOMES

    def close_unopened(self, channels: Iterable[int]) -> None:
        """Confirm the close of channels that the peer never opened."""
        for channel in channels:
            self._unopened[channel] = None

    @property
    def unopened(self) -> AbstractSet[int]:
        """Channels that were closed without having been opened, whose confirmation is not written yet."""
        return self._unopened.keys()

    # --- connections

    def connect(self) -> None:
        """Drop what the old connection owed; the resume covers it."""
        link = self._link
        self.pongs = 0
        for queue in (self._dirty, self._owing, self._pings, self._pings_out):
            queue.clear()
        for kept in (self._unproven, self._ending, self._unopened):
            kept.clear()
        self._proof = None
        self.wants_proof = False
        self._resuming.clear()
        if link.resumed:
            self._resuming.extend(link.incoming.values())
        self._resume_left = link.resumed

    # --- writing

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Append owed packets, about `limit` bytes at most; returns the bytes."""
        written = self._write_pings(limit, out)
        if self._resume_left and written < limit:
            written += self._write_resumption(limit - written, out)
        while self._dirty and not self._resume_left and written < limit:
            incoming = self._dirty.popleft()
            incoming.dirty = False
            written += incoming.write_acks(out)
        if self._unopened and not self._resume_left and written < limit:
            written += self._write_unopened(out)
        if self._unproven:
            written += self.write_proof(out)
        return written

    def write_proof(self, out: list[Buffer]) -> int:
        """Write the ping for proof, if it is due and nothing has to be written before it."""
        if self._resume_left or self._dirty or not self._may_ask():
            return 0
        self.wants_proof = False
        self._proof = [(one, one.proof) for one in self._unproven]
        self._pings_out.append(Purpose.PROOF)
        out.append(PING)
        return len(PING)

    def _write_unopened(self, out: list[Buffer]) -> int:
        written = 0
        for channel in self._unopened:
            packet = encode_ack(Ack.CLOSED, (channel,), self._link.in_id_size, None)
            out.append(packet)
            written += len(packet)
        self._unopened.clear()
        return written

    def _write_pings(self, limit: int, out: list[Buffer]) -> int:
        if not self.pongs and not self._pings:
            return 0
        pongs = min(self.pongs, limit // len(PONG) + 1)
        pings = min(len(self._pings), limit // len(PING) + 1)
        self.pongs -= pongs
        for _ in range(pings):
            self._pings_out.append(self._pings.popleft())
        out.append(PONG * pongs + PING * pings)
        return len(PONG) * pongs + len(PING) * pings

    def _write_resumption(self, limit: int, out: list[Buffer]) -> int:
        written = 0
        while self._resuming and written < limit:
            written += self._resuming.popleft().write_resumption(out)
        if not self._resuming:
            self._resume_left = False
            self._link.told_resume = True
            out.append(RESUME)
            written += len(RESUME)
        return written


COUNTED_ACKS: Final = 4  # a window of messages
SIZED_ACKS: Final = 2  # a window of bytes
OUTCOMES_MOST: Final = 2**20  # answers that a peer may leave without a sign that it has read them


class Outbox:
    """Bytes of messages that wait for the transport, as a plain attribute because each send reads it."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = 0


class Link:
    """The state that receiving and sending share."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None, *, is_connector: bool) -> None:
        self.config = config
        self.limits = limits
        self.observer = observer
        sizes = (config.connector_id_size, config.listener_id_size)
        transactions = (config.connector_transactions, config.listener_transactions)
        self.out_id_size, self.in_id_size = sizes if is_connector else sizes[::-1]
        self.out_transactions, self.in_transactions = transactions if is_connector else transactions[::-1]
        self.ack_count = max(1, config.window // COUNTED_ACKS)
        self.ack_bytes = max(1, limits.channel_bytes // SIZED_ACKS)
        self.floor = min(limits.channel_floor, limits.channel_bytes)
        # A peer with the same limits stops when it is over them, so by one message more at most, and by those that
        # its outbox had admitted.
        extra = limits.message + limits.outbox + (16 + PART_OVERHEAD) * config.parts + 128
        self.held_most = limits.connection_bytes + extra
        self.outcomes_most = OUTCOMES_MOST
        self.events: list[Event] = []
        self.outbox = Outbox()
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.now = 0.0
        self.over = False
        self.epoch = 0
        self.link_id = 0
        self.wants_shutdown = False
        self.reset()

    def reset(self) -> None:
        """Forget everything that belongs to one link."""
        self.connected = False
        self.resumed = False
        self.peer_resumed = False  # the peer has told what it has, or need not
        self.told_resume = False  # and so have we
        self.shutdown_written = False
        self.peer_shut_down = False
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.unannounced: dict[Outgoing, None] = {}  # the peer has none of their messages, as far as we know
        self.watchers: dict[int, int] = {}
        # A channel's first bytes up to the floor are free; what is over that counts for the link's budget. The sum
        # over all channels does not depend on the order in which messages come, so both sides agree about it.
        self.retained = 0  # bytes in all windows of ours
        self.retained_over = 0  # of them, over the floors
        self.outbox.used = 0
        self.held = 0  # bytes of the peer that the application has not consumed
        self.held_over = 0  # of them, over the floors
        self.outcomes = 0  # answers that are kept because the peer may not know them
        self.closing = 0  # channels of ours that are to be closed
        self.unanswered = 0  # channels of the peer with commits that the application has not answered
        self.scheduler = Scheduler()
        self.control = Control(self)

    # --- phases

    @property
    def is_free(self) -> bool:
        """True if connected and the peer's resume has come."""
        return self.connected and self.peer_resumed

    @property
    def is_resuming(self) -> bool:
        """True if connected and the peer's resume has not come."""
        return self.connected and not self.peer_resumed

    def connect(self, *, resumed: bool) -> None:
        self.connected = True
        self.resumed = resumed
        self.observe_state("link", "connected")
        self.peer_resumed = self.told_resume = not resumed
        self.shutdown_written = False
        self.scheduler = Scheduler()
        for outgoing in self.outgoing.values():
            outgoing.connect()
            if outgoing.received < outgoing.first:
                self.unannounced[outgoing] = None
            self.schedule(outgoing)
        for incoming in self.incoming.values():
            incoming.connect()
        self.control.connect()

    def disconnect(self) -> None:
        self.connected = False
        for outgoing in self.outgoing.values():
            outgoing.disconnect()
        for incoming in [one for one in self.incoming.values() if one.done]:
            self.forget_incoming(incoming)  # the peer closed it, and learns from our resume that it is over
        self.scheduler = Scheduler()
        for timer in Timer:
            self.deadlines.stop(timer)

    def check_resume(self) -> None:
        if not self.is_resuming:
            raise RemoteProtocolError("a resume on a connection that has none to come", rule="relink-R04")
        for outgoing in self.outgoing.values():
            if outgoing.heard or (outgoing.received < outgoing.first and not outgoing.close_told):
                continue
            unanswered = any(run.operation is Operation.COMMIT for run in outgoing.journal)
            if not outgoing.close_told or unanswered:
                what = f"the resume left out channel {outgoing.channel}, where {outgoing.received} was received"
                raise RemoteProtocolError(what, rule="relink-R02")

    def resume(self) -> None:
        """Finish the peer's resume: a channel that it left out is unknown to the peer, or closed there."""
        self.peer_resumed = True
        for outgoing in [*self.outgoing.values()]:
            if outgoing.free:
                self.schedule(outgoing)
            elif outgoing.close_told and not outgoing.heard:
                # A close goes out only when the peer is known to have had a message: it is over, and not lost.
                outgoing.closed()
            else:
                outgoing.release_to_write()

    @property
    def lost(self) -> int:
        """Messages of ours that are not answered."""
        return sum(outgoing.outstanding for outgoing in self.outgoing.values())

    # --- shutdown

    @property
    def may_write_shutdown(self) -> bool:
        """True if shutdown can be written: behind the first message of each of our channels."""
        return self.wants_shutdown and not self.shutdown_written and not self.unannounced

    @property
    def is_finished(self) -> bool:
        """True if both sides have shut down and nothing is open."""
        if not (self.shutdown_written and self.peer_shut_down):
            return False
        waits = self.retained or self.closing or self.held or self.unanswered
        return not waits and self.control.is_clear

    # --- channels of ours

    def open(self, channel: int) -> Outgoing:
        """Make a channel that is not in the table yet: its first message opens it."""
        return Outgoing(channel, self)

    def enter(self, outgoing: Outgoing) -> None:
        self.outgoing[outgoing.channel] = outgoing
        self.unannounced[outgoing] = None
        self.observe_state(f"out {outgoing.channel}", "open")

    def forget_outgoing(self, outgoing: Outgoing) -> None:
        del self.outgoing[outgoing.channel]
        self.unannounced.pop(outgoing, None)
        self.closing -= 1
        outgoing.free = False
        self.control.forget(outgoing)
        self.observe_state(f"out {outgoing.channel}", "closed")
        self.wake(outgoing.channel)

    def schedule(self, outgoing: Outgoing) -> None:
        if not outgoing.scheduled and outgoing.is_ready():
            self.scheduler.add(outgoing)

    # --- room

    def admits(
        self, outgoing: Outgoing, cost: int, *, queued: int = 0, messages: int = 0, overdraw: bool = False
    ) -> bool:
        """Return True if the window has room behind `queued` bytes over the floors and `messages` in this channel."""
        if outgoing.closing or outgoing.outstanding + messages >= self.config.window:
            return False
        size = outgoing.bytes + messages * cost + cost
        if size <= self.floor:
            return True
        if self.retained_over + queued > self.limits.connection_bytes and not overdraw:
            return False
        return size <= self.limits.channel_bytes or outgoing.outstanding + messages == 0

    def freed(self, outgoing: Outgoing, size: int, over: int) -> None:
        """Return bytes to the budget, `over` of them from above the floor, and wake watchers."""
        was_full = self.retained_over > self.limits.connection_bytes
        self.retained -= size
        self.retained_over -= over
        if not self.watchers:
            return
        if was_full and self.retained_over <= self.limits.connection_bytes:
            for channel in [*self.watchers]:
                self.wake(channel)
        else:
            self.wake(outgoing.channel)

    def wake(self, channel: int) -> None:
        """Report `Writable` to the watcher of a channel, if there is room."""
        cost = self.watchers.get(channel)
        if cost is None:
            return
        if self.admits(self.outgoing.get(channel) or self.open(channel), cost):
            del self.watchers[channel]
            self.events.append(Writable(channel))

    # --- channels of the peer

    def accept(self, channel: int) -> Incoming:
        """Open a channel of the peer for its first message."""
        incoming = self.incoming[channel] = Incoming(channel, self)
        self.observe_state(f"in {channel}", "open")
        return incoming

    def forget_incoming(self, incoming: Incoming) -> None:
        """Remove a channel of the peer that is over."""
        del self.incoming[incoming.channel]
        self.control.forget(incoming)
        self.observe_state(f"in {incoming.channel}", "closed")

    # --- acks that wait

    def owe_acks(self) -> None:
        if self.connected and Timer.ACKS not in self.deadlines:
            ends = self.wants_shutdown and self.peer_shut_down
            self.deadlines.set(Timer.ACKS, self.now if ends else self.now + self.config.ack_delay)

    def observe_state(self, channel: str, state: str) -> None:
        if self.observer is not None:
            self.observer.state(channel, state)
