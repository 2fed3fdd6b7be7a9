"""Helpers for tests of engines: feed hexadecimal, read what they write, compare their state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from muxkit.core import Cursor, encode_varu64
from muxkit.core.events import (
    Cancelled,
    Confirmed,
    Failed,
    Finished,
    Halves,
    Opened,
    Pong,
    Probed,
    Received,
    Refused,
    Stopped,
    Writable,
)
from muxkit.protocols.bpmux import (
    Chunk,
    Config,
    Duplex,
    Engine,
    Entity,
    Event,
    Kind,
    Partial,
    Pinged,
    Receiver,
    Requested,
    Responded,
    Sender,
    Sink,
    Source,
    parse_chunk,
)
from muxkit.testing._pair import EnginePair, drain, feed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from muxkit._errors import RemoteProtocolError
    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.bpmux.entities import Parts
    from muxkit.protocols.bpmux.frames import Type
    from muxkit.protocols.bpmux.send import Outgoing
    from muxkit.protocols.bpmux.state import State

U64_MAX = 2**64 - 1

WINDOW = ("by_hand", "credit", "held", "lent", "renewed_at", "renews", "size", "target", "unfinished")


def by_hand(
    *, limits: Limits | None = None, letter: bool = False, pongs: bool = True, observer: Observer | None = None
) -> Engine:
    """Make an engine that writes nothing by itself but pongs: every grant is made by hand."""
    config = Config(grants=False, keepalive=None, letter=letter, pongs=pongs)
    return Engine(config, limits=limits, observer=observer)


def automatic(*, limits: Limits | None = None, letter: bool = False, first_id: int = 1) -> Engine:
    """Make an engine with automatic grants and without keepalive."""
    return Engine(Config(keepalive=None, letter=letter, first_id=first_id), limits=limits)


def with_top_credit(credit: int = 1000, *, limits: Limits | None = None, letter: bool = False) -> Engine:
    """Make an engine with `by_hand` that has granted the peer top-level credit for openings."""
    engine = by_hand(limits=limits, letter=letter)
    engine.top_stream.give_credit(credit)
    drain(engine)
    return engine


def with_sink(credit: int = 0, *, limits: Limits | None = None) -> tuple[Engine, Sender]:
    """Make an engine whose sink 3 is announced and has so much credit."""
    engine = by_hand(limits=limits)
    sink = engine.open_sink(id=3)
    written(engine)
    grant(engine, "in-stream 3", credit)
    return engine, sink


def allowed_to_open(credit: int = 1000, *, limits: Limits | None = None, letter: bool = False) -> Engine:
    """Make an engine with `by_hand` that has top-level credit from the peer."""
    engine = by_hand(limits=limits, letter=letter)
    grant(engine, "in-stream 0", credit)
    return engine


def fed(engine: Engine, *chunks: str, now: float = 0.0) -> list[tuple[object, ...]]:
    """Feed hexadecimal; return the events as tuples."""
    return [told(event) for event in feed(engine, [bytes.fromhex(chunk) for chunk in chunks], now=now)]


def written(engine: Engine) -> str:
    """Return all that the engine writes, in hexadecimal with a space after each chunk."""
    return " ".join(chunk.hex() for chunk in split(drain(engine)))


def split(data: bytes) -> list[bytes]:
    cursor, chunks = Cursor(data), []
    while cursor.remaining:
        start = cursor.position
        parse_chunk(cursor)
        chunks.append(data[start : cursor.position])
    return chunks


def parsed(data: bytes) -> list[Chunk | Partial]:
    cursor, chunks = Cursor(data), []
    while cursor.remaining:
        chunks.append(parse_chunk(cursor))
    return chunks


def violation(engine: Engine, *chunks: str, now: float = 0.0) -> RemoteProtocolError:
    """Feed a violation; check that exactly one Failed is reported and that the engine does nothing afterwards."""
    events = feed(engine, [bytes.fromhex(chunk) for chunk in chunks], now=now)
    assert events, "no violation"
    *before, last = events
    assert isinstance(last, Failed), f"no violation: {last}"
    assert not any(isinstance(event, Failed) for event in before)
    assert engine.over
    assert not engine.has_output()
    assert engine.buffers_to_send() == []
    assert engine.next_deadline() is None
    assert not engine.receive_bytes(b"\x64\x00", now)
    assert not engine.receive_eof(now)
    assert not engine.handle_deadline(now + 1000)
    return last.error


def told(event: Event) -> tuple[object, ...]:
    """Return an event as a tuple: its name, the label of its entity, and the rest."""
    name = type(event).__name__
    match event:
        case Received(receiver, items):
            return name, entity_of(receiver).label, *items
        case Opened(channel, opening):
            first, *others = (entity_of(half).label for half in (channel.sender, channel.receiver) if half is not None)
            return name, first, opening, *others
        case Cancelled(half, payload) | Stopped(half, payload):
            return name, entity_of(half).label, payload
        case Requested(half, payload) | Responded(half, payload):
            return name, half.label, payload
        case Finished(half) | Confirmed(half) | Refused(half) | Writable(half):
            return name, entity_of(half).label
        case Pong(key) | Probed(key):
            return name, key.label if isinstance(key, Entity) else repr(key)
        case Pinged(entity):
            return name, entity.label
        case Failed(error):
            return name, str(error), error.rule, error.offset, error.limit
        case _:
            return name, repr(event)


def entity_of(half: object) -> Entity:
    assert isinstance(half, Entity)  # as all halves of this engine are
    return half


def grant(engine: Engine, channel: str, credit: int) -> None:
    """Let the peer grant credit: `grant(engine, "in-stream 3", 10)`."""
    types = ("out-request", "in-request", "out-sink", "in-sink", "out-stream", "in-stream")
    name, _, id = channel.partition(" ")
    tag = types.index(name) << 5 | 0x08
    chunk = bytes([tag]) + encode_varu64(int(id)) + encode_varu64(credit)
    assert not any(isinstance(event, Failed) for event in engine.receive_bytes(chunk, 0.0))


@overload
def the(engine: Engine, kind: Literal[Kind.SINK_OUT, Kind.SINK_IN, Kind.REQUEST_IN], id: int) -> Sender: ...
@overload
def the(engine: Engine, kind: Literal[Kind.STREAM_OUT, Kind.STREAM_IN, Kind.REQUEST_OUT], id: int) -> Receiver: ...
@overload
def the(engine: Engine, kind: Kind, id: int) -> Entity: ...
def the(engine: Engine, kind: Kind, id: int) -> Entity:
    """Return the entity of this kind with this id."""
    return engine.entities(kind)[id]


def channel_of(entity: Entity) -> Halves:
    """Return the channel that an entity is the whole or one half of."""
    halves = [half for half in (entity, entity.twin) if half is not None]
    sender = next((half for half in halves if isinstance(half, Sender)), None)
    receiver = next((half for half in halves if isinstance(half, Receiver)), None)
    return Halves(sender, receiver)


def ids(engine: Engine) -> dict[str, list[int]]:
    """Return the ids in each map; empty maps are left out."""
    return {kind.name.lower(): sorted(engine.entities(kind)) for kind in Kind if engine.entities(kind)}


def sums_of(engine: Engine) -> State:
    """Return the budgets, queues and counters that the engine keeps over all its entities."""
    return engine._state


def line_of(state: State) -> list[Entity]:
    """Return the receivers that wait for a loan from the reassembly budget, the first one first."""
    return [*state.reassembly._waiting]


def unread_by(engine: Engine) -> int:
    """Return how many received bytes the engine holds back because they don't complete a chunk."""
    return engine._reader.held.size


