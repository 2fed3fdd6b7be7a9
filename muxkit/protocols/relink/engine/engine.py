"""The rules of a Relink link as one object that outlives its connections; no Trio, no clock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core import Buffer
from muxkit.protocols.relink.config import Config
from muxkit.protocols.relink.engine.events import (
    EpochChanged,
    Event,
    Failed,
    Finished,
    HungUp,
    LinkReplaced,
    Silent,
    Writable,
)
from muxkit.protocols.relink.engine.items import JOIN_MOST, Timer
from muxkit.protocols.relink.engine.receiving import Reader
from muxkit.protocols.relink.engine.state import SHUTDOWN, Link, Multicast, Outbox, Purpose
from muxkit.protocols.relink.frames import (
    OVERHEAD,
    PART_OVERHEAD,
    SMALL_MOST,
    Ack,
    Operation,
    Parts,
    bounds_of,
    message_cost,
    message_size,
    observe_written,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from muxkit._observer import Observer
    from muxkit.protocols.relink.engine.state import Incoming, Outgoing


CHANNEL_PRICE = 6 * 1024  # bytes of memory for a channel each way, its session objects and a task that handles it


class LinkEngine:
    """One end of a link; a `StreamEngine` between `connection_made` and `connection_lost`, as often as need be.

    A command either does all of its work or raises `LocalProtocolError` and changes nothing. Numbers of messages
    never wrap here: they are `Config.first_sequence`, and one more for each message since the channel was opened.
    Messages may be queued before the first connection and between two. `consume` (or an answer) is due for
    everything that `receive` gave, or the peer's window stays full.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        is_connector: bool,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        config, limits = config or Config(), (limits or Limits()).at_price(CHANNEL_PRICE)
        link = Link(config, limits, observer, is_connector=is_connector)
        self._link = link
        self.config = link.config
        self.limits = link.limits
        self._small = message_cost((0,), link.out_id_size)  # weight of a small message without payload
        # Looked up for each message.
        self._largest = link.limits.message
        self._window = link.config.window
        self._channel_bytes = link.limits.channel_bytes
        self._connection_bytes = link.limits.connection_bytes
        self.is_connector = is_connector
        self._observer = observer
        bounds = bounds_of(self.config, is_connector=is_connector, message=self.limits.message)
        self._bounds = bounds
        self._reader = Reader(self._link, bounds)
        self._liveness = Liveness(self._link, self._reader)

    # --- what is known

    @property
    def epoch(self) -> int:
        """The listener's epoch, to be sent with the next request; 0 before there is a link."""
        return self._link.epoch

    @property
    def link_id(self) -> int:
        """The id of the link; 0 before there is one."""
        return self._link.link_id

    @property
    def over(self) -> bool:
        """True once the link has finished or failed: each command raises."""
        return self._link.over

    @property
    def is_connected(self) -> bool:
        return self._link.connected

    @property
    def is_resumed(self) -> bool:
        """True if connected and, on a resumed link, the peer's resume has come."""
        return self._link.is_free

    @property
    def is_shutting_down(self) -> bool:
        return self._link.wants_shutdown

    @property
    def has_peer_shut_down(self) -> bool:
        return self._link.peer_shut_down

    @property
    def outbox(self) -> int:
        """Bytes of messages that wait for the transport."""
        return self._link.outbox.used

    @property
    def waiting(self) -> Outbox:
        """The counter behind `outbox`, which changes in place."""
        return self._link.outbox

    @property
    def unanswered(self) -> int:
        """Messages of ours that are still in a window."""
        return self._link.lost

    @property
    def held_bytes(self) -> int:
        """Bytes received and not consumed, including the overhead of each message."""
        return self._link.held

    @property
    def retained_bytes(self) -> int:
        """Bytes queued, or sent and not yet released from the window, including the overhead of each message."""
        return self._link.retained

    @property
    def channel_count(self) -> int:
        """Channels of both directions that take memory."""
        return len(self._link.outgoing) + len(self._link.incoming)

    @property
    def owed_answers(self) -> int:
        """Channels of the peer with committed messages that we have not answered."""
        return self._link.unanswered

    @property
    def owes_control(self) -> bool:
        """True if pings, pongs, acks or a resume wait to be written. Cheaper than `has_output`."""
        return bool(self._link.control)

    @property
    def unparsed(self) -> int:
        """Bytes that came beyond `frames_at_once` packets; `receive_bytes(b"", now)` goes on with them."""
        return self._reader.unparsed if self._link.connected and not self._link.over else 0

    @property
    def frames_at_once(self) -> int:
        """Packets that one call of `receive_bytes` parses at most."""
        return self._reader.frames_at_once

    @frames_at_once.setter
    def frames_at_once(self, count: int) -> None:
        self._reader.frames_at_once = count

    @property
    def bytes_received(self) -> int:
        """Bytes parsed on the present connection."""
        return self._reader.offset

    @property
    def arrivals(self) -> int:
        """A count that changes with each message received, announced by an event or not."""
        return sum(one.arrived for one in self._link.incoming.values())

    @property
    def channels(self) -> tuple[int, ...]:
        """Our open channels, including those whose close is not confirmed yet."""
        return tuple(self._link.outgoing)

    @property
    def peer_channels(self) -> tuple[int, ...]:
        """The peer's open channels."""
        return tuple(self._link.incoming)

    # --- connections

    def connection_made(self, now: float, *, epoch: int, link_id: int) -> None:
        """Start a connection after its handshake (`Agreed`).

        If it names another link than ours, everything about ours is gone: `LinkReplaced` or `EpochChanged`.
        """
        link = self._link
        self._check_alive()
        if link.connected:
            raise LocalProtocolError("there is a connection already; connection_lost comes first")
        if not link_id or not epoch:
            raise LocalProtocolError(f"epoch {epoch} and link id {link_id} name no link")
        link.now = now
        resumed = (epoch, link_id) == (link.epoch, link.link_id)
        if link.link_id and not resumed:
            self._replace(epoch, link_id)
        link.epoch, link.link_id = epoch, link_id
        self._reader.restart()
        link.connect(resumed=resumed)
        self._liveness.connect(now)

    def connection_lost(self, now: float) -> None:
        """End the connection: bytes that were pulled may not have arrived. Does nothing without a connection."""
        link = self._link
        if link.connected:
            link.now = now
            link.disconnect()
            self._reader.restart()

    def link_lost(self, now: float, *, epoch: int = 0) -> None:
        """Drop the link after `Refused`: the listener does not know it. A new one may follow."""
        self._check_alive()
        self._link.now = now
        if self._link.link_id:
            self._replace(epoch, 0)
            self._link.epoch = 0

    def _replace(self, epoch: int, link_id: int) -> None:
        link = self._link
        event = LinkReplaced if epoch == link.epoch else EpochChanged
        told = event(link.epoch, link.link_id, epoch, link_id, link.lost)
        watched = [*link.watchers]
        link.reset()
        link.link_id = link_id
        link.events.append(told)
        link.events.extend(Writable(channel) for channel in watched)

    # --- the stream

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Parse received bytes; never raises."""
        link = self._link
        if link.over or not link.connected:
            return
        link.now = now
        failure = self._reader.feed(data)
        if failure is not None:
            self._fail(failure)
        else:
            self._liveness.heard(now)
            if link.peer_shut_down:
                self._check_finished()

    def receive_eof(self, now: float) -> None:
        """Report the end of the stream; `connection_lost` is still to be called."""
        if self._link.connected and not self._link.over:
            self._link.events.append(HungUp(clean=not self._reader.is_mid_packet))

    def events(self) -> Sequence[Event]:
        events = self._link.events
        if not events:
            return ()
        self._link.events = []
        return events

    def has_output(self) -> bool:
        link = self._link
        if link.over or not link.connected:
            return False
        return bool(link.scheduler.line or link.control) or link.may_write_shutdown

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        link, out = self._link, list[Buffer]()
        if link.over or not link.connected:
            return out
        written = link.control.write(limit, out) if link.control else 0
        if written < limit:
            link.scheduler.pull(limit - written, out)
            if link.control.wants_proof:
                link.control.write_proof(out)
        if link.wants_shutdown and link.may_write_shutdown:
            link.shutdown_written = True
            out.append(SHUTDOWN)
            self._hurry()
        if self._observer is not None:
            observe_written(self._observer, out, self._bounds)
        if link.peer_shut_down:
            self._check_finished()
        return out

    def _fail(self, error: RemoteProtocolError) -> None:
        self._stop(Failed(error))
        if self._observer is not None:
            self._observer.error(error)

    def _stop(self, last: Event) -> None:
        self._link.events.append(last)
        self._link.over = True

    def _check_finished(self) -> None:
        link = self._link
        if link.peer_shut_down and link.wants_shutdown and not link.over:
            self._hurry()
            if link.is_finished:
                self._stop(Finished())

    def _hurry(self) -> None:
        """Make waiting acks due at once, since both sides are shutting down."""
        if self._link.peer_shut_down and self._link.connected:
            self._link.control.make_all_due()

    # --- time

    def next_deadline(self) -> float | None:
        return None if self._link.over else self._link.deadlines.next

    def handle_deadline(self, now: float) -> None:
        link = self._link
        if link.over:
            return
        link.now = now
        silent = self._liveness.handle(now)
        if silent is not None:
            link.events.append(silent)

    # --- the peer's messages

    def receive(self, channel: int, most: int | None = None) -> tuple[int, list[Parts]]:
        """Take messages that wait: the number of the first, and the messages, which have no gap between them.

        What was rolled back leaves gaps, so call it until it gives none. What it gave is kept until `consume`.
        """
        incoming = self._link.incoming.get(channel)
        return (0, []) if incoming is None else incoming.receive(most)

    def consume(self, channel: int, *, through: int, now: float) -> None:
        """Acknowledge the messages up to this one as consumed; does nothing if they were consumed before."""
        self._link.now = now
        incoming = self._link.incoming.get(channel)
        if incoming is None:
            raise LocalProtocolError(f"the peer has no channel {channel}")
        incoming.consume(through)
        if self._link.peer_shut_down:
            self._check_finished()

    def rewind(self, channel: int) -> None:
        """Return messages that were taken and not consumed to the queue, to be given by `receive` again."""
        incoming = self._link.incoming.get(channel)
        if incoming is not None:
            incoming.rewind()

    def committed(self, channel: int, *, through: int, now: float) -> None:
        """Answer the messages up to this one with `committed`; they count as consumed."""
        self._answer(Ack.COMMITTED, channel, through, now)

    def uncommitted(self, channel: int, *, through: int, now: float) -> None:
        """Answer the messages up to this one with `uncommitted`; they count as consumed."""
        self._answer(Ack.UNCOMMITTED, channel, through, now)

    def _answer(self, ack: Ack, channel: int, through: int, now: float) -> None:
        incoming: Incoming | None = self._link.incoming.get(channel)
        if incoming is None:
            raise LocalProtocolError(f"the peer has no channel {channel}")
        incoming.check_answer(through)
        self._link.now = now
        incoming.answer(ack, through)
        self._check_finished()

    # --- the link

    def ping(self) -> None:
        """Send a ping; `Ponged` comes with the answer, unless the connection is lost before."""
        self._check_alive()
        if not self._link.connected:
            raise LocalProtocolError("there is no connection to ping on")
        self._link.control.ping(Purpose.ASKED)

    def shutdown(self) -> None:
        """Open no more channels; `Finished` comes once the peer has done the same and everything is answered."""
        self._check_alive()
        self._link.wants_shutdown = True

    # --- our messages

    def room(self, channel: int) -> int:
        """Messages that fit the channel's window by number; `admits` counts bytes as well."""
        outgoing = self._link.outgoing.get(channel)
        if outgoing is None:
            return self.config.window
        return 0 if outgoing.closing else self.config.window - outgoing.outstanding

    def admits(self, channel: int, size: int, parts: int = 1) -> bool:
        """Return True if a message with `size` bytes of payload in so many parts can be sent now.

        It can if the channel's window has room in messages and in bytes, or is empty, and the link's budget is not
        spent. With the budget spent, each channel still has its floor.
        """
        link = self._link
        outgoing = link.outgoing.get(channel)
        if outgoing is None:
            outgoing = link.open(channel)
        # The usual case first, since this is called before each message; `Link.admits` is the complete rule.
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
        """Upper bound of the window bytes that such a message takes."""
        if parts == 1:
            return message_cost((size,), self._link.out_id_size)
        return 32 + 16 * parts + size + OVERHEAD + PART_OVERHEAD * parts

    def watch(self, channel: int, size: int = 1, parts: int = 1) -> None:
        """Report `Writable` once such a message fits, or once it can be tried on a new link."""
        self._link.watchers[channel] = self._cost(size, parts)
        if channel not in self._link.outgoing or not self._link.outgoing[channel].closing:
            self._link.wake(channel)

    def send(self, channel: int, parts: Sequence[bytes], *, overdraw: bool = False) -> int:
        """Queue a message and return its number. The first message opens the channel.

        `overdraw` admits a message over the link's budget, for a caller that was told of room which other channels have
        used since. A peer with our limits accepts up to `Limits.outbox` of that.
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
        """Send one part on an open channel if it fits and leaves `reserve` bytes of window free.

        Returns None, and changes nothing, otherwise; `send` then decides.
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
        """Send several short messages, all or none, as `try_send` does; returns the number of the last."""
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
        """Queue messages while they fit and return how many did; raises only if the first is refused."""
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
        """Queue one packet to several channels, which may repeat; returns its numbers in the order of `channels`."""
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
        """Return True if all windows and the link's budget have room for such a multicast."""
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
        """Make a new channel, or raise if none can be opened beside `new` others."""
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


