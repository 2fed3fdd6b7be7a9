"""One channel of the peer: what came on it, who has it, and what is to be told about it.

A message arrives, waits (under transactions it is held before, until the peer has decided), is taken by the
application, and stays here until it is consumed: a receiver that is opened anew gets the rest again.
"""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, cast

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE
from muxkit.protocols.relink._events import Arrived, RolledBack
from muxkit.protocols.relink._items import Run, Span
from muxkit.protocols.relink._packets import Ack, Operation, Parts, encode_ack
from muxkit.protocols.relink._sequences import advance, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.core import Buffer
    from muxkit.protocols.relink._state import Link


class Incoming:
    """One channel of the peer, from its first message until its end is confirmed and the peer knows that."""

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
        """Messages were put, and weighed."""
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
        """The number that a decision stands for; None if it repeats what is known."""
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
        """What `meant` gave: give out the messages that were held, or drop them."""
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
        """The messages through this one, which were taken, are done with."""
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
        """Say what became of the messages through this one; they count as consumed."""
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
        """The first `count` messages, which were taken, are consumed."""
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
        """What was rolled back counts as taken, and consumed, as soon as everything before it is."""
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
        """The channel is over as soon as the peer has closed it, nothing of it is left, and the peer knows all answers.

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
        """What the peer has not been told of, apart from what can wait."""
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
        """Everything that the peer may not know, with numbers."""
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
        """What a pong to a ping that is written now will show: the peer has read the answers through this one."""
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
