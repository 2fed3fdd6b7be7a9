"""Engines for tests: fed with hexadecimal, asked for what they wrote, compared by what they hold."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypedDict, Unpack

from muxkit.core import Cursor, Ranges
from muxkit.core.events import Failed
from muxkit.protocols.relink import Config
from muxkit.protocols.relink.events import Arrived
from muxkit.protocols.relink.frames import Bounds, bounds_of, parse_packet
from muxkit.testing._pair import drain, feed
from tests.protocols.relink._numbered import NumberedEngine, told

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError
    from muxkit._limits import Limits
    from muxkit.protocols.relink.frames import Packet
    from muxkit.protocols.relink.receive import ChannelReceiver
    from muxkit.protocols.relink.send import ChannelSender

EPOCH, LINK = 7, 5
GENEROUS = Bounds(2, 2, 2**32, 2**32, 2**64)


class Settings(TypedDict, total=False):
    """The settings that tests change."""

    connector_id_size: int
    listener_id_size: int
    connector_transactions: bool
    listener_transactions: bool
    window: int
    targets: int
    parts: int
    first_sequence: int


def quiet(**settings: Unpack[Settings]) -> Config:
    """Settings without the keepalive, so that no time passes by itself."""
    return Config(keepalive=None, **settings)


def transactional(**settings: Unpack[Settings]) -> Config:
    settings["connector_transactions"] = settings["listener_transactions"] = True
    return quiet(**settings)


def connector(config: Config | None = None, *, limits: Limits | None = None) -> NumberedEngine:
    """A connector's engine on the first connection of its link."""
    engine = NumberedEngine(config or quiet(), is_connector=True, limits=limits)
    engine.connection_made(0.0, epoch=EPOCH, link_id=LINK)
    return engine


def listener(config: Config | None = None, *, limits: Limits | None = None) -> NumberedEngine:
    engine = NumberedEngine(config or quiet(), is_connector=False, limits=limits)
    engine.connection_made(0.0, epoch=EPOCH, link_id=LINK)
    return engine


def reconnect(*engines: NumberedEngine, now: float = 0.0) -> None:
    """Lose the connection with what was not delivered, and resume the link on another one."""
    for engine in engines:
        engine.connection_lost(now)
    for engine in engines:
        engine.connection_made(now, epoch=engine.epoch, link_id=engine.link_id)


def pair(config: Config | None = None, *, limits: Limits | None = None) -> tuple[NumberedEngine, NumberedEngine]:
    """A connector and a listener on the first connection of their link."""
    return connector(config, limits=limits), listener(config, limits=limits)


def deliver(sender: NumberedEngine, receiver: NumberedEngine, now: float = 0.0) -> bytes:
    """Move everything that the sender has to write to the receiver; return the bytes."""
    data = drain(sender)
    receiver.receive_bytes(data, now)
    return data


def arrived(engine: NumberedEngine, channel: int) -> list[tuple[int, list[tuple[bytes, ...]]]]:
    """Take the batches of a channel from the events, each with the number of its first message; the others stay."""
    events = engine.events()
    batches = [one for one in events if isinstance(one, Arrived) and one.receiver.channel == channel]
    engine.state.events = [one for one in events if one not in batches]
    return [(one.first, one.messages) for one in batches]


def taken(engine: NumberedEngine, channel: int) -> list[tuple[bytes, ...]]:
    """Take the messages of a channel from the events, without their numbers."""
    return [parts for _, batch in arrived(engine, channel) for parts in batch]


def exchange(*engines: NumberedEngine, now: float = 0.0) -> None:
    """Exchange bytes between two engines until neither has output, without letting time pass."""
    while any(engine.has_output() for engine in engines):
        for one, other in (engines, engines[::-1]):
            other.receive_bytes(drain(one), now)


def settle(one: NumberedEngine, other: NumberedEngine, now: float = 0.0) -> float:
    """Exchange bytes, and let time pass until no timer runs; return the time."""
    for _ in range(10):
        exchange(one, other, now=now)
        dues = [due for engine in (one, other) if (due := engine.next_deadline()) is not None]
        if not dues:
            break
        now = max(now, min(dues))
        for engine in (one, other):
            engine.handle_deadline(now)
    return now


