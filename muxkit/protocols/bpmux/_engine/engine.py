"""The rules of bpmux/rel as one object: bytes and commands in, events and bytes out; no Trio, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.protocols.bpmux._config import Config
from muxkit.protocols.bpmux._engine.entities import OURS, Entity, Kind
from muxkit.protocols.bpmux._engine.events import Event, Failed, HungUp
from muxkit.protocols.bpmux._engine.liveness import Liveness
from muxkit.protocols.bpmux._engine.opening import Openings
from muxkit.protocols.bpmux._engine.outgoing import OVERHEAD
from muxkit.protocols.bpmux._engine.reader import Reader
from muxkit.protocols.bpmux._engine.state import State
from muxkit.protocols.bpmux._engine.tracing import observe_written

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from muxkit._observer import Observer
    from muxkit.core import Buffer, Outbox

CHANNEL_PRICE = 5 * 1024  # bytes of memory for a duplex, its session objects and a task that handles it


class Engine:
    """One end of a bpmux/rel connection; a `StreamEngine`.

    Commands take and give `Entity` objects. A command either does all of its work or raises
    `LocalProtocolError` and changes nothing. `consumed` must be called for every `Message` that the application
    has taken, or the peer's credit is never renewed.
    """

    def __init__(
        self, config: Config | None = None, *, limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        self.config = config or Config()
        self.limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self._observer = observer
        self._state = State(self.config, self.limits, observer)
        self._reader = Reader(self._state)
        self._openings = Openings(self._state)
        self._liveness = Liveness(self._state, self._reader)
        self._largest = self.limits.message
        self.consumed = self._state.consume
        """The application has taken so many bytes of an entity's messages; harmless after the entity is gone.

        Gives whether that makes something to write.
        """
        self.over = False
        self.hung_up_cleanly = False

    # --- what is known

    @property
    def top_sink(self) -> Entity:
        """Where top-level messages to the peer go."""
        return self._state.top_sink

    @property
    def top_stream(self) -> Entity:
        """Where top-level messages of the peer come from."""
        return self._state.top_stream

    def entities(self, kind: Kind) -> dict[int, Entity]:
        """One of the six maps of the document; to look at, not to change."""
        return self._state.maps[kind]

    @property
    def channels(self) -> int:
        """Live channels of both sides, requests included, the top level not."""
        return self._state.ours + self._state.theirs

    @property
    def places(self) -> int:
        """How many more channels of ours the limit leaves room for."""
        return self.limits.channels - self._state.ours

    @property
    def outbox(self) -> int:
        """Bytes that are queued and wait only for the transport."""
        return self._state.outbox.used

    @property
    def waiting(self) -> Outbox:
        """`outbox` as an object, for those who ask often."""
        return self._state.outbox

    @property
    def messages_sent(self) -> int:
        return self._state.messages_sent

    @property
    def bytes_received(self) -> int:
        return self._reader.offset

    @property
    def unread(self) -> int:
        """Channels that the peer opened and ended, and of which not everything was consumed."""
        return len(self._state.unread)

    @property
    def unparsed(self) -> int:
        """Bytes that came beyond `frames_at_once` chunks; `receive_bytes(b"", now)` goes on with them."""
        return 0 if self.over else self._reader.unparsed

    @property
    def frames_at_once(self) -> int:
        """Chunks that one call of `receive_bytes` parses at most."""
        return self._reader.frames_at_once

    @frames_at_once.setter
    def frames_at_once(self, count: int) -> None:
        self._reader.frames_at_once = count

    @property
    def live(self) -> int:
        """Live entities, those of the top level and both halves of duplexes included."""
        return sum(map(len, self._state.maps))

    @property
    def is_quiet(self) -> bool:
        """Is nothing alive, the top level included?"""
        return not any(self._state.maps)

    # --- the stream

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Take in what came; never raises."""
        if self.over:
            return
        self._state.now = now
        failure = self._reader.feed(data)
        if failure is not None:
            self._stop(Failed(failure))
        else:
            self._liveness.heard(now)

    def receive_eof(self, now: float) -> None:
        """The peer will send nothing more."""
        if not self.over:
            clean = not self._reader.is_mid_chunk and self.channels == 0
            self.hung_up_cleanly = clean
            self._stop(HungUp(clean))

    def events(self) -> Sequence[Event]:
        events = self._state.events
        if not events:
            return ()
        self._state.events = []
        return events

    def has_output(self) -> bool:
        control = self._state.control
        return bool(control.dirty or control.acks or self._state.scheduler.line) and not self.over

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        out: list[Buffer] = []
        if not self.over:
            control = self._state.control
            written = control.write(limit, out) if control.dirty or control.acks else 0
            if written < limit:
                self._state.scheduler.pull(limit - written, out)
            if self._observer is not None:
                observe_written(self._observer, out)
        return out

    # --- time

    def next_deadline(self) -> float | None:
        return None if self.over else self._liveness.next()

    def handle_deadline(self, now: float) -> None:
        if not self.over:
            last = self._liveness.handle(now)
            if last is not None:
                self._stop(last)

    def _stop(self, last: Event) -> None:
        self._state.events.append(last)
        if self._observer is not None and isinstance(last, Failed):
            self._observer.error(last.error)
        self.over = True

    # --- opening

    def open_sink(self, payload: bytes = b"", *, id: int | None = None) -> Entity:
        """A new entity that we send messages on. The opening is queued at once."""
        self._check_alive()
        return self._openings.sink(payload, id)

    def open_stream(self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None) -> Entity:
        """A new entity that the peer sends messages on. `credit` grants by hand instead of automatically."""
        self._check_alive()
        return self._openings.stream(payload, id, credit)

    def open_duplex(
        self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None
    ) -> tuple[Entity, Entity]:
        """A sink and a stream with one id."""
        self._check_alive()
        return self._openings.duplex(payload, id, credit)

    def open_request(self, payload: bytes = b"", *, id: int | None = None, credit: int | None = None) -> Entity:
        """A question that the peer answers once. `credit` is what the answer may need."""
        self._check_alive()
        return self._openings.request(payload, id, credit)

    # --- sending

    def admits(self, entity: Entity, size: int) -> bool:
        """May a message of `size` bytes be sent now?

        Yes if credit covers it beside what is queued, or if nothing is queued and there is some credit: then
        the engine keeps the tail and sends it in parts as credit comes.
        """
        outgoing = entity.outgoing
        if outgoing is None:
            return entity.credit.available > 0 or size == 0
        return outgoing.admits(size)

    def watch(self, entity: Entity, size: int = 1) -> None:
        """Tell me with `Writable` when a message of `size` bytes may fit; an empty one needs no credit."""
        self._state.outgoing(entity).watch(size)

    def send(self, entity: Entity, payload: bytes, *, end: bytes | None = None) -> None:
        """Queue a message, and with it perhaps the end of the entity; all of it or nothing."""
        self._check_sending(entity, "send on")
        answers = entity.kind is Kind.REQUEST_IN
        if answers and end is not None:
            raise LocalProtocolError(f"{entity.label}: an answer is the end of its request, and has no other")
        if entity.receives:
            raise LocalProtocolError(f"{entity.label}: messages on it come from the peer")
        size = len(payload)
        if size > self.limits.message:
            self._check_size(size, entity.label)
        if not self.admits(entity, size):
            raise LocalProtocolError(f"{entity.label}: {size} bytes to send against {entity.credit_out} of credit")
        outgoing = self._state.outgoing(entity)
        if end:
            self._check_size(len(end), entity.label)
            if outgoing.queued + outgoing.claimed + size + len(end) > entity.credit_out:
                raise LocalProtocolError(
                    f"{entity.label}: {size} + {len(end)} bytes to send against {entity.credit_out} of credit"
                )
        self._state.push(outgoing, payload)
        if end is not None:
            outgoing.close(end)
        if answers or end is not None:
            self._state.ending(entity)
        elif not outgoing.scheduled and outgoing.is_ready():
            self._state.scheduler.add(outgoing)

    def try_send(self, entity: Entity, payload: bytes) -> bool:
        """`send` for what most messages are: short, and covered by credit. False, and nothing done, if it is not."""
        outgoing, size = entity.outgoing, len(payload)
        if outgoing is None or not outgoing.accepts or size > self._largest or self.over:
            return False
        if size > entity.credit.available - outgoing.queued - outgoing.claimed:
            return False
        state, queue = self._state, outgoing.queue  # `push_covered`, without its calls: this runs for each message
        (queue or outgoing.ready_queue()).append(payload)
        outgoing.queued += size
        outgoing.counted += size + OVERHEAD
        state.outbox.used += size + OVERHEAD
        state.messages_sent += 1
        if not outgoing.scheduled and (entity.announced or outgoing.is_ready()):
            state.scheduler.add(outgoing)
        return True

    def try_send_all(self, entity: Entity, payloads: list[bytes]) -> bool:
        """The same for several: all or none."""
        outgoing = entity.outgoing
        if outgoing is None or not outgoing.accepts or self.over:
            return False
        sizes = [*map(len, payloads)]
        size = sum(sizes)
        if size > entity.credit.available - outgoing.queued - outgoing.claimed or max(sizes) > self._largest:
            return False
        self._state.push_covered(outgoing, payloads, size)
        return True

    def send_many(self, entity: Entity, payloads: Iterable[bytes]) -> int:
        """Queue messages as long as they are admitted; gives how many were. It raises only if the first is refused."""
        self._check_sending(entity, "send on")
        count = 0
        for payload in payloads:
            if not self.admits(entity, len(payload)):
                break
            if count and (entity.ending or len(payload) > self.limits.message):
                break
            self.send(entity, payload)
            count += 1
        return count

    def end(self, entity: Entity, payload: bytes = b"") -> None:
        """Say that we are done with an entity: close what we send on, or cancel what the peer sends on.

        A payload is paid from the entity's credit. Messages queued before are sent first, and before the end of
        the top level all openings.
        """
        self._check_sending(entity, "end")
        if payload:
            self._check_size(len(payload), entity.label)
        if payload and not self.admits(entity, len(payload)):
            raise LocalProtocolError(
                f"{entity.label}: an end payload of {len(payload)} bytes against {entity.credit_out} of credit"
            )
        self._state.outgoing(entity).close(payload)
        self._state.ending(entity)

    def abort(self, entity: Entity) -> None:
        """Forget what was not begun, also if its end is queued already, then end; harmless once the end is out.

        On a sink, and for a request that is not answered, the end has a payload, by custom an error. It may have
        to wait for a byte of credit, since without it the peer would take the messages for complete.
        """
        self._check_alive()
        if entity.gone:
            raise LocalProtocolError(f"{entity.label}: cannot abort an entity that is gone")
        if entity.end_out:
            return
        if entity is self.top_sink:
            self._state.decline(begun=False)
        outgoing = self._state.outgoing(entity)
        lost = outgoing.drop_unbegun()
        if lost:
            outgoing.reopen()
        if not entity.ending:
            # The end of a request without an answer cannot be taken for one, so it need not wait for credit.
            can_explain = entity.kind is not Kind.REQUEST_IN or entity.credit_out > 0
            outgoing.close(b"" if entity.receives or not can_explain else ABORTED)
        self._state.count(outgoing, outgoing.waits_for_transport())
        self._state.ending(entity)

    def refuse(self, entity: Entity) -> None:
        """End both halves of what the peer has just opened; too many of these end the connection.

        Harmless when the entity, or the connection, is over already.
        """
        if self.over:
            return
        if not self._state.resets.take(self._state.now):
            self._stop(Failed(RemoteProtocolError("too many channels opened to be refused", limit="backlog")))
            return
        for half in (entity, entity.twin):
            if half is not None and not half.gone and not half.ending:
                self.end(half)

    def blame(self, entity: Entity) -> None:
        """Work for the peer failed: too many of these on channels that it made end the connection."""
        if self.over or entity.kind in OURS or self._state.resets.take(self._state.now):
            return
        burst, rate = self.limits.resets_burst, self.limits.resets_per_second
        what = f"more than {burst} channels of the peer failed at once and {rate} a second"
        self._stop(Failed(RemoteProtocolError(what, limit="resets_per_second")))

    def _check_sending(self, entity: Entity, what: str) -> None:
        self._check_alive()
        if entity.gone:
            raise LocalProtocolError(f"{entity.label}: cannot {what} an entity that is gone")
        if entity.ending:
            raise LocalProtocolError(f"{entity.label}: cannot {what} it, it was ended")

    def _check_size(self, size: int, what: str) -> None:
        if size > self.limits.message:
            raise LocalProtocolError(f"{what}: {size} bytes against Limits(message={self.limits.message})")

    def _check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the connection is over")

    # --- control

    def give_credit(self, entity: Entity, amount: int) -> None:
        """Grant by hand, beside what is granted automatically."""
        self._check_sending(entity, "give credit for")
        entity.own_window().grant(amount)
        self._state.renew(entity, amount)
        self._state.top_up(entity)

    def consumed_opening(self, size: int) -> None:
        """The application has taken an opening payload."""
        self._state.consume(self.top_stream, size)

    def ping(self, entity: Entity) -> None:
        """Ask for a sign of life; the answer is a `Ponged`."""
        self._check_sending(entity, "ping")
        self._state.control.owe_ping(entity)

    def pong(self, entity: Entity) -> None:
        """Answer a ping by hand (with `Config(pongs=False)`)."""
        self._check_sending(entity, "pong")
        self._state.control.owe_pong(entity)


ABORTED = b"\x01"  # any payload but an empty one means that the sender failed
