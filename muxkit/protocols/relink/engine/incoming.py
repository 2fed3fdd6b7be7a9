"""The peer's channels: what came and is not consumed, the answers to it, and the acks that are owed.

A message arrives (under transactions it is held until the peer has decided), is given to the application with an
event, and stays here until it is consumed: a receiver that is opened anew gets the rest again.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE, Buffer, Ranges, counted
from muxkit.protocols.relink import frames
from muxkit.protocols.relink.engine.events import Arrived, Ended, Opened, RolledBack
from muxkit.protocols.relink.engine.link import LinkState, Run, Timer, advance, counts_of, extend, resolve

RESUME: Final = frames.encode_general(frames.General.RESUME)
COUNTED_ACKS: Final = 4  # a window of messages
SIZED_ACKS: Final = 2  # a window of bytes
LARGE_LEAST: Final = frames.SMALL_MOST + 1  # bytes of a part whose size takes eight bytes


NO_SPANS: Final = Ranges(0)  # of channels without transactions; nothing is ever added


class Incoming:
    """One of the peer's channels, from its first message until the peer knows that its close is confirmed."""

    __slots__ = (
        "_again",
        "_told_last",
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
        "kept",
        "known",
        "link",
        "outcomes",
        "owing",
        "replaying",
        "room",
        "spans",
        "theirs",
        "told_answer",
        "told_consumed",
        "told_received",
        "unacked",
    )

    def __init__(self, channel: int, theirs: PeerChannels) -> None:
        self.theirs: PeerChannels = theirs
        link = theirs.link
        self.link: LinkState = link
        self.channel: int = channel
        none = link.config.first_sequence - 1
        # Each of these is the last of its kind; before the first message it is one less than its number.
        self.arrived: int = none
        self.decided: int = none
        self.consumed: int = none
        self.told_received: int = none
        self.told_consumed: int = none
        self.told_answer: int = none
        self._told_last: frames.Operation | frames.Ack | None = None
        self._again = False  # the next answer is told with its number
        # Messages from `consumed` + 1 on: those that were given to the application, with the window bytes of one that
        # was rolled back in its place, then those on which the peer has not decided.
        self.kept: deque[frames.Parts | int] = deque()
        self.held: deque[frames.Parts] = deque() if link.in_transactions else NO_QUEUE
        self.room: int = link.config.window
        self.bytes: int = 0
        self.unacked: int = 0  # bytes consumed that the peer was not told of
        # Committed messages that the application has not answered; the window bounds them.
        self.spans: Ranges = Ranges(sys.maxsize) if link.in_transactions else NO_SPANS
        self.answers: deque[Run] = deque() if link.in_transactions else NO_QUEUE  # to be told
        # Told or not, and the peer may not know them.
        self.outcomes: deque[Run] = deque() if link.in_transactions else NO_QUEUE
        self.direct: bool = True  # messages may be put here without another question
        self.known: bool = True  # on this connection the peer was told what we have
        self.replaying: bool = False  # the peer may repeat decisions
        self.ended: bool = False
        self.close_came: bool = False  # on this connection
        self.done: bool = False  # the channel is over, and the peer is to be told so
        self.due: bool = False  # acks that can be batched are to be written now
        self.dirty: bool = False  # in line to write acks
        self.owing: bool = False  # acks wait for the timer

    # --- arriving

    def came(self, messages: list[frames.Parts], weight: int) -> None:
        """Store complete messages, which cost `weight` bytes of window together, and owe an ack for them."""
        theirs, count = self.theirs, len(messages)
        over = self.bytes + weight - theirs.floor
        if over > 0:
            theirs.held_over += min(over, weight)
        self.bytes += weight
        theirs.bytes += weight
        theirs.arrivals += count
        self.room -= count
        self.arrived += count
        if self.link.in_transactions:
            self.held.extend(messages)
        else:
            self.kept.extend(messages)
            self.give(self.arrived - count + 1, messages)
        if self.arrived - max(self.told_received, self.told_consumed) >= theirs.ack_count:
            theirs.make_due(self)
        elif not self.owing:
            theirs.owe(self)

    def give(self, first: int, messages: list[frames.Parts]) -> None:
        """Report messages; what comes before the event is fetched is added to it."""
        event = self.theirs.fresh.get(self.channel)
        if event is not None:
            event.messages += messages
        else:
            event = self.theirs.fresh[self.channel] = Arrived(self.channel, first, messages)
            self.link.happened.append(event)

    def rewind(self) -> None:
        """Report everything again that is not consumed."""
        fresh = self.theirs.fresh.pop(self.channel, None)
        if fresh is not None:
            self.link.happened[:] = [event for event in self.link.happened if event is not fresh]
        for number, parts in enumerate(self.kept, self.consumed + 1):
            if isinstance(parts, int):
                self.theirs.fresh.pop(self.channel, None)
            else:
                self.give(number, [parts])

    # --- what the sender decides: find out what is meant, which may raise, and later take it

    def meant(self, operation: frames.Operation, sequence: int | None, count: int) -> int | None:
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

    def decide(self, operation: frames.Operation, through: int) -> None:
        """Apply a decision through the number that `meant` gave: give held messages, or drop them."""
        first = self.decided + 1
        self.decided = through
        self.replaying = False
        messages = [self.held.popleft() for _ in range(through + 1 - first)]
        if operation is frames.Operation.ROLLBACK:
            self.theirs.fresh.pop(self.channel, None)  # what follows is reported apart
            self.kept.extend(map(self.weigh, messages))
            self.link.happened.append(RolledBack(self.channel, through))
            self._pass_rolled_back()
            return
        self.kept.extend(messages)
        self.theirs.unanswered += not self.spans
        self.spans.add_range(first, through)
        self.give(first, messages)

    def check_close(self, count: int) -> None:
        what = f"close on channel {self.channel}"
        if self.close_came:
            raise RemoteProtocolError(f"{what}, which was closed before", rule="relink-K04")
        if self.held:
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
            self.link.happened.append(Ended(self.channel))
        self.confirm_end()

    # --- what the application does

    def weigh(self, parts: frames.Parts) -> int:
        """Return the window bytes of a message, as its sender counts them."""
        if len(parts) == 1:
            size = len(parts[0])
            return (self.theirs.small if size <= frames.SMALL_MOST else self.theirs.large) + (size + 7 & -8)
        return frames.message_cost(tuple(map(len, parts)), self.link.in_id_size)

    def check_given(self, through: int) -> None:
        last = self.consumed + len(self.kept)
        if through > last:
            raise LocalProtocolError(f"channel {self.channel}: message {through}; {last} is the last that was given")

    def consume(self, through: int) -> None:
        """Remove given messages through this one from the window."""
        count = through - self.consumed
        if count <= 0:
            return
        kept, theirs = self.kept, self.theirs
        if count > len(kept):
            self.check_given(through)
        weight = 0
        if count == len(kept) and not self.held:
            weight = self.bytes
            kept.clear()
        else:
            for _ in repeat(None, count):
                parts = kept.popleft()
                weight += parts if isinstance(parts, int) else self.weigh(parts)
        self.consumed = through
        self.room += count
        over = self.bytes - theirs.floor
        if over > 0:
            theirs.held_over -= min(over, weight)
        self.bytes -= weight
        self.unacked += weight
        theirs.bytes -= weight
        if kept and isinstance(kept[0], int):
            self._pass_rolled_back()
        if self.unacked >= theirs.ack_bytes or self.consumed - self.told_consumed >= theirs.ack_count:
            theirs.make_due(self)
        elif not self.owing:
            theirs.owe(self)
        if self.ended:
            self.confirm_end()

    def _pass_rolled_back(self) -> None:
        """Consume rolled-back messages, once everything before them is."""
        count = next((index for index, parts in enumerate(self.kept) if not isinstance(parts, int)), len(self.kept))
        self.consume(self.consumed + count)

    def check_answer(self, through: int) -> None:
        if not self.link.in_transactions:
            raise LocalProtocolError(f"channel {self.channel} has no transactions")
        self.check_given(through)
        if through not in self.spans:
            raise LocalProtocolError(f"channel {self.channel}: no message {through} waits for an answer")

    def answer(self, ack: frames.Ack, through: int) -> None:
        """Answer the messages through this one; they count as consumed."""
        link = self.link
        self.spans.discard_below(through + 1)
        self.theirs.unanswered -= not self.spans
        oldest = self.arrived - link.config.window  # what came before it is known, or the window were full
        self._forget_outcomes(oldest)
        extend(self.answers, ack, through)
        link.outcomes += extend(self.outcomes, ack, through)
        self.theirs.touch(self)
        self.consume(through)
        self.confirm_end()

    def _forget_outcomes(self, through: int) -> None:
        """Forget the answers through this number, which the peer knows."""
        while self.outcomes and self.outcomes[0].through <= through:
            self.outcomes.popleft()
            self.link.outcomes -= 1

    def confirm_end(self) -> None:
        """End the channel once the peer has closed it, all is consumed, and the peer knows all answers.

        A peer that comes back before that repeats the close, and decisions before it: they are waited for. A resume
        does not speak of a channel that is over, so it is not over while an answer could have to be repeated.
        """
        if self.close_came and not self.done and self.consumed == self.arrived and not self.spans:
            self.done = not self.outcomes
            if not self.link.is_connected:
                if self.done:
                    self.theirs.forget(self)
            elif self.done:
                self.theirs.touch(self)
            else:
                self.link.probes.end_when_proven(self)

    # --- telling

    def write_acks(self, out: list[Buffer]) -> int:
        """Write the acks that are due."""
        if not self.known:
            return 0
        written = 0
        if self.answers:
            written += self._write_answers(out)
            self.link.probes.prove(self)
        if self.due or self.done:
            self.due = False
            self.unacked = 0
            if self.arrived > max(self.told_received, self.consumed):
                written += self._write(
                    frames.Ack.RECEIVED, self.arrived, out, is_next=self.arrived == self.told_received + 1
                )
                self.told_received = self.arrived
            if self.consumed > self.told_consumed:
                is_next = self.consumed == self.told_consumed + 1
                written += self._write(frames.Ack.CONSUMED, self.consumed, out, is_next=is_next)
                self.told_consumed = self.consumed
        if self.done:
            self.known = False
            self.theirs.forget(self)
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
        packet = frames.encode_notice(ack, (self.channel,), self.link.in_id_size, None if is_next else number)
        out.append(packet)
        return len(packet)

    def write_resumption(self, out: list[Buffer]) -> int:
        """Write the channel's part of our resume: all acks, with numbers."""
        written = self._write(frames.Ack.RECEIVED, self.arrived, out, is_next=False)
        written += self._write(frames.Ack.CONSUMED, self.consumed, out, is_next=False)
        self.told_received, self.told_consumed = self.arrived, self.consumed
        self.due, self.unacked = False, 0
        self._again = True
        if self.answers:
            self.answers.clear()
        for run in self.outcomes:
            written += self._write(run.kind, run.through, out, is_next=False)
            self.told_answer, self._told_last = run.through, run.kind
        if self.outcomes:
            # If it was closed, the pong may then come with the repeated close, and not a round trip later.
            (self.link.probes.end_when_proven if self.ended else self.link.probes.prove)(self)
        self.known = True
        self.direct = not self.ended
        return written

    def connect(self) -> None:
        self.known = not self.link.resumes
        self.direct = self.known and not self.ended
        self.replaying = self.link.resumes and self.link.in_transactions
        self.close_came = self.due = self.dirty = self.owing = False

    @property
    def proof(self) -> int:
        """The last answer that the reply to a ping written now would prove read."""
        return self.told_answer

    def proven(self, through: int) -> None:
        """The peer has read all answers through this one."""
        self.link.probes.ending.pop(self, None)
        self._forget_outcomes(through)
        if self.outcomes:
            self.link.probes.prove(self)
        self.confirm_end()


