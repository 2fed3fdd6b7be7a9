"""The rules of a Relink link as one object that outlives its connections; no Trio, no clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, Keepalive, Outbox, StallWatch
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
from muxkit.protocols.relink.engine.incoming import PeerChannels
from muxkit.protocols.relink.engine.link import LinkState, Purpose, Timer
from muxkit.protocols.relink.engine.outgoing import OurChannels
from muxkit.protocols.relink.engine.parser import Parser
from muxkit.protocols.relink.frames import General, bounds_of, encode_general, observe_written

SHUTDOWN: Final = encode_general(General.SHUTDOWN)
CHANNEL_PRICE = 6 * 1024  # bytes of memory for a channel each way, its session objects and a task that handles it


class LinkEngine(LinkState):
    """One end of a link; a `StreamEngine` between `connection_made` and `connection_lost`, as often as need be.

    A command either does all of its work or raises `LocalProtocolError` and changes nothing. Numbers of messages
    never wrap here: they are `Config.first_sequence`, and one more for each message since the channel was opened.
    Messages may be queued before the first connection and between two. `consume` (or an answer) is due for
    everything that `Arrived` brought, or the peer's window stays full.
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
        super().__init__(config, limits, observer, is_connector=is_connector)
        self._ours = ours = OurChannels(self)
        self._theirs = theirs = PeerChannels(self)
        self._bounds = bounds_of(config, is_connector=is_connector, message=limits.message)
        self._parser = Parser(self, ours, theirs, self._bounds)
        self._keepalive: Keepalive[Timer] = Keepalive(
            self.deadlines, Timer.KEEPALIVE, Timer.ANSWER, interval=config.keepalive, timeout=config.keepalive_timeout
        )
        self._stall: StallWatch[Timer] = StallWatch(
            self.deadlines, Timer.STALL, seconds=limits.stall, least=limits.stall_bytes
        )
        self._is_watching = False  # a packet was unfinished behind the last read
        self.frames_at_once: int = sys.maxsize
        """Packets that one call of `receive_bytes` parses at most."""
        self.unparsed: int = 0
        """Bytes that came beyond these; `receive_bytes(b"", now)` goes on with them.

        A multicast that not all of its channels have yet counts as one more.
        """
        self.waiting: Outbox = ours.outbox
        """The counter behind `outbox`, which changes in place."""

        # The commands on channels are those of the two tables.
        self.room: Final = ours.room
        self.admits: Final = ours.admits
        self.watch: Final = ours.watch
        self.send: Final = ours.send
        self.try_send: Final = ours.try_send
        self.try_send_all: Final = ours.try_send_all
        self.multicast: Final = ours.multicast
        self.fits: Final = ours.fits
        self.check_targets: Final = ours.check_targets
        self.commit: Final = ours.commit
        self.rollback: Final = ours.rollback
        self.close: Final = ours.close
        self.consume: Final = theirs.consume
        self.rewind: Final = theirs.rewind
        self.committed: Final = theirs.committed
        self.uncommitted: Final = theirs.uncommitted

    # --- what is known

    @property
    def outbox(self) -> int:
        """Bytes of messages that wait for the transport."""
        return self._ours.outbox.used

    @property
    def unanswered(self) -> int:
        """Messages of ours that are still in a window."""
        return self._ours.unanswered

    @property
    def held_bytes(self) -> int:
        """Bytes received and not consumed, including the overhead of each message."""
        return self._theirs.bytes

    @property
    def retained_bytes(self) -> int:
        """Bytes queued, or sent and not yet released from the window, including the overhead of each message."""
        return self._ours.retained

    @property
    def channel_count(self) -> int:
        """Channels of both directions that take memory."""
        return len(self._ours.live) + len(self._theirs.live)

    def queued(self, channel: int) -> int:
        """Return how many messages of a channel of ours are queued and not written yet."""
        outgoing = self._ours.live.get(channel)
        return 0 if outgoing is None else len(outgoing.unsent)

    @property
    def owed_answers(self) -> int:
        """Channels of the peer with committed messages that we have not answered."""
        return self._theirs.unanswered

    @property
    def owes_control(self) -> bool:
        """True if pings, pongs, acks or a resume wait to be written. Cheaper than `has_output`."""
        theirs, probes = self._theirs, self.probes
        if probes.pongs or probes.pings or theirs.dirty or theirs.resume_left or theirs.unopened:
            return True
        return bool(probes.unproven) and probes.may_ask

    @property
    def bytes_received(self) -> int:
        """Bytes parsed on the present connection."""
        return self._parser.offset

    @property
    def arrivals(self) -> int:
        """A count that changes with each message received, announced by an event or not."""
        return self._theirs.arrivals

    @property
    def channels(self) -> tuple[int, ...]:
        """Our open channels, including those whose close is not confirmed yet."""
        return tuple(self._ours.live)

    @property
    def peer_channels(self) -> tuple[int, ...]:
        """The peer's open channels."""
        return tuple(self._theirs.live)

    # --- connections

    def connection_made(self, now: float, *, epoch: int, link_id: int) -> None:
        """Start a connection after its handshake (`Agreed`).

        If it names another link than ours, everything about ours is gone: `LinkReplaced` or `EpochChanged`.
        """
        self.check_alive()
        if self.is_connected:
            raise LocalProtocolError("there is a connection already; connection_lost comes first")
        if not link_id or not epoch:
            raise LocalProtocolError(f"epoch {epoch} and link id {link_id} name no link")
        self.now: float = now
        resumes = (epoch, link_id) == (self.epoch, self.link_id)
        if self.link_id and not resumes:
            self._replace(epoch, link_id)
        self.epoch, self.link_id = epoch, link_id
        self._parser.restart()
        self.is_connected = True
        self.resumes: bool = resumes
        self.peer_resumed: bool = not resumes
        self.told_resume: bool = not resumes
        self.shutdown_written: bool = False
        self.observe_state("link", "connected")
        self.probes.reset()
        self._ours.connect()
        self._theirs.connect()
        self._keepalive.start(now)

    def connection_lost(self, now: float) -> None:
        """End the connection: bytes that were pulled may not have arrived. Does nothing without a connection."""
        if self.is_connected:
            self.now = now
            self._stall.stop()
            self.is_connected: bool = False
            for timer in Timer:
                self.deadlines.stop(timer)
            self._ours.disconnect()
            self._theirs.disconnect()
            self._parser.restart()
            self.unparsed = 0

    def link_lost(self, now: float, *, epoch: int = 0) -> None:
        """Drop the link after `Refused`: the listener does not know it. A new one may follow."""
        self.check_alive()
        self.now = now
        if self.link_id:
            self._replace(epoch, 0)
            self.epoch: int = 0

    def _replace(self, epoch: int, link_id: int) -> None:
        event = LinkReplaced if epoch == self.epoch else EpochChanged
        told = event(self.epoch, self.link_id, epoch, link_id, self._ours.unanswered)
        watched = [*self._ours.watchers]
        self._reset()
        self._ours.reset()
        self._theirs.reset()
        self.link_id: int = link_id
        self.happened.append(told)
        self.happened.extend(Writable(channel) for channel in watched)

    # --- the stream

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Parse received bytes; never raises."""
        parser = self._parser
        if self.over or not self.is_connected:
            return
        self.now = now
        failure = parser.feed(data, self.frames_at_once)
        self.unparsed = parser.unparsed
        if failure is not None:
            self._stop(Failed(failure))
            if self.observer is not None:
                self.observer.error(failure)
            return
        self._keepalive.heard(now)
        if parser.is_mid_packet:
            self._is_watching = True
            self._stall.watch(now, parser.offset)
        elif self._is_watching:
            self._is_watching = False
            self._stall.stop()
        if self.has_peer_shut_down:
            self._check_finished()

    def receive_eof(self, now: float) -> None:
        """Report the end of the stream; `connection_lost` is still to be called."""
        if not self.is_connected or self.over:
            return
        is_clean = not self._parser.is_mid_packet
        self.happened.append(HungUp(clean=is_clean))
        # A peer that hangs up after both shutdowns has discarded the link (3.6), and dialling again would make a new
        # one. Acks and proofs that are still under way concern nobody then; messages that nobody confirmed do.
        if is_clean and self.has_peer_shut_down and self.shutdown_written and not self._has_unconfirmed_messages:
            self._finish()

    def events(self) -> Sequence[Event]:
        events = self.happened
        if not events:
            return ()
        self.happened: list[Event] = []
        self._theirs.fresh.clear()
        return events

    def has_output(self) -> bool:
        if self.over or not self.is_connected:
            return False
        if self._ours.scheduler.line or self.owes_control:
            return True
        return self.is_shutting_down and self._may_write_shutdown

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        out = list[Buffer]()
        if self.over or not self.is_connected:
            return out
        written = self._write_control(limit, out) if self.owes_control else 0
        if written < limit:
            self._ours.scheduler.pull(limit - written, out)
            if self.probes.wants_proof and not (self._theirs.dirty or self._theirs.resume_left):
                self.probes.write_proof(out)
        if self.is_shutting_down:
            if self._may_write_shutdown:
                self.shutdown_written = True
                out.append(SHUTDOWN)
            self._check_finished()
        if self.observer is not None:
            observe_written(self.observer, out, self._bounds, self.repeats)
        return out

    def _write_control(self, limit: int, out: list[Buffer]) -> int:
        """Write what is owed, before messages; about `limit` bytes at most."""
        theirs, probes = self._theirs, self.probes
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
        ours = self._ours
        if self.shutdown_written or ours.unannounced:
            return False
        return self.out_id_size > 0 or all(one.close_written for one in ours.live.values())

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """Let this block send and pull although the peer broke a rule, which ended only what we can read."""
        was_over = self.over
        self.over = False
        try:
            yield
        finally:
            self.over = was_over

    def _stop(self, last: Event) -> None:
        self.happened.append(last)
        self.over: bool = True
        self.unparsed = 0

    def _check_finished(self) -> None:
        """End the link once both shutdowns were sent and every message is confirmed; acks no longer wait for a timer.

        A `closed` for our close is not waited for: both shutdowns are enough (3.6), and with ids of 0 bytes the
        original program never sends one. Our closes are written before the end, for a peer that does wait for them.
        """
        ours, theirs = self._ours, self._theirs
        if not (self.has_peer_shut_down and self.is_shutting_down) or self.over:
            return
        if self.is_connected:
            theirs.make_all_due()
        if not (self.shutdown_written and theirs.is_clear) or self._has_unconfirmed_messages or self.probes.ending:
            return
        if not ours.closing or all(one.close_written for one in ours.live.values() if one.closing):
            self._finish()

    @property
    def _has_unconfirmed_messages(self) -> bool:
        """True while one of the two applications may still have to process a message of this link."""
        return bool(self._ours.retained or self._theirs.bytes or self._theirs.unanswered)

    def _finish(self) -> None:
        """End the link in order. The peer has everything of the channels that we closed, so they are closed."""
        for outgoing in [one for one in self._ours.live.values() if one.closing]:
            outgoing.closed()
        self._stop(Finished())

    # --- time

    def next_deadline(self) -> float | None:
        return None if self.over else self.deadlines.next

    def handle_deadline(self, now: float) -> None:
        if self.over:
            return
        self.now = now
        for timer in self.deadlines.expired(now):
            if self.observer is not None:
                self.observer.timer(timer.value)
            if timer is Timer.ACKS:
                self._theirs.make_all_due()
            elif timer is Timer.KEEPALIVE:
                if self._keepalive.is_due(now):
                    self.probes.pings.append(Purpose.ALIVE)
                    self._keepalive.asked(now)
            elif timer is Timer.ANSWER:
                self.happened.append(Silent(self._keepalive.silence(now)))
                return
            elif self._stall.shortfall(self._parser.offset) is not None:
                self.happened.append(Silent(self.limits.stall, stalled=True))
                return
            else:
                self._stall.watch(now, self._parser.offset)

    # --- the link

    def ping(self) -> None:
        """Send a ping; `Ponged` comes with the answer, unless the connection is lost before."""
        self.check_alive()
        if not self.is_connected:
            raise LocalProtocolError("there is no connection to ping on")
        self.probes.pings.append(Purpose.ASKED)

    def shutdown(self) -> None:
        """Open no more channels; `Finished` follows once the peer has done the same and every message is confirmed."""
        self.check_alive()
        self.is_shutting_down = True
