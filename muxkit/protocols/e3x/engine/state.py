"""The channels of an engine: what packets of the peer do to them, their timers, and the queues of what to send.

Each packet is checked completely before it changes anything; a packet ends at most its own channel.

A channel that the application has closed goes on until its end. The document has no way to say "stop sending", only
`err`, which drops everything in both directions. So, and this is not in the document:

- An err is sent only after all packets of this side are confirmed: before, it could cost the peer what it has not
  processed yet.
- Then an end by the peer closes the channel in order, and any other unread packet is answered with an err.
- A peer that sends nothing has `State.linger` seconds for its end.
- A peer that goes on sending and processes nothing for `CLOSE_TIMEOUT` would wait for this side as this side waits for
  it; the channel breaks.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from typing import Final

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import NO_QUEUE, ChannelTable, Ids, Ranges, StartPace, TokenBucket
from muxkit.protocols.e3x.config import Config
from muxkit.protocols.e3x.engine import events
from muxkit.protocols.e3x.engine.channel import (
    NEVER,
    Arrival,
    Assembly,
    EngineChannel,
    Incoming,
    Outgoing,
    Piece,
    Reassembly,
    Tombstone,
)
from muxkit.protocols.e3x.engine.congestion import Congestion
from muxkit.protocols.e3x.engine.events import Cause, Fault
from muxkit.protocols.e3x.packets import ID_MOST, SEQ_MOST, TYPE_MOST, Packet, decode_miss, name_of, parse_packet

LINGER = 10.0  # s, at least, that a tombstone is kept, to answer what the peer sends again
ERR_REPEATS = 2  # times that an err is sent again, a second apart; not in the document
ERR_PAUSE = 1.0  # s
ERRS_PER_SECOND = 4000  # on packet links: more could overflow the buffer of the peer's socket, and no ack would tell
ERRS_AT_ONCE = 64
OVERHEAD = 256  # bytes that a waiting packet counts beside its body
CLOSE_TIMEOUT: Final = 5.0  # s
CLOSED: Final = "closed"  # the err of a closed channel
REST_SHARE: Final = 1.0  # s between two probes of channels that rest, on average over the session
USED_RANGES = 1024  # gaps in the peer's used ids that are remembered


class State:
    """The channels to one peer, and what is kept about them; the engine itself is one."""

    def __init__(self, odd: bool, config: Config, limits: Limits, observer: Observer | None) -> None:
        self.odd = odd
        self.config = config
        self.limits = limits
        self.observer = observer
        self.now: float = 0.0
        self.packet: int = config.packet
        self.linger: float = max(LINGER, config.timeout)  # the peer sends again for as long
        first = 1 if odd else 2
        self.table: ChannelTable[EngineChannel] = ChannelTable(limits, Ids(first, ID_MOST, step=2))
        self.tombstones: OrderedDict[int, Tombstone] = OrderedDict()
        self.used: UsedIds = UsedIds()
        self.unopened: OrderedDict[int, EngineChannel] = OrderedDict()  # the first packet was not received yet
        self.congestion: Congestion = Congestion(config.packet, is_on=config.congestion)
        self.reassembly: Reassembly = Reassembly(limits)
        self.refusals: Final = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        """Says when work on the next channel of the peer may begin; to be told what began, and what need not."""
        self.err_pace: Final = TokenBucket(ERRS_PER_SECOND, ERRS_AT_ONCE)
        self.happened: list[events.Event] = []
        self.faults: Counter[Fault] = Counter()
        self.counters: Counter[str] = Counter()
        self.reported: set[Fault] = set()
        # Queues of what to send
        self.errs: dict[int, str] = {}
        self.answers: dict[int, None] = {}  # ids of tombstones to answer from
        self.acking: dict[int, EngineChannel] = {}
        self.resends: deque[tuple[EngineChannel, Piece]] = deque()
        self.line: deque[EngineChannel] = deque()
        self.drained: dict[int, EngineChannel] = {}  # watched ones that sent something since they were looked at
        self.crowded: dict[int, EngineChannel] = {}  # watched ones with room of their own, and none in the outbox
        self.resting: set[int] = set()  # ids of channels whose peer has everything, and that are probed rarely
        self.held: int = 0  # bytes received and not processed
        self.waiting: int = 0  # packets received and not processed
        self.unsent: int = 0  # bytes queued, on all channels
        self._timers: list[tuple[float, int]] = []

    # --- channels

    @property
    def window(self) -> int:
        """Packets of one channel that may wait for the application."""
        return max(1, min(self.config.window, self.limits.channel_bytes // self.packet))

    @property
    def room(self) -> int:
        """Bytes of memory for one more packet that waits."""
        return self.limits.connection_bytes - self.held - OVERHEAD * self.waiting

    @property
    def room_next(self) -> int:
        """Bytes of memory for the packet that is next in order on its channel: there is always some."""
        return max(self.room, self.limits.channel_floor, self.config.packet)

    def new_channel(self, id: int, type: str, *, ours: bool, reliable: bool) -> EngineChannel:
        channel = EngineChannel(id, type, ours)
        if reliable:
            most_flying = self.limits.channel_bytes
            channel.outgoing = Outgoing(self.config.first_window, self.config.most_window, most_flying)
            channel.incoming = Incoming(self.window)
            channel.assembly = Assembly(self.reassembly)
        channel.heard_at = self.now
        return channel

    def is_ours(self, id: int) -> bool:
        return (id % 2 == 1) == self.odd

    def close_if_over(self, channel: EngineChannel) -> None:
        """Remove a channel if both sides have ended it and all packets are acked."""
        if channel.gone or not (channel.ended and channel.peer_ended):
            return
        incoming, outgoing = channel.incoming, channel.outgoing
        if incoming is None or outgoing is None:
            if not channel.datagrams:
                self._remove(channel, Tombstone(self.now + self.linger))
                self.happened.append(events.Closed(channel))
        elif outgoing.acked == outgoing.next_seq - 1:
            owes_ack = incoming.owes_news
            self._remove(channel, Tombstone(self.now + self.linger, ack=incoming.processed))
            if owes_ack:
                self.answers[channel.id] = None
            self.happened.append(events.Closed(channel))

    def break_channel(self, channel: EngineChannel, cause: Cause, text: str, *, tell: bool) -> None:
        """Break a channel; with `tell` the peer is sent an err."""
        if tell:
            self.break_silently(channel, text)
        else:
            self._remove(channel, Tombstone(self.now + self.linger))
        if channel.announced or channel.ours:
            self.happened.append(events.Broken(channel, cause, text))

    def break_silently(self, channel: EngineChannel, err: str, *, is_ordered: bool = False) -> None:
        """Break a channel and send the peer an err, without an event."""
        self.errs[channel.id] = err
        tombstone = Tombstone(self.now + self.linger, err=err, repeats=ERR_REPEATS, is_ordered=is_ordered)
        self._remove(channel, tombstone)
        heapq.heappush(self._timers, (self.now + ERR_PAUSE, channel.id))

    def drop_unopened(self, channel: EngineChannel) -> None:
        """Remove a channel whose first packet was not received; without a tombstone, because that may still arrive."""
        self._remove(channel, None)

    def _remove(self, channel: EngineChannel, tombstone: Tombstone | None) -> None:
        self.table.remove(channel.id)
        self.unopened.pop(channel.id, None)
        self.acking.pop(channel.id, None)
        self.drained.pop(channel.id, None)
        self.crowded.pop(channel.id, None)
        self.resting.discard(channel.id)
        channel.gone = True
        if channel.incoming is not None:
            self.held -= channel.incoming.bytes
            self.waiting -= channel.incoming.waiting
        if channel.outgoing is not None:
            self.unsent -= channel.outgoing.unsent
        self.unsent -= channel.queued
        channel.queued = 0
        channel.datagrams = NO_QUEUE
        if channel.assembly is not None:
            channel.assembly.drop()
        if tombstone is not None:
            tombstone.processed = 0 if channel.incoming is None else channel.incoming.processed
            self._add_tombstone(channel.id, tombstone)
        if self.observer is not None:
            self.observer.state(f"channel {channel.id}", "gone")

    def _add_tombstone(self, id: int, tombstone: Tombstone) -> None:
        if not self.is_ours(id):
            self.used.add(id)
        self.tombstones[id] = tombstone
        self.tombstones.move_to_end(id)
        while self._has_to_forget():
            forgotten, _ = self.tombstones.popitem(last=False)
            self.errs.pop(forgotten, None)  # they may be unsent, if the link takes nothing
            self.answers.pop(forgotten, None)

    def _has_to_forget(self) -> bool:
        """Whether the oldest tombstone has expired, or there are too many."""
        id, oldest = next(iter(self.tombstones.items()))
        if oldest.until <= self.now:
            return True
        # When many channels are aborted at once, their errs wait: those tombstones are kept beside the limit.
        beside = self.limits.channels if oldest.is_ordered and id in self.errs else 0
        return len(self.tombstones) > self.limits.tombstones + beside

    def tombstone(self, id: int) -> Tombstone | None:
        """Return the tombstone of a channel, unless it has expired."""
        tombstone = self.tombstones.get(id)
        if tombstone is None or self.now < tombstone.until:
            return tombstone
        del self.tombstones[id]
        return None

    # --- packets of the peer

    def receive(self, data: bytes) -> None:
        """Parse a packet and apply it."""
        try:
            packet = parse_packet(data)
        except RemoteProtocolError as error:
            self.fault(Fault.MALFORMED, str(error))
            return
        if self.observer is not None:
            self.observer.frame("in", f"channel {packet.channel}", name_of(packet), len(packet.body))
        channel = self.table.get(packet.channel)
        if channel is None:
            self._receive_unknown(packet)
        elif packet.err is not None:
            if not channel.ours:
                self.starts.broken_off(self.now)
            self.break_channel(channel, Cause.PEER, packet.err, tell=False)
        elif channel.is_reliable:
            self._receive_reliable(channel, packet)
        else:
            self._receive_unreliable(channel, packet)

    # --- packets of unknown channels

    def _receive_unknown(self, packet: Packet) -> None:
        tombstone = self.tombstone(packet.channel)
        if tombstone is not None:
            if packet.seq is not None and packet.err is None:  # the last ack, or the err, was lost
                if tombstone.ack is not None:
                    self.answers[packet.channel] = None
                elif tombstone.err is not None and self.refusals.take(self.now):
                    self.errs[packet.channel] = tombstone.err
            self.fault(Fault.DUPLICATE, f"channel {packet.channel} is over")
        elif packet.err is not None or self.is_ours(packet.channel) or packet.channel in self.used:
            self.fault(Fault.UNKNOWN, f"channel {packet.channel} does not exist")
        elif packet.ack is not None and packet.ack > 0:
            self.fault(Fault.UNSENT, f"channel {packet.channel}: ack {packet.ack} where nothing was sent")
        elif packet.seq is None and packet.type is not None:
            self._open_unreliable(packet, packet.type)
        elif packet.seq == 1 and packet.type is not None:
            self._open_reliable(packet, packet.type)
        elif packet.seq == 1:
            self.fault(Fault.MISPLACED, f"channel {packet.channel}: a first packet without a type")
        elif packet.seq is not None and self.config.reliable and packet.seq <= self.window:
            self._await_opening(packet)
        else:
            self.fault(Fault.UNKNOWN, f"channel {packet.channel} does not exist")

    def _open_unreliable(self, packet: Packet, type: str) -> None:
        if len(type) > TYPE_MOST:
            self._refuse(packet.channel, Fault.MISPLACED, too_long(type))
            return
        channel = self._admit(packet.channel, type, reliable=False)
        if channel is not None:
            self.used.add(packet.channel)
            channel.announced = True
            self.happened.append(events.Opened(channel, packet.body))
            self._end_unreliable(channel, packet)

    def _open_reliable(self, packet: Packet, type: str) -> None:
        refusal = self._refusal(type)
        if refusal is not None:
            self._refuse(packet.channel, Fault.MISPLACED, refusal)
            return
        if len(packet.body) > self.room_next:
            self.fault(Fault.FULL, f"channel {packet.channel}: no memory left for its first packet")
            return
        channel = self._admit(packet.channel, type, reliable=True)
        if channel is not None:
            self.used.add(packet.channel)
            self._receive_reliable(channel, packet)

    def _refusal(self, type: str) -> str | None:
        if len(type) > TYPE_MOST:
            return too_long(type)
        if not self.config.reliable:
            return "only unreliable channels are taken"
        return f"{type[:64]} is unreliable" if type in self.config.unreliable_types else None

    def _await_opening(self, packet: Packet) -> None:
        """Keep a packet that arrived before the first of its channel, so that a miss can ask for that."""
        channel = self._admit(packet.channel, "", reliable=True, answers=False)
        if channel is not None:
            while len(self.unopened) >= self.limits.half_open:
                self.drop_unopened(next(iter(self.unopened.values())))
                what = f"{self.limits.half_open} channels wait for their first packet"
                self.fault(Fault.FLOOD, what, limit="half_open")
            self.unopened[channel.id] = channel
            channel.dies_at = self.now + self.limits.handshake
            self._receive_reliable(channel, packet)

    def _admit(self, id: int, type: str, *, reliable: bool, answers: bool = True) -> EngineChannel | None:
        census = self.table.census
        if census.theirs >= self.limits.channels or not census.has_backlog_room:
            limit = "backlog" if census.theirs < self.limits.channels else "channels"
            text = f"{census.theirs} channels, {census.waiting} not taken: Limits({limit})"
            if answers:
                self._refuse(id, Fault.FLOOD, text, limit=limit)
            else:
                self.fault(Fault.FLOOD, f"channel {id}: {text}", limit=limit)
            return None
        channel = self.new_channel(id, type, ours=False, reliable=reliable)
        channel.taken = False
        self.table.add_theirs(id, channel)
        if self.observer is not None:
            self.observer.state(f"channel {id}", "open")
        return channel

    def _refuse(self, id: int, fault: Fault, text: str, *, limit: str | None = None) -> None:
        self.fault(fault, f"channel {id}: {text}", limit=limit)
        if len(self.errs) < self.limits.tombstones and self.refusals.take(self.now):
            self.errs[id] = text if fault is not Fault.FLOOD else "too many channels"

    # --- reliable channels

    def _receive_reliable(self, channel: EngineChannel, packet: Packet) -> None:
        outgoing, incoming = channel.outgoing, channel.incoming
        assert outgoing is not None
        assert incoming is not None
        where = f"channel {channel.id}"
        if packet.ack is not None and packet.ack > outgoing.sent:
            self.fault(Fault.UNSENT, f"{where}: ack {packet.ack} where {outgoing.sent} was the last sent")
            return
        if packet.seq is None and (packet.ack is None or packet.body or packet.end or packet.type is not None):
            self.fault(Fault.MISPLACED, f"{where} is reliable, and a packet came without seq")
            return
        if packet.seq == 1 and not channel.ours and packet.type is None:
            self.fault(Fault.MISPLACED, f"{where}: a first packet without a type")
            return
        if packet.seq is not None and self._is_beyond_end(incoming, packet, packet.seq):
            self.fault(Fault.MISPLACED, f"{where}: seq {packet.seq} does not fit to its end")
            return
        channel.heard_at = self.now
        if packet.miss_fault:
            self.fault(Fault.MISS, f"{where}: {packet.miss_fault}")
        if packet.ack is not None:
            self._acknowledge(channel, outgoing, packet, packet.ack)
        if packet.seq is not None and not channel.gone:
            self._keep(channel, incoming, packet, packet.seq)
        if not channel.gone:
            self.owe_ack(channel)
            self.arm(channel)

    def _is_beyond_end(self, incoming: Incoming, packet: Packet, seq: int) -> bool:
        """Whether a packet lies behind the end of its channel, or moves the end."""
        if incoming.end_seq is not None:
            return seq > incoming.end_seq or (packet.end and seq != incoming.end_seq)
        return packet.end and seq < incoming.highest

    def _acknowledge(self, channel: EngineChannel, outgoing: Outgoing, packet: Packet, ack: int) -> None:
        window, missing = None, []
        if packet.miss is not None:
            miss = decode_miss(ack, packet.miss)
            window, missing = miss.window, miss.missing
        congestion = self.congestion
        news = outgoing.acknowledge(ack, window, missing, self.now, congestion.fell_at)
        if news is None:
            return
        if outgoing.is_resting:
            # Many channels that rest are probed as rarely as one of them: one probe per `REST_SHARE` for all.
            self.resting.add(channel.id)
            outgoing.probe_at = max(outgoing.probe_at, self.now + REST_SHARE * len(self.resting))
        elif self.resting:
            self.resting.discard(channel.id)
        congestion.ack_received(news.round_trip, news.lost, self.now, is_sure=news.is_sure, is_cut=news.is_cut)
        self.counters["lost"] += news.named
        self.resends.extend((channel, piece) for piece in news.resend)
        if news.last >= news.first:
            self.happened.append(events.Delivered(channel, news.first, news.last))
        self.queue_up(channel)
        if ack == SEQ_MOST and not channel.ended:
            self.break_channel(channel, Cause.EXHAUSTED, f"seq {SEQ_MOST} was used, and there is no other", tell=True)
        self.close_if_over(channel)
        if channel.closing:
            self._continue_closing(channel, has_advanced=news.last >= news.first)

    def _keep(self, channel: EngineChannel, incoming: Incoming, packet: Packet, seq: int) -> None:
        # Do not keep fields that are not needed any more: a head may be large, and only bodies are counted.
        type, packet.type, packet.miss = packet.type, None, None
        before = incoming.bytes
        room = min(self.limits.channel_bytes - before, self.room)
        arrival = incoming.take(packet, seq, self.now, room, self.room_next)
        self.held += incoming.bytes - before
        if arrival is not Arrival.KEPT:
            fault = Fault.DUPLICATE if arrival is Arrival.DUPLICATE else Fault.FULL
            self.fault(fault, f"channel {channel.id}: seq {seq} is {arrival.value}")
            return
        self.waiting += 1
        if packet.end:
            incoming.end_seq = seq
        if seq == 1 and not channel.ours:
            self._accept_opening(channel, type or "")
        if not channel.gone and (channel.ours or channel.type):
            self.deliver(channel)

    def _accept_opening(self, channel: EngineChannel, type: str) -> None:
        """Accept or refuse a channel whose first packet has arrived."""
        refusal = self._refusal(type)
        if refusal is not None:
            self.fault(Fault.MISPLACED, f"channel {channel.id}: {refusal}")
            self.break_silently(channel, refusal)
            return
        channel.type = type
        channel.dies_at = NEVER
        self.unopened.pop(channel.id, None)
        self.used.add(channel.id)

    def deliver(self, channel: EngineChannel) -> None:
        """Report the next message, unless the application has one; put pieces together on the way."""
        incoming, assembly = channel.incoming, channel.assembly
        assert incoming is not None
        assert assembly is not None
        if channel.closing:
            self._continue_closing(channel)
            return
        while not channel.gone and (packet := incoming.next()) is not None:
            body: bytes | None = packet.body
            if self.config.frag:
                try:
                    body = assembly.add(packet.frag, packet.body)
                    if packet.end and body is None:
                        raise RemoteProtocolError(f"an end before {packet.frag} pieces of its message")
                except RemoteProtocolError as error:
                    self.break_channel(channel, Cause.MESSAGE, str(error), tell=True)
                    return
            if body is None:
                self.processed(channel)
            elif not channel.ours and not channel.announced:
                channel.announced = True
                incoming.handed = 1
                self.happened.append(events.Opened(channel, body))
            elif body or not packet.end:
                incoming.handed = 1
                self.happened.append(events.Message(channel, body))
            else:
                self.processed(channel)

    def take(self, channel: EngineChannel, most: int) -> list[bytes]:
        """Take up to `most` complete messages behind the one reported last; the next `done` counts for all."""
        incoming, assembly = channel.incoming, channel.assembly
        bodies: list[bytes] = []
        if channel.gone or incoming is None or assembly is None or not incoming.handed or assembly.expected:
            return bodies
        while len(bodies) < most and (packet := incoming.further()) is not None:
            if (packet.frag and self.config.frag) or (packet.end and not packet.body):
                break
            incoming.handed += 1
            bodies.append(packet.body)
        return bodies

    def processed(self, channel: EngineChannel) -> None:
        """Count the next packet of a channel as processed."""
        incoming = channel.incoming
        assert incoming is not None
        before = incoming.bytes
        packet = incoming.done()
        self.held += incoming.bytes - before
        self.waiting -= 1
        if packet.end:
            incoming.ended = channel.peer_ended = True
            incoming.ack_now = True
            self.happened.append(events.Ended(channel))
        self.owe_ack(channel)
        self.arm(channel)
        self.close_if_over(channel)

    # --- closed channels

    def discard(self, channel: EngineChannel) -> None:
        """Discard from now on what arrives on a channel, and wait for its end."""
        channel.closing = True
        if channel.assembly is not None:
            channel.assembly.drop()
        self._continue_closing(channel)

    def _continue_closing(self, channel: EngineChannel, *, has_advanced: bool = False) -> None:
        """End a closed channel, or set its timeout, after a packet or, with `has_advanced`, an ack has arrived."""
        incoming, outgoing = channel.incoming, channel.outgoing
        if channel.gone or incoming is None or outgoing is None:
            return
        packet = incoming.next()
        if packet is not None and packet.end and not packet.body:
            self.processed(channel)
        if channel.gone:
            return
        is_unread = incoming.waiting > 0
        if outgoing.acked == outgoing.next_seq - 1:
            if is_unread:
                self._end_closed(channel)
            elif has_advanced or channel.dies_at == NEVER:
                channel.dies_at = self.now + self.linger
        elif is_unread and (has_advanced or channel.dies_at == NEVER):
            channel.dies_at = self.now + CLOSE_TIMEOUT
        if not channel.gone:
            self.arm(channel)

    def close_timed_out(self, channel: EngineChannel) -> None:
        """End a closed channel that has waited for too long."""
        outgoing = channel.outgoing
        if outgoing is None or outgoing.acked == outgoing.next_seq - 1:
            self._end_closed(channel)
        else:
            text = f"the peer went on sending, and processed nothing of ours for {CLOSE_TIMEOUT} s"
            self.break_silently(channel, CLOSED)
            self.happened.append(events.Broken(channel, Cause.TIMEOUT, text))

    def _end_closed(self, channel: EngineChannel) -> None:
        self.break_silently(channel, CLOSED)
        self.happened.append(events.Closed(channel))

    # --- unreliable channels

    def _receive_unreliable(self, channel: EngineChannel, packet: Packet) -> None:
        if packet.seq is not None or packet.ack is not None or packet.miss_fault:
            self.fault(Fault.MISPLACED, f"channel {channel.id} is unreliable, and a packet came with seq or ack")
            return
        if packet.type is not None and packet.type != channel.type:
            self.fault(Fault.MISPLACED, f"channel {channel.id}: a second type")
            return
        if channel.peer_ended:
            self.fault(Fault.MISPLACED, f"channel {channel.id}: a packet after its end")
            return
        channel.heard_at = self.now
        if channel.ours:
            channel.announced = True
        if (packet.body or not packet.end) and not channel.closing:
            self.happened.append(events.Message(channel, packet.body))
        self._end_unreliable(channel, packet)

    def _end_unreliable(self, channel: EngineChannel, packet: Packet) -> None:
        if packet.end:
            channel.peer_ended = True
            self.happened.append(events.Ended(channel))
            self.close_if_over(channel)

    # --- time

    def arm(self, channel: EngineChannel) -> None:
        """Set the timer of a channel to when something is due on it. A timer that fires early costs one check."""
        due = channel.due(self.config.timeout)
        if due < channel.timer_at:
            channel.timer_at = due
            heapq.heappush(self._timers, (due, channel.id))

    def next_timer(self) -> float | None:
        """`SeparateTimers`: when the next timer fires, without packets that wait to be sent."""
        return self._timers[0][0] if self._timers else None

    def due_channels(self, now: float) -> list[EngineChannel]:
        """Return the channels whose timer has fired, which must be armed again; also repeat errs that are due."""
        due = []
        while self._timers and self._timers[0][0] <= now:
            when, id = heapq.heappop(self._timers)
            channel = self.table.get(id)
            if channel is None:
                self._repeat_err(id)
            elif channel.timer_at == when:
                channel.timer_at = NEVER
                due.append(channel)
        return due

    def _repeat_err(self, id: int) -> None:
        tombstone = self.tombstone(id)
        if tombstone is not None and tombstone.err is not None and tombstone.repeats > 0:
            tombstone.repeats -= 1
            self.errs[id] = tombstone.err
            heapq.heappush(self._timers, (self.now + ERR_PAUSE, id))

    # --- queues of what to send

    def queue_up(self, channel: EngineChannel) -> None:
        """Put a channel in the line of those with something to send."""
        if not channel.in_line and not channel.gone:
            channel.in_line = True
            self.line.append(channel)

    def owe_ack(self, channel: EngineChannel) -> None:
        """Queue an ack of a channel, if it is due now."""
        if channel.incoming is not None and channel.incoming.ack_now:
            self.acking[channel.id] = channel

    # --- events

    def fault(self, fault: Fault, text: str, *, limit: str | None = None) -> None:
        """Count a fault; report the first of its kind until the events are taken."""
        self.faults[fault] += 1
        if fault is not Fault.DUPLICATE and fault not in self.reported:
            self.reported.add(fault)
            self.happened.append(events.Faulted(fault, text, limit))


def too_long(type: str) -> str:
    return f"a type of {len(type)} characters, {TYPE_MOST} are allowed"


class UsedIds:
    """The ids that the peer has used; it may open each once, and openings may overtake each other."""

    def __init__(self) -> None:
        self._ranges = Ranges(USED_RANGES)
        self._floor = 0

    def __contains__(self, id: int) -> bool:
        index = (id + 1) // 2  # 1, 3, 5 … and 2, 4, 6 … both become 1, 2, 3 …
        return index <= self._floor or index in self._ranges

    def add(self, id: int) -> None:
        index = (id + 1) // 2
        if index <= self._floor:
            return
        try:
            self._ranges.add(index)
        except RemoteProtocolError:
            # There are too many gaps: the ids in the lowest gap count as used from now on.
            _, self._floor = next(iter(self._ranges))
            self._ranges.discard_below(self._floor + 1)
            self.add(id)