class PeerChannels:
    """The peer's channels by number, the bytes that they hold, the commands on them, and the acks to be written.

    Acks are merged until they are written. A packet is checked as a whole before any of it is applied.
    """

    def __init__(self, link: LinkState) -> None:
        self.link = link
        self.floor: int = link.floor
        # What messages of one part weigh without their payload.
        self.small: int = frames.message_cost((0,), link.in_id_size)
        self.large: int = frames.message_cost((LARGE_LEAST,), link.in_id_size) - LARGE_LEAST
        self.ack_count: int = max(1, link.config.window // COUNTED_ACKS)
        self.ack_bytes: int = max(1, link.limits.short_window // SIZED_ACKS)
        self.arrivals = 0
        """A count that changes with each message received, announced by an event or not."""
        self.reset()

    def reset(self) -> None:
        """Forget what belongs to one link."""
        self.live: dict[int, Incoming] = {}
        self.fresh: dict[int, Arrived] = {}  # events that were not fetched yet, and to which more may be added
        self.bytes = 0  # that the application has not consumed
        self.held_over = 0  # of them, over the floors
        self.unanswered = 0  # channels with commits that the application has not answered
        self.connect()

    def connect(self) -> None:
        """Drop what the old connection owed; the resume covers it."""
        self.dirty: deque[Incoming] = deque()  # in line to write acks
        self.owing: list[Incoming] = []  # whose acks wait for the timer
        self.unopened: dict[int, None] = {}  # closed by the peer without having been opened, and not yet confirmed
        self.resuming: deque[Incoming] = deque()
        self.resume_left: bool = self.link.resumes
        for incoming in self.live.values():
            incoming.connect()
        if self.link.resumes:
            self.resuming.extend(self.live.values())

    def disconnect(self) -> None:
        for incoming in [one for one in self.live.values() if one.done]:
            self.forget(incoming)  # the peer closed it, and learns from our resume that it is over

    def forget(self, incoming: Incoming) -> None:
        """Remove a channel that is over."""
        del self.live[incoming.channel]
        self.fresh.pop(incoming.channel, None)
        self.link.probes.forget(incoming)
        self.link.observe_state(f"in {incoming.channel}", "closed")

    # --- commands

    def consume(self, channel: int, *, through: int, now: float) -> None:
        """Acknowledge the messages up to this one as consumed; does nothing if they were consumed before."""
        self.link.now = now
        incoming = self.live.get(channel)
        if incoming is None:
            raise LocalProtocolError(f"the peer has no channel {channel}")
        incoming.consume(through)

    def rewind(self, channel: int) -> None:
        """Report the messages that were given and not consumed once more."""
        incoming = self.live.get(channel)
        if incoming is not None:
            incoming.rewind()

    def committed(self, channel: int, *, through: int, now: float) -> None:
        """Answer the messages up to this one with `committed`; they count as consumed."""
        self._answer(frames.Ack.COMMITTED, channel, through, now)

    def uncommitted(self, channel: int, *, through: int, now: float) -> None:
        """Answer the messages up to this one with `uncommitted`; they count as consumed."""
        self._answer(frames.Ack.UNCOMMITTED, channel, through, now)

    def _answer(self, ack: frames.Ack, channel: int, through: int, now: float) -> None:
        incoming = self.live.get(channel)
        if incoming is None:
            raise LocalProtocolError(f"the peer has no channel {channel}")
        incoming.check_answer(through)
        self.link.now = now
        incoming.answer(ack, through)

    # --- messages

    def check(self, head: frames.MessageHead) -> int:
        """Check the head of a message; returns its cost in each of its channels."""
        link = self.link
        weight = frames.message_cost(head.sizes, link.in_id_size, head.padding)
        new = 0
        over = self.held_over
        for channel, count in counts_of(head.channels).items():
            incoming = self.live.get(channel)
            what = f"a message on channel {channel}"
            if incoming is None:
                self._check_opening(channel, new)
                new += 1
                room, held = link.config.window, 0
            else:
                if not incoming.known:
                    raise RemoteProtocolError(f"{what} before it was resumed", rule="relink-H35")
                if incoming.ended:
                    raise RemoteProtocolError(f"{what}, which was closed", rule="relink-K04")
                room, held = incoming.room, incoming.bytes
            if count > room:
                raise RemoteProtocolError(
                    f"{what}: {count} beside {link.config.window - room} that are not consumed, "
                    f"Config(window={link.config.window}) are allowed",
                    rule="relink-F03",
                )
            over += max(0, min(held + count * weight - self.floor, count * weight))
            if over > link.held_most:
                raise RemoteProtocolError(
                    f"{what}: {count * weight} bytes beside {self.bytes} that are not consumed, "
                    f"{link.limits.connection_bytes} are allowed",
                    limit="connection_bytes",
                )
        return weight

    def _check_opening(self, channel: int, new: int) -> None:
        link = self.link
        what = f"a message that opens channel {channel}"
        if link.has_peer_shut_down:
            raise RemoteProtocolError(f"{what} after the shutdown", rule="relink-S04")
        if not link.told_resume:
            raise RemoteProtocolError(f"{what} before our resume", rule="relink-H35")
        live = len(self.live) + new
        if live >= link.limits.channels:
            raise RemoteProtocolError(f"{what} beside {live} live ones", limit=link.limits.bound_of_channels)

    def deliver(self, channels: Sequence[int], parts: frames.Parts, weight: int) -> None:
        """Store a complete message that `check` admitted."""
        link = self.link
        for channel in channels:
            incoming = self.live.get(channel)
            if incoming is None:
                incoming = self.live[channel] = Incoming(channel, self)
                link.observe_state(f"in {channel}", "open")
                link.happened.append(Opened(channel))
            incoming.came([parts], weight)
        if link.observer is not None:
            for channel in channels:
                link.observer.frame("in", f"in {channel}", "message", sum(map(len, parts)))

    # --- operations

    def operate(self, packet: frames.OperationPacket) -> None:
        """Apply a commit, a rollback or a close."""
        link, operation = self.link, packet.operation
        if operation is not frames.Operation.CLOSE and link.outcomes > link.outcomes_most:
            raise RemoteProtocolError(f"{link.outcomes} answers, and no sign that the peer has read them")
        plans: list[tuple[Incoming, int | None]] = []
        unopened: dict[int, None] = {}
        for channel, count in counts_of(packet.channels).items():
            what = f"{operation.name.lower()} on channel {channel}"
            incoming = self.live.get(channel)
            if incoming is None:
                if operation is not frames.Operation.CLOSE:
                    raise RemoteProtocolError(f"{what}, which is not open", rule="relink-O12")
                unopened[channel] = None  # a close is tied to no message: there may never have been one
            elif not incoming.known:
                raise RemoteProtocolError(f"{what} before it was resumed", rule="relink-H35")
            elif operation is frames.Operation.CLOSE:
                incoming.check_close(count)
                plans.append((incoming, None))
            else:
                plans.append((incoming, incoming.meant(operation, packet.sequence, count)))
        owed = len(unopened.keys() | self.unopened.keys()) if unopened else 0
        if owed > link.limits.channels:
            what = f"close on {owed} channels without a message, and the peer does not read that they are closed"
            raise RemoteProtocolError(what, limit="channels")
        self.unopened.update(unopened)
        for incoming, number in plans:
            if operation is frames.Operation.CLOSE:
                incoming.close()
            elif number is not None:
                incoming.decide(operation, number)

    # --- acks

    def owe(self, incoming: Incoming) -> None:
        """Let the acks of a channel wait for the timer, unless both sides are shutting down."""
        link = self.link
        if link.is_shutting_down and link.has_peer_shut_down:
            self.make_due(incoming)
            return
        incoming.owing = True
        self.owing.append(incoming)
        if len(self.owing) == 1 and link.is_connected:
            link.deadlines.set(Timer.ACKS, link.now + link.config.ack_delay)

    def make_due(self, incoming: Incoming) -> None:
        incoming.due = True
        self.touch(incoming)

    def touch(self, incoming: Incoming) -> None:
        """Put a channel in line to write acks."""
        if not incoming.dirty and self.link.is_connected:
            incoming.dirty = True
            self.dirty.append(incoming)

    def make_all_due(self) -> None:
        """Make all waiting acks due."""
        owing, self.owing = self.owing, []
        for incoming in owing:
            incoming.owing = False
            self.make_due(incoming)

    @property
    def is_clear(self) -> bool:
        """True if no ack, answer or resume waits to be written."""
        return not (self.dirty or self.owing or self.resume_left or self.unopened)

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Write what is owed, about `limit` bytes at most; the resume comes before all else."""
        written = self._write_resume(limit, out) if self.resume_left else 0
        if self.resume_left:
            return written
        while self.dirty and written < limit:
            incoming = self.dirty.popleft()
            incoming.dirty = False
            written += incoming.write_acks(out)
        if written < limit:
            for channel in self.unopened:
                packet = frames.encode_notice(frames.Ack.CLOSED, (channel,), self.link.in_id_size)
                out.append(packet)
                written += len(packet)
            self.unopened.clear()
        return written

    def _write_resume(self, limit: int, out: list[Buffer]) -> int:
        written = 0
        while self.resuming and written < limit:
            written += self.resuming.popleft().write_resumption(out)
        if not self.resuming:
            self.resume_left = False
            self.link.told_resume = True
            out.append(RESUME)
            written += len(RESUME)
        return written
