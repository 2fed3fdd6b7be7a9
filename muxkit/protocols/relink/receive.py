"""The receiving half of a channel: what came and is not consumed, the answers to it, and what the peer is told.

A message arrives, is given to the application with an event, and stays here until it is consumed. Under transactions it
is first kept apart until the peer has decided about it. A receiver that is opened anew gets the messages again that
were not consumed (`rewind`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE, Buffer, Ranges, Reason, counted
from muxkit.core.halves import Receiver
from muxkit.protocols.relink import events, frames
from muxkit.protocols.relink.numbers import Run, advance, extend, resolve
from muxkit.protocols.relink.state import ReceiveTable, State

NO_SPANS: Final = Ranges(0)  # of channels without transactions; nothing is ever added


class ChannelReceiver(Receiver[Any]):
    """One of the peer's channels, from its first message until the peer knows that its close is confirmed.

    It stands in the table from the first message on. Before that the application may have asked for it.
    """

    __slots__ = (
        "_again",
        "_told_last",
        "answers",
        "arrived",
        "bytes",
        "channel",
        "close_came",
        "consumed_through",
        "decided",
        "direct",
        "dirty",
        "done",
        "due",
        "ended",
        "kept",
        "known",
        "outcomes",
        "owing",
        "owner",
        "replaying",
        "room",
        "spans",
        "state",
        "table",
        "told_answer",
        "told_consumed",
        "told_received",
        "unacked",
        "undecided",
    )

    def __init__(self, channel: int, state: State) -> None:
        self.owner: object | None = None
        self.state: State = state
        self.table: ReceiveTable = state.theirs
        self.channel: int = channel
        none = state.config.first_sequence - 1
        # The highest number in each stage, and `first_sequence - 1` if there is none.
        self.arrived: int = none
        self.decided: int = none
        self.consumed_through: int = none
        self.told_received: int = none
        self.told_consumed: int = none
        self.told_answer: int = none
        self._told_last: frames.Operation | frames.Ack | None = None
        self._again = False  # the next answer is told with its number
        # Messages from `consumed` + 1 on: those that were given to the application, with the window bytes of one that
        # was rolled back in its place, then those on which the peer has not decided.
        self.kept: deque[frames.Parts | int] = deque()
        self.undecided: deque[frames.Parts] = deque() if state.in_transactions else NO_QUEUE
        self.room: int = state.config.window
        self.bytes: int = 0
        self.unacked: int = 0  # bytes consumed that the peer was not told of
        # Committed messages that the application has not answered; the window bounds them.
        self.spans: Ranges = Ranges(sys.maxsize) if state.in_transactions else NO_SPANS
        self.answers: deque[Run] = deque() if state.in_transactions else NO_QUEUE  # to be told
        # Told or not, and the peer may not know them.
        self.outcomes: deque[Run] = deque() if state.in_transactions else NO_QUEUE
        self.direct: bool = True  # messages may be put here without another question
        self.known: bool = True  # on this connection the peer was told what we have
        self.replaying: bool = False  # the peer may repeat decisions
        self.ended: bool = False
        self.close_came: bool = False  # on this connection
        self.done: bool = False  # the channel is over, and the peer is to be told so
        self.due: bool = False  # acks that can be batched are to be written now
        self.dirty: bool = False  # in line to write acks
        self.owing: bool = False  # acks wait for the timer

    @property
    def label(self) -> str:
        return f"channel {self.channel}"

    @property
    def held(self) -> int:
        return self.bytes

    @property
    def is_open(self) -> bool:
        """True from the first message on, until the channel is over."""
        return self.table.live.get(self.channel) is self

    def consumed(self, items: Sequence[Any], size: int) -> bool:
        """Do nothing: an application that uses channels of Relink says by itself what it has processed."""
        return False

    def stop(self, reason: Reason) -> None:
        """Do nothing: the document has no word for it, and another receiver may go on."""

    # --- arriving

    def enter(self) -> None:
        """The first message came."""
        self.table.expected.pop(self.channel, None)
        self.table.live[self.channel] = self
        self.state.observe_state(f"in {self.channel}", "open")
        self.state.report(events.ChannelOpened(self))

    def came(self, messages: list[frames.Parts], weight: int) -> None:
        """Store complete messages, which cost `weight` bytes of window together, and owe an acknowledgement."""
        table, state, count = self.table, self.state, len(messages)
        over = self.bytes + weight - table.floor
        if over > 0:
            table.held_over += min(over, weight)
        self.bytes += weight
        table.bytes += weight
        state.progress += count
        self.room -= count
        self.arrived += count
        if state.in_transactions:
            self.undecided.extend(messages)
        else:
            self.kept.extend(messages)
            self.give(self.arrived - count + 1, messages)
        if self.arrived - max(self.told_received, self.told_consumed) >= table.ack_count:
            table.make_due(self)
        elif not self.owing:
            table.owe(self)

    def give(self, first: int, messages: list[frames.Parts]) -> None:
        """Report messages. They are added to the last event if that is about the messages in front of them."""
        happened = self.state.events
        last = happened[-1] if happened else None
        if isinstance(last, events.Arrived) and last.receiver is self and last.first + len(last.messages) == first:
            last.messages += messages
        else:
            happened.append(events.Arrived(self, first, messages))

    def rewind(self) -> None:
        """Report everything again that is not consumed."""
        happened = self.state.events
        happened[:] = [one for one in happened if not (isinstance(one, events.Arrived) and one.receiver is self)]
        for number, parts in enumerate(self.kept, self.consumed_through + 1):
            if not isinstance(parts, int):
                self.give(number, [parts])

    # --- what the sender decides: find out what is meant, which may raise, and later take it

    def meant(self, operation: frames.Operation, sequence: int | None, count: int) -> int | None:
        """Return the number that a decision stands for; None if it repeats a known one."""
        what = f"{operation.name.lower()} on channel {self.channel}"
        if not self.state.in_transactions:
            raise RemoteProtocolError(f"{what}, which has no transactions", rule="relink-T06")
        if self.close_came:
            raise RemoteProtocolError(f"{what}, which was closed", rule="relink-K04")
        if sequence is None:
            return advance(what, count, done=self.decided, last=self.arrived)
        behind = self.state.config.window if self.replaying else 0
        number = resolve(what, sequence, done=self.decided, last=self.arrived, behind=behind)
        if number == self.decided:
            if not self.replaying:
                raise RemoteProtocolError(f"{what}: {sequence} was decided before", rule="relink-Q11")
            return None
        return number

    def decide(self, operation: frames.Operation, through: int) -> None:
        """Apply a decision through the number that `meant` gave: give held messages, or drop them."""
        first = self.decided + 1
        self.decided = through
        self.replaying = False
        messages = [self.undecided.popleft() for _ in range(through + 1 - first)]
        if operation is frames.Operation.ROLLBACK:
            self.kept.extend(map(self.weigh, messages))
            self.state.report(events.RolledBack(self, through))
            self._pass_rolled_back()
            return
        self.kept.extend(messages)
        self.table.unanswered += not self.spans
        self.spans.add_range(first, through)
        self.give(first, messages)

    def check_close(self, count: int) -> None:
        what = f"close on channel {self.channel}"
        if self.close_came:
            raise RemoteProtocolError(f"{what}, which was closed before", rule="relink-K04")
        if self.undecided:
            left = self.arrived - self.decided
            raise RemoteProtocolError(
                f"{what}: {counted(left, 'message')} neither committed nor rolled back", rule="relink-K02"
            )
        if count > 1:
            raise RemoteProtocolError(f"{what} {count} times", rule="relink-K04")

    def close(self) -> None:
        self.close_came = True
        if not self.ended:  # it may have come before, on an earlier connection
            self.ended = True
            self.direct = False
            self.state.report(events.Ended(self))
        self.confirm_end()

    # --- what the application does

    def weigh(self, parts: frames.Parts) -> int:
        """Return the window bytes of a message, as its sender counts them."""
        if len(parts) == 1:
            size = len(parts[0])
            return (self.table.small if size <= frames.SMALL_MOST else self.table.large) + (size + 7 & -8)
        return frames.message_cost(tuple(map(len, parts)), self.state.in_id_size)

    def _check_given(self, through: int) -> None:
        last = self.consumed_through + len(self.kept)
        if through > last:
            raise LocalProtocolError(f"channel {self.channel}: message {through}; {last} is the last that was given")

    def consume(self, through: int, now: float) -> None:
        """Acknowledge the messages through this one as consumed. Does nothing if they were consumed before."""
        self._check_live()
        self.state.now = now
        self._consume(through)

    def committed(self, through: int, now: float) -> None:
        """Answer the messages through this one with `committed`. They count as consumed."""
        self._answer(frames.Ack.COMMITTED, through, now)

    def uncommitted(self, through: int, now: float) -> None:
        """Answer the messages through this one with `uncommitted`. They count as consumed."""
        self._answer(frames.Ack.UNCOMMITTED, through, now)

    def _consume(self, through: int) -> None:
        """Remove given messages through this one from the window."""
        count = through - self.consumed_through
        if count <= 0:
            return
        kept, table = self.kept, self.table
        if count > len(kept):
            self._check_given(through)
        weight = 0
        if count == len(kept) and not self.undecided:
            weight = self.bytes
            kept.clear()
        else:
            for _ in repeat(None, count):
                parts = kept.popleft()
                weight += parts if isinstance(parts, int) else self.weigh(parts)
        self.consumed_through = through
        self.room += count
        over = self.bytes - table.floor
        if over > 0:
            table.held_over -= min(over, weight)
        self.bytes -= weight
        self.unacked += weight
        table.bytes -= weight
        if kept and isinstance(kept[0], int):
            self._pass_rolled_back()
        if self.unacked >= table.ack_bytes or self.consumed_through - self.told_consumed >= table.ack_count:
            table.make_due(self)
        elif not self.owing:
            table.owe(self)
        if self.ended:
            self.confirm_end()

    def _pass_rolled_back(self) -> None:
        """Consume rolled-back messages, once everything before them is."""
        count = next((index for index, parts in enumerate(self.kept) if not isinstance(parts, int)), len(self.kept))
        self._consume(self.consumed_through + count)

    def _answer(self, ack: frames.Ack, through: int, now: float) -> None:
        """Answer the messages through this one."""
        state = self.state
        self._check_live()
        if not state.in_transactions:
            raise LocalProtocolError(f"channel {self.channel} has no transactions")
        self._check_given(through)
        if through not in self.spans:
            raise LocalProtocolError(f"channel {self.channel}: no message {through} waits for an answer")
        state.now = now
        self.spans.discard_below(through + 1)
        self.table.unanswered -= not self.spans
        oldest = self.arrived - state.config.window  # what came before it is known, or the window were full
        self._forget_outcomes(oldest)
        extend(self.answers, ack, through)
        state.probes.outcomes += extend(self.outcomes, ack, through)
        self.table.touch(self)
        self._consume(through)
        self.confirm_end()

    def _check_live(self) -> None:
        if self.table.live.get(self.channel) is not self:
            raise LocalProtocolError(f"the peer has no channel {self.channel}")

    def _forget_outcomes(self, through: int) -> None:
        """Forget the answers through this number, which the peer knows."""
        while self.outcomes and self.outcomes[0].through <= through:
            self.outcomes.popleft()
            self.state.probes.outcomes -= 1

    def confirm_end(self) -> None:
        """End the channel once the peer has closed it, all is consumed, and the peer knows all answers.

        A peer that comes back before that repeats the close, and decisions before it: they are waited for. A resume
        does not speak of a channel that is over, so it is not over while an answer could have to be repeated.
        """
        if self.close_came and not self.done and self.consumed_through == self.arrived and not self.spans:
            self.done = not self.outcomes
            if not self.state.is_connected:
                if self.done:
                    self.table.forget(self)
            elif self.done:
                self.table.touch(self)
            else:
                self.state.probes.end_when_proven(self)

    # --- telling

    def write_acks(self, out: list[Buffer]) -> int:
        """Write the acks that are due."""
        if not self.known:
            return 0
        written = 0
        if self.answers:
            written += self._write_answers(out)
            self.state.probes.prove(self)
        if self.due or self.done:
            self.due = False
            self.unacked = 0
            if self.arrived > max(self.told_received, self.consumed_through):
                written += self._write(
                    frames.Ack.RECEIVED, self.arrived, out, is_next=self.arrived == self.told_received + 1
                )
                self.told_received = self.arrived
            if self.consumed_through > self.told_consumed:
                is_next = self.consumed_through == self.told_consumed + 1
                written += self._write(frames.Ack.CONSUMED, self.consumed_through, out, is_next=is_next)
                self.told_consumed = self.consumed_through
        if self.done:
            self.known = False
            self.table.forget(self)
            written += self._write(frames.Ack.CLOSED, 0, out, is_next=True)
        return written

    def _write_answers(self, out: list[Buffer]) -> int:
        written = 0
        while self.answers:
            run = self.answers.popleft()
            is_next = not self._again and run.through == self.told_answer + 1 and self._told_last in (None, run.kind)
            written += self._write(run.kind, run.through, out, is_next=is_next)
            self.told_answer, self._told_last, self._again = run.through, run.kind, False
        return written

    def _write(self, ack: frames.Operation | frames.Ack, number: int, out: list[Buffer], *, is_next: bool) -> int:
        packet = frames.encode_notice(ack, (self.channel,), self.state.in_id_size, None if is_next else number)
        out.append(packet)
        return len(packet)

    def write_resumption(self, out: list[Buffer]) -> int:
        """Write the channel's part of our resume: all acks, with numbers."""
        written = self._write(frames.Ack.RECEIVED, self.arrived, out, is_next=False)
        written += self._write(frames.Ack.CONSUMED, self.consumed_through, out, is_next=False)
        self.told_received, self.told_consumed = self.arrived, self.consumed_through
        self.due, self.unacked = False, 0
        self._again = True
        if self.answers:
            self.answers.clear()
        for run in self.outcomes:
            written += self._write(run.kind, run.through, out, is_next=False)
            self.told_answer, self._told_last = run.through, run.kind
        if self.outcomes:
            # If it was closed, the pong may then come with the repeated close, and not a round trip later.
            (self.state.probes.end_when_proven if self.ended else self.state.probes.prove)(self)
        self.known = True
        self.direct = not self.ended
        return written

    def connect(self) -> None:
        self.known = not self.state.resumes
        self.direct = self.known and not self.ended
        self.replaying = self.state.resumes and self.state.in_transactions
        self.close_came = self.due = self.dirty = self.owing = False

    @property
    def proof(self) -> int:
        """The last answer that the reply to a ping written now would prove read."""
        return self.told_answer

    def proven(self, through: int) -> None:
        """The peer has read all answers through this one."""
        self.state.probes.ending.pop(self, None)
        self._forget_outcomes(through)
        if self.outcomes:
            self.state.probes.prove(self)
        self.confirm_end()
