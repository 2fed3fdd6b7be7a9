"""An engine and a peer that is written by hand: what is said to it, what it tells, what it writes."""

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


def told(event: Event) -> tuple[object, ...]:
    """An event as something that can be compared."""
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


class Talk:
    """One engine, and the peer as a script. Streams of the peer get new numbers unless one is named."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = 0.0
        self.last = -1
        self._next = 2 + engine.role.peer

    def say(self, text: str, *, stream: int | None = None, fin: bool = False) -> list[tuple[object, ...]]:
        """The next bytes of a stream; what the engine tells about them."""
        if stream is None:
            stream, self._next = self._next, self._next + 4
        self.last = stream
        self.engine.receive_stream(stream, bytes.fromhex(text), fin, self.now)
        return self.heard()

    def datagram(self, text: str) -> list[tuple[object, ...]]:
        self.engine.receive_datagram(bytes.fromhex(text), self.now)
        return self.heard()

    def reset(self, stream: int) -> list[tuple[object, ...]]:
        self.engine.receive_reset(stream, self.now)
        return self.heard()

    def heard(self) -> list[tuple[object, ...]]:
        return [told(event) for event in self.engine.events()]

    def messages(self, text: str, *, stream: int | None = None) -> list[Arrived]:
        """The same for those who want the events themselves."""
        if stream is None:
            stream, self._next = self._next, self._next + 4
        self.engine.receive_stream(stream, bytes.fromhex(text), False, self.now)
        return [event for event in self.engine.events() if isinstance(event, Arrived)]

    def violation(self, text: str, *, stream: int | None = None, fin: bool = False) -> RemoteProtocolError:
        """What is wrong with these bytes."""
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
        """Time passes, with every deadline at its moment."""
        end = self.now + seconds
        while (due := self.engine.next_deadline()) is not None and due <= end:
            self.now = due
            self.engine.handle_deadline(due)
        self.now = end
        return self.heard()

    # --- what the engine writes

    def written(self, *, may_open: bool = True, limit: int = 2**30) -> list[tuple[int, str, bool]]:
        """(stream, bytes, is it the end) of everything that can be written."""
        pulled: dict[int, tuple[bytes, bool]] = {}
        while (stream := self.engine.next_stream(may_open)) is not None:
            data, fin = self.engine.stream_to_send(stream, limit)
            pulled[stream] = (pulled.get(stream, (b"", False))[0] + data, fin)
        return [(stream, data.hex(), fin) for stream, (data, fin) in pulled.items()]

    def bytes_written(self) -> list[str]:
        """The same without the streams."""
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
    role: Role,
    *,
    config: Config | None = None,
    limits: Limits | None = None,
    headers: Headers = (),
) -> Talk:
    """Nothing was said yet."""
    return Talk(Engine(role, config, limits=limits, headers=headers))


def opened(role: Role, *, config: Config | None = None, limits: Limits | None = None) -> Talk:
    """The handshake is over on both sides."""
    talk = fresh(role, config=config, limits=limits)
    talk.say(V + "01 02 00", fin=True)
    talk.written()
    talk.engine.control_to_run()
    assert talk.engine.is_connected
    return talk


def server(*, config: Config | None = None, limits: Limits | None = None) -> Talk:
    return opened(Role.SERVER, config=config, limits=limits)


def client(*, config: Config | None = None, limits: Limits | None = None) -> Talk:
    return opened(Role.CLIENT, config=config, limits=limits)


def entry(talk: Talk) -> SenderMachine:
    """The entrypoint of a client."""
    return talk.engine.senders[0]


def receiver_of(talk: Talk, channel: int) -> ReceiverMachine:
    return talk.engine.receivers[channel]


def sender_of(talk: Talk, channel: int) -> SenderMachine:
    return talk.engine.senders[channel]
