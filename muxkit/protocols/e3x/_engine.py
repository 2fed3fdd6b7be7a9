"""The rules of e3x as one object: datagrams and commands in, events and datagrams out; no Trio, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.core import queue_of
from muxkit.protocols.e3x._arrivals import Arrivals
from muxkit.protocols.e3x._config import LEAST_PACKET, Config
from muxkit.protocols.e3x._departures import Departures, admits, overhead
from muxkit.protocols.e3x._events import Cause, Event
from muxkit.protocols.e3x._fragments import cut, pieces_after
from muxkit.protocols.e3x._packets import ID_MOST, SEQ_MOST, TYPE_MOST, Packet, encode_packet, quoted
from muxkit.protocols.e3x._sending import Piece
from muxkit.protocols.e3x._state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._observer import Observer
    from muxkit.protocols.e3x._channel import EngineChannel

ERR_MOST = 128  # characters of an err that we send


@attrs.frozen(kw_only=True)
class Stats:
    """What an engine can say about itself; times in seconds, since its beginning."""

    packets_sent: int
    packets_received: int
    bytes_sent: int
    bytes_received: int
    resent: int
    """Packets sent again."""
    lost: int
    """Packets that the peer missed."""
    evicted: int
    """Packets of unreliable channels that were too old when their turn came."""
    channels: int
    held: int
    """Bytes received and not processed."""
    unsent: int
    """Bytes queued and not sent."""
    faults: dict[str, int]
    """What came and was dropped, by `Fault`."""
    round_trip: float | None
    """Smoothed; None before the first."""
    least_round_trip: float | None
    queue: float
    """What the path's queue adds to it."""
    rate: float
    """Bytes a second that may be sent: our congestion control, see `_congestion`."""
    falls: int
    """How often the rate was lowered."""


CHANNEL_PRICE = 7 * 1024  # bytes of memory for a channel, its session objects and a task that handles it


