"""The Relink engine: received bytes and commands go in, events and bytes to send come out.

Several modules share the work:

    reader     splits received bytes into packets, checks them, and applies them to the state
    state      the link, its two tables of channels, and what they have in common: the theory of operation
    send       `ChannelSender`, the rules for one channel that we send on
    receive    `ChannelReceiver`, the rules for one channel that we receive from
    probes     pings, and what their answers prove
    common     the common channels of muxkit, an engine of its own on top of this one
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, Keepalive, Outbox, StallWatch
from muxkit.core.events import Failed, HungUp, Silent, Writable
from muxkit.protocols.relink import frames
from muxkit.protocols.relink.config import Config
from muxkit.protocols.relink.events import EpochChanged, Event, LinkFinished, LinkReplaced, Stalled
from muxkit.protocols.relink.probes import Purpose
from muxkit.protocols.relink.reader import Reader
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender, Multicast
from muxkit.protocols.relink.state import State, Timer

SHUTDOWN: Final = frames.encode_general(frames.General.SHUTDOWN)
# Bytes of memory for a channel each way, with its session objects and a task that handles it.
CHANNEL_PRICE: Final = 6 * 1024


class Engine:
    """One end of a link; a `StreamEngine` between `connection_made` and `connection_lost`, as often as need be.

    `receive_bytes` and `handle_deadline` return what happened, and `events` returns what commands caused. Commands on
    channels are those of their halves, which `sender` and `receiver` give. Messages may be queued before the first
    connection and between two. What `Arrived` brought has to be consumed or answered, or the peer's window stays full.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        is_connector: bool,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config: Config = config or Config()
        self.limits: Limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self.state: Final = State(self.config, self.limits, observer, is_connector=is_connector)
        self._bounds = frames.bounds_of(self.config, is_connector=is_connector, message=self.limits.message)
        self._reader = Reader(self.state, self._bounds)
        deadlines = self.state.deadlines
        self._keepalive: Keepalive[Timer] = Keepalive(
            deadlines,
            Timer.KEEPALIVE,
            Timer.ANSWER,
            interval=self.config.keepalive,
            timeout=self.config.keepalive_timeout,
        )
        self._stall: StallWatch[Timer] = StallWatch(
            deadlines, Timer.STALL, seconds=self.limits.stall, least=self.limits.stall_bytes
        )
        self._is_watching = False  # a packet was unfinished behind the last read
        self.frames_at_once: int = sys.maxsize
        """The most packets that one call of `receive_bytes` parses."""
        self.unparsed: int = 0
        """Received bytes behind the first `frames_at_once` packets; `receive_bytes(b"", now)` parses more of them.

        A multicast that not all of its channels have yet counts as one more byte.
        """
        self.waiting: Outbox = self.state.ours.outbox
        """The counter behind `outbox`, for frequent reads."""

    # --- what is known

    @property
    def epoch(self) -> int:
        """The epoch of the listener; 0 before there is a link."""
        return self.state.epoch

    @property
    def link_id(self) -> int:
        """The id of the link; 0 before there is one."""
        return self.state.link_id

    @property
    def over(self) -> bool:
        """True once the link has finished or failed."""
        return self.state.over

    @property
    def outbox(self) -> int:
        """Bytes of messages that wait for the transport."""
        return self.state.ours.outbox.used

    @property
    def bytes_received(self) -> int:
        """Bytes parsed on the present connection."""
        return self._reader.offset

    # --- channels

    def sender(self, channel: int) -> ChannelSender:
        """Return the half to send on of this channel of ours: the live one, or one that its first message opens."""
        return self.state.ours.live.get(channel) or ChannelSender(channel, self.state)

    def next_sender(self, channel: int) -> ChannelSender:
        """Return the half for the next life of a channel of ours. It has no room before the present life is over."""
        return ChannelSender(channel, self.state)

    def receiver(self, channel: int) -> ChannelReceiver:
        """Return the half to receive from of this channel of the peer: the live one, or the one that will be."""
        theirs = self.state.theirs
        receiver = theirs.receiver(channel)
        if receiver is None:
            receiver = theirs.expected[channel] = ChannelReceiver(channel, self.state)
        return receiver

    def forget_expected(self, receiver: ChannelReceiver) -> None:
        """The application no longer waits for the peer to open this channel; harmless if it is open."""
        if self.state.theirs.expected.get(receiver.channel) is receiver:
            del self.state.theirs.expected[receiver.channel]

    # --- multicast

    def multicast(self, senders: Sequence[ChannelSender], parts: Sequence[bytes]) -> list[int]:
        """Queue one packet to several channels, which may repeat; return its numbers in the order of `senders`."""
        state = self.state
        self.check_targets(len(senders))
        state.check_parts(parts)
        kept = tuple(map(bytes, parts))
        sizes = [len(part) for part in kept]
        cost = frames.message_cost(sizes, state.out_id_size)
        counts = _counted(senders)
        new = 0
        for sender in counts:
            sender.check_sending(new)
            new += not sender.has_sent
        full = self._find_full(counts, cost)
        if full is not None:
            raise full[0].full(kept, cost, full[1])
        item = Multicast(counts, kept, frames.message_size(sizes, state.out_id_size), cost, len(counts))
        return [sender.push((item,), cost, grown=True) for sender in senders]

    def fits(self, senders: Sequence[ChannelSender], parts: Sequence[bytes]) -> bool:
        """Return True if all windows and the link's budget have room for such a multicast."""
        cost = frames.message_cost([len(part) for part in parts], self.state.out_id_size)
        return self._find_full(_counted(senders), cost) is None

    def check_targets(self, count: int) -> None:
        """Raise `LocalProtocolError` if one packet cannot name so many channels."""
        most = self.config.targets
        if not 1 <= count <= most:
            raise LocalProtocolError(f"{count} channels; Config(targets={most}) are the most")

    def _find_full(self, targets: dict[ChannelSender, int], cost: int) -> tuple[ChannelSender, int] | None:
        """Return the first channel without room for its share of a multicast, and how many messages it has room for."""
        queued = 0
        for sender, count in targets.items():
            for before in range(count):
                if not sender.has_room_for(cost, queued=queued, messages=before):
                    return sender, before
                queued += sender.over_floor(cost, before * cost)
        return None

    # --- connections

    def connection_made(self, now: float, *, epoch: int, link_id: int) -> None:
        """Start a connection after its handshake (`Agreed`).

        If it names another link than ours, everything about ours is gone: `LinkReplaced` or `EpochChanged`.
        """
        state = self.state
        state.check_alive()
        if state.is_connected:
            raise LocalProtocolError("there is a connection already; connection_lost comes first")
        if not link_id or not epoch:
            raise LocalProtocolError(f"epoch {epoch} and link id {link_id} name no link")
        state.now = now
        resumes = (epoch, link_id) == (state.epoch, state.link_id)
        if state.link_id and not resumes:
            self._replace(epoch, link_id)
        state.epoch, state.link_id = epoch, link_id
        self._reader.restart()
        state.is_connected = True
        state.resumes = resumes
        state.peer_resumed = state.told_resume = not resumes
        state.shutdown_written = False
        state.observe_state("link", "connected")
        state.probes.reset()
        state.ours.connect()
        state.theirs.connect()
        self._keepalive.start(now)

    def connection_lost(self, now: float) -> None:
        """End the connection: bytes that were pulled may not have arrived. Does nothing without a connection."""
        state = self.state
        if state.is_connected:
            state.now = now
            self._stall.stop()
            state.is_connected = False
            for timer in Timer:
                state.deadlines.stop(timer)
            state.ours.disconnect()
            state.theirs.disconnect()
            self._reader.restart()
            self.unparsed = 0

    def link_lost(self, now: float, *, epoch: int = 0) -> None:
        """Drop the link after `Refused`, because the listener doesn't know it. A new one may follow."""
        state = self.state
        state.check_alive()
        state.now = now
        if state.link_id:
            self._replace(epoch, 0)
            state.epoch = 0

    def _replace(self, epoch: int, link_id: int) -> None:
        state = self.state
        event = LinkReplaced if epoch == state.epoch else EpochChanged
        told = event(state.epoch, state.link_id, epoch, link_id, state.ours.unanswered)
        watching = [sender for sender, _ in state.ours.watchers.values()]
        for sender in state.ours.live.values():
            sender.closing = True  # nothing more may be sent on what belongs to the old link
        state.reset()
        state.link_id = link_id
        state.events.append(told)
        state.events.extend(Writable(sender) for sender in watching)

    # --- the stream

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Event]:
        """Parse received bytes and return what happened; never raises."""
        reader, state = self._reader, self.state
        if state.over or not state.is_connected:
            return ()
        state.now = now
        failure = reader.feed(data, self.frames_at_once)
        self.unparsed = reader.unparsed
        if failure is not None:
            self._stop(Failed(failure))
            if state.observer is not None:
                state.observer.error(failure)
            return state.take_events()
        self._keepalive.heard(now)
        if reader.is_mid_packet:
            self._is_watching = True
            self._stall.watch(now, reader.offset)
        elif self._is_watching:
            self._is_watching = False
            self._stall.stop()
        if state.has_peer_shut_down:
            self._check_finished()
        return state.take_events() if state.events else ()

    def receive_eof(self, now: float) -> Sequence[Event]:
        """Report the end of the stream; `connection_lost` is still to be called."""
        state = self.state
        if not state.is_connected or state.over:
            return ()
        is_clean = not self._reader.is_mid_packet
        state.events.append(HungUp(is_clean))
        # A peer that hangs up after both shutdowns has discarded the link (3.6), and dialling again would make a new
        # one. Acks and proofs that are still under way concern nobody then; messages that nobody confirmed do.
        has_ended = state.has_peer_shut_down and state.shutdown_written and not state.has_unconfirmed_messages
        if is_clean and has_ended:
            self._finish()
        return state.take_events()

    def events(self) -> Sequence[Event]:
        """Take the events that commands and writing have caused, oldest first."""
        return self.state.take_events() if self.state.events else ()

    def has_output(self) -> bool:
        """Return True if there is anything to write."""
        state = self.state
        if state.over or not state.is_connected:
            return False
        if state.ours.scheduler.line or state.owes_control:
            return True
        return state.is_shutting_down and self._may_write_shutdown

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        """Take about `limit` bytes to write now."""
        out: list[Buffer] = []
        state = self.state
        if state.over or not state.is_connected:
            return out
        written = self._write_control(limit, out) if state.owes_control else 0
        if written < limit:
            state.ours.scheduler.pull(limit - written, out)
            if state.probes.wants_proof and not (state.theirs.dirty or state.theirs.resume_left):
                state.probes.write_proof(out)
        if state.is_shutting_down:
            if self._may_write_shutdown:
                state.shutdown_written = True
                out.append(SHUTDOWN)
            self._check_finished()
        if state.observer is not None:
            frames.observe_written(state.observer, out, self._bounds, state.repeats)
        return out

    def _write_control(self, limit: int, out: list[Buffer]) -> int:
        """Write what is owed, before messages; about `limit` bytes at most."""
        theirs, probes = self.state.theirs, self.state.probes
        written = probes.write(limit, out) if probes.pongs or probes.pings else 0
        if written < limit:
            written += theirs.write(limit - written, out)
        if probes.unproven and not (theirs.dirty or theirs.resume_left):
            written += probes.write_proof(out)
        return written

    @property
    def _may_write_shutdown(self) -> bool:
        """True if shutdown, once it is wanted, can be written: behind the first message of each of our channels.

        With ids of 0 bytes it is written behind the close of the only channel. The original program has no close in
        that form, so it reads the shutdown as the end of the channel and refuses messages after it.
        """
        state = self.state
        if state.shutdown_written or state.ours.unannounced:
            return False
        return state.out_id_size > 0 or all(one.close_written for one in state.ours.live.values())

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """Let this block send and pull although the peer broke a rule, which ended only what we can read."""
        was_over = self.state.over
        self.state.over = False
        try:
            yield
        finally:
            self.state.over = was_over

    def _stop(self, last: Event) -> None:
        self.state.events.append(last)
        self.state.over = True
        self.unparsed = 0

    def _check_finished(self) -> None:
        """End the link once both shutdowns were sent and every message is confirmed; acks no longer wait for a timer.

        A `closed` for our close is not waited for: both shutdowns are enough (3.6), and with ids of 0 bytes the
        original program never sends one. Our closes are written before the end, for a peer that does wait for them.
        """
        state, ours, theirs = self.state, self.state.ours, self.state.theirs
        if not (state.has_peer_shut_down and state.is_shutting_down) or state.over:
            return
        if state.is_connected:
            theirs.make_all_due()
        if not (state.shutdown_written and theirs.is_clear) or state.has_unconfirmed_messages or state.probes.ending:
            return
        if not ours.closing or all(one.close_written for one in ours.live.values() if one.closing):
            self._finish()

    def _finish(self) -> None:
        """End the link in order. The peer has everything of the channels that we closed, so they are closed."""
        for sender in [one for one in self.state.ours.live.values() if one.closing]:
            sender.closed()
        self._stop(LinkFinished())

    # --- time

    def next_deadline(self) -> float | None:
        """Return when to call `handle_deadline`."""
        return None if self.state.over else self.state.deadlines.next

    def handle_deadline(self, now: float) -> Sequence[Event]:
        """Act on the timers that are due, and return what happened."""
        state = self.state
        if state.over:
            return ()
        state.now = now
        for timer in state.deadlines.expired(now):
            if state.observer is not None:
                state.observer.timer(timer.value)
            if timer is Timer.ACKS:
                state.theirs.make_all_due()
            elif timer is Timer.KEEPALIVE:
                if self._keepalive.is_due(now):
                    state.probes.pings.append(Purpose.ALIVE)
                    self._keepalive.asked(now)
            elif timer is Timer.ANSWER:
                state.events.append(Silent(self._keepalive.silence(now)))
                break
            elif self._stall.shortfall(self._reader.offset) is not None:
                state.events.append(Stalled(self.limits.stall))
                break
            else:
                self._stall.watch(now, self._reader.offset)
        return self.events()

    # --- the link

    def ping(self) -> None:
        """Send a ping; `Pong` comes with the answer, unless the connection is lost before."""
        self.state.check_alive()
        if not self.state.is_connected:
            raise LocalProtocolError("there is no connection to ping on")
        self.state.probes.pings.append(Purpose.ASKED)

    def shutdown(self) -> None:
        """Open no more channels. `LinkFinished` follows once the peer has done the same and all is confirmed."""
        state = self.state
        state.check_alive()
        state.is_shutting_down = True
        if state.is_connected:
            # The peer can't finish before it has every answer, and the acks that wait for more would be the last ones.
            state.theirs.make_all_due()


def _counted(senders: Sequence[ChannelSender]) -> dict[ChannelSender, int]:
    """Count how often each sender is named."""
    counts: dict[ChannelSender, int] = {}
    for sender in senders:
        counts[sender] = counts.get(sender, 0) + 1
    return counts
