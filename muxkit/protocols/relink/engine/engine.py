"""The rules of a Relink link as one object that outlives its connections; no Trio, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core import Buffer
from muxkit.protocols.relink._config import Config
from muxkit.protocols.relink._control import SHUTDOWN, Purpose
from muxkit.protocols.relink._events import EpochChanged, Event, Failed, Finished, HungUp, LinkReplaced, Writable
from muxkit.protocols.relink._frames import bounds_of
from muxkit.protocols.relink._liveness import Liveness
from muxkit.protocols.relink._packets import Ack, Parts
from muxkit.protocols.relink._reader import Reader
from muxkit.protocols.relink._sending import Sending
from muxkit.protocols.relink._state import Link, Outbox
from muxkit.protocols.relink._tracing import observe_written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._observer import Observer
    from muxkit.protocols.relink._incoming import Incoming


CHANNEL_PRICE = 6 * 1024  # bytes of memory for a channel each way, its session objects and a task that handles it


class LinkEngine(Sending):
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
        super().__init__(Link(config, limits, observer, is_connector=is_connector))
        self.is_connector = is_connector
        self._observer = observer
        bounds = bounds_of(self.config, is_connector=is_connector, message=self.limits.message)
        self._bounds = bounds
        self._reader = Reader(self._link, bounds)
        self._liveness = Liveness(self._link, self._reader)

    # --- what is known

    @property
    def epoch(self) -> int:
        """Of the link, 0 before there is one: what a `ConnectorHandshake` has to ask for."""
        return self._link.epoch

    @property
    def link_id(self) -> int:
        """0 before there is a link."""
        return self._link.link_id

    @property
    def over(self) -> bool:
        """Finished, or failed: nothing more can be done with this object."""
        return self._link.over

    @property
    def is_connected(self) -> bool:
        return self._link.connected

    @property
    def is_resumed(self) -> bool:
        """Connected, and the peer has said what it has; always so on the first connection of a link."""
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
        """The same as an object that is asked for each message."""
        return self._link.outbox

    @property
    def unanswered(self) -> int:
        """Messages of ours that are still in a window."""
        return self._link.lost

    @property
    def held_bytes(self) -> int:
        """What came and was not consumed, the costs of keeping it included."""
        return self._link.held

    @property
    def retained_bytes(self) -> int:
        """What was sent and may have to be sent again, and what was not sent yet, counted in the same way."""
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
        """Is there anything to be written beside messages? Cheaper than `has_output`."""
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
        """On this connection."""
        return self._reader.offset

    @property
    def arrivals(self) -> int:
        """Another number when a message of the peer has come, though no event may have told of it."""
        return sum(one.arrived for one in self._link.incoming.values())

    @property
    def channels(self) -> tuple[int, ...]:
        """Ours that are open, those that wait for the confirmation of their end included."""
        return tuple(self._link.outgoing)

    @property
    def peer_channels(self) -> tuple[int, ...]:
        """The peer's that are open."""
        return tuple(self._link.incoming)

    # --- connections

    def connection_made(self, now: float, *, epoch: int, link_id: int) -> None:
        """A handshake is done (`Agreed`): packets may flow.

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
        """The connection is gone, and what was pulled may not have arrived. Harmless without one."""
        link = self._link
        if link.connected:
            link.now = now
            link.disconnect()
            self._reader.restart()

    def link_lost(self, now: float, *, epoch: int = 0) -> None:
        """The listener does not know our link (`Refused`): everything about it is gone, a new one may follow."""
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
        """Take in what came; never raises."""
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
        """The peer will send nothing more on this connection; `connection_lost` is still to be called."""
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
        """Both sides are leaving: acks that would wait for more are due."""
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
        """The application is done with the messages up to this one; harmless if they were consumed before."""
        self._link.now = now
        incoming = self._link.incoming.get(channel)
        if incoming is None:
            raise LocalProtocolError(f"the peer has no channel {channel}")
        incoming.consume(through)
        if self._link.peer_shut_down:
            self._check_finished()

    def rewind(self, channel: int) -> None:
        """Give out again what was taken and not consumed."""
        incoming = self._link.incoming.get(channel)
        if incoming is not None:
            incoming.rewind()

    def committed(self, channel: int, *, through: int, now: float) -> None:
        """The application has processed the committed messages up to this one; they count as consumed."""
        self._answer(Ack.COMMITTED, channel, through, now)

    def uncommitted(self, channel: int, *, through: int, now: float) -> None:
        """The application could not process the committed messages up to this one; they count as consumed."""
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
        """Ask for a sign of life on this connection; the answer is a `Ponged`, if the connection lives so long."""
        self._check_alive()
        if not self._link.connected:
            raise LocalProtocolError("there is no connection to ping on")
        self._link.control.ping(Purpose.ASKED)

    def shutdown(self) -> None:
        """Open no more channels; once the peer has said so as well and all is answered, `Finished` comes."""
        self._check_alive()
        self._link.wants_shutdown = True