class Engine:
    """One end of e3x towards one peer; a datagram engine.

    The connector is odd, the listener even. Commands take and give `EngineChannel` objects; each either does all of its
    work or raises `LocalProtocolError` and changes nothing. Nothing that a peer sends makes an engine raise or end.
    """

    def __init__(
        self,
        odd: bool,
        config: Config | None = None,
        *,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config = config or Config()
        self.limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self._state = State(odd, self.config, self.limits, observer)
        self._arrivals = Arrivals(self._state)
        self._departures = Departures(self._state)
        self.next_timer = self._state.next_timer
        """As in `muxkit.core.SeparateTimers`: what is in line to be sent has no say in it."""

    # --- what is known

    @property
    def channels(self) -> int:
        """Live channels of both sides."""
        return len(self._state.table)

    @property
    def frames(self) -> int:
        """Packets received."""
        return self._state.counters["packets_received"]

    @property
    def places(self) -> int:
        """How many more channels of ours the limit leaves room for."""
        return self._state.table.census.places

    @property
    def packet_size(self) -> int:
        """The largest packet to send, in bytes. What is queued was cut already: a new size holds for what follows."""
        return self._state.packet

    @packet_size.setter
    def packet_size(self, size: int) -> None:
        if not LEAST_PACKET <= size <= 65_507:
            raise LocalProtocolError(f"packets of {size} bytes; from {LEAST_PACKET} to 65507 are possible")
        self._state.packet = size

    def channel(self, id: int) -> EngineChannel | None:
        """The live channel with this id."""
        return self._state.table.get(id)

    def quota(self, channel: EngineChannel) -> int:
        """Bytes of a message that the next packet can carry: on an unreliable channel, the largest message."""
        seq = None if channel.outgoing is None else channel.outgoing.next_seq
        return self._state.packet - overhead(channel, seq, end=True)

    def stats(self) -> Stats:
        state, counters, congestion = self._state, self._state.counters, self._state.congestion
        return Stats(
            packets_sent=counters["packets_sent"],
            packets_received=counters["packets_received"],
            bytes_sent=counters["bytes_sent"],
            bytes_received=counters["bytes_received"],
            resent=counters["resent"],
            lost=counters["lost"],
            evicted=counters["evicted"],
            channels=len(state.table),
            held=state.held,
            unsent=state.unsent,
            faults={fault.value: count for fault, count in state.faults.items()},
            round_trip=congestion.round_trip,
            least_round_trip=congestion.least_round_trip,
            queue=congestion.queue,
            rate=congestion.rate,
            falls=congestion.falls,
        )

    # --- the network

    def receive_datagram(self, data: bytes, now: float) -> None:
        """Take in what came; never raises."""
        state = self._state
        state.now = max(state.now, now)
        state.counters["packets_received"] += 1
        state.counters["bytes_received"] += len(data)
        self._arrivals.receive(bytes(data))

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        """Take out what may go now."""
        self._state.now = max(self._state.now, now)
        return self._departures.pull(self._state.now)

    def events(self) -> Sequence[Event]:
        """What happened since the last call, oldest first."""
        return self._state.take_events() if self._state.events else ()

    @property
    def owes(self) -> bool:
        """Is there anything to send that no rate holds back: acks, errs?"""
        return self._departures.is_owing

    def parting(self, type: str, body: bytes) -> bytes:
        """A packet that opens a channel and ends it, past all queues: for last words that nobody will repeat."""
        return encode_packet(Packet(self._state.table.allocate(), type, seq=1, end=True, body=body))

    def final_acks(self) -> list[tuple[int, int]]:
        """What we have processed, by channel, the ones that ended a while ago too: for a peer that we leave."""
        live = [(channel.id, channel.incoming.processed) for channel in self._state.table if channel.incoming]
        ended = [(id, tombstone.processed) for id, tombstone in self._state.tombstones.items()]
        return [(id, ack) for id, ack in live + ended if ack > 0]

    def take_final_ack(self, id: int, ack: int) -> None:
        """The peer is about to leave, and has processed so much of this channel."""
        channel = self._state.table.get(id)
        if channel is not None and channel.outgoing is not None and channel.outgoing.acked < ack:
            self._arrivals.receive(encode_packet(Packet(id, ack=ack)))

    # --- time

    def tell_time(self, now: float) -> None:
        """Commands count from here; for those that come after a long silence."""
        self._state.now = max(self._state.now, now)

    def next_deadline(self) -> float | None:
        """When to call `handle_deadline`, and `datagrams_to_send` after it."""
        if self._departures.is_owing:
            return self._state.now
        moment = self._state.next_timer()
        if not self._departures.is_waiting:
            return moment
        # What is in line may turn out to be closed off by a window; then the look was for nothing, once.
        ready = max(self._state.congestion.free_at, self._state.now) if self.config.congestion else self._state.now
        return ready if moment is None else min(ready, moment)

    def handle_deadline(self, now: float) -> None:
        """Act on what is due; harmless when early."""
        state = self._state
        state.now = now = max(state.now, now)
        for channel in state.due_channels(now):
            self._handle_time(channel, now)
            if not channel.gone:
                state.arm(channel)

    def _handle_time(self, channel: EngineChannel, now: float) -> None:
        state = self._state
        if state.observer is not None:
            state.observer.timer(f"channel {channel.id}")
        if channel.dies_at is not None and channel.dies_at <= now:
            if channel.closing:
                self._arrivals.give_up(channel)
            elif channel.id in state.unopened:
                state.drop_unopened(channel)
            else:
                state.break_channel(channel, Cause.TIMEOUT, f"no end came for {state.linger} s after ours", tell=False)
            return
        incoming, outgoing = channel.incoming, channel.outgoing
        if outgoing is not None and outgoing.probe_at is not None and channel.silent_at(self.config.timeout) <= now:
            text = f"nothing came for {self.config.timeout} s"
            state.break_channel(channel, Cause.TIMEOUT, text, tell=True)
            return
        if incoming is not None and incoming.ack_at is not None and incoming.ack_at <= now:
            # Of a channel that may be a forgery nothing is said twice unasked.
            incoming.handle_time(now, 0.0 if channel.id in state.unopened else self.config.timeout)
            state.owe_ack(channel)
        if outgoing is not None and outgoing.probe_at is not None and outgoing.probe_at <= now:
            state.resends.extendleft((channel, piece) for piece in reversed(outgoing.probes(now)))

    # --- opening

    def open(
        self, type: str, body: bytes = b"", *, reliable: bool = True, id: int | None = None, end: bool = False
    ) -> EngineChannel:
        """A new channel; its first packet, which carries `body`, is queued at once. With `end` it is also our last."""
        state = self._state
        if not type:
            raise LocalProtocolError("a channel needs a type")
        if len(type) > TYPE_MOST:
            raise LocalProtocolError(f"a type of {len(type)} characters, {TYPE_MOST} are allowed")
        if reliable and type in self.config.unreliable_types:
            raise LocalProtocolError(f"channels of type {type!r} are unreliable")
        try:
            quoted(type)
        except UnicodeEncodeError:
            raise LocalProtocolError(f"type {type!r} is no text that can be sent") from None
        if id is None:
            state.table.census.check_ours()
            id = state.table.allocate()
        elif not 1 <= id <= ID_MOST or not state.is_ours(id):
            side = "odd" if state.odd else "even"
            raise LocalProtocolError(f"channel {id}: ours are {side}, from {1 if state.odd else 2} to {ID_MOST}")
        elif id in state.tombstones:
            raise LocalProtocolError(f"channel {id} was used a moment ago")
        channel = state.new_channel(id, type, ours=True, reliable=reliable)
        self._check_size(channel, len(body))
        state.table.add_ours(id, channel)
        if state.observer is not None:
            state.observer.state(f"channel {id}", "open")
        self._queue(channel, body, end)
        return channel

    # --- sending

    def admits(self, channel: EngineChannel, size: int) -> bool:
        """Is there room in the queue for a message of `size` bytes? An unreliable channel always has some."""
        return not channel.gone and admits(self._state, channel, size)

    def watch(self, channel: EngineChannel, size: int = 1) -> None:
        """Tell me with `Writable` when a message of `size` bytes may fit."""
        if channel.outgoing is not None and not channel.gone:
            channel.outgoing.watched = size
            self._state.watching[channel.id] = channel

    def send(self, channel: EngineChannel, body: bytes, *, end: bool = False) -> int:
        """Queue a message, and with `end` nothing after it; gives its receipt.

        On a reliable channel the message is delivered when a `Delivered` reaches the receipt. On an unreliable one
        the receipt is 0; if too much waits, the oldest is dropped.
        """
        self._check_sending(channel)
        self._check_size(channel, len(body))
        if not self.admits(channel, len(body)):
            raise LocalProtocolError(
                f"channel {channel.id}: {len(body)} bytes beside those queued, "
                f"against Limits(channel_first={self.limits.channel_first}, outbox={self.limits.outbox})"
            )
        return self._queue(channel, body, end)

    def end(self, channel: EngineChannel) -> int:
        """Say that we send nothing more; what is queued goes first. Gives a receipt, as `send`."""
        self._check_sending(channel)
        if channel.outgoing is not None and channel.outgoing.next_seq > SEQ_MOST:
            raise LocalProtocolError(f"channel {channel.id}: no seq is left for an end; break it with err")
        return self._queue(channel, b"", True)

    def err(self, channel: EngineChannel, text: str) -> None:
        """Break the channel and tell the peer why; what is queued is forgotten. Harmless when it is gone."""
        if not channel.gone:
            clean = text.encode(errors="replace").decode()[:ERR_MOST]
            self._state.forget(channel, clean or "err")

    def done(self, channel: EngineChannel) -> None:
        """The application has processed the last `Opened` or `Message` of the channel; harmless when it is gone."""
        if channel.gone:
            return
        self.accept(channel)
        if channel.incoming is not None:
            if not channel.incoming.handed:
                raise LocalProtocolError(f"channel {channel.id}: nothing is being processed")
            for _ in range(channel.incoming.handed):
                self._arrivals.processed(channel)
            self._arrivals.deliver(channel)

    def accept(self, channel: EngineChannel) -> None:
        """The application took a channel of the peer's, and has not processed its first message yet."""
        if not channel.gone and not channel.taken:
            channel.taken = True
            self._state.table.accept(channel.id)

    def take(self, channel: EngineChannel, most: int) -> list[bytes]:
        """Up to `most` messages that came whole behind the one that was told last; the next `done` is for all."""
        return [] if channel.gone or channel.incoming is None else self._arrivals.take(channel, most)

    def close(self, channel: EngineChannel) -> None:
        """Take nothing more that comes, and end our side; see `_closing`. Harmless when the channel is gone."""
        if channel.gone or channel.closing:
            return
        if not channel.ended:
            self.end(channel)
        self._arrivals.close(channel)

    def _check_sending(self, channel: EngineChannel) -> None:
        if channel.gone:
            raise LocalProtocolError(f"channel {channel.id} is gone")
        if channel.ended:
            raise LocalProtocolError(f"channel {channel.id} was ended")

    def _check_size(self, channel: EngineChannel, size: int) -> None:
        if channel.outgoing is None or not self.config.frag:
            room = self.quota(channel)
            if size > room:
                raise LocalProtocolError(
                    f"channel {channel.id}: {size} bytes; a packet of {self._state.packet} has room for {room}"
                )
            if channel.outgoing is None:
                return
        if size > self.limits.message:
            raise LocalProtocolError(
                f"channel {channel.id}: {size} bytes against Limits(message={self.limits.message})"
            )
        first, other = self._rooms(channel, size)
        if first < 1:
            raise LocalProtocolError(
                f"a packet of {self._state.packet} bytes has no room beside type {channel.type[:64]!r}"
            )
        seq = channel.outgoing.next_seq + pieces_after(size, first, other)
        if seq > SEQ_MOST:
            raise LocalProtocolError(
                f"channel {channel.id}: seq {seq} would be needed, {SEQ_MOST} is the last; break it with err"
            )

    def _rooms(self, channel: EngineChannel, size: int) -> tuple[int, int]:
        """Bytes of body in the first packet of a message, and in each other one."""
        assert channel.outgoing is not None
        packet, seq = self._state.packet, channel.outgoing.next_seq
        whole = packet - overhead(channel, seq, end=True)
        if size <= whole:
            return whole, whole
        # Numbers are counted with as many digits as they can have in this message.
        frag, last = size, min(SEQ_MOST, seq + size)
        first = packet - overhead(channel, seq, frag=frag, end=True)
        return first, packet - overhead(channel, max(2, last), frag=frag, end=True)

    def _queue(self, channel: EngineChannel, body: bytes, end: bool) -> int:
        state, outgoing = self._state, channel.outgoing
        channel.ended = channel.ended or end
        state.queue_up(channel)
        if outgoing is None:
            channel.datagrams = queue_of(channel.datagrams)
            channel.datagrams.append((body, end))
            channel.queued += len(body)
            state.unsent += len(body)
            while channel.queued > self.limits.channel_first and len(channel.datagrams) > 1:
                size = len(channel.datagrams.popleft()[0])
                channel.queued -= size
                state.unsent -= size
                state.counters["evicted"] += 1
            if end:
                channel.dies_at = state.now + state.linger
                state.arm(channel)
            return 0
        first, other = self._rooms(channel, len(body))
        for frag, piece in cut(body, first, other):
            type = channel.type if channel.ours and outgoing.next_seq == 1 else None
            outgoing.push(Piece(outgoing.next_seq, piece, type=type, end=end and frag == 0, frag=frag))
        state.unsent += len(body)
        return outgoing.next_seq - 1