def fed(engine: NumberedEngine, *packets: str, now: float = 0.0) -> list[tuple[object, ...]]:
    """Feed packets in hexadecimal; return the events as tuples."""
    return [told(event) for event in feed(engine, [bytes.fromhex(packet) for packet in packets], now=now)]


def seen(engine: NumberedEngine) -> list[tuple[object, ...]]:
    return [told(event) for event in engine.events()]


def written(engine: NumberedEngine) -> str:
    """Return all output of the engine in hexadecimal, with a space after each packet."""
    bounds = bounds_of(engine.config, is_connector=engine.state.is_connector, message=2**64)
    turned = Bounds(bounds.ack_id_size, bounds.id_size, 2**32, 2**32, 2**64)
    return " ".join(packet.hex() for packet in split(drain(engine), turned))


def split(data: bytes, bounds: Bounds = GENEROUS) -> list[bytes]:
    cursor, packets = Cursor(data), []
    while cursor.remaining:
        start = cursor.position
        parse_packet(cursor, bounds)
        packets.append(data[start : cursor.position])
    return packets


def parsed(data: bytes, bounds: Bounds = GENEROUS) -> list[Packet]:
    cursor, packets = Cursor(data), []
    while cursor.remaining:
        packets.append(parse_packet(cursor, bounds))
    return packets


def violation(engine: NumberedEngine, *packets: str, now: float = 0.0) -> RemoteProtocolError:
    """Feed packets, the last of which breaks a rule: it gives one Failed, changes nothing, and ends the engine."""
    *legal, last = [bytes.fromhex(packet) for packet in packets]
    assert not any(isinstance(event, Failed) for event in feed(engine, legal, now=now))
    before = state_of(engine)
    events = feed(engine, [last], now=now)
    assert len(events) == 1, events
    (failure,) = events
    assert isinstance(failure, Failed), failure
    assert state_of(engine) == before
    assert engine.over
    assert not engine.has_output()
    assert engine.buffers_to_send() == []
    assert engine.next_deadline() is None
    engine.receive_bytes(bytes(8), now)
    engine.receive_eof(now)
    engine.handle_deadline(now + 1000)
    assert not engine.events()
    return failure.error


def state_of(engine: NumberedEngine) -> object:
    """Return everything that a command or a packet may change, as one comparable value."""
    state = engine.state
    ours, theirs, probes = state.ours, state.theirs, state.probes
    return (
        {channel: _fields(one) for channel, one in ours.live.items()},
        {channel: _fields(one) for channel, one in theirs.live.items()},
        (ours.retained, ours.retained_over, ours.outbox.used, ours.closing, [one.channel for one in ours.unannounced]),
        (theirs.bytes, theirs.held_over, state.progress, theirs.unanswered, theirs.resume_left),
        (state.is_connected, state.resumes, state.peer_resumed, state.told_resume, state.shutdown_written),
        (state.has_peer_shut_down, state.is_shutting_down, state.epoch, state.link_id, probes.outcomes),
        ([*ours.watchers], tuple(theirs.unopened), [one.channel for one in theirs.resuming]),
        ([one.channel for one in theirs.dirty], [one.channel for one in theirs.owing]),
        (probes.pongs, len(probes.pings), len(probes._under_way), len(probes.unproven), probes.wants_proof),
        len(ours.scheduler),
    )


def _fields(one: ChannelSender | ChannelReceiver) -> dict[str, object]:
    skipped = {"owner", "state", "table", "head", "head_size"}
    names: tuple[str, ...] = getattr(type(one), "__slots__", ()) or vars(type(one))["__mypyc_attrs__"]  # if compiled
    return {name: _copy(getattr(one, name)) for name in names if name not in skipped and name[:2] != "__"}


def _copy(value: object) -> object:
    return [repr(item) for item in value] if isinstance(value, (deque, Ranges)) else value