class Liveness:
    """Keepalive, and the least speed of a packet, of the present connection. A failure ends it, not the link."""

    def __init__(self, link: Link, reader: Reader) -> None:
        self._link = link
        self._reader = reader
        self._heard_at = 0.0
        self._mark = 0  # bytes received when the present span of a stall began
        self._is_asking = False  # ANSWER runs
        self._is_watching = False  # STALL runs

    def connect(self, now: float) -> None:
        self._heard_at = now
        self._is_asking = self._is_watching = False
        self._wait_for_silence()

    def heard(self, now: float) -> None:
        """Note that bytes were received."""
        self._heard_at = now
        if self._is_asking:
            self._is_asking = False
            self._link.deadlines.stop(Timer.ANSWER)
            self._wait_for_silence()
        if not self._reader.is_mid_packet:
            if self._is_watching:
                self._is_watching = False
                self._link.deadlines.stop(Timer.STALL)
        elif not self._is_watching:
            self._watch_progress(now)

    def handle(self, now: float) -> Silent | None:
        """Act on expired timers; returns the event that ends the connection, if any."""
        link = self._link
        for timer in link.deadlines.expired(now):
            if link.observer is not None:
                link.observer.timer(timer.value)
            silent: Silent | None = None
            if timer is Timer.ACKS:
                link.control.make_all_due()
            elif timer is Timer.KEEPALIVE:
                self._keep_alive(now)
            elif timer is Timer.ANSWER:
                silent = Silent(now - self._heard_at)
            else:
                silent = self._check_progress(now)
            if silent is not None:
                return silent
        return None

    def _wait_for_silence(self) -> None:
        if self._link.config.keepalive is not None:
            self._link.deadlines.set(Timer.KEEPALIVE, self._heard_at + self._link.config.keepalive)

    def _keep_alive(self, now: float) -> None:
        config = self._link.config
        if config.keepalive is not None and now < self._heard_at + config.keepalive:
            self._wait_for_silence()  # something came since the timer was set
            return
        self._link.control.ping(Purpose.ALIVE)
        self._is_asking = True
        self._link.deadlines.set(Timer.ANSWER, now + config.keepalive_timeout)

    def _watch_progress(self, now: float) -> None:
        self._mark = self._reader.offset
        self._is_watching = True
        self._link.deadlines.set(Timer.STALL, now + self._link.limits.stall)

    def _check_progress(self, now: float) -> Silent | None:
        """Compare the progress of the unfinished packet with the least speed."""
        limits = self._link.limits
        if self._reader.offset - self._mark < limits.stall_bytes:
            return Silent(limits.stall, stalled=True)
        self._watch_progress(now)
        return None
