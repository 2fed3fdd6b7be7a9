"""Our channels: what is queued, written and kept of their messages, within their windows and the link's budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice, repeat
from typing import Final, cast

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE, Buffer, Outbox, Scheduler, counted
from muxkit.protocols.relink import frames
from muxkit.protocols.relink.engine import events
from muxkit.protocols.relink.engine.link import LinkState, Run, advance, counts_of, extend, resolve

JOIN_MOST: Final = 2048  # bytes of payload up to which a packet is put together when it is queued


# --- what is queued


@attrs.define(eq=False)
class Large:
    """A queued message with several parts, or with one that is too large to copy."""

    buffers: list[Buffer]
    size: int  # of all of them
    cost: int  # in the window

    def __len__(self) -> int:
        return self.size


@attrs.define(eq=False)
class Multicast:
    """A message queued on several channels, written once it is the next in all of them."""

    counts: dict[Outgoing, int]  # how often it goes to each channel, which may be named twice
    parts: tuple[bytes, ...]
    size: int  # as a packet to one channel
    cost: int  # in the window of one
    waiting: int  # channels in which something else is still before it
    written: bool = False  # as one packet; again it is written to each channel that lacks it

    def __len__(self) -> int:
        return self.size


Item = bytes | Large | Multicast  # bytes are a packet with one small part, and cost `OVERHEAD` beside it


# --- one channel


class Outgoing:
    """One of our channels, from its first message until its close is confirmed; a source of the scheduler.

    What happens to a message: it is queued, written, received by the peer, consumed or answered there, and only
    then released from the window.
    """

    __slots__ = (
        "_again",
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
        "head",
        "head_size",
        "heard",
        "journal",
        "kept",
        "last_answer",
        "link",
        "next",
        "ours",
        "received",
        "received_told",
        "released",
        "scheduled",
        "sent",
        "stalled",
        "told",
        "unsent",
    )

    def __init__(self, channel: int, ours: OurChannels) -> None:
        self.ours: OurChannels = ours
        link = ours.link
        self.link: LinkState = link
        self.channel: int = channel
        first = link.config.first_sequence
        self.first: int = first
        self.next: int = first
        # Each of these is the last of its kind; before the first message it is one less than its number.
        none = first - 1
        self.sent: int = none  # written on this connection, or known to have arrived
        self.received: int = none
        self.consumed: int = none
        self.answered: int = none
        self.released: int = none
        self.decided: int = none  # committed or rolled back here
        self.told: int = none  # the same, and told to the peer
        self.received_told: int = none  # as named by the peer's acks of just this kind
        self.consumed_told: int = none
        self.last_answer: frames.Ack | None = None
        self.bytes: int = 0  # in the window
        self.unsent: deque[Item] = deque()
        self.kept: deque[Item] = deque()  # `released` + 1 to `sent`
        self.grown: int = 0  # items in both that are more than a packet put together
        # Not answered yet, and the rollbacks before.
        self.journal: deque[Run] = deque() if link.out_transactions else NO_QUEUE
        self.decisions: deque[Run] = deque() if link.out_transactions else NO_QUEUE  # to be written
        self._told_last: frames.Operation | frames.Ack | None = None
        self._again = False  # the next decision is told with its number, since the peer may have missed one
        # Life.
        self.free: bool = link.is_resumed  # messages may go out on this connection
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
    def outstanding(self) -> int:
        """Messages in the window."""
        return self.next - 1 - self.released

    # --- queueing

    def shape_head(self, size: int) -> None:
        """Encode the head of a message of this size; kept, since most messages are as long as the one before."""
        self.head_size, self.head = size, frames.message_head((self.channel,), (size,), self.link.out_id_size)

    def pack(self, parts: Sequence[bytes]) -> Item:
        """Encode a message for the queue, copying only small payloads."""
        if len(parts) != 1:
            buffers = frames.message_buffers((self.channel,), parts, self.link.out_id_size)
            size = sum(map(len, buffers))
            cost = size + frames.OVERHEAD + frames.PART_OVERHEAD * max(0, len(parts) - 1)
            return Large(buffers if cost > JOIN_MOST else [b"".join(buffers)], size, cost)
        payload = parts[0]
        size = len(payload)
        if size != self.head_size:
            self.shape_head(size)
        padding = frames.PADDING[size & 7]
        if size <= JOIN_MOST:
            return self.head + payload + padding
        size += len(self.head) + len(padding)
        return Large([self.head, payload, padding] if padding else [self.head, payload], size, size + frames.OVERHEAD)

    def push(self, items: Sequence[Item], cost: int, *, grown: bool) -> int:
        """Queue admitted messages, which cost so much together, and return the number of the last.

        `grown`: they are more than packets put together.
        """
        ours = self.ours
        if self.next == self.first:
            ours.enter(self)
        self.unsent.extend(items)
        if grown:
            self.grown += len(items)
        ours.retained_over += self.over_floor(cost)
        self.bytes += cost
        ours.retained += cost
        ours.outbox.used += sum(map(len, items))
        self.next += len(items)
        if not self.scheduled and self.free and not self.stalled:
            ours.scheduler.add(self)
        return self.next - 1

    def over_floor(self, cost: int, before: int = 0) -> int:
        """Return how many of `cost` bytes more, behind `before` others, count for the link's budget."""
        return max(0, min(self.bytes + before + cost - self.link.floor, cost))

    def decide(self, operation: frames.Operation, through: int) -> None:
        self.decided = through
        for decisions in (self.journal, self.decisions):
            extend(decisions, operation, through)
        self.schedule()

    def close(self) -> None:
        self.closing = True
        self.ours.closing += 1
        self.schedule()
        self._confirm()

    # --- writing

    def schedule(self) -> None:
        """Get in line to write, if there is something."""
        if not self.scheduled and self.is_ready():
            self.ours.scheduler.add(self)

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
            self.link.probes.prove(self, at_once=True)

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
                self.ours.outbox.used -= size
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
                out.extend(frames.message_buffers((self.channel,), item.parts, self.link.out_id_size))
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
            self.ours.unannounced.pop(self, None)
        self.sent += count
        self.ours.outbox.used -= size
        if self.closing:
            self._confirm()  # here, since it may have been another channel's turn, or the last bytes of our own

    def _write_multicast(self, item: Multicast, out: list[Buffer]) -> int:
        if not self.stalled:
            self.stalled = True
            item.waiting -= 1
        if item.waiting:
            return 0
        channels = [one.channel for one, count in item.counts.items() for _ in range(count)]
        buffers = frames.message_buffers(channels, item.parts, self.link.out_id_size, multicast=True)
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
        packet = frames.encode_notice(operation, (self.channel,), self.link.out_id_size, None if is_next else through)
        self.told, self._told_last, self._again = max(self.told, through), operation, False
        out.append(packet)
        if self.closing:
            self._confirm()
        return len(packet)

    def _write_close(self, out: list[Buffer]) -> int:
        packet = frames.encode_notice(frames.Operation.CLOSE, (self.channel,), self.link.out_id_size)
        self.close_written = self.close_told = True
        out.append(packet)
        return len(packet)

    # --- connections

    def connect(self) -> None:
        """Prepare for a new connection: wait for the peer's resume."""
        self.free = self.link.is_resumed
        self.heard = self.stalled = self.scheduled = self.close_written = False
        self.deficit = 0
        self._again = self.link.resumes

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
        if self.link.observer is not None and self.sent > self.received:
            # What an earlier connection was to repeat, and could not, comes before what that connection wrote first.
            left = self.link.repeats.get(self.channel, 0)
            self.link.repeats[self.channel] = left + self.sent - self.received
        if self.received < self.first:
            self.confirmed = False  # whatever was known before: it has nothing of this life now
        for _ in range(self.sent - self.received):
            item = self.kept.pop()
            self.unsent.appendleft(item)
            self.ours.outbox.used += len(item)
        self.sent = self.received
        self.told = min(self.told, self.received)
        if self.journal or self.decisions:
            self.decisions = deque(Run(one.kind, one.through) for one in self.journal)
        self.free = True
        self.schedule()
        self._confirm()

    # --- what the peer acknowledges: find out what is meant, which may raise, and later take it

    def meant(self, ack: frames.Ack, sequence: int | None, count: int) -> int | None:
        """Return the number that an ack stands for; None if it repeats known facts, as in a resume."""
        link = self.link
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
        if not link.out_transactions:
            raise RemoteProtocolError(f"{what}, which has no transactions", rule="relink-T06")
        if sequence is None:
            number = advance(what, count, done=self.answered, last=self.told)
        else:
            behind = link.config.window if link.is_resuming else 0
            found = resolve(what, sequence, done=self.answered, last=self.told, behind=behind)
            if found is None:
                return None
            number = found
            if number == self.answered:
                if link.is_resuming or ack is self.last_answer:
                    return None
                raise RemoteProtocolError(f"{what}: {sequence} was answered otherwise before", rule="relink-Q11")
        run = next(run for run in self.journal if run.through >= number)
        if run.kind is not frames.Operation.COMMIT:
            rule = "relink-T04" if sequence is None else "relink-T03"
            raise RemoteProtocolError(f"{what}: message {number} was rolled back", rule=rule)
        return number

    def take(self, ack: frames.Ack, number: int) -> None:
        """Apply an ack of all messages through this number."""
        happened = self.link.happened
        if number >= self.first:
            self.confirmed = True
        self.ours.unannounced.pop(self, None)
        if ack is frames.Ack.RECEIVED:
            self.received_told = number
            if number > self.received:
                self.received = number
                happened.append(events.Received(self.channel, number))
            if not self.free:
                self.release_to_write()
        elif ack is frames.Ack.CONSUMED:
            self.consumed_told = number
            if number > self.consumed:
                self.consumed = number
                happened.append(events.Consumed(self.channel, number))
                self.received = max(self.received, number)
                self._release(self._resolved() if self.link.out_transactions else number)
        else:
            first, self.answered, self.last_answer = self.answered + 1, number, ack
            event = events.Committed if ack is frames.Ack.COMMITTED else events.Uncommitted
            happened.append(event(self.channel, first, number))
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
        over = max(0, min(self.bytes - self.link.floor, size))
        self.bytes -= size
        self.ours.freed(self.channel, size, over)

    def check_closed(self) -> bool:
        """Return True if `closed` ends the channel, False if it repeats, in a resume, an earlier end."""
        what = f"closed on channel {self.channel}"
        if not self.close_told:
            if self.link.is_resuming and not self.heard:
                return False
            raise RemoteProtocolError(f"{what}, which was not closed", rule="relink-K02")
        if self.unsent or self.has_unanswered_commits:
            open_ends = f"{len(self.unsent)} messages not received, {self.decided - self.answered} not answered"
            raise RemoteProtocolError(f"{what}: {open_ends}", rule="relink-K02")
        return True

    def closed(self) -> None:
        """Finish the channel after `closed`, which stands for all acks that are missing."""
        if self.consumed < self.next - 1:
            self.consumed = self.next - 1
            self.link.happened.append(events.Consumed(self.channel, self.consumed))
        self._release(self.next - 1)
        self.link.happened.append(events.ChannelClosed(self.channel))
        self.free = False
        self.ours.forget(self)


