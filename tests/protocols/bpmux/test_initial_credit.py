"""The first credit of channels that both ends agree on, and that an end which does not know of it never sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit import Limits, LocalProtocolError
from muxkit.core import encode_varu64
from muxkit.core.events import Failed
from muxkit.protocols.bpmux import Config, Engine, Kind
from muxkit.protocols.bpmux.frames import encode_announcement
from muxkit.testing._pair import EnginePair, drain, feed
from muxkit_adapters import memory
from tests.protocols.bpmux._helpers import sender_of

from ._helpers import automatic, fed, grant, told, violation, written
from ._pairs import next_duplex, sessions
from ._world import TIGHT, World

if TYPE_CHECKING:
    from muxkit.protocols.bpmux import Event

CREDIT = 50
FIRST = Limits().channel_first
PLAIN = Config(keepalive=None, initial_credit=0)
EARLY = Config(keepalive=None, initial_credit=CREDIT)
POOR = Limits(
    channel_bytes=100, channel_floor=50, connection_bytes=100, message=200_000, reassembly=200_000, resets_burst=10**6
)


def early(*, limits: Limits | None = None) -> Engine:
    return Engine(EARLY, limits=limits)


def heard(engine: Engine, *, credit: int = CREDIT) -> Engine:
    """Let an engine write what it writes first, and hear the announcement of its peer."""
    drain(engine)
    assert not feed(engine, [encode_announcement(credit), bytes.fromhex("a800f93000")])
    return engine


def pair_of(one: Config, other: Config) -> EnginePair[Engine, Event]:
    return EnginePair(Engine(one), Engine(other))


@pytest.mark.clause("bpmux-T01", "bpmux-S02", "bpmux-G13")
@pytest.mark.requirement("R-22", "R-32", "R-33", "R-44")
@pytest.mark.seeds(10, soak=2500)
@pytest.mark.parametrize("limits", [TIGHT, POOR], ids=["tight", "poor"])
@pytest.mark.parametrize(
    "other", [EARLY, PLAIN, Config(keepalive=None, initial_credit=7)], ids=["same", "none", "less"]
)
def test_a_random_life_with_a_first_credit_keeps_the_books(seed: int, limits: Limits, other: Config) -> None:
    world = World(seed, limits, config=EARLY, other=other)
    for _ in range(200):
        world.act()
        world.check()
    world.close()
    assert world.done > 0


def test_what_announces_it_is_top_level_credit_for_everybody_else() -> None:
    engine, usual = early(), Engine(PLAIN)
    assert written(engine) == "a80000 a80032 a80000 a800fa01ffce"
    assert written(usual) == "a800fa020000"
    knows_nothing = automatic()
    assert fed(knows_nothing, encode_announcement(CREDIT).hex()) == []
    assert knows_nothing.top_sink.credit_out == CREDIT


def test_it_stands_before_all_else_that_is_written() -> None:
    engine = early()
    fed(engine, "50 01 00", "42 01 00")  # opened and ended by the peer before anything was written
    assert written(engine) == "a80000 a80032 a80000 a101 a800fa01ffce"


def test_a_message_travels_with_the_opening() -> None:
    engine = heard(early())
    sink, _ = engine.open_duplex(id=1)
    assert sink.credit_out == CREDIT
    sink.send(b"first")
    assert written(engine).split(" ")[-1] == "50010566697273" + "74"


def test_channels_that_were_open_before_it_was_heard_have_it_too() -> None:
    engine = early()
    sink = engine.open_sink(id=1)
    drain(engine)
    assert not sink.has_room(1)
    sink.notify_when_room(1)
    assert [told(event) for event in feed(engine, [encode_announcement(20)])] == [("Writable", "out-sink 1")]
    assert (sink.credit_out, engine.open_sink().credit_out, engine.top_sink.credit_out) == (20, 20, 20)


def test_what_was_not_announced_to_the_peer_yet_is_not_used() -> None:
    engine = early()
    feed(engine, [encode_announcement(20)])
    sink = engine.open_sink()
    assert sink.credit_out == 0
    drain(engine)
    assert sink.credit_out == 20


def test_each_end_uses_what_the_other_announced() -> None:
    pair = pair_of(EARLY, Config(keepalive=None, initial_credit=7))
    pair.run_until_quiet()
    assert [engine.open_sink().credit_out for engine in pair.engines] == [7, CREDIT]


def test_by_default_it_is_as_large_as_the_limits_allow() -> None:
    assert written(Engine(Config())).startswith("a80000 a800f91000 a80000 ")
    assert written(Engine(Config(), limits=Limits(channel_first=60))).startswith("a80000 a8003c a80000")


@pytest.mark.parametrize("other", [Config(letter=True), Config(grants=False)], ids=["letter", "by hand"])
def test_by_default_an_engine_that_cannot_give_it_announces_nothing(other: Config) -> None:
    assert "a80000" not in written(Engine(other))


@pytest.mark.clause("bpmux-R11")
@pytest.mark.parametrize(("one", "other"), [(EARLY, PLAIN), (PLAIN, EARLY), (PLAIN, PLAIN)])
def test_unless_both_ends_say_so_all_credit_is_granted(one: Config, other: Config) -> None:
    pair = pair_of(one, other)
    pair.run_until_quiet()
    for engine, peer in (pair.engines, pair.engines[::-1]):
        sink = engine.open_sink(id=9)
        assert sink.credit_out == 0
        with pytest.raises(LocalProtocolError, match="1 bytes to send, 0 granted"):
            sink.send(b"x")
        pair.run_until_quiet()
        assert sink.credit_out == peer.entities(Kind.STREAM_IN)[9].credit_in == peer.limits.channel_first


@pytest.mark.parametrize(
    "first",
    [
        "a80032",  # a usual grant
        "a80000 a80032",
        "a80000 a80032 a80001",
        "a80000 a80000 a80000",
        "500100 a80000",
        "a80000 500100 a80032 a80000",
        "500100 a80000 a80032 a80000",  # behind something else
    ],
)
def test_grants_that_only_look_like_it_announce_nothing(first: str) -> None:
    engine = early()
    drain(engine)
    feed(engine, [bytes.fromhex(first), bytes.fromhex("500300")])
    assert engine.open_sink(id=8).credit_out == 0


@pytest.mark.parametrize("credit", [1, 247, 248, 4096, 2**32, 2**64 - 1 - FIRST])
def test_it_is_heard_however_it_is_cut(credit: int) -> None:
    data = encode_announcement(credit) + bytes.fromhex("500100")
    for at in range(1, len(data)):
        engine = early()
        drain(engine)
        feed(engine, [data[:at], data[at:]])
        assert engine.open_sink().credit_out == credit, at
    engine = early()
    drain(engine)
    feed(engine, [data[at : at + 1] for at in range(len(data))])
    assert engine.open_sink().credit_out == credit


@pytest.mark.requirement("R-22", "R-71")
def test_it_is_announced_even_if_the_peer_ends_its_top_level_first() -> None:
    """The announcement was withdrawn then, and a peer that counted on it was taken for one that breaks the rules."""
    engine = early()
    fed(engine, encode_announcement(CREDIT).hex(), "50 01 00")
    fed(engine, "62 00 00")  # the peer ends its top level before this side has written anything
    assert engine.entities(Kind.STREAM_IN)[1].grant == FIRST - CREDIT
    assert written(engine) == "a80000 a80032 a80000 a100 a801fa01ffce"
    fed(engine, "50 02 00")
    assert written(engine) == "a802fa01ffce"
    assert engine.open_sink().credit_out == CREDIT


@pytest.mark.requirement("R-22")
def test_channels_that_nobody_takes_hold_no_more_than_the_limits_say() -> None:
    limits = Limits(channels=20, channel_bytes=1000, channel_floor=50, channel_first=60, connection_bytes=200)
    engine = heard(early(limits=limits))
    for id in range(1, 21):
        payload = bytes(CREDIT).hex()
        events = fed(engine, f"50 {id:02x} 00", f"50 {id:02x} {CREDIT:02x} {payload}")
        assert [event[0] for event in events] == ["Opened", "Received"]
    drain(engine)
    windows = [entity.window for entity in engine.entities(Kind.STREAM_IN).values()]
    assert sum(window.credit + window.held for window in windows) <= 200 + 20 * 50
    error = violation(engine, "50 15 00")
    assert error.limit == "channels"


@pytest.mark.clause("bpmux-R23")
@pytest.mark.requirement("R-22")
def test_more_than_the_first_credit_and_the_grants_is_a_violation() -> None:
    limits = Limits(channel_bytes=CREDIT, channel_floor=CREDIT, channel_first=CREDIT)
    engine = heard(early(limits=limits))
    fed(engine, "50 01 00")
    assert written(engine) == ""
    error = violation(engine, "50 01 33" + bytes(CREDIT + 1).hex())
    assert error.rule == "bpmux-R23"
    assert str(error).startswith("in-stream 1: the peer sent 51 bytes with 50")


@pytest.mark.parametrize("channels", [1, 5])
def test_credit_above_64_bits_is_a_violation_beside_it_too(channels: int) -> None:
    engine = heard(early(), credit=2**64 - 1 - FIRST)
    for id in range(1, channels + 1):
        engine.open_sink(id=id)
    drain(engine)
    [event] = feed(engine, [b"\xa8\x01" + encode_varu64(2**64 - 1)])
    assert isinstance(event, Failed)
    assert event.error.rule == "bpmux-R25"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Config(initial_credit=-1), r"Config\(initial_credit=-1\): expected a number from 0"),
        (lambda: Config(initial_credit=1, letter=True), "as letter=True is set"),
        (lambda: Config(initial_credit=1, grants=False), "as grants=False is set"),
        (
            lambda: Engine(Config(initial_credit=4097)),
            r"initial_credit=4097\) is above 4096, the lower of Limits\(channel_floor=4096, channel_first=131072\)",
        ),
        (lambda: Engine(EARLY, limits=Limits(channel_first=49)), "is above 49, the lower of"),
    ],
)
def test_a_first_credit_that_cannot_be_is_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=says):
        make()


def test_a_grant_beside_it_is_added() -> None:
    engine = heard(early())
    sink = engine.open_sink(id=3)
    drain(engine)
    grant(engine, "in-stream 3", 10)
    assert sink.credit_out == CREDIT + 10


async def test_in_sessions_the_first_message_waits_for_nothing() -> None:
    async with sessions(memory.pair(), config=EARLY) as pair:
        async with pair.one.open() as here:  # the announcements have come with this one
            there = await next_duplex(pair.other)
            await there.send(b"x")
            assert await here.receive() == b"x"
            await there.aclose()
        async with pair.one.open() as here:
            assert sender_of(here).credit_out == CREDIT
            await here.send(b"at once")
            await here.send(bytes(2000))  # more than that waits for a grant, and comes
            there = await next_duplex(pair.other)
            assert [await there.receive(), await there.receive()] == [b"at once", bytes(2000)]
            await there.aclose()
