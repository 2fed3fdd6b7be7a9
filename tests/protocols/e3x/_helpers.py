"""Helpers for tests of engines: feed packets written as keys and values, read what they send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.protocols.e3x import (
    Broken,
    Closed,
    Config,
    Delivered,
    Ended,
    Engine,
    EngineChannel,
    Event,
    Faulted,
    Message,
    Opened,
    Packet,
    Writable,
    encode_head,
    join_packet,
    parse_packet,
)

if TYPE_CHECKING:
    from muxkit._limits import Limits

SEQ_MOST = 2**32 - 1


def listener(
    *, limits: Limits | None = None, window: int = 50, reliable: bool = True, unreliable: tuple[str, ...] = ()
) -> Engine:
    """Make the side whose peer opens channels 1, 3, 5 …; with a window of 50 it need not tell its window."""
    return Engine(False, Config(window=window, reliable=reliable, unreliable_types=unreliable), limits=limits)


def connector(*, limits: Limits | None = None, window: int = 50, unreliable: tuple[str, ...] = ()) -> Engine:
    """Make the side that opens channels 1, 3, 5 …, without a limit on the rate."""
    config = Config(window=window, congestion=False, unreliable_types=unreliable)
    return Engine(True, config, limits=limits)


def raw(body: bytes = b"", /, **fields: object) -> bytes:
    """Encode a packet with any keys and values, legal or not."""
    return join_packet(encode_head(fields), body)


def fed(engine: Engine, body: bytes = b"", /, *, now: float = 0.0, **fields: object) -> list[object]:
    """Feed one packet; return the events, as `told` does."""
    engine.receive_datagram(raw(body, **fields), now)
    return told(engine)


def told(engine: Engine) -> list[object]:
    return [_short(event) for event in engine.events()]


def _short(event: Event) -> object:
    match event:
        case Opened(channel, body):
            return ("opened", channel.id, channel.type, body)
        case Message(channel, body):
            return ("message", channel.id, body)
        case Ended(channel):
            return ("ended", channel.id)
        case Delivered(channel, first, last):
            return ("delivered", channel.id, first, last)
        case Writable(channel):
            return ("writable", channel.id)
        case Closed(channel):
            return ("closed", channel.id)
        case Broken(channel, cause, text):
            return ("broken", channel.id, cause.value, text)
        case Faulted(fault, _):
            return ("fault", fault.value)


def sent(engine: Engine, now: float = 0.0) -> list[Packet]:
    """Return the packets that the engine sends now."""
    return [parse_packet(data) for data in engine.datagrams_to_send(now)]


def seqs(packets: list[Packet]) -> list[int | None]:
    return [packet.seq for packet in packets]


def acks(packets: list[Packet]) -> list[tuple[int | None, list[int] | None]]:
    """Return `ack` and `miss` of the packets that have nothing else."""
    return [(packet.ack, packet.miss) for packet in packets if packet.seq is None and packet.ack is not None]


def wait(engine: Engine, until: float) -> list[tuple[float, Packet]]:
    """Let time pass; return the packets sent meanwhile, with their times."""
    out: list[tuple[float, Packet]] = []
    while (due := engine.next_deadline()) is not None and due <= until:
        engine.handle_deadline(due)
        out.extend((due, packet) for packet in sent(engine, due))
    return out


def opened(engine: Engine, id: int = 1, *, now: float = 0.0) -> EngineChannel:
    """Let the peer open a reliable channel and the application accept it; its ack was sent."""
    assert fed(engine, c=id, type="chat", seq=1, now=now) == [("opened", id, "chat", b"")]
    channel = engine.channel(id)
    assert channel is not None
    engine.done(channel)
    sent(engine, now)
    wait(engine, now + 1.0)
    return channel


def sending(engine: Engine, count: int, *, now: float = 0.0) -> EngineChannel:
    """Open a reliable channel and send packets 1 to `count`, with the opening."""
    channel = engine.open("chat")
    for number in range(2, count + 1):
        engine.send(channel, b"%d" % number)
    assert seqs(sent(engine, now)) == list(range(1, count + 1))
    return channel


def unacked(channel: EngineChannel) -> list[int]:
    assert channel.outgoing is not None
    return list(channel.outgoing._pieces)