# --- all channels


class OurChannels:
    """Our channels by number, the budget that they share, and the commands on them.

    A command either does all of its work or raises `LocalProtocolError` and changes nothing.
    """

    def __init__(self, link: LinkState) -> None:
        self.link = link
        self._small = frames.message_cost((0,), link.out_id_size)  # weight of a small message without payload
        # Looked up for each message.
        self._floor = link.floor
        self._largest = link.limits.message
        self._window = link.config.window
        self._channel_bytes = link.limits.short_window
        self._connection_bytes = link.limits.connection_bytes
        self.outbox: Outbox = Outbox()
        self.reset()

    def reset(self) -> None:
        """Forget what belongs to one link."""
        self.live: dict[int, Outgoing] = {}
        self.unannounced: dict[Outgoing, None] = {}  # the peer has none of their messages, as far as we know
        self.watchers: dict[int, int] = {}
        self.retained: int = 0  # bytes in all windows
        self.retained_over: int = 0  # of them, over the floors
        self.outbox.used = 0
        self.closing: int = 0  # channels that are to be closed
        self.scheduler: Scheduler = Scheduler()

    @property
    def unanswered(self) -> int:
        """Messages of ours that are still in a window."""
        return sum(outgoing.outstanding for outgoing in self.live.values())

    # --- room

    def room(self, channel: int) -> int:
        """Messages that fit the channel's window by number; `admits` counts bytes as well."""
        outgoing = self.live.get(channel)
        if outgoing is None:
            return self._window
        return 0 if outgoing.closing else self._window - outgoing.outstanding

    def admits(self, channel: int, size: int, parts: int = 1) -> bool:
        """Return True if a message with `size` bytes of payload in so many parts can be sent now.

        It can if the channel's window has room in messages and in bytes, or is empty, and the link's budget is not
        spent. With the budget spent, each channel still has its floor.
        """
        return self._has_room(self.live.get(channel), self._cost(size, parts))

    def _has_room(
        self, outgoing: Outgoing | None, cost: int, *, queued: int = 0, messages: int = 0, overdraw: bool = False
    ) -> bool:
        """Return True if there is room behind `queued` bytes over the floors, and `messages` more in this channel."""
        kept = 0
        if outgoing is not None:
            if outgoing.closing:
                return False
            kept, messages = outgoing.bytes + messages * cost, outgoing.outstanding + messages
        else:
            kept = messages * cost
        if messages >= self._window:
            return False
        if kept + cost <= self._floor:
            return True
        if self.retained_over + queued > self._connection_bytes and not overdraw:
            return False
        return kept + cost <= self._channel_bytes or messages == 0

    def _cost(self, size: int, parts: int) -> int:
        """Upper bound of the window bytes that such a message takes."""
        if parts == 1:
            return (
                self._small + (size + 7 & -8)
                if size <= frames.SMALL_MOST
                else frames.message_cost((size,), self.link.out_id_size)
            )
        return 32 + 16 * parts + size + frames.OVERHEAD + frames.PART_OVERHEAD * parts

    def fits(self, channels: Sequence[int], parts: Sequence[bytes]) -> bool:
        """Return True if all windows and the link's budget have room for such a multicast."""
        cost = frames.message_cost([len(part) for part in parts], self.link.out_id_size)
        targets = {self.live.get(channel) or Outgoing(channel, self): n for channel, n in counts_of(channels).items()}
        return self._find_full(targets, cost) is None

    def _find_full(self, targets: dict[Outgoing, int], cost: int) -> tuple[Outgoing, int] | None:
        """Return the first channel without room for its share of a multicast, and how many messages it has room for."""
        queued = 0
        for outgoing, count in targets.items():
            for before in range(count):
                if not self._has_room(outgoing, cost, queued=queued, messages=before):
                    return outgoing, before
                queued += outgoing.over_floor(cost, before * cost)
        return None

    def watch(self, channel: int, size: int = 1, parts: int = 1) -> None:
        """Report `Writable` once such a message fits, or once it can be tried on a new link."""
        self.watchers[channel] = self._cost(size, parts)
        if channel not in self.live or not self.live[channel].closing:
            self._wake(channel)

    def _wake(self, channel: int) -> None:
        """Report `Writable` to the watcher of a channel, if there is room."""
        cost = self.watchers.get(channel)
        if cost is not None and self._has_room(self.live.get(channel), cost):
            del self.watchers[channel]
            self.link.happened.append(events.Writable(channel))

    def freed(self, channel: int, size: int, over: int) -> None:
        """Return bytes to the budget, `over` of them from above the floor, and wake watchers."""
        was_full = self.retained_over > self._connection_bytes
        self.retained -= size
        self.retained_over -= over
        if not self.watchers:
            return
        if was_full and self.retained_over <= self._connection_bytes:
            for watched in [*self.watchers]:
                self._wake(watched)
        else:
            self._wake(channel)

    # --- sending

    def send(self, channel: int, parts: Sequence[bytes], *, overdraw: bool = False) -> int:
        """Queue a message and return its number. The first message opens the channel.

        `overdraw` admits a message over the link's budget, for a caller that was told of room which other channels have
        used since. A peer with our limits accepts up to `Limits.outbox` of that.
        """
        outgoing = self._check_sending(channel)
        self._check_parts(parts)
        item = outgoing.pack(parts)
        cost = len(item) + frames.OVERHEAD if isinstance(item, bytes) else item.cost
        if not self._has_room(outgoing, cost, overdraw=overdraw):
            raise self._full(outgoing, parts, cost)
        return outgoing.push((item,), cost, grown=not isinstance(item, bytes))

    def try_send(self, channel: int, payload: bytes, reserve: int = 0) -> int | None:
        """Send one part on an open channel if it fits and leaves `reserve` bytes of window free.

        Returns None, and changes nothing, otherwise; `send` then decides.
        """
        size = len(payload)
        outgoing = self.live.get(channel)
        if outgoing is None or size > self._largest or outgoing.closing or self.link.over:
            return None
        # From here on `pack`, `_has_room` and `push` without their calls, since this runs for each message.
        if size != outgoing.head_size:
            outgoing.shape_head(size)
        item = outgoing.head + payload + frames.PADDING[size & 7] if size <= JOIN_MOST else outgoing.pack((payload,))
        length = len(item)
        cost = length + frames.OVERHEAD
        number, kept = outgoing.next, outgoing.bytes
        if (
            kept + cost + reserve > self._channel_bytes
            or number - outgoing.released > self._window
            or self.retained_over > self._connection_bytes
        ):
            return None
        outgoing.unsent.append(item)
        if size > JOIN_MOST:
            outgoing.grown += 1
        outgoing.bytes = kept + cost
        self.retained += cost
        if kept >= self._floor:
            self.retained_over += cost
        elif kept + cost > self._floor:
            self.retained_over += kept + cost - self._floor
        self.outbox.used += length
        outgoing.next = number + 1
        if not outgoing.scheduled and outgoing.free and not outgoing.stalled:
            self.scheduler.add(outgoing)
        return number

    def try_send_all(self, channel: int, payloads: Sequence[bytes], reserve: int = 0) -> int | None:
        """Send several short messages, all or none, as `try_send` does; returns the number of the last."""
        count = len(payloads)
        outgoing = self.live.get(channel)
        if outgoing is None or outgoing.closing or self.link.over or not count or max(map(len, payloads)) > JOIN_MOST:
            return None
        items = [outgoing.pack((payload,)) for payload in payloads]
        cost = sum(map(len, items)) + count * frames.OVERHEAD
        if (
            outgoing.bytes + cost + reserve > self._channel_bytes
            or outgoing.outstanding + count > self._window
            or self.retained_over + outgoing.over_floor(cost) > self._connection_bytes
        ):
            return None
        return outgoing.push(items, cost, grown=False)

    def multicast(self, channels: Sequence[int], parts: Sequence[bytes]) -> list[int]:
        """Queue one packet to several channels, which may repeat; returns its numbers in the order of `channels`."""
        self.check_targets(len(channels))
        self._check_parts(parts)
        kept = tuple(map(bytes, parts))
        sizes = [len(part) for part in kept]
        cost = frames.message_cost(sizes, self.link.out_id_size)
        targets: dict[Outgoing, int] = {}
        for channel, count in counts_of(channels).items():
            targets[self._check_sending(channel, sum(one.next == one.first for one in targets))] = count
        full = self._find_full(targets, cost)
        if full is not None:
            raise self._full(full[0], kept, cost, full[1])
        item = Multicast(targets, kept, frames.message_size(sizes, self.link.out_id_size), cost, len(targets))
        by_number = {outgoing.channel: outgoing for outgoing in targets}
        return [by_number[channel].push((item,), cost, grown=True) for channel in channels]

    def check_targets(self, count: int) -> None:
        most = self.link.config.targets
        if not 1 <= count <= most:
            raise LocalProtocolError(f"{count} channels; Config(targets={most}) are the most")

    def commit(self, channel: int, *, through: int | None = None) -> None:
        """Have the peer process the messages up to this one (None: all) that are not decided yet."""
        self._decide(frames.Operation.COMMIT, channel, through)

    def rollback(self, channel: int, *, through: int | None = None) -> None:
        """Have the peer ignore the messages up to this one (None: all) that are not decided yet."""
        self._decide(frames.Operation.ROLLBACK, channel, through)

    def _decide(self, operation: frames.Operation, channel: int, through: int | None) -> None:
        outgoing = self._check_open(channel)
        if not self.link.out_transactions:
            raise LocalProtocolError(f"channel {channel} has no transactions")
        last = outgoing.next - 1
        through = last if through is None else through
        if not outgoing.decided < through <= last:
            raise LocalProtocolError(
                f"channel {channel}: {operation.name.lower()} through {through}; "
                f"{outgoing.decided + 1} to {last} are not decided yet"
            )
        outgoing.decide(operation, through)

    def close(self, channel: int) -> None:
        """Close a channel behind everything that was sent; `ChannelClosed` tells that the peer has all of it."""
        outgoing = self._check_open(channel)
        undecided = outgoing.next - 1 - outgoing.decided
        if self.link.out_transactions and undecided:
            raise LocalProtocolError(
                f"channel {channel}: {counted(undecided, 'message')} neither committed nor rolled back"
            )
        outgoing.close()

    # --- checks

    def _check_open(self, channel: int) -> Outgoing:
        self.link.check_alive()
        outgoing = self.live.get(channel)
        if outgoing is None or outgoing.closing:
            raise LocalProtocolError(f"channel {channel} is {'not open' if outgoing is None else 'closed'}")
        return outgoing

    def _check_sending(self, channel: int, new: int = 0) -> Outgoing:
        """Return the open channel or a new one; raises if none can be opened beside `new` others."""
        link = self.link
        outgoing = self.live.get(channel)
        link.check_alive()
        if outgoing is not None:
            if not outgoing.closing:
                return outgoing
            raise LocalProtocolError(
                f"channel {channel} is closed; it can be opened anew when the peer has confirmed it"
            )
        if link.is_shutting_down:
            raise LocalProtocolError(f"channel {channel} is not open, and none can be opened after the shutdown")
        if not 0 <= channel < 1 << 8 * link.out_id_size:
            raise LocalProtocolError(f"channel {channel} does not fit an id of {link.out_id_size} bytes")
        live = len(self.live) + new
        if live >= link.limits.channels:
            name = link.limits.bound_of_channels
            raise LocalProtocolError(f"{live} channels are open; raise Limits({name}=…) on both sides")
        return Outgoing(channel, self)

    def _check_parts(self, parts: Sequence[bytes]) -> None:
        most = self.link.config.parts
        if len(parts) > most:
            raise LocalProtocolError(f"{len(parts)} parts against Config(parts={most})")
        size = sum(map(len, parts))
        if size > self._largest:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self._largest})")

    def _full(self, outgoing: Outgoing, parts: Sequence[bytes], cost: int, messages: int = 0) -> LocalProtocolError:
        size = sum(map(len, parts))
        return LocalProtocolError(
            f"channel {outgoing.channel}: {size} bytes beside {outgoing.outstanding + messages} messages of "
            f"{outgoing.bytes + messages * cost} bytes that are not answered; "
            f"{self._window} of {self._channel_bytes} fit, and {self._connection_bytes} in all"
        )

    # --- lives

    def enter(self, outgoing: Outgoing) -> None:
        """Open a channel with its first message."""
        self.live[outgoing.channel] = outgoing
        self.unannounced[outgoing] = None
        self.link.observe_state(f"out {outgoing.channel}", "open")

    def forget(self, outgoing: Outgoing) -> None:
        """Remove a channel whose close is confirmed."""
        del self.live[outgoing.channel]
        self.unannounced.pop(outgoing, None)
        self.closing -= 1
        self.link.probes.forget(outgoing)
        self.link.observe_state(f"out {outgoing.channel}", "closed")
        self._wake(outgoing.channel)

    # --- what the peer acknowledges

    def acknowledge(self, packet: frames.AckPacket) -> None:
        """Check an ack against the state of its channels, then apply it: all of it or, with an error, nothing."""
        name = packet.ack.name.lower()
        plans: list[tuple[Outgoing, int | None]] = []
        is_end = packet.ack is frames.Ack.CLOSED
        for channel, count in counts_of(packet.channels).items():
            outgoing = self.live.get(channel)
            if outgoing is None:
                if is_end:
                    continue  # it never had a message, or its end was heard of before: nothing follows
                raise RemoteProtocolError(f"{name} on channel {channel}, which is not open", rule="relink-O12")
            if not is_end:
                plans.append((outgoing, outgoing.meant(packet.ack, packet.sequence, count)))
            elif count > 1:
                what = f"closed on channel {channel} {count} times, which was closed once"
                raise RemoteProtocolError(what, rule="relink-K02")
            elif outgoing.check_closed():
                plans.append((outgoing, None))
        for outgoing, number in plans:
            if is_end:
                outgoing.closed()
                continue
            outgoing.heard = True
            if number is not None:
                outgoing.take(packet.ack, number)

    # --- connections

    def connect(self) -> None:
        self.scheduler = Scheduler()
        for outgoing in self.live.values():
            outgoing.connect()
            if outgoing.received < outgoing.first:
                self.unannounced[outgoing] = None
            outgoing.schedule()

    def disconnect(self) -> None:
        for outgoing in self.live.values():
            outgoing.disconnect()
        self.scheduler = Scheduler()

    def resume(self) -> None:
        """Finish the peer's resume: a channel that it left out is unknown to the peer, or closed there."""
        for outgoing in self.live.values():
            if outgoing.heard or (outgoing.received < outgoing.first and not outgoing.close_told):
                continue
            if not outgoing.close_told or outgoing.has_unanswered_commits:
                what = f"the resume left out channel {outgoing.channel}, where {outgoing.received} was received"
                raise RemoteProtocolError(what, rule="relink-R02")
        self.link.peer_resumed = True
        for outgoing in [*self.live.values()]:
            if outgoing.free:
                outgoing.schedule()
            elif outgoing.close_told and not outgoing.heard:
                # A close goes out only when the peer is known to have had a message: it is over, and not lost.
                outgoing.closed()
            else:
                outgoing.release_to_write()
