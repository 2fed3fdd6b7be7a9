"""Helpers for tests of engines: feed packets written as keys and values, read what they send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.core import Reason
from muxkit.protocols.e3x import (
    Broken,
    Closed,
    Config,
    Delivered,
    Engine,
    EngineChannel,
    Event,
    Faulted,
    Finished,
    Opened,
    Packet,
    Received,
    Writable,
    encode_head,
    join_packet,
    parse_packet,
)
from muxkit.protocols.e3x.receive import ReliableReceiver, UnreliableReceiver
from muxkit.protocols.e3x.send import ReliableSender

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    return received(engine, raw(body, **fields), now)


def received(engine: Engine, packet: bytes, now: float = 0.0) -> list[object]:
    """Feed one packet as it is."""
    return heard(engine.receive_datagram(packet, now)) + told(engine)


def told(engine: Engine) -> list[object]:
    """Return the events of commands and of writing."""
    return heard(engine.events())


def heard(events: Sequence[Event]) -> list[object]:
    return [_short(event) for event in events]


def _short(event: Event) -> object:
    match event:
        case Opened(EngineChannel() as channel, body):
            return ("opened", channel.id, channel.type, body)
        case Received(ReliableReceiver() | UnreliableReceiver() as receiver, [body]):
            return ("message", receiver.channel.id, body)
        case Finished(ReliableReceiver() | UnreliableReceiver() as receiver):
            return ("ended", receiver.channel.id)
        case Delivered(EngineChannel() as channel, first, last):
            return ("delivered", channel.id, first, last)
        case Writable(ReliableSender() as sender):
            return ("writable", sender.channel.id)
        case Closed(EngineChannel() as channel):
            return ("closed", channel.id)
        case Broken(EngineChannel() as channel, cause, text):
            return ("broken", channel.id, cause.value, text)
        case Faulted(fault, _):
            return ("fault", fault.value)
        case _:
            return event


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
    return _pass_time(engine, until)[0]


def told_until(engine: Engine, until: float) -> list[object]:
    """Let time pass; return the events meanwhile."""
    return _pass_time(engine, until)[1]


def _pass_time(engine: Engine, until: float) -> tuple[list[tuple[float, Packet]], list[object]]:
    out: list[tuple[float, Packet]] = []
    events: list[object] = []
    while (due := engine.next_deadline()) is not None and due <= until:
        events += heard(engine.handle_deadline(due))
        out.extend((due, packet) for packet in sent(engine, due))
        events += told(engine)
    return out, events


def opened(engine: Engine, id: int = 1, *, now: float = 0.0) -> EngineChannel:
    """Let the peer open a reliable channel and the application accept it; its ack was sent."""
    assert fed(engine, c=id, type="chat", seq=1, now=now) == [("opened", id, "chat", b"")]
    channel = engine.channel(id)
    assert channel is not None
    channel.receiver.done()
    sent(engine, now)
    wait(engine, now + 1.0)
    return channel


def sending(engine: Engine, count: int, *, now: float = 0.0) -> EngineChannel:
    """Open a reliable channel and send packets 1 to `count`, with the opening."""
    channel = engine.open("chat")
    for number in range(2, count + 1):
        channel.sender.send(b"%d" % number)
    assert seqs(sent(engine, now)) == list(range(1, count + 1))
    return channel


def unacked(channel: EngineChannel) -> list[int]:
    assert isinstance(channel.sender, ReliableSender)
    return channel.sender.unacked


def close(channel: EngineChannel) -> None:
    """Do what closing a channel of a session does."""
    if not channel.sender.ended:
        channel.sender.finish()
    channel.receiver.stop(Reason())


def receiver_with(capacity: int) -> ReliableReceiver:
    """Make a receiver that keeps so many packets ahead, and has received none."""
    engine = connector()
    channel = engine.open("chat")
    assert isinstance(channel.sender, ReliableSender)
    return ReliableReceiver(engine.state, channel, channel.sender, capacity=capacity)
