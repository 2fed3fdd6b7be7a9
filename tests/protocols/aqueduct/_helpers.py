"""A scripted peer of one engine: the bytes that it sends, the events of the engine, and what the engine writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.core import Reset
from muxkit.protocols.aqueduct import (
    Acked,
    Arrived,
    Config,
    Connected,
    Ended,
    Engine,
    Failed,
    HungUp,
    Nacked,
    Parted,
    Role,
    Silent,
    Unclaimed,
    Writable,
)
from muxkit.protocols.aqueduct.frames import VERSION

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError
    from muxkit._limits import Limits
    from muxkit.protocols.aqueduct import Event, Headers, ReceiverMachine, SenderMachine

V = VERSION.hex()
EMPTY = "04 00 00 00 00"  # MESSAGE 0 without anything


def summary_of(event: Event) -> tuple[object, ...]:
    """Give an event as a tuple that can be compared."""
    name = type(event).__name__
    match event:
        case Arrived():
            return name, event.receiver.id, event.number, event.payload
        case Acked() | Nacked():
            return name, event.receipt.sender.id
        case Writable():
            return name, event.sender.id
        case Connected():
            return name, event.headers
        case Parted():
            return name, event.reason
        case HungUp():
            return name, event.clean
        case Silent():
            return name, event.seconds
        case Failed():
            return name, event.error.rule
        case Ended():
            return event.outcome.value.title().replace(" ", ""), event.half.id
        case Unclaimed():
            return name, event.half.id


class ScriptedPeer:
    """One engine and its peer as a script. The peer's streams get new numbers unless one is given."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = 0.0
        self.last = -1
        self._next = 2 + engine.role.peer

    def send(self, text: str, *, stream: int | None = None, fin: bool = False) -> list[tuple[object, ...]]:
        """Send the next bytes of a stream; give the events of the engine."""
        if stream is None:
            stream, self._next = self._next, self._next + 4
        self.last = stream
        self.engine.receive_stream(stream, bytes.fromhex(text), fin, self.now)
        return self.events()

    def datagram(self, text: str) -> list[tuple[object, ...]]:
        self.engine.receive_datagram(bytes.fromhex(text), self.now)
        return self.events()

    def reset(self, stream: int) -> list[tuple[object, ...]]:
        self.engine.receive_reset(stream, self.now)
        return self.events()

    def events(self) -> list[tuple[object, ...]]:
        return [summary_of(event) for event in self.engine.events()]

    def messages(self, text: str, *, stream: int | None = None) -> list[Arrived]:
        """Send the next bytes of a stream; give the messages that arrived."""
        if stream is None:
            stream, self._next = self._next, self._next + 4
        self.engine.receive_stream(stream, bytes.fromhex(text), False, self.now)
        return [event for event in self.engine.events() if isinstance(event, Arrived)]

    def violation(self, text: str, *, stream: int | None = None, fin: bool = False) -> RemoteProtocolError:
        """Send bytes that break a rule; give the error."""
        if stream is None:
            stream, self._next = self._next, self._next + 4
        self.engine.receive_stream(stream, bytes.fromhex(text), fin, self.now)
        return self.failure()

    def datagram_violation(self, text: str) -> RemoteProtocolError:
        self.engine.receive_datagram(bytes.fromhex(text), self.now)
        return self.failure()

    def failure(self) -> RemoteProtocolError:
        last = [*self.engine.events()][-1]
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
            self.engine.handle_deadline(due)
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
    assert peer.engine.is_connected
    return peer


def server(*, config: Config | None = None, limits: Limits | None = None) -> ScriptedPeer:
    return opened(Role.SERVER, config=config, limits=limits)


def client(*, config: Config | None = None, limits: Limits | None = None) -> ScriptedPeer:
    return opened(Role.CLIENT, config=config, limits=limits)


def entry(peer: ScriptedPeer) -> SenderMachine:
    """Give the entrypoint of a client."""
    return peer.engine.senders[0]


def receiver_of(peer: ScriptedPeer, channel: int) -> ReceiverMachine:
    return peer.engine.receivers[channel]


def sender_of(peer: ScriptedPeer, channel: int) -> SenderMachine:
    return peer.engine.senders[channel]
