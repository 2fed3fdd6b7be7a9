"""A scripted peer of one engine: the bytes that it sends, the events of the engine, and what the engine writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from muxkit.core import Reset
from muxkit.core.events import Cancelled, Confirmed, Failed, Finished, HungUp, Received, Silent, Stopped, Writable
from muxkit.protocols.aqueduct import Config, Engine, Role
from muxkit.protocols.aqueduct.events import Acked, Arrived, Connected, Lost, Nacked, Parted, Unclaimed
from muxkit.protocols.aqueduct.frames import VERSION
from muxkit.protocols.aqueduct.half import EngineHalf, Outcome
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from muxkit._errors import RemoteProtocolError
    from muxkit._limits import Limits
    from muxkit.core import ReceiveBudget, ReceiveWindow, StreamId
    from muxkit.protocols.aqueduct.carrier import Carrier
    from muxkit.protocols.aqueduct.events import Event
    from muxkit.protocols.aqueduct.frames import Headers

V = VERSION.hex()
EMPTY = "04 00 00 00 00"  # MESSAGE 0 without anything


@attrs.define
class Statistics:
    """What an engine holds at this moment."""

    channels: int
    streams_in: int
    streams_out: int
    outbox: int
    ended_unattached: int
    dropped_datagrams: int


def statistics_of(engine: Engine) -> Statistics:
    state = engine.state
    return Statistics(
        channels=engine.channels,
        streams_in=len(state.incoming),
        streams_out=len(state.streams.streams),
        outbox=engine.outbox,
        ended_unattached=state.ended_unattached,
        dropped_datagrams=state.dropped_datagrams,
    )


class HasWindow(Protocol):
    """A stream of the peer as a carrier keeps it."""

    window: ReceiveWindow
    over: bool


def incoming_of(carrier: Carrier) -> Mapping[StreamId, HasWindow]:
    """Return the streams of the peer on which something can still arrive, or is not consumed yet."""
    return carrier._incoming


def unlent_early_bytes_of(carrier: Carrier) -> int:
    """Return how many of the bytes that new streams may send early are neither granted nor due: none, at any time."""
    return carrier._early_most - carrier._early_granted - carrier._early_due


def budget_of(carrier: Carrier) -> ReceiveBudget:
    """Return the budget that the windows of a carrier's streams share."""
    return carrier._budget


def senders_of(engine: Engine) -> dict[int, EngineSender]:
    """Give the live senders by id."""
    return {half.id or 0: half for half in engine.halves if isinstance(half, EngineSender)}


def receivers_of(engine: Engine) -> dict[int, EngineReceiver]:
    """Give the live receivers by id."""
    return {half.id or 0: half for half in engine.halves if isinstance(half, EngineReceiver)}


def flat(events: Iterable[Event]) -> list[Event | Arrived]:
    """Give events with the messages of each `Received` in its place."""
    result: list[Event | Arrived] = []
    for event in events:
        result += event.items if isinstance(event, Received) else [event]
    return result


def ended_half(event: object) -> EngineHalf | None:
    """Give the half whose end an event reports."""
    half: object
    match event:
        case Finished() | Cancelled():
            half = event.receiver
        case Stopped():
            half = event.sender
        case Confirmed() | Lost():
            half = event.half
        case _:
            return None
    assert isinstance(half, EngineHalf)
    return half


def outcome_in(event: object) -> Outcome:
    """Give the outcome that the end of a half is reported with."""
    half = ended_half(event)
    assert half is not None
    if isinstance(event, Stopped):
        assert isinstance(half, EngineSender)
        assert Outcome.NO_RECEIVER in (half.outcome, half.outcome_told)
        return Outcome.NO_RECEIVER
    assert half.outcome is not None
    return half.outcome


def taken(message: Arrived) -> bool:
    """Count a message as taken by the application."""
    return message.receiver.consumed([message], len(message.payload))


def summary_of(event: Event | Arrived) -> tuple[object, ...]:
    """Give an event as a tuple that can be compared."""
    name = type(event).__name__
    half = ended_half(event)
    if half is not None:
        return outcome_in(event).value.title().replace(" ", ""), half.id
    match event:
        case Arrived():
            return name, event.receiver.id, event.number, event.payload
        case Acked() | Nacked():
            return name, event.receipt.sender.id
        case Writable():
            assert isinstance(event.sender, EngineSender)
            return name, event.sender.id
        case Connected():
            return name, event.headers
        case Parted():
            return name, event.reason
        case HungUp():
            return name, event.is_clean
        case Silent():
            return name, event.seconds
        case Failed():
            return name, event.error.rule
        case Unclaimed():
            return name, event.half.id
        case _:
            raise AssertionError(event)


