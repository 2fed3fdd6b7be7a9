"""The rules of a Relink link as one object that outlives its connections; no Trio, no clock."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


class LinkEngine:
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
        link = LinkState(config, limits, observer, is_connector=is_connector)
        self.config = config
        self.limits = limits
        self.is_connector = is_connector
        self._link = link
        self._ours = ours = OurChannels(link)
        self._theirs = theirs = PeerChannels(link)
        self._observer = observer
        self._bounds = bounds_of(config, is_connector=is_connector, message=limits.message)
        self._parser = Parser(link, ours, theirs, self._bounds)
        self._keepalive: Keepalive[Timer] = Keepalive(
            link.deadlines,
            Timer.KEEPALIVE,
            Timer.ANSWER,
            interval=config.keepalive,
            timeout=config.keepalive_timeout,
        )
        self._stall: StallWatch[Timer] = StallWatch(
            link.deadlines, Timer.STALL, seconds=limits.stall, least=limits.stall_bytes
        )
        self._is_watching = False  # a packet was unfinished behind the last read
        self.frames_at_once = sys.maxsize
        """Packets that one call of `receive_bytes` parses at most."""
        self.unparsed = 0
        """Bytes that came beyond these; `receive_bytes(b"", now)` goes on with them.

        A multicast that not all of its channels have yet counts as one more.
        """
        self.waiting: Outbox = ours.outbox
        """The counter behind `outbox`, which changes in place."""

        # The commands on channels are those of the two tables.
        self.room = ours.room
        self.admits = ours.admits
        self.watch = ours.watch
        self.send = ours.send
        self.try_send = ours.try_send
        self.try_send_all = ours.try_send_all
        self.send_many = ours.send_many
        self.multicast = ours.multicast
        self.fits = ours.fits
        self.check_targets = ours.check_targets
        self.commit = ours.commit
        self.rollback = ours.rollback
        self.close = ours.close
        self.consume = theirs.consume
        self.rewind = theirs.rewind
        self.committed = theirs.committed
        self.uncommitted = theirs.uncommitted

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

    @property
    def owed_answers(self) -> int:
        """Channels of the peer with committed messages that we have not answered."""
        return self._theirs.unanswered

    @property
    def owes_control(self) -> bool:
        """True if pings, pongs, acks or a resume wait to be written. Cheaper than `has_output`."""
        theirs, probes = self._theirs, self._link.probes
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
        link = self._link
        link.check_alive()
        if link.connected:
            raise LocalProtocolError("there is a connection already; connection_lost comes first")
        if not link_id or not epoch:
            raise LocalProtocolError(f"epoch {epoch} and link id {link_id} name no link")
        link.now = now
        resumed = (epoch, link_id) == (link.epoch, link.link_id)
        if link.link_id and not resumed:
            self._replace(epoch, link_id)
        link.epoch, link.link_id = epoch, link_id
        self._parser.restart()
        link.connect(resumed=resumed)
        self._ours.connect()
        self._theirs.connect()
        self._keepalive.start(now)

    def connection_lost(self, now: float) -> None:
        """End the connection: bytes that were pulled may not have arrived. Does nothing without a connection."""
        link = self._link
        if link.connected:
            link.now = now
            self._stall.stop()
            link.disconnect()
            self._ours.disconnect()
            self._theirs.disconnect()
            self._parser.restart()
            self.unparsed = 0

    def link_lost(self, now: float, *, epoch: int = 0) -> None:
        """Drop the link after `Refused`: the listener does not know it. A new one may follow."""
        self._link.check_alive()
        self._link.now = now
        if self._link.link_id:
            self._replace(epoch, 0)
            self._link.epoch = 0

    def _replace(self, epoch: int, link_id: int) -> None:
        link = self._link
        event = LinkReplaced if epoch == link.epoch else EpochChanged
        told = event(link.epoch, link.link_id, epoch, link_id, self._ours.unanswered)
        watched = [*self._ours.watchers]
        for part in (link, self._ours, self._theirs):
            part.reset()
        link.link_id = link_id
        link.events.append(told)
        link.events.extend(Writable(channel) for channel in watched)

    # --- the stream

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Parse received bytes; never raises."""
        link, parser = self._link, self._parser
        if link.over or not link.connected:
            return
        link.now = now
        failure = parser.feed(data, self.frames_at_once)
        self.unparsed = parser.unparsed
        if failure is not None:
            self._stop(Failed(failure))
            if self._observer is not None:
                self._observer.error(failure)
            return
        self._keepalive.heard(now)
        if parser.is_mid_packet:
            self._is_watching = True
            self._stall.watch(now, parser.offset)
        elif self._is_watching:
            self._is_watching = False
            self._stall.stop()
        if link.peer_shut_down:
            self._check_finished()

    def receive_eof(self, now: float) -> None:
        """Report the end of the stream; `connection_lost` is still to be called."""
        if self._link.connected and not self._link.over:
            self._link.events.append(HungUp(clean=not self._parser.is_mid_packet))

    def events(self) -> Sequence[Event]:
        events = self._link.events
        if not events:
            return ()
        self._link.events = []
        self._theirs.fresh.clear()
        return events

    def has_output(self) -> bool:
        link = self._link
        if link.over or not link.connected:
            return False
        if self._ours.scheduler.line or self.owes_control:
            return True
        return link.wants_shutdown and self._may_write_shutdown

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        link, out = self._link, list[Buffer]()
        if link.over or not link.connected:
            return out
        written = self._write_control(limit, out) if self.owes_control else 0
        if written < limit:
            self._ours.scheduler.pull(limit - written, out)
            if link.probes.wants_proof and not (self._theirs.dirty or self._theirs.resume_left):
                link.probes.write_proof(out)
        if link.wants_shutdown:
            if self._may_write_shutdown:
                link.shutdown_written = True
                out.append(SHUTDOWN)
            self._check_finished()
        if self._observer is not None:
            observe_written(self._observer, out, self._bounds)
        return out

    def _write_control(self, limit: int, out: list[Buffer]) -> int:
        """Write what is owed, before messages; about `limit` bytes at most."""
        theirs, probes = self._theirs, self._link.probes
        written = probes.write(limit, out) if probes.pongs or probes.pings else 0
        if written < limit:
            written += theirs.write(limit - written, out)
        if probes.unproven and not (theirs.dirty or theirs.resume_left):
            written += probes.write_proof(out)
        return written

    @property
    def _may_write_shutdown(self) -> bool:
        """True if shutdown, once it is wanted, can be written: behind the first message of each of our channels."""
        return not (self._link.shutdown_written or self._ours.unannounced)

    def _stop(self, last: Event) -> None:
        self._link.events.append(last)
        self._link.over = True
        self.unparsed = 0

    def _check_finished(self) -> None:
        """Once both sides are shutting down acks do not wait, and when nothing is open the link is over."""
        link, ours, theirs = self._link, self._ours, self._theirs
        if not (link.peer_shut_down and link.wants_shutdown) or link.over:
            return
        if link.connected:
            theirs.make_all_due()
        waits = ours.retained or ours.closing or theirs.bytes or theirs.unanswered or link.probes.ending
        if link.shutdown_written and theirs.is_clear and not waits:
            self._stop(Finished())

    # --- time

    def next_deadline(self) -> float | None:
        return None if self._link.over else self._link.deadlines.next

    def handle_deadline(self, now: float) -> None:
        link = self._link
        if link.over:
            return
        link.now = now
        for timer in link.deadlines.expired(now):
            if link.observer is not None:
                link.observer.timer(timer.value)
            if timer is Timer.ACKS:
                self._theirs.make_all_due()
            elif timer is Timer.KEEPALIVE:
                if self._keepalive.is_due(now):
                    link.probes.pings.append(Purpose.ALIVE)
                    self._keepalive.asked(now)
            elif timer is Timer.ANSWER:
                link.events.append(Silent(self._keepalive.silence(now)))
                return
            elif self._stall.shortfall(self._parser.offset) is not None:
                link.events.append(Silent(self.limits.stall, stalled=True))
                return
            else:
                self._stall.watch(now, self._parser.offset)

    # --- the link

    def ping(self) -> None:
        """Send a ping; `Ponged` comes with the answer, unless the connection is lost before."""
        self._link.check_alive()
        if not self._link.connected:
            raise LocalProtocolError("there is no connection to ping on")
        self._link.probes.pings.append(Purpose.ASKED)

    def shutdown(self) -> None:
        """Open no more channels; `Finished` comes once the peer has done the same and everything is answered."""
        self._link.check_alive()
        self._link.wants_shutdown = True
