"""Pings under way, their answers and what ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.runtime import LinkLost, Ping, Pings

if TYPE_CHECKING:
    from trio.testing import MockClock


def lost() -> Exception:
    return LinkLost("cut", by="network")


async def test_a_ping_gives_the_seconds_until_its_answer(autojump_clock: MockClock) -> None:
    pings = Pings[str]()
    ping = pings.sent("top")
    assert "top" in pings
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def answer() -> None:
            await trio.sleep(0.25)
            pings.answered("top")

        assert await ping.wait() == 0.25
    assert pings.round_trip == 0.25
    assert "top" not in pings


async def test_pings_are_answered_in_the_order_in_which_they_were_sent(autojump_clock: MockClock) -> None:
    pings = Pings[int]()
    first = pings.sent(1)
    await trio.sleep(1)
    second, other = pings.sent(1), pings.sent(2)
    await trio.sleep(1)
    pings.answered(1)
    pings.answered(2)
    assert (first.took, second.took, other.took) == (2.0, None, 1.0)
    assert len(pings) == 1


async def test_the_round_trip_is_smoothed_over_all_answers(autojump_clock: MockClock) -> None:
    pings = Pings[None]()
    assert pings.round_trip is None
    for took in (1.0, 2.0):
        pings.sent(None)
        await trio.sleep(took)
        pings.answered(None)
    assert pings.round_trip == pytest.approx(0.875 * 1.0 + 0.125 * 2.0)


async def test_an_answer_to_no_ping_changes_nothing() -> None:
    pings = Pings[str]()
    pings.answered("top")
    assert pings.round_trip is None


async def test_those_that_get_no_answer_raise_why(autojump_clock: MockClock) -> None:
    pings = Pings[str]()
    ended, going_on, late = pings.sent("gone"), pings.sent("top"), pings.sent("top")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_fails, ended)
        await trio.testing.wait_all_tasks_blocked()
        pings.ended(lost, "gone")
        pings.ended(lost, "unknown")
        assert len(pings) == 2
        nursery.start_soon(_fails, going_on)
        await trio.testing.wait_all_tasks_blocked()
        pings.ended(lost)
    assert len(pings) == 0
    await _fails(late)


async def test_a_ping_whose_task_was_cancelled_keeps_its_place_until_it_is_answered(autojump_clock: MockClock) -> None:
    pings = Pings[str]()
    given_up, wanted = pings.sent("top"), pings.sent("top")
    with trio.move_on_after(1):
        await given_up.wait()
    assert not given_up.is_wanted
    pings.answered("top")
    assert wanted.took is None
    pings.answered("top")
    assert wanted.took == 1.0


async def test_a_new_connection_gets_the_pings_that_are_still_wanted(autojump_clock: MockClock) -> None:
    pings, resent = Pings[str](), list[str]()
    given_up, wanted = pings.sent("top"), pings.sent("top")
    with trio.move_on_after(1):
        await given_up.wait()
    pings.resend(resent.append)
    assert resent == ["top"]
    await trio.sleep(0.5)
    pings.answered("top")
    assert wanted.took == 0.5
    assert given_up.took is None
    assert len(pings) == 0


async def _fails(ping: Ping) -> None:
    with pytest.raises(LinkLost):
        await ping.wait()