class ScriptedPeer:
    """One engine and its peer as a script. The peer's streams get new numbers unless one is given."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.happened: list[Event] = []  # returned by the engine, and not asked for yet
        self.now = 0.0
        engine.state.clock = self
        self.last = -1
        self._next = 2 + engine.role.peer

    def send(self, text: str, *, stream: int | None = None, fin: bool = False) -> list[tuple[object, ...]]:
        """Send the next bytes of a stream; give the events of the engine."""
        if stream is None:
            stream, self._next = self._next, self._next + 4
        self.last = stream
        self.receive_stream(stream, bytes.fromhex(text), fin, self.now)
        return self.events()

    def datagram(self, text: str) -> list[tuple[object, ...]]:
        self.receive_datagram(bytes.fromhex(text), self.now)
        return self.events()

    def reset(self, stream: int) -> list[tuple[object, ...]]:
        self.receive_reset(stream, self.now)
        return self.events()

    def current_time(self) -> float:
        """The clock of the engine."""
        return self.now

    # The engine returns events, which tests ask for later.

    def receive_stream(self, stream: int, data: bytes, fin: bool, now: float) -> None:
        self.happened += self.engine.receive_stream(stream, data, fin, now)

    def receive_datagram(self, data: bytes, now: float) -> None:
        self.happened += self.engine.receive_datagram(data, now)

    def receive_reset(self, stream: int, now: float) -> None:
        self.happened += self.engine.receive_reset(stream, now)

    def receive_stopped(self, stream: int, now: float) -> None:
        self.happened += self.engine.receive_stopped(stream, now)

    def receive_closed(self, now: float) -> None:
        self.happened += self.engine.receive_closed(now)

    def handle_deadline(self, now: float) -> None:
        self.happened += self.engine.handle_deadline(now)

    def full_events(self) -> list[Event | Arrived]:
        """Give what happened since the last call."""
        events, self.happened = [*self.happened, *self.engine.events()], []
        return flat(events)

    def events(self) -> list[tuple[object, ...]]:
        return [summary_of(event) for event in self.full_events()]

    def messages(self, text: str, *, stream: int | None = None) -> list[Arrived]:
        """Send the next bytes of a stream; give the messages that arrived."""
        if stream is None:
            stream, self._next = self._next, self._next + 4
        self.receive_stream(stream, bytes.fromhex(text), False, self.now)
        return [event for event in self.full_events() if isinstance(event, Arrived)]

    def violation(self, text: str, *, stream: int | None = None, fin: bool = False) -> RemoteProtocolError:
        """Send bytes that break a rule; give the error."""
        if stream is None:
            stream, self._next = self._next, self._next + 4
        self.receive_stream(stream, bytes.fromhex(text), fin, self.now)
        return self.failure()

    def datagram_violation(self, text: str) -> RemoteProtocolError:
        self.receive_datagram(bytes.fromhex(text), self.now)
        return self.failure()

    def failure(self) -> RemoteProtocolError:
        last = self.full_events()[-1]
        assert isinstance(last, Failed), last
        assert self.engine.over
        assert not self.engine.has_output(True)
        assert self.engine.next_deadline() is None
        return last.error

    def later(self, seconds: float) -> list[tuple[object, ...]]:
        """Let time pass, with every deadline at its moment; give the events of the engine."""
        end = self.now + seconds
        while (due := self.engine.next_deadline()) is not None and due <= end:
            self.now = due
            self.handle_deadline(due)
        self.now = end
        return self.events()

    # --- what the engine writes

    def written(self, *, may_open: bool = True, limit: int = 2**30) -> list[tuple[int, str, bool]]:
        """Give (stream, bytes, whether they are its last) of everything that can be written."""
        pulled: dict[int, tuple[bytes, bool]] = {}
        while (stream := self.engine.next_stream(may_open)) is not None:
            data, fin = self.engine.stream_to_send(stream, limit)
            pulled[stream] = (pulled.get(stream, (b"", False))[0] + data, fin)
        return [(stream, data.hex(), fin) for stream, (data, fin) in pulled.items()]

    def bytes_written(self) -> list[str]:
        """Give the bytes of each stream that can be written."""
        return [data for _, data, _ in self.written()]

    def datagrams(self, limit: int = 1200) -> list[str]:
        sent = []
        while (data := self.engine.datagram_to_send(limit)) is not None:
            sent.append(data.hex())
        return sent

    def resets(self) -> list[int]:
        return [control.stream for control in self.engine.control_to_run() if isinstance(control, Reset)]


def hexed(text: str) -> str:
    return bytes.fromhex(text).hex()


def fresh(
    role: Role, *, config: Config | None = None, limits: Limits | None = None, headers: Headers = ()
) -> ScriptedPeer:
    """Make an engine before its handshake."""
    return ScriptedPeer(Engine(role, config, limits=limits, headers=headers))


def opened(role: Role, *, config: Config | None = None, limits: Limits | None = None) -> ScriptedPeer:
    """Make an engine that has finished its handshake."""
    peer = fresh(role, config=config, limits=limits)
    peer.send(V + "01 02 00", fin=True)
    peer.written()
    peer.engine.control_to_run()
    assert peer.engine.reader.handshake.is_connected
    return peer


def server(*, config: Config | None = None, limits: Limits | None = None) -> ScriptedPeer:
    return opened(Role.SERVER, config=config, limits=limits)


def client(*, config: Config | None = None, limits: Limits | None = None) -> ScriptedPeer:
    return opened(Role.CLIENT, config=config, limits=limits)


def entry(peer: ScriptedPeer) -> EngineSender:
    """Give the entrypoint of a client."""
    return senders_of(peer.engine)[0]


def receiver_of(peer: ScriptedPeer, channel: int) -> EngineReceiver:
    return receivers_of(peer.engine)[channel]


def sender_of(peer: ScriptedPeer, channel: int) -> EngineSender:
    return senders_of(peer.engine)[channel]
