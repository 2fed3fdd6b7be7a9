"""`try_send` and `try_send_all` do what `send` does, or change nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from muxkit import Limits, LocalProtocolError
from muxkit.protocols.relink.send import JOIN_MOST
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import connector, deliver, listener, quiet, state_of, taken

if TYPE_CHECKING:
    from tests.protocols.relink._numbered import NumberedEngine


SMALL = Limits(channel_bytes=6000, channel_floor=1000, connection_bytes=4000, message=5000, reassembly=5000)


def engines() -> tuple[NumberedEngine, NumberedEngine, NumberedEngine]:
    """Return three equal engines with open channels."""
    made = tuple(connector(quiet(window=40), limits=SMALL) for _ in range(3))
    for engine in made:
        engine.send(1, (b"first",))
        engine.send(2, (bytes(1500),))
    return made  # type: ignore[return-value]  # a generator has no length


@pytest.mark.seeds(50, soak=1000)
def test_one_by_one_and_all_at_once_leave_the_same_behind(seed: int) -> None:
    dice = random.Random(seed)
    general, quick, many = engines()
    for _ in range(30):
        sizes = [dice.choice((0, 1, 7, 8, 64, 300, JOIN_MOST)) for _ in range(dice.randint(1, 4))]
        payloads = [dice.randbytes(size) for size in sizes]
        before = state_of(many)
        last = many.try_send_all(1, payloads)
        if last is None:
            assert state_of(many) == before
            fits = all(_sent(general, payload) for payload in payloads)
            assert not fits or general.state.ours.retained_over > SMALL.connection_bytes, (
                "which one by one may overstep"
            )
            return
        number: int | None = None
        for payload in payloads:
            number = quick.try_send(1, payload)
            assert number == general.send(1, (payload,)), "what fits all together fits one by one"
        assert number == last
        assert state_of(general) == state_of(quick) == state_of(many)
        if dice.random() < 0.3:
            assert drain(general) == drain(quick) == drain(many)


def _sent(engine: NumberedEngine, payload: bytes) -> bool:
    try:
        engine.send(1, (payload,))
    except LocalProtocolError:
        return False
    return True


@pytest.mark.parametrize("size", [0, 64, JOIN_MOST, JOIN_MOST + 1, 4000])
def test_a_message_of_any_size_is_the_same_as_sent_in_general(size: int) -> None:
    general, quick, _ = engines()
    payload = random.Random(size).randbytes(size)
    assert quick.try_send(1, payload) == general.send(1, (payload,))
    for name in ("retained", "retained_over"):
        assert getattr(quick.state.ours, name) == getattr(general.state.ours, name)
    assert quick.outbox == general.outbox
    other = listener(quiet(window=40), limits=SMALL)
    deliver(quick, other)
    assert taken(other, 1) == [(b"first",), (payload,)]


def test_room_that_is_reserved_is_not_used() -> None:
    limits = Limits(channel_bytes=6000)
    one, other = connector(quiet(), limits=limits), connector(quiet(), limits=limits)
    for engine in (one, other):
        engine.send(1, (b"x",))
    while one.try_send(1, bytes(64), 1000) is not None:
        pass
    while other.try_send_all(1, [bytes(64)], 1000) is not None:
        pass
    assert state_of(one) == state_of(other)
    assert one.admits(1, 900)
    assert not one.admits(1, 1100)


@pytest.mark.parametrize("why", ["not open", "closed", "over", "too large", "nothing"])
def test_what_is_not_usual_is_left_to_the_general_way(why: str) -> None:
    one, _, _ = engines()
    channel, payload = 1, b"x"
    match why:
        case "not open":
            channel = 3
        case "closed":
            one.close(1)
        case "over":
            one.receive_bytes(bytes.fromhex("A0 00 00 00 00 00 00 00"), 0.0)
        case "too large":
            payload = bytes(SMALL.message + 1)
    before = state_of(one)
    if why != "nothing":
        assert one.try_send(channel, payload) is None
    assert one.try_send_all(channel, [] if why == "nothing" else [payload]) is None
    assert state_of(one) == before


@pytest.mark.requirement("R-08")
def test_an_overdraft_is_for_the_budget_of_the_link_and_not_for_the_window() -> None:
    one, _, _ = engines()
    for channel in range(10, 20):
        if not one.admits(channel, 1500):
            break
        one.send(channel, (bytes(1500),))
    assert not one.admits(20, 1500)
    with pytest.raises(LocalProtocolError, match="4000 bytes on all"):
        one.send(20, (bytes(1500),))
    one.send(20, (bytes(1500),), overdraw=True)
    with pytest.raises(LocalProtocolError, match="40 messages of 6000 bytes"):
        one.send(20, (bytes(4900),), overdraw=True)
    with pytest.raises(LocalProtocolError, match="against Limits"):
        one.send(21, (bytes(5001),), overdraw=True)


@pytest.mark.requirement("R-08")
def test_a_peer_with_the_same_limits_bears_the_overdraft() -> None:
    one, other = connector(quiet(parts=1), limits=SMALL), listener(quiet(parts=1), limits=SMALL)
    over = 0
    for channel in range(1000):
        if over + 5000 > SMALL.outbox:
            break
        if not one.admits(channel, 4000):
            over += 4000 + 80
        one.send(channel, (bytes(4000),), overdraw=True)
    deliver(one, other)
    assert not other.over
    assert over > SMALL.outbox - 10_000
