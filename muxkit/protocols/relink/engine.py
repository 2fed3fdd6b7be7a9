"""The Relink engine: received bytes and commands go in, events and bytes to send come out.

The engine does no I/O, and it works without Trio. `_connection` connects it to a stream. Several modules share the
work:

    reader     splits received bytes into packets, checks them, and applies them to the state
    state      has the state of the link and its two tables of channels, and explains the theory of operation
    send       has `ChannelSender`, the rules for one channel that we send on
    receive    has `ChannelReceiver`, the rules for one channel that we receive from
    probes     sends pings, and keeps track of what their pongs prove
    common     builds muxkit's common channels, as a second engine on top of this one
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
# Bytes of memory for one channel in each direction, with its session objects and a task that handles it.
CHANNEL_PRICE: Final = 6 * 1024


class Engine:
    """One end of a link.

    A link has one connection after another. From `connection_made` to `connection_lost` the engine is a `StreamEngine`
    for the current connection. Messages may also be queued while there is no connection.

    `receive_bytes` and `handle_deadline` return events, and `events` returns the events that commands have caused.
    `sender` and `receiver` return the halves of a channel, which have the commands for it. The application has to
    consume or answer every message that an `Arrived` event delivers. Otherwise the peer's window stays full.
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
        # True if the last read ended in the middle of a packet, so that `_stall` is running.
        self._is_watching = False
        self.frames_at_once: int = sys.maxsize
        """The highest number of packets that one call of `receive_bytes` parses."""
        self.unparsed: int = 0
        """Received bytes that are still to be parsed, because the last call reached `frames_at_once`.

        `receive_bytes(b"", now)` continues with these bytes. A multicast that is still to be delivered to some of its
        channels counts as one more byte.
        """
        self.waiting: Outbox = self.state.ours.outbox
        """The counter that `outbox` returns. Reading it directly is faster."""

    # --- properties

    @property
    def epoch(self) -> int:
        """The epoch of the listener, which identifies its running instance; 0 without a link."""
        return self.state.epoch

    @property
    def link_id(self) -> int:
        """The id of the link; 0 without a link."""
        return self.state.link_id

    @property
    def over(self) -> bool:
        """True once the link has finished or failed."""
        return self.state.over

    @property
    def outbox(self) -> int:
        """Bytes of queued messages that are still to be written."""
        return self.state.ours.outbox.used

    @property
    def bytes_received(self) -> int:
        """Bytes parsed on the current connection."""
        return self._reader.offset

    # --- channels

    def sender(self, channel: int) -> ChannelSender:
        """Return the sender of a channel.

        If the channel isn't open, the returned sender opens it with its first message.
        """
        return self.state.ours.live.get(channel) or ChannelSender(channel, self.state)

    def next_sender(self, channel: int) -> ChannelSender:
        """Return the sender for the next life of a channel. It has no room until the current life has ended."""
        return ChannelSender(channel, self.state)

    def receiver(self, channel: int) -> ChannelReceiver:
        """Return the receiver of a channel of the peer. The peer may open the channel later."""
        theirs = self.state.theirs
        receiver = theirs.receiver(channel)
        if receiver is None:
            receiver = theirs.expected[channel] = ChannelReceiver(channel, self.state)
        return receiver

    def forget_expected(self, receiver: ChannelReceiver) -> None:
        """Stop expecting that the peer opens the receiver's channel. Does nothing if the channel is open."""
        if self.state.theirs.expected.get(receiver.channel) is receiver:
            del self.state.theirs.expected[receiver.channel]

    # --- multicast

    def multicast(self, senders: Sequence[ChannelSender], parts: Sequence[bytes]) -> list[int]:
        """Queue one message on several channels, to be written as one packet.

        `senders` may name a channel more than once. Returns the numbers of the message in its channels, in the order of
        `senders`.

        Raises:
            LocalProtocolError: The message can't be sent on one of the channels now. Nothing was queued.
        """
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
        """Return True if the windows of all senders and the link's budget have room for a multicast of these parts."""
        cost = frames.message_cost([len(part) for part in parts], self.state.out_id_size)
        return self._find_full(_counted(senders), cost) is None

    def check_targets(self, count: int) -> None:
        """Raise `LocalProtocolError` if one packet can't name `count` channels."""
        most = self.config.targets
        if not 1 <= count <= most:
            raise LocalProtocolError(
                f"invalid number of channels {count}: expected 1 to {most}, which is Config(targets=)"
            )

    def _find_full(self, targets: dict[ChannelSender, int], cost: int) -> tuple[ChannelSender, int] | None:
        """Find the first channel that doesn't have room for all copies of a multicast that are meant for it.

        Returns the channel's sender and the number of copies that it does have room for, or None.
        """
        queued = 0
        for sender, count in targets.items():
            for before in range(count):
                if not sender.has_room_for(cost, queued=queued, messages=before):
                    return sender, before
                queued += sender.over_floor(cost, before * cost)
        return None

    # --- connections

    def connection_made(self, now: float, *, epoch: int, link_id: int) -> None:
        """Start a connection after the handshake has ended with `Agreed`.

        If `epoch` and `link_id` name a link other than ours, our link is lost with all of its channels, and the engine
        reports `LinkReplaced` or `EpochChanged`.

        Raises:
            LocalProtocolError: The link has ended or has a connection, or `epoch` or `link_id` is 0.
        """
        state = self.state
        state.check_alive()
        if state.is_connected:
            raise LocalProtocolError("the link already has a connection: expected a call of connection_lost first")
        if not link_id or not epoch:
            raise LocalProtocolError(
                f"invalid link: expected an epoch and a link id above 0, got {epoch} and {link_id}"
            )
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
        """End the connection. Does nothing without a connection.

        Bytes from `buffers_to_send` may be lost, so messages that aren't acknowledged are repeated after the next
        resume.
        """
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
        """Drop the link after `Refused`, because the listener doesn't know the link. The engine may get a new link."""
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
            sender.closing = True  # the sender belongs to the old link, so it must refuse further messages
        state.reset()
        state.link_id = link_id
        state.events.append(told)
        state.events.extend(Writable(sender) for sender in watching)

    # --- the stream

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Event]:
        """Parse received bytes and return the events. Never raises; a peer that breaks a rule causes `Failed`."""
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
        """Report the end of the stream. The caller still has to call `connection_lost`."""
        state = self.state
        if not state.is_connected or state.over:
            return ()
        is_clean = not self._reader.is_mid_packet
        state.events.append(HungUp(is_clean))
        # A peer that hangs up after both shutdowns has discarded the link (section 3.6 of the document), so dialling
        # again would only create a new link. The link therefore ends here, even if acknowledgements or pongs were still
        # under way. It doesn't end if messages are unconfirmed, because the application has to be notified of a loss.
        has_ended = state.has_peer_shut_down and state.shutdown_written and not state.has_unconfirmed_messages
        if is_clean and has_ended:
            self._finish()
        return state.take_events()

    def events(self) -> Sequence[Event]:
        """Return the events that commands and writing have caused since the last call, oldest first."""
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
        """Return the buffers to write next, with about `limit` bytes. The caller must write all of them, in order."""
        out: list[Buffer] = []
        state = self.state
        if state.over or not state.is_connected:
            return out
        if state.ours.scheduler.line:
            state.theirs.make_due_early()
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
        """Write pings, pongs, the resume and acknowledgements, up to about `limit` bytes. They come before messages."""
        theirs, probes = self.state.theirs, self.state.probes
        written = probes.write(limit, out) if probes.pongs or probes.pings else 0
        if written < limit:
            written += theirs.write(limit - written, out)
        if probes.unproven and not (theirs.dirty or theirs.resume_left):
            written += probes.write_proof(out)
        return written

    @property
    def _may_write_shutdown(self) -> bool:
        """True if the shutdown hasn't been written, but could be written now.

        No channel can be opened after the shutdown, so it has to follow the first message of each of our channels. With
        channel ids of 0 bytes it has to follow the close of the only channel. Relink's original implementation has no
        close in that mode: it treats the shutdown as the end of the channel, and refuses messages after the shutdown.
        """
        state = self.state
        if state.shutdown_written or state.ours.unannounced:
            return False
        return state.out_id_size > 0 or all(one.close_written for one in state.ours.live.values())

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """Allow this block to send and write although the link has failed.

        A peer that broke a rule makes it impossible to read on, but we can still write, for example a reason.
        """
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
        """End the link if both shutdowns were sent and every message is confirmed.

        Acknowledgements don't wait for the timer any more once both sides are shutting down.

        We don't wait for the `closed` of a channel that we closed. The document is satisfied with both shutdowns
        (section 3.6), and with channel ids of 0 bytes Relink's original implementation never sends a `closed`. But we
        do write our closes before the end, because the peer may wait for them.
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
        """End the link cleanly. The peer has consumed all messages, so the channels that we closed count as closed."""
        for sender in [one for one in self.state.ours.live.values() if one.closing]:
            sender.closed()
        self._stop(LinkFinished())

    # --- time

    def next_deadline(self) -> float | None:
        """Return the time at which `handle_deadline` has to be called, or None."""
        return None if self.state.over else self.state.deadlines.next

    def handle_deadline(self, now: float) -> Sequence[Event]:
        """Act on the timers that are due, and return the events."""
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
        """Send a ping. `Pong` reports the answer, unless the connection is lost before the answer arrives.

        Raises:
            LocalProtocolError: The link has ended or has no connection.
        """
        self.state.check_alive()
        if not self.state.is_connected:
            raise LocalProtocolError("can't send a ping: the link has no connection at the moment")
        self.state.probes.pings.append(Purpose.ASKED)

    def shutdown(self) -> None:
        """Open no more channels, and notify the peer of that.

        `LinkFinished` is reported after the peer has shut down as well and all messages are confirmed.
        """
        state = self.state
        state.check_alive()
        state.is_shutting_down = True
        if state.is_connected:
            # The peer can't finish the link before it has every acknowledgement, so these mustn't wait for the timer.
            state.theirs.make_all_due()


def _counted(senders: Sequence[ChannelSender]) -> dict[ChannelSender, int]:
    """Count how often `senders` names each sender."""
    counts: dict[ChannelSender, int] = {}
    for sender in senders:
        counts[sender] = counts.get(sender, 0) + 1
    return counts
