"""The sending halves of channels: they queue messages, cut them into packets, and resend packets that were lost.

A reliable channel numbers its packets. The number is called *seq*. The receiver answers with two fields: *ack* is the
seq up to which its application has processed everything, and *miss* lists packets that haven't arrived although later
ones have. `state` explains these terms and the life of a channel.

The reliable sender
===================

A `ReliableSender` keeps each packet until an ack covers it. The *window* limits how many such packets there may be.
Since an ack means that the application has processed the packet, the window also limits what the receiver has to store.

The sender resends a packet in two cases:

- A miss lists the packet.
- No ack has arrived for a while. Then the sender *probes*: it resends the oldest packet without an ack, and the last
  one. If one of the last packets was lost, no later packet makes the receiver notice the gap, so a resend of the last
  packet is necessary to get a miss. If the oldest one was lost, its resend closes the gap itself.

The answer to a probe may show that every packet has arrived, but that the application hasn't processed them. Then
nothing was lost, and resending is useless. The channel *rests*: the sender still probes, but less and less often, only
in case the ack itself gets lost.

Asking for an ack
=================

The specification allows a receiver to delay its ack for up to a second, but only if the received packet doesn't contain
an ack itself. So adding an ack to a packet means asking for one. A sender adds an ack

- about four times per round trip, so that the window moves on smoothly,
- to the last packet before it has to wait,
- and when it has processed packets of the peer since its last ack.

An `UnreliableSender` needs none of this. It sends each message in one packet and forgets it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from muxkit._errors import LocalProtocolError
from muxkit.core import NO_QUEUE, Ceiling, queue_of
from muxkit.core.events import Writable
from muxkit.protocols.e3x.events import Cause, Delivered
from muxkit.protocols.e3x.packets import (
    ASK_SIZE,
    ID_MOST,
    LISTED_MOST,
    SEQ_MOST,
    cut,
    decode_miss,
    head_of,
    pieces_after,
)
from muxkit.protocols.e3x.state import NEVER, EngineChannel, EngineSender, Piece, State

# Minimum number of seconds between two resends of a packet. The specification demands that a packet in a miss is "only
# be resent once until at least one second has passed".
RESEND_PAUSE: Final = 1.0
# While a packet is missing, a receiver repeats its acks without being asked, every `receive.GAP_REPEAT` seconds. If we
# have heard no ack for this many seconds, which is a little less, the next one may be such a repetition. Then it isn't
# the answer to our packet, and we don't use it to measure the round trip.
SPOKE_UNASKED: Final = 0.2
# Seconds without an ack before the first probe. Each further pause is `PROBE_FACTOR` times as long, up to `PROBE_MOST`.
# That gives eight probes in ten seconds, after which a channel without an answer breaks.
PROBE_FIRST: Final = 1.0
PROBE_FACTOR: Final = 1.1
PROBE_MOST: Final = 1.3
# Seconds between the answer to a probe and the next probe of a resting channel. The pause doubles with each answer, up
# to `REST_MOST`. A probe finds out something new only if the ack for all packets was lost. muxkit's receivers send this
# ack twice, so that is rare. Therefore 30 s are short enough, and at that rate probes cost next to nothing.
REST_FIRST: Final = 2.0
REST_MOST: Final = 30.0
# With many resting channels, each waits longer, so that the session sends one probe per this many seconds on average.
REST_SHARE: Final = 1.0
# The largest size of a packet without its body. Only the packet that opens a channel may be larger, by its type.
OVERHEAD_MOST: Final = 4 + len(head_of(ID_MOST, None, SEQ_MOST, True, SEQ_MOST)) + ASK_SIZE


@attrs.define(eq=False)
class News:
    """What an ack, and the miss in the same packet, have shown the sender."""

    first: int  # the first newly acked seq
    last: int  # the last newly acked seq; `first - 1` if no packet was newly acked
    resend: list[Piece]  # the packets to resend now
    named: int = 0  # how many packets are listed by this miss and by no earlier one
    lost: int = 0  # how many of these were sent after congestion control has last lowered the rate
    is_cut: bool = False  # True if the miss is as long as it can be, so further packets may be missing
    round_trip: float | None = None  # in seconds; None if this ack doesn't measure it
    is_sure: bool = True  # False if `round_trip` may be wrong, because the ack may answer another packet


class ReliableSender(EngineSender):
    """The sending half of a reliable channel."""

    def __init__(self, state: State, channel: EngineChannel) -> None:
        super().__init__(state, channel)
        config = state.config
        self._ceiling = Ceiling(min(config.first_window, config.most_window))
        self._most_window = config.most_window
        self._short_window = state.limits.short_window
        # This many bytes may be unacked without a look at the limits of the session: a short window, or less if the
        # peer's window is smaller
        self._short_flight = min(self._short_window, self._ceiling.size * state.unit)
        self._pieces: dict[int, Piece] = {}
        self._ready: Piece | None = None  # the packet that `is_ready` has found and `write` will encode
        self.next_seq: int = 1
        self.last: int = 0
        """The seq of the last packet of the last message, which is the number of that message's receipt."""
        self.unsent: int = 0  # bytes that were queued and not sent
        self.flying: int = 0  # bytes that were sent and not acked
        self.is_cut: bool = False  # True if the last miss was as long as it can be, so further packets may be missing
        self.watched: int = 0  # size of the message for which `Writable` was requested; 0 if it wasn't requested
        self.acked_at: float = 0.0  # when the last ack arrived
        self.asked_at: float = -1.0  # when a packet has last asked for an ack
        self.asked_seq: int = 0  # the seq of that packet
        self._since_asked = 0  # bytes that were sent after that packet
        self.stands_still: bool = False  # True if the last ack acked no new packet, because a packet is missing
        # While acks stand still, one packet at a time measures the round trip. This is when it was sent.
        self.timed_at: float | None = None
        self.waiting_since: float = 0.0  # since when the sender has been waiting for an ack of new packets
        self.probe_at: float = NEVER  # when the sender probes if no ack arrives before
        self.probe_pause: float = PROBE_FIRST
        # The seq of the last sent packet, if a probe has resent it and hasn't been answered; otherwise 0
        self._probed = 0
        # True if every packet that was sent has arrived, but the application of the peer hasn't processed all of them
        self.is_resting: bool = False
        self._rest_pause = REST_FIRST

    # --- properties

    @property
    def queued(self) -> int:
        return self.unsent

    @property
    def credit_out(self) -> int | None:
        """The rest of the window in packets, because the specification counts windows in packets."""
        return max(0, self.limit - self.sent)

    @property
    def has_sent(self) -> bool:
        """True while the peer's application may not have processed every message."""
        return self.acked < self.last

    @property
    def acked(self) -> int:
        return self._ceiling.acknowledged

    @property
    def sent(self) -> int:
        """The highest seq that this side has sent."""
        return self._ceiling.sent

    @property
    def is_written(self) -> bool:
        return self.sent == self.next_seq - 1

    @property
    def is_done(self) -> bool:
        """True if the peer has acked every queued packet."""
        return self.acked == self.next_seq - 1

    @property
    def awaits_ack(self) -> bool:
        return not (self.channel.gone or self.is_done)

    @property
    def unacked(self) -> list[int]:
        """The seqs of all packets that the peer hasn't acked, including packets that haven't been sent."""
        return list(self._pieces)

    @property
    def window(self) -> int:
        """Size of the window in packets: how many packets may be sent and not acked."""
        return self._ceiling.size

    @property
    def limit(self) -> int:
        """The highest seq that the peer accepts. It can be lower than `sent`, because a miss may shrink the window."""
        return self._ceiling.acknowledged + self._ceiling.size

    @property
    def quota(self) -> int:
        """Maximum size of the next packet's body in bytes."""
        return self.state.packet - overhead(self.channel, self.next_seq, end=True)

    def due(self, timeout: float) -> float:
        if self.probe_at == NEVER or self.is_resting:  # a resting channel can't time out before its next probe
            return self.probe_at
        return min(self.probe_at, self.silent_at(timeout))

    def silent_at(self, timeout: float) -> float:
        """Return when the channel will break unless a packet arrives, or `NEVER` if all sent packets are acked."""
        if self.probe_at == NEVER:
            return NEVER
        if self.is_resting:
            return self.probe_at + timeout  # the peer doesn't have to send a packet before we probe
        return max(self.channel.heard_at, self.waiting_since) + timeout

    # --- queueing messages

    def has_room(self, size: int) -> bool:
        """Return True if a message of `size` bytes may be queued.

        An empty queue accepts any message, so a channel never has to wait for another channel.
        """
        if self.channel.gone:
            return False
        limits = self.state.limits
        unsent = self.unsent
        return unsent == 0 or (unsent + size <= limits.channel_first and self.state.unsent + size <= limits.outbox)

    def notify_when_room(self, size: int) -> None:
        if not self.channel.gone:
            self.watched = size
            self.state.drained[self.channel.id] = self  # have the sender checked once, because there may be room now

    def check_size(self, size: int) -> None:
        self._body_sizes(size)

    def try_send(self, message: bytes) -> bool | None:
        """Queue a message if it has room. Return None instead of raising if it hasn't, or if the channel has ended."""
        if not self.has_room(len(message)) or self.ended:
            return None
        self.queue(message, end=False, is_message=True)
        self.state.messages_sent += 1
        return True

    def queue(self, body: bytes, *, end: bool, is_message: bool) -> None:
        channel, state, seq = self.channel, self.state, self.next_seq
        if 1 < seq <= SEQ_MOST and len(body) <= min(state.packet - OVERHEAD_MOST, state.limits.message):
            self._pieces[seq] = Piece(seq, body, None, end, 0)
            self.next_seq = seq + 1
        else:
            for frag, piece in cut(body, *self._body_sizes(len(body))):
                seq = self.next_seq
                type = channel.type if channel.ours and seq == 1 else None
                self._pieces[seq] = Piece(seq, piece, type, end and frag == 0, frag)
                self.next_seq = seq + 1
        self.ended = end
        state.queue_up(channel)
        self.unsent += len(body)
        state.unsent += len(body)
        if is_message:
            self.last = self.next_seq - 1

    def _body_sizes(self, size: int) -> tuple[int, int]:
        """Return the maximum size of the body in the first packet of a message, and in each of its other packets.

        Raises:
            LocalProtocolError: The message can't be sent, because it is too large or needs more seqs than are left.
        """
        state, channel, seq = self.state, self.channel, self.next_seq
        packet = state.packet
        whole = packet - overhead(channel, seq, end=True)
        if size > whole and not state.config.frag:
            raise too_large(channel, size, packet, whole)
        if size > state.limits.message:
            raise LocalProtocolError(
                f"channel {channel.id}: message too large: {size} bytes against Limits(message={state.limits.message})"
            )
        if size <= whole:
            first = other = whole
        else:
            # Reserve as many digits for `seq` and `frag` as these numbers can have in this message.
            first = packet - overhead(channel, seq, frag=size, end=True)
            other = packet - overhead(channel, max(2, min(SEQ_MOST, seq + size)), frag=size, end=True)
        if first < 1:
            raise LocalProtocolError(
                f"type too long: no room for a message in a packet of {packet} bytes with type {channel.type[:64]!r}"
            )
        seq += pieces_after(size, first, other)
        if seq > SEQ_MOST:
            raise LocalProtocolError(
                f"channel {channel.id}: expected seqs up to {SEQ_MOST}, the message needs {seq}; open another channel"
            )
        return first, other

    def report_if_writable(self) -> None:
        state, id = self.state, self.channel.id
        if self.watched:
            if self.has_room(self.watched):
                self.watched = 0
                state.happened.append(Writable(self))
            elif self.unsent + self.watched <= state.limits.channel_first:
                state.crowded.setdefault(id, self)
                return
        state.crowded.pop(id, None)

    def dropped(self) -> None:
        self.state.unsent -= self.unsent
        self.state.flying -= self.flying

    # --- sending packets

    @property
    def is_ready(self) -> bool:
        self._ready = self.next()
        return self._ready is not None

    @property
    def has_more(self) -> bool:
        return self._ready is not None

    def next(self) -> Piece | None:
        """Return the next new packet, or None if there is none or if the window or a memory limit forbids sending it.

        The sender also pauses while the peer misses more packets than a `miss` can list, because the peer couldn't
        report the loss of a new packet.
        """
        ceiling = self._ceiling
        piece = self._pieces.get(ceiling.sent + 1)
        if piece is None or self.is_cut or ceiling.sent >= ceiling.acknowledged + ceiling.size:
            return None
        flying = self.flying + len(piece.body)
        return piece if flying <= self._short_flight or not self.flying or self._may_fly(flying) else None

    def _may_fly(self, flying: int) -> bool:
        """Return True if the window and the limits allow `flying` unacked bytes on this channel."""
        state, limits = self.state, self.state.limits
        most = min(self._ceiling.size * state.unit, limits.channel_bytes)
        return flying <= most and state.flying + flying - self.flying <= limits.connection_bytes

    def write(self, now: float) -> bytes:
        assert self._ready is not None
        return self.encode(self._ready, now)

    def encode(self, piece: Piece, now: float) -> bytes:
        """Encode a packet that is sent now, for the first time or again.

        The packet includes an ack if this side has new information for the peer, or wants an ack from the peer.
        """
        state, channel = self.state, self.channel
        receiver = channel.receiver
        if piece.times == 0:
            self._spend(len(piece.body), now)
        self._since_asked += len(piece.body)
        piece.times += 1
        piece.sent_at = now
        piece.is_queued = False
        self._ready = self.next()
        head = head_of(channel.id, piece.type, piece.seq, piece.end, piece.frag)
        # An opening never includes an ack, because no packet has been received on its channel.
        if piece.type is None and (self._ready is None or self._wants_ack(piece, now) or receiver.owes_news):
            part = receiver.encode_ack(state.packet - 4 - len(head) - len(piece.body), wants_miss=False, now=now)
            if part:
                head += part
                state.acking.pop(channel.id, None)
                self._mark_asked(piece, now)
        state.arm(channel)
        name = "end" if piece.end else "open" if piece.type else "data"
        return state.packet_of(channel.id, head, f"{name} again" if piece.times > 1 else name, piece.body)

    def _spend(self, size: int, now: float) -> None:
        """Update the window, the byte counters and the probe timer for a new packet, which is sent now."""
        ceiling, state = self._ceiling, self.state
        if ceiling.sent == ceiling.acknowledged:
            self.waiting_since = now
            self.probe_pause = PROBE_FIRST
            self.probe_at = now + min(PROBE_FIRST, state.config.timeout)
        elif self.is_resting:
            self._wake(now)
            self.probe_at = now + PROBE_FIRST
        ceiling.sent += 1
        self.unsent -= size
        self.flying += size
        state.flying += size
        state.unsent -= size
        if self.watched:
            state.drained[self.channel.id] = self

    def take_back(self, piece: Piece) -> bool:
        """Return True if a packet in the resend queue must not be sent after all.

        That is the case if the peer has acked the packet meanwhile, or if the packet is now above the window. The
        packet may be queued again later.
        """
        if self._ceiling.acknowledged < piece.seq <= self.limit:
            return False
        piece.is_queued = False
        return True

    # --- acks

    def receive_ack(self, ack: int, deltas: list[int] | None) -> None:
        """Apply the ack of a packet, and its miss, which is encoded in `deltas` (`decode_miss`).

        The caller has checked that `ack` <= `sent`.
        """
        state, channel, congestion = self.state, self.channel, self.state.congestion
        window: int | None = None
        missing: list[int] = []
        if deltas is not None:
            if len(deltas) == 1:  # usually, no packet is missing
                window = deltas[0]
            else:
                miss = decode_miss(ack, deltas)
                window, missing = miss.window, miss.missing
        news = self._acknowledge(ack, window, missing, state.now, congestion.fell_at)
        if news is None:
            return
        if self.is_resting:
            # Limit the total rate of probes to one per `REST_SHARE` seconds, however many channels rest.
            state.resting.add(channel.id)
            self.probe_at = max(self.probe_at, state.now + REST_SHARE * len(state.resting))
        elif state.resting:
            state.resting.discard(channel.id)
        congestion.ack_received(news.round_trip, news.lost, state.now, is_sure=news.is_sure, is_cut=news.is_cut)
        state.lost += news.named
        if news.resend:
            state.resends.extend([(self, piece) for piece in news.resend])
        has_advanced = news.last >= news.first
        if has_advanced:
            state.silence.heard(state.now)
            state.report(channel, Delivered(channel, news.first, news.last))
        if self.next() is not None:
            state.queue_up(channel)
        if ack == SEQ_MOST and not self.ended:
            text = f"seq {SEQ_MOST} was used, and there is no other"
            state.break_channel(channel, Cause.EXHAUSTED, text, tell=True)
        if self.ended:
            state.close_if_over(channel)
        if channel.closing:
            channel.receiver.continue_closing(has_advanced=has_advanced)

    def _acknowledge(self, ack: int, window: int | None, missing: list[int], now: float, fell_at: float) -> News | None:
        """Apply an ack and its miss to the window and the packets. Return None if a later ack has arrived before."""
        before = self._ceiling.acknowledged
        if ack < before:
            return None
        self._ceiling.acknowledge(ack, None if window is None else min(window, self._most_window))
        if window is not None:
            self._short_flight = min(self._short_window, self._ceiling.size * self.state.unit)
        news = News(before + 1, ack, [])
        rested, self.acked_at = now - self.acked_at, now
        if ack > before:
            self._forget(before, ack, news, now)
            self.timed_at = None
        # Ignore listed packets that we haven't sent, and those above the window, because the peer would drop them.
        highest = min(self._ceiling.sent, self.limit)
        if missing:
            missing = [seq for seq in missing if ack < seq <= highest]
        self.stands_still = ack == before and bool(missing)
        for seq in missing:
            piece = self._pieces[seq]
            if not piece.is_named:
                piece.is_named = True
                news.named += 1
                news.lost += piece.times == 1 and piece.sent_at > fell_at
                if seq == self.asked_seq:
                    self.timed_at = None  # the packet that was to measure the round trip has been lost
            # The first resend of a packet is immediate. Later resends wait `RESEND_PAUSE`.
            if not piece.is_queued and (piece.times == 1 or now >= piece.sent_at + RESEND_PAUSE):
                piece.is_queued = True
                news.resend.append(piece)
        if self._probed and not missing and ack == before and self._probed == highest:
            self._rest(now)
        was_cut, self.is_cut = self.is_cut, len(missing) >= LISTED_MOST - 1
        news.is_cut = self.is_cut
        if was_cut or news.is_cut:
            self.timed_at = None
        elif news.named and news.round_trip is None:
            news.round_trip = self._seen_beyond(missing[-1], now)
        elif self.stands_still and not news.named and self.timed_at is not None:
            if rested < SPOKE_UNASKED:
                news.round_trip, news.is_sure = now - self.timed_at, False
            self.timed_at = None
        return news

    def _wants_ack(self, piece: Piece, now: float) -> bool:
        """Return True if this packet, which has just been marked as sent, should ask for an ack.

        About four packets per round trip ask for one. The last packet before the sender has to pause asks in any case.

        While a missing packet keeps acks from advancing, an ack doesn't show which packet it answers. During that time
        only one packet at a time asks for an ack, so that the next ack measures the round trip of that packet.
        """
        pace = self.state.congestion
        if not self.stands_still:
            quarter = max(1, self._ceiling.size // 4)
            is_far = piece.seq - self.asked_seq >= quarter or self._since_asked >= quarter * self.state.unit
            return piece.times > 1 or is_far or now - self.asked_at >= pace.ask_pause
        round_trip = pace.round_trip
        if round_trip is None or now - self.asked_at < 1.5 * round_trip:
            return False
        return self.timed_at is None or now - self.timed_at > 3 * round_trip

    def _mark_asked(self, piece: Piece, now: float) -> None:
        """Record that this packet asks for an ack."""
        self.timed_at = now if self.stands_still and self._ready is not None else None
        self.asked_at, self.asked_seq, self._since_asked = now, piece.seq, 0
        piece.asks = True

    def _forget(self, before: int, ack: int, news: News, now: float) -> None:
        first = self._pieces[before + 1]
        is_clean = True
        asked: Piece | None = None
        for seq in range(before + 1, ack + 1):
            piece = self._pieces.pop(seq)
            self.flying -= len(piece.body)
            self.state.flying -= len(piece.body)
            is_clean = is_clean and piece.times == 1
            if piece.asks:
                asked = piece
        # The packet that asked for this ack measures the round trip, unless the ack was delayed because another packet
        # was missing. In that case the resend of the missing packet made the ack possible, so measure the resend.
        if asked is not None and is_clean and not self.stands_still:
            news.round_trip = now - asked.sent_at
        elif first.times == 2 and first.is_named:
            news.round_trip, news.is_sure = now - first.sent_at, False
        self._probed, self.is_resting, self._rest_pause = 0, False, REST_FIRST
        self.probe_pause = PROBE_FIRST
        self.waiting_since = now
        self.probe_at = now + PROBE_FIRST if self._ceiling.sent > ack else NEVER

    def _seen_beyond(self, last_missing: int, now: float) -> float | None:
        """Return the round trip of the packet after the last missing packet.

        The arrival of that packet showed the peer the gap and made it send the miss. Returns None if the packet has
        been resent, because then the round trip is ambiguous.
        """
        after = self._pieces.get(last_missing + 1)
        return now - after.sent_at if after is not None and after.times == 1 else None

    # --- probes

    def probes(self, now: float) -> list[Piece]:
        """Return the packets to resend as a probe: the oldest unacked packet and the last one, each once per second.

        The last one is the last packet within the peer's window. The peer would drop a packet above its window, and
        might not answer.
        """
        oldest, last = self._pieces[self.acked + 1], self._pieces[min(self.sent, self.limit)]
        pieces = [oldest] if oldest is last else [oldest, last]
        rested = [piece for piece in pieces if now >= piece.sent_at + RESEND_PAUSE]
        if rested:
            if self.is_resting:
                self._wake(now)
            self._probed = last.seq if last in rested else self._probed
            self.probe_pause = min(self.probe_pause * PROBE_FACTOR, PROBE_MOST)
            self.probe_at = now + self.probe_pause
        else:
            self.probe_at = min(piece.sent_at for piece in pieces) + RESEND_PAUSE
        probes = [piece for piece in rested if not piece.is_queued]
        for piece in probes:
            piece.is_queued = True
        return probes

    def _rest(self, now: float) -> None:
        """Start or continue a rest, because the peer has answered a probe. Each rest is longer than the one before."""
        self._probed = 0
        self.is_resting = True
        self.probe_at = now + self._rest_pause
        self._rest_pause = min(2 * self._rest_pause, REST_MOST)

    def _wake(self, now: float) -> None:
        """End a rest. From now on the channel breaks if the peer doesn't answer within the timeout."""
        self._probed = 0
        self.is_resting = False
        self.waiting_since = now
        self.probe_pause = PROBE_FIRST


class UnreliableSender(EngineSender):
    """The sending half of an unreliable channel.

    It accepts every message, and drops the oldest queued messages if too many bytes are queued. The peer never acks its
    packets, so it has no timers.
    """

    def __init__(self, state: State, channel: EngineChannel) -> None:
        super().__init__(state, channel)
        self.datagrams: deque[tuple[bytes, bool]] = NO_QUEUE
        """Unsent messages. Each message comes with a flag that is True if the message is the last of the channel."""
        self.queued_bytes: int = 0

    @property
    def queued(self) -> int:
        return self.queued_bytes

    @property
    def has_sent(self) -> bool:
        """Always False, because the peer never acks packets of an unreliable channel."""
        return False

    @property
    def is_ready(self) -> bool:
        return bool(self.datagrams)

    @property
    def has_more(self) -> bool:
        return bool(self.datagrams)

    @property
    def is_done(self) -> bool:
        return not self.datagrams

    @property
    def is_written(self) -> bool:
        return self.is_done

    def due(self, timeout: float) -> float:
        return NEVER

    @property
    def quota(self) -> int:
        """Maximum size of a message in bytes."""
        return self.state.packet - overhead(self.channel, None, end=True)

    def check_size(self, size: int) -> None:
        if size > self.quota:
            raise too_large(self.channel, size, self.state.packet, self.quota)

    def has_room(self, size: int) -> bool:
        return not self.channel.gone

    def notify_when_room(self, size: int) -> None:
        """Do nothing, because there is always room."""

    def queue(self, body: bytes, *, end: bool, is_message: bool) -> None:
        self.check_size(len(body))
        state = self.state
        self.ended = end
        state.queue_up(self.channel)
        self.datagrams = queue_of(self.datagrams)
        self.datagrams.append((body, end))
        self._count(len(body))
        while self.queued_bytes > state.limits.channel_first and len(self.datagrams) > 1:
            self._count(-len(self.datagrams.popleft()[0]))
            state.evicted += 1
        if end:
            self.channel.dies_at = state.now + state.linger
            state.arm(self.channel)

    def _count(self, size: int) -> None:
        self.queued_bytes += size
        self.state.unsent += size

    def write(self, now: float) -> bytes:
        """Remove the oldest message from the queue and encode its packet. The queue must not be empty."""
        channel = self.channel
        body, end = self.datagrams.popleft()
        self._count(-len(body))
        type = channel.type if channel.ours and not channel.announced else None
        head = head_of(channel.id, type, None, end, 0)
        return self.state.packet_of(channel.id, head, "end" if end else "data", body)

    def dropped(self) -> None:
        self._count(-self.queued_bytes)
        self.datagrams = NO_QUEUE


def too_large(channel: EngineChannel, size: int, packet: int, room: int) -> LocalProtocolError:
    """Return the error for a message that doesn't fit into a packet."""
    return LocalProtocolError(
        f"channel {channel.id}: message too large: {size} bytes; a packet of {packet} has room for {room}"
    )


def overhead(channel: EngineChannel, seq: int | None, *, frag: int = 0, end: bool = False) -> int:
    """Return the size of a packet of this channel without the body."""
    # The first packet of an unreliable channel may be lost, so its packets contain the type until the peer answers.
    type = channel.type if channel.ours and (seq is None or seq == 1) else None
    return 4 + len(head_of(channel.id, type, seq, end, frag)) + (0 if seq is None else ASK_SIZE)