def opening_of(queue: Outgoing) -> tuple[Type, bytes] | None:
    """Return the opening chunk that the queue has not written completely."""
    return queue._opening


def begun_of(queue: Outgoing) -> int:
    """Return how many bytes of its first item the queue has already written in parts."""
    return queue._begun


def sender_of(channel: Sink | Duplex) -> Sender:
    """Return the engine's side of the half that sends on a session's channel."""
    sender = channel.half.sender if isinstance(channel, Sink) else channel.sink.half.sender
    assert isinstance(sender, Sender)
    return sender


def receiver_of(channel: Source | Duplex) -> Receiver:
    """Return the engine's side of the half that receives on a session's channel."""
    receiver = channel.half.receiver if isinstance(channel, Source) else channel.source.half.receiver
    assert isinstance(receiver, Receiver)
    return receiver


def state_of(engine: Engine) -> object:
    """Return all that a command or a chunk may change, as one value: maps, credit, queues, budgets, control chunks."""
    state = sums_of(engine)
    entities = [
        (
            kind.name,
            id,
            entity.credit.available,
            tuple(getattr(entity.window, name) for name in WINDOW),
            (entity.end_in, entity.partial, entity.is_wanted, entity.direct, entity.life),
            (entity.grant, entity.pings, entity.pongs, entity.late),
            None if entity.parts is None else _parts_of(entity.parts),
            None if entity.outgoing is None else _queue_of(entity),
        )
        for kind in Kind
        for id, entity in sorted(engine.entities(kind).items())
    ]
    return (
        entities,
        (state.ours, state.theirs, state.outbox.used, state.unfinished),
        (state.budget.used, state.budget.windows),
        (state.reassembly.left, [one.label for one in line_of(state)]),
        (bytes(state.control.acks), state.control.leaving, state.control.pongs_queued),
        engine._reader.rules.announced,
    )


def _parts_of(parts: Parts) -> object:
    return (parts.is_end, [one.label for one in parts.pinged], None if parts.pieces is None else parts.pieces.size)


def _queue_of(entity: Entity) -> object:
    queue = entity.outgoing
    assert queue is not None
    if not (queue.queue or opening_of(queue) or queue.end is not None or queue.claimed or queue.openings_before_end):
        return None
    return (
        tuple(queue.queue),
        opening_of(queue),
        begun_of(queue),
        queue.end,
        queue.queued,
        queue.claimed,
        queue.counted,
        queue.openings_before_end,
    )


def pair_of(
    *,
    limits: Limits | None = None,
    weather: random.Random | None = None,
    latency: float = 0.0,
    letter: bool = False,
    first_id: int = 1,
    listener: Callable[[int, Event], None] | None = None,
) -> EnginePair[Engine, Event]:
    """Make two automatic engines that have exchanged their first grants; the first one numbers from `first_id`."""
    pair: EnginePair[Engine, Event] = EnginePair(
        automatic(limits=limits, letter=letter, first_id=first_id),
        automatic(limits=limits, letter=letter),
        weather=weather,
        latency=latency,
        listener=listener,
    )
    pair.run_until_quiet()
    return pair


def seen(pair: EnginePair[Engine, Event], side: int) -> list[tuple[object, ...]]:
    """Return the events of one side since the last call, as tuples."""
    return [told(event) for event in pair.take_events(side)]
