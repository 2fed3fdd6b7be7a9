"""The sending half of a channel: what is queued, written and kept of its messages, within its window.

A message is queued, written, received by the peer, and consumed or answered there. Only then it leaves the window.
Until the peer has received it, the message is kept, because another connection may have to carry it again.

Relink has no grants: a sender bounds its own window. A short window is enough on a short path. On a long one the window
grows as `core.receive_windows` says, by what the peer's acknowledgements say is consumed. The pong of a ping measures
the round trip. Once windows have taken `LONG_SHARE` of the link's budget, they are all short, so that channels of which
the peer reads nothing leave room for the others.
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

JOIN_MOST: Final = 2048  # bytes of payload up to which a packet is put together when it is queued


# --- what is queued


@attrs.define(eq=False)
class Large:
    """A queued message with several parts, or with one part that is too large to copy."""

    buffers: list[Buffer]
    size: int  # of all of them
    cost: int  # in the window

    def __len__(self) -> int:
        return self.size


@attrs.define(eq=False)
class Multicast:
    """A message that is queued on several channels. It is written once it is the next one in all of them."""

    counts: dict[ChannelSender, int]  # how often it goes to each channel, which may be named twice
    parts: tuple[bytes, ...]
    size: int  # as a packet to one channel
    cost: int  # in the window of one
    waiting: int  # channels in which something else is still before it
    written: bool = False  # as one packet; again it is written to each channel that lacks it

    def __len__(self) -> int:
        return self.size


Item = bytes | Large | Multicast  # bytes are a packet with one small part, and cost `OVERHEAD` beside it


class ChannelSender(Sender):
    """One of our channels, from its first message until its close is confirmed; a source of the scheduler.

    It stands in the table from the first message on. A command either does all of its work, or it raises
    `LocalProtocolError` and changes nothing. Numbers of messages never wrap: the first one is
    `Config.first_sequence`, and each further message has one more.
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
        self.next: int = first
        # The highest number in each stage, and `first - 1` if there is none.
        none = first - 1
        self.sent: int = none  # written on this connection, or known to have arrived
        self.received: int = none
        self.consumed: int = none
        self.answered: int = none
        self.released: int = none
        self.decided: int = none  # committed or rolled back here
        self.told: int = none  # the same, and told to the peer
        self.received_told: int = none  # as named by the peer's acknowledgements of just this kind
        self.consumed_told: int = none
        self.last_answer: frames.Ack | None = None
        self.bytes: int = 0  # in the window
        self.window: int = self.table.short_window  # bytes that may be in it
        self._meter: ReceiveWindow | None = None  # says how large it should be, once the channel is busy
        self._unmetered = 0  # bytes that left the window and that the meter was not told of
        self.unsent: deque[Item] = deque()
        self.kept: deque[Item] = deque()  # `released` + 1 to `sent`
        self.grown: int = 0  # items in both that are more than a packet put together
        # Not answered yet, and the rollbacks before.
        self.journal: deque[Run] = deque() if state.out_transactions else NO_QUEUE
        self.decisions: deque[Run] = deque() if state.out_transactions else NO_QUEUE  # to be written
        self._told_last: frames.Operation | frames.Ack | None = None
        self._again = False  # the next decision is told with its number, since the peer may have missed one
        self.free: bool = False  # messages may go out on this connection; decided with the first one
        self.heard: bool = False  # the peer spoke of it on this connection
        self.confirmed: bool = False  # the peer is known to have had a message of this life
        self.stalled: bool = False  # the next message is a multicast that waits for its other channels
        self.closing: bool = False
        self.close_written: bool = False  # on this connection
        self.close_told: bool = False  # on any, and the peer may have it
        self.head: bytes = b""  # of a message with one part of so many bytes
        self.head_size: int = -1
        self.deficit: int = 0
        self.scheduled: bool = False

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
        """Messages in the window."""
        return self.next - 1 - self.released

    # --- room

    @property
    def room(self) -> int:
        """How many more messages the window takes by number. `admits` counts bytes as well."""
        return 0 if self.closing else self.state.config.window - self.outstanding

    def check_size(self, size: int) -> None:
        """Do nothing: `State.check_parts` has checked the parts, and this size includes what they cost beside it."""

    def has_room(self, size: int) -> bool:
        return self.admits(size)

    def admits(self, size: int, parts: int = 1) -> bool:
        """Return True if a message with `size` bytes of payload in so many parts can be sent now.

        It can if the channel's window has room in messages and in bytes, or is empty, and the link's budget is not
        spent. If the budget is spent, each channel still has its floor. A sender for the next life of a channel has no
        room before the present life is over.
        """
        is_mine = self.next > self.first or self.table.is_free_for(self)
        return is_mine and self.has_room_for(self._cost(size, parts))

    def notify_when_room(self, size: int) -> None:
        self.watch(size)

    def watch(self, size: int = 1, parts: int = 1) -> None:
        """Report `Writable` once such a message fits, or once it can be tried on a new link."""
        self.table.watchers[self.channel] = self, self._cost(size, parts)
        self.table.wake(self.channel)

    def has_room_for(self, cost: int, *, queued: int = 0, messages: int = 0, overdraw: bool = False) -> bool:
        """Return True if there is room behind `queued` bytes over the floors, and `messages` more in this channel."""
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
        """Return True if the window is longer than a short one, and has room for so many bytes in all."""
        table = self.table
        return size <= self.window and table.retained_over + queued <= table.long_bytes

    def _cost(self, size: int, parts: int) -> int:
        """Return an upper bound of the window bytes that such a message takes."""
        if parts == 1:
            if size <= frames.SMALL_MOST:
                return self.table.small + (size + 7 & -8)
            return frames.message_cost((size,), self.state.out_id_size)
        return 32 + 16 * parts + size + frames.OVERHEAD + frames.PART_OVERHEAD * parts

    def over_floor(self, cost: int, before: int = 0) -> int:
        """Return how many of `cost` bytes more, behind `before` others, count for the link's budget."""
        return max(0, min(self.bytes + before + cost - self.state.floor, cost))

    # --- commands

    def send(self, message: bytes) -> None:
        self.send_parts((message,))

    def send_parts(self, parts: Sequence[bytes], *, overdraw: bool = False) -> int:
        """Queue a message and return its number. The first message opens the channel.

        `overdraw` admits a message over the link's budget, for a caller that was told of room which other channels have
        used since. A peer with our limits accepts up to `Limits.outbox` of that.
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
        """Queue a message of one part if the channel is open, and if `reserve` bytes of the window stay free.

        Returns the number of the message. Returns None, having changed nothing, in any less usual case, which
        `send_parts` decides.
        """
        size = len(payload)
        state, table = self.state, self.table
        if self.next == self.first or size > table.largest or self.closing or state.over:
            return None
        # From here on `_pack`, `has_room_for` and `push` without their calls, because this runs for each message.
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
        """Queue all of several short messages, or none, as `try_push` does. Returns the number of the last one."""
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
        """Let the peer process the messages up to this one (None: all) that are not decided yet."""
        self._decide(frames.Operation.COMMIT, through)

    def rollback(self, through: int | None = None) -> None:
        """Let the peer ignore the messages up to this one (None: all) that are not decided yet."""
        self._decide(frames.Operation.ROLLBACK, through)

    def close(self) -> None:
        """Close the channel behind everything that was sent. `ChannelClosed` says that the peer has all of it."""
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
        """Close the channel if anything was sent on it. What is not decided is rolled back."""
        if self.has_sent:
            if self.state.out_transactions and self.decided < self.next - 1:
                self.rollback()
            self.close()

    def cancel(self, reason: Reason) -> None:
        """Do the same as `finish`: what was sent cannot be taken back, and the document has no place for a reason."""
        if not self.closing:
            self.finish()

    # --- checks

    def _check_open(self) -> None:
        self.state.check_alive()
        if not self.has_sent or self.closing:
            raise LocalProtocolError(f"channel {self.channel} is {'closed' if self.closing else 'not open'}")

    def check_sending(self, new: int = 0) -> None:
        """Raise `LocalProtocolError` if no message can be sent, or if no channel can be opened beside `new` others."""
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
            raise LocalProtocolError(f"{live} channels are open; raise Limits({name}=…) on both sides")

    def full(self, parts: Sequence[bytes], cost: int, messages: int = 0) -> LocalProtocolError:
        """Return the error for a message without room, behind so many others of the same cost."""
        size, limits = sum(map(len, parts)), self.state.limits
        return LocalProtocolError(
            f"channel {self.channel}: {size} bytes beside {self.outstanding + messages} messages of "
            f"{self.bytes + messages * cost} bytes that are not answered; "
            f"{self.state.config.window} of {self.window} fit, and {limits.connection_bytes} in all"
        )

    # --- queueing

    def _shape_head(self, size: int) -> None:
        """Encode the head of a message of this size. It is kept, because most messages are as long as the last one."""
        self.head_size, self.head = size, frames.message_head((self.channel,), (size,), self.state.out_id_size)

    def _pack(self, parts: Sequence[bytes]) -> Item:
        """Encode a message for the queue, copying only small payloads."""
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
        """Queue messages that have room, and that cost so much together. Return the number of the last one.

        `grown` says that they are more than packets put together.
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
        """Get in line to write, if there is something."""
        if not self.scheduled and self.is_ready():
            self.table.scheduler.add(self)

    def is_ready(self) -> bool:
        if not self.free:
            return False
        if self.decisions and self.decisions[0].through <= self.sent:
            return True
        if self.unsent:
            return not self.stalled
        # A peer forgets a closed channel at once, and its next resume is silent about it, as about a channel of which
        # it never had a message. The two could not be told apart.
        return self.closing and not self.close_written and not self.decisions and self.confirmed

    def _confirm(self) -> None:
        """Ping if a close waits only for proof that the peer has read the channel's first message."""
        if self.closing and not self.confirmed and self.free and not self.unsent and not self.decisions:
            self.state.probes.prove(self, at_once=True)

    @property
    def proof(self) -> int:
        """The last message that the answer to a ping written now would prove received."""
        return self.sent

    def proven(self, through: int) -> None:
        """The peer has read everything through this message."""
        if through >= self.first:
            self.confirmed = True
        self.schedule()

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        unsent = self.unsent
        if unsent and not (self.grown or self.decisions) and self.free:
            size = sum(map(len, cast("deque[bytes]", unsent)))
            if size <= budget and not self.closing and self.sent >= self.first:
                # What most queues are, all at once.
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
        """Write messages within the budget, up to the next decision or a multicast that must wait."""
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
            self._confirm()  # here, since it may have been another channel's turn, or the last bytes of our own

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
        """Prepare for a new connection, and wait for the peer's resume."""
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
        """Queue again what the peer lacks behind `received`, with the decisions that it may have missed."""
        if self.sent > self.received:
            self.close_told = False  # it lacks messages, so it cannot have the close behind them
        if self.state.observer is not None and self.sent > self.received:
            # What an earlier connection was to repeat, and could not, comes before what that connection wrote first.
            left = self.state.repeats.get(self.channel, 0)
            self.state.repeats[self.channel] = left + self.sent - self.received
        if self.received < self.first:
            self.confirmed = False  # whatever was known before: it has nothing of this life now
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

    # --- what the peer acknowledges: `meant` finds out what that is, and may raise; `take` applies it later

    def meant(self, ack: frames.Ack, sequence: int | None, count: int) -> int | None:
        """Return the number that an acknowledgement stands for, or None if it repeats known facts, as in a resume."""
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
        """Apply an acknowledgement of all messages through this number."""
        if number >= self.first:
            self.confirmed = True
        self.table.unannounced.pop(self, None)
        if ack is frames.Ack.RECEIVED:
            self.received_told = number
            if number > self.received:
                self.received = number
                self.state.report(events.Received(self, number))
            if not self.free:
                self.release_to_write()
        elif ack is frames.Ack.CONSUMED:
            self.consumed_told = number
            if number > self.consumed:
                self.consumed = number
                self.state.report(events.Consumed(self, number))
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

    def _resolved(self) -> int:
        """Return the last message that was answered, or rolled back and consumed."""
        resolved = max(self.answered, self.released)
        if self.journal and self.journal[0].kind is frames.Operation.ROLLBACK:
            resolved = max(resolved, min(self.journal[0].through, self.consumed))
        return resolved

    def _release(self, through: int) -> None:
        """Remove the messages through this number from the window."""
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
        """Let the window follow the path, each time that a part of a short window was consumed."""
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
        """Return True if `closed` ends the channel, and False if it repeats, in a resume, an earlier end."""
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
        """Finish the channel after `closed`, which stands for all acknowledgements that are missing."""
        if self.consumed < self.next - 1:
            self.consumed = self.next - 1
            self.state.report(events.Consumed(self, self.consumed))
        self._release(self.next - 1)
        if self._meter is not None:
            self._meter.retire()
        self.state.report(events.ChannelClosed(self))
        self.free = False
        self.table.forget(self)
