"""What can be sent? The commands about our own channels, each done as a whole or refused without a trace."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError
from muxkit.protocols.relink._items import JOIN_MOST, Multicast
from muxkit.protocols.relink._packets import (
    OVERHEAD,
    PART_OVERHEAD,
    SMALL_MOST,
    Operation,
    message_cost,
    message_size,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from muxkit.protocols.relink._outgoing import Outgoing
    from muxkit.protocols.relink._state import Link


class Sending:
    """The sending half of a link's engine."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.config = link.config
        self.limits = link.limits
        self._small = message_cost((0,), link.out_id_size)  # weight of a small message without payload
        # Looked up for each message.
        self._largest = link.limits.message
        self._window = link.config.window
        self._channel_bytes = link.limits.channel_bytes
        self._connection_bytes = link.limits.connection_bytes

    # --- our messages

    def room(self, channel: int) -> int:
        """How many messages fit the channel's window by their number; `admits` knows about bytes as well."""
        outgoing = self._link.outgoing.get(channel)
        if outgoing is None:
            return self.config.window
        return 0 if outgoing.closing else self.config.window - outgoing.outstanding

    def admits(self, channel: int, size: int, parts: int = 1) -> bool:
        """May a message with `size` bytes of payload in so many parts be sent now?

        Yes if the window of the channel has room for it beside what is unanswered, in messages and in bytes, or
        if the window is empty. When the link's own budget is spent, small windows are all that is left.
        """
        link = self._link
        outgoing = link.outgoing.get(channel)
        if outgoing is None:
            outgoing = link.open(channel)
        # First the usual case, for the caller who asks before each message; `Link.admits` has the whole of it.
        if (
            parts == 1
            and size <= SMALL_MOST
            and not outgoing.closing
            and outgoing.bytes + (size + 7 & -8) + self._small <= link.limits.channel_bytes
            and outgoing.next - outgoing.released <= link.config.window
            and link.retained_over <= link.limits.connection_bytes
        ):
            return True
        return link.admits(outgoing, self._cost(size, parts))

    def _cost(self, size: int, parts: int) -> int:
        """The most that such a message can weigh."""
        if parts == 1:
            return message_cost((size,), self._link.out_id_size)
        return 32 + 16 * parts + size + OVERHEAD + PART_OVERHEAD * parts

    def watch(self, channel: int, size: int = 1, parts: int = 1) -> None:
        """Tell me with `Writable` when such a message fits, or when it may be tried on a new link."""
        self._link.watchers[channel] = self._cost(size, parts)
        if channel not in self._link.outgoing or not self._link.outgoing[channel].closing:
            self._link.wake(channel)

    def send(self, channel: int, parts: Sequence[bytes], *, overdraw: bool = False) -> int:
        """Queue a message; gives its number. It opens the channel if it is not open.

        `overdraw` is for who was told that there is room, and finds that others have spent the link's budget since:
        what he sends then counts beside it. A peer with our limits bears `Limits.outbox` of that.
        """
        link = self._link
        outgoing = link.outgoing.get(channel)
        if outgoing is None or outgoing.closing or link.over:
            outgoing = self._check_sending(channel, 0)
        if len(parts) != 1:
            self._check_parts(parts)
        item = outgoing.pack(parts)
        cost = len(item) + OVERHEAD if isinstance(item, bytes) else item.cost
        if (
            outgoing.bytes + cost > link.limits.channel_bytes
            or outgoing.next - outgoing.released > link.config.window
            or link.retained_over > link.limits.connection_bytes
            or cost > link.limits.message
        ):
            self._check_room(outgoing, parts, cost, overdraw=overdraw)
        if outgoing.next == outgoing.first:
            link.enter(outgoing)
        return outgoing.push(item, cost)

    def try_send(self, channel: int, payload: bytes, reserve: int = 0) -> int | None:
        """`send` for what most messages are: one part on an open channel that has room for `reserve` bytes more.

        None, and nothing done, if it is not.
        """
        link, size = self._link, len(payload)
        outgoing = link.outgoing.get(channel)
        if outgoing is None or size > self._largest or outgoing.closing or link.over:
            return None
        # From here on `pack` and `push` without their calls, since this runs for each message.
        item = outgoing.pack_small(payload) if size <= JOIN_MOST else outgoing.pack((payload,))
        length = len(item)
        cost = length + OVERHEAD
        number, kept = outgoing.next, outgoing.bytes
        if (
            kept + cost + reserve > self._channel_bytes
            or number - outgoing.released > self._window
            or link.retained_over > self._connection_bytes
        ):
            return None
        outgoing.unsent.append(item)
        if size > JOIN_MOST:
            outgoing.grown += 1
        outgoing.bytes = kept + cost
        link.retained += cost
        if kept >= link.floor:
            link.retained_over += cost
        elif kept + cost > link.floor:
            link.retained_over += kept + cost - link.floor
        link.outbox.used += length
        outgoing.next = number + 1
        if not outgoing.scheduled and outgoing.free and not outgoing.stalled:
            link.scheduler.add(outgoing)
        return number

    def try_send_all(self, channel: int, payloads: Sequence[bytes], reserve: int = 0) -> int | None:
        """The same for several short messages, all or none; gives the number of the last."""
        link, count = self._link, len(payloads)
        outgoing = link.outgoing.get(channel)
        if outgoing is None or outgoing.closing or link.over or not count or max(map(len, payloads)) > JOIN_MOST:
            return None
        items = [outgoing.pack_small(payload) for payload in payloads]
        length = sum(map(len, items))
        cost = length + count * OVERHEAD
        before = outgoing.bytes
        over = max(0, before + cost - link.floor) - max(0, before - link.floor)
        if (
            before + cost + reserve > self._channel_bytes
            or outgoing.next - 1 + count - outgoing.released > self._window
            or link.retained_over + over > self._connection_bytes
        ):
            return None
        outgoing.unsent.extend(items)
        outgoing.bytes = before + cost
        link.retained += cost
        link.retained_over += over
        link.outbox.used += length
        outgoing.next += count
        if not outgoing.scheduled and outgoing.free and not outgoing.stalled:
            link.scheduler.add(outgoing)
        return outgoing.next - 1

    def send_many(self, channel: int, messages: Iterable[Sequence[bytes]]) -> int:
        """Queue messages as long as they fit; gives how many did. It raises only if the first is refused."""
        count = 0
        for parts in messages:
            try:
                self.send(channel, parts)
            except LocalProtocolError:
                if not count:
                    raise
                break
            count += 1
        return count

    def multicast(self, channels: Sequence[int], parts: Sequence[bytes]) -> list[int]:
        """One packet to several channels, which may repeat; gives the numbers, in the order of `channels`."""
        link = self._link
        self.check_targets(len(channels))
        self._check_parts(parts)
        kept = tuple(map(bytes, parts))
        sizes = [len(part) for part in kept]
        cost = message_cost(sizes, link.out_id_size)
        counts = Counter(channels)
        outgoings: dict[int, Outgoing] = {}
        queued = 0
        for channel, count in counts.items():
            outgoing = link.outgoing.get(channel)
            if outgoing is None or outgoing.closing or link.over:
                outgoing = self._check_sending(channel, sum(one.next == one.first for one in outgoings.values()))
            outgoings[channel] = outgoing
            for before in range(count):
                self._check_room(outgoing, kept, cost, queued=queued, messages=before)
                over = outgoing.bytes + (before + 1) * cost - link.floor
                queued += max(0, min(over, cost))
        targets = {outgoings[channel]: count for channel, count in counts.items()}
        item = Multicast(targets, kept, message_size(sizes, link.out_id_size), cost)
        numbers: list[int] = []
        for channel in channels:
            outgoing = outgoings[channel]
            if outgoing.next == outgoing.first:
                link.enter(outgoing)
            numbers.append(outgoing.push(item, cost))
        return numbers

    def fits(self, channels: Sequence[int], parts: Sequence[bytes]) -> bool:
        """Is there room for such a multicast now, in all windows and in the link's budget?"""
        link = self._link
        cost = message_cost([len(part) for part in parts], link.out_id_size)
        queued = 0
        for channel, count in Counter(channels).items():
            outgoing = link.outgoing.get(channel) or link.open(channel)
            for before in range(count):
                if not link.admits(outgoing, cost, queued=queued, messages=before):
                    return False
                queued += max(0, min(outgoing.bytes + (before + 1) * cost - link.floor, cost))
        return True

    def check_targets(self, count: int) -> None:
        if not 1 <= count <= self.config.targets:
            raise LocalProtocolError(f"{count} channels; Config(targets={self.config.targets}) are the most")

    def commit(self, channel: int, *, through: int | None = None) -> None:
        """Have the peer process the messages up to this one (None: all) that are not decided yet."""
        self._decide(Operation.COMMIT, channel, through)

    def rollback(self, channel: int, *, through: int | None = None) -> None:
        """Have the peer ignore the messages up to this one (None: all) that are not decided yet."""
        self._decide(Operation.ROLLBACK, channel, through)

    def _decide(self, operation: Operation, channel: int, through: int | None) -> None:
        outgoing = self._check_open(channel)
        if not self._link.out_transactions:
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
        if self._link.out_transactions and outgoing.decided < outgoing.next - 1:
            raise LocalProtocolError(
                f"channel {channel}: {outgoing.next - 1 - outgoing.decided} messages neither committed nor rolled back"
            )
        outgoing.close()

    # --- checks

    def _check_alive(self) -> None:
        if self._link.over:
            raise LocalProtocolError("the link is over")

    def _check_open(self, channel: int) -> Outgoing:
        self._check_alive()
        outgoing = self._link.outgoing.get(channel)
        if outgoing is None or outgoing.closing:
            raise LocalProtocolError(f"channel {channel} is {'not open' if outgoing is None else 'closed'}")
        return outgoing

    def _check_sending(self, channel: int, new: int) -> Outgoing:
        """The channel is not open: may it be opened, beside `new` others?"""
        link = self._link
        self._check_alive()
        if channel in link.outgoing:
            raise LocalProtocolError(
                f"channel {channel} is closed; it can be opened anew when the peer has confirmed it"
            )
        if link.wants_shutdown:
            raise LocalProtocolError(f"channel {channel} is not open, and none can be opened after the shutdown")
        if not 0 <= channel < 1 << 8 * link.out_id_size:
            raise LocalProtocolError(f"channel {channel} does not fit an id of {link.out_id_size} bytes")
        if len(link.outgoing) + new >= self.limits.channels:
            live = len(link.outgoing) + new
            name = self.limits.bound_of_channels
            raise LocalProtocolError(f"{live} channels are open; raise Limits({name}=…) on both sides")
        return link.open(channel)

    def _check_parts(self, parts: Sequence[bytes]) -> None:
        if len(parts) > self.config.parts:
            raise LocalProtocolError(f"{len(parts)} parts against Config(parts={self.config.parts})")

    def _check_room(
        self,
        outgoing: Outgoing,
        parts: Sequence[bytes],
        cost: int,
        *,
        queued: int = 0,
        messages: int = 0,
        overdraw: bool = False,
    ) -> None:
        size = sum(map(len, parts))
        if size > self.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self.limits.message})")
        if not self._link.admits(outgoing, cost, queued=queued, messages=messages, overdraw=overdraw):
            raise LocalProtocolError(
                f"channel {outgoing.channel}: {size} bytes beside {outgoing.outstanding + messages} messages of "
                f"{outgoing.bytes + messages * cost} bytes that are not answered; "
                f"{self.config.window} of {self.limits.channel_bytes} fit, and {self.limits.connection_bytes} in all"
            )
