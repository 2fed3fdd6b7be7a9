"""Two yamux engines without a transport, and frames written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from muxkit.core import Reason
from muxkit.core.events import ChannelFailed, Failed, Opened, Received
from muxkit.protocols.yamux import Config, Engine
from muxkit.protocols.yamux.frames import HEADER, HEADER_SIZE, Flag, Type, encode_header
from muxkit.protocols.yamux.receive import StreamReceiver
from muxkit.protocols.yamux.send import StreamSender

if TYPE_CHECKING:
    from muxkit.core.events import Halves
    from muxkit.core.mux_state import MuxState

SYN, ACK, FIN, RST = Flag.SYN, Flag.ACK, Flag.FIN, Flag.RST
WINDOW = 256 * 1024
QUIET = Config(keepalive=None)


class Frame(NamedTuple):
    """One frame, with its payload if it is a data frame."""

    type: int
    flags: int
    stream: int
    length: int
    payload: bytes = b""


def data(stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return encode_header(Type.DATA, flags, stream, len(payload)) + payload


def update(stream: int, credit: int = 0, flags: int = 0) -> bytes:
    return encode_header(Type.WINDOW_UPDATE, flags, stream, credit)


def ping(value: int, flags: int = SYN, stream: int = 0) -> bytes:
    return encode_header(Type.PING, flags, stream, value)


def go_away(code: int, stream: int = 0) -> bytes:
    return encode_header(Type.GO_AWAY, 0, stream, code)


def engine(*, is_client: bool = False, **options: Any) -> Engine:
    made = Engine(options.pop("config", QUIET), is_client=is_client, **options)
    made.handle_deadline(0.0)
    return made


def fed(one: Engine, *frames: bytes, now: float = 0.0) -> list[Any]:
    """Give an engine bytes, and return the events."""
    return [*one.receive_bytes(b"".join(frames), now), *one.events()]


def written(one: Engine) -> bytes:
    pieces: list[bytes] = []
    while one.has_output():
        pieces += map(bytes, one.buffers_to_send())
    return b"".join(pieces)


def frames_in(written: bytes) -> list[Frame]:
    found, position = [], 0
    while position < len(written):
        _, type, flags, stream, length = HEADER.unpack_from(written, position)
        position += HEADER_SIZE
        payload = written[position : position + length] if type == Type.DATA else b""
        position += len(payload)
        found.append(Frame(type, flags, stream, length, payload))
    return found


def frames_of(one: Engine) -> list[Frame]:
    """Let an engine write, and return the frames."""
    return frames_in(written(one))


def violation(one: Engine, *frames: bytes, rule: str) -> None:
    """Feed frames of which the last breaks a rule, and check that the session ends with go-away 1."""
    *_, last = fed(one, *frames)
    assert isinstance(last, Failed)
    assert last.error.rule == rule
    assert one.over
    told = frames_in(one.farewell(Reason(str(last.error), 400)))
    assert told[0] == Frame(Type.GO_AWAY, 0, 0, 1)


def sums_of(one: Engine) -> MuxState:
    """Return the budgets and counters that the engine keeps over all its streams."""
    return one._shared


def sender_of(halves: Halves) -> StreamSender:
    assert isinstance(halves.sender, StreamSender)
    return halves.sender


def receiver_of(halves: Halves) -> StreamReceiver:
    assert isinstance(halves.receiver, StreamReceiver)
    return halves.receiver


def opened(events: list[Any]) -> Halves:
    found: Halves
    (found,) = (event.channel for event in events if isinstance(event, Opened))
    return found


def messages(events: list[Any]) -> list[bytes]:
    return [item for event in events if isinstance(event, Received) for item in event.items]


def failure(events: list[Any]) -> ChannelFailed:
    (found,) = (event for event in events if isinstance(event, ChannelFailed))
    return found


class Pair:
    """A client and a server that are joined by hand."""

    def __init__(self, **options: Any) -> None:
        self.client = engine(is_client=True, **options)
        self.server = engine(**options)
        self.seen: dict[Engine, list[Any]] = {self.client: [], self.server: []}

    def run(self, now: float = 0.0) -> None:
        """Carry bytes both ways until both sides are silent."""
        while self.client.has_output() or self.server.has_output():
            for one, other in ((self.client, self.server), (self.server, self.client)):
                self.seen[other] += fed(other, written(one), now=now)
                self.seen[one] += one.events()

    def channel(self, opening: bytes = b"") -> tuple[Halves, Halves]:
        """Open a channel from the client, and take it at the server."""
        here = self.client.open_channel(opening)
        self.run()
        there = opened(self.seen[self.server])
        self.server.accept(sender_of(there))
        self.run()
        for seen in self.seen.values():
            seen.clear()
        return here, there
