"""A full listener lets those wait who come, and lets those go who make no progress."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from muxkit import Limits, Refused
from muxkit.runtime import Admission, Place, Standing, current_place, source_of
from muxkit.runtime.admission import AT_ONCE, MOVES

if TYPE_CHECKING:
    from trio.testing import MockClock

pytestmark = pytest.mark.requirement("R-13")


@attrs.define
class Guest:
    """A session as its place sees it."""

    channels: int = 0
    messages: int = 0
    told: Refused | None = None

    def activity(self) -> int | None:
        return None if self.channels else self.messages

    def send_away(self, refused: Refused) -> None:
        self.told = refused


def admitted(admission: Admission, source: str = "") -> Place:
    assert admission.make_room()
    place = admission.admit(source)
    assert place is not None
    return place


def served(admission: Admission, source: str = "") -> Place:
    place = admitted(admission, source)
    place.establish()
    return place


def filled(limits: Limits, source: str = "") -> tuple[Admission, list[Place]]:
    """Return the places of a listener with as many half-open connections as it may have."""
    admission = Admission(limits)
    return admission, [admitted(admission, source) for _ in range(limits.half_open)]


async def test_while_there_is_room_silence_ends_nothing(mock_clock: MockClock) -> None:
    admission = Admission(Limits(connections=3, half_open=3))
    silent = [admitted(admission), admitted(admission)]
    mock_clock.jump(9.0)
    admitted(admission)
    assert [place.standing for place in silent] == [Standing.HALF_OPEN] * 2


async def test_a_newcomer_pushes_out_nobody_who_has_just_come(mock_clock: MockClock) -> None:
    admission, places = filled(Limits(half_open=100))
    assert not admission.make_room()
    assert {place.standing for place in places} == {Standing.HALF_OPEN}


async def test_who_makes_no_progress_for_a_tenth_of_the_handshake_gives_way(mock_clock: MockClock) -> None:
    admission, places = filled(Limits(half_open=3, handshake=10.0))
    mock_clock.jump(0.9)
    places[0].progressed()
    mock_clock.jump(0.2)
    assert admission.make_room()
    assert [place.standing for place in places] == [Standing.HALF_OPEN, Standing.EVICTED, Standing.HALF_OPEN]
    assert places[1].scope.cancel_called


async def test_a_newcomer_waits_until_a_handshake_is_finished(autojump_clock: MockClock) -> None:
    admission, places = filled(Limits(half_open=3))

    async def finish() -> None:
        await trio.sleep(0.5)
        places[1].establish()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(finish)
        assert await admission.wait_for_place()
    assert trio.current_time() == pytest.approx(0.5)
    assert (admission.half_open, admission.served) == (2, 1)


async def test_a_newcomer_waits_until_one_may_be_asked_to_go(autojump_clock: MockClock) -> None:
    admission, places = filled(Limits(half_open=3))
    assert await admission.wait_for_place()
    assert trio.current_time() == pytest.approx(1.0)
    assert places[0].gave_way


async def test_a_peer_whose_bytes_came_while_the_program_was_busy_is_not_judged_first(
    autojump_clock: MockClock,
) -> None:
    admission, [place] = filled(Limits(half_open=1))

    async def progress_in_the_same_pass() -> None:
        await trio.sleep(1.0)
        place.establish()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(progress_in_the_same_pass)
        assert await admission.wait_for_place()
    assert not place.gave_way


async def test_the_address_with_the_most_half_open_connections_loses_one_first(mock_clock: MockClock) -> None:
    admission = Admission(Limits(half_open=4))
    lone = admitted(admission, "192.0.2.1")
    many = [admitted(admission, "192.0.2.2") for _ in range(3)]
    mock_clock.jump(1.0)
    assert admission.make_room()
    assert not lone.gave_way
    assert [place.gave_way for place in many] == [True, False, False]


async def test_one_address_has_so_many_half_open_connections_and_no_more(mock_clock: MockClock) -> None:
    admission = Admission(Limits(half_open_per_address=2))
    first = [admitted(admission, "192.0.2.1") for _ in range(2)]
    assert admission.make_room()
    assert admission.admit("192.0.2.1") is None
    admitted(admission, "192.0.2.2")
    first[0].establish()
    admitted(admission, "192.0.2.1")
    mock_clock.jump(1.0)
    admitted(admission, "192.0.2.1")
    assert first[1].gave_way, "one of the same address that makes no progress"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_a_network_of_a_host_counts_as_one_address(host: str, expected: str) -> None:
    assert source_of(host) == expected


async def test_the_session_that_was_idle_for_longest_gives_way_and_is_told_why(autojump_clock: MockClock) -> None:
    admission, guests = Admission(Limits(connections=3)), [Guest(channels=1), Guest(), Guest()]
    places = [served(admission) for _ in guests]
    with places[0].occupy(guests[0]), places[1].occupy(guests[1]), places[2].occupy(guests[2]):

        async def work_a_little() -> None:
            await trio.sleep(5.0)
            guests[1].messages += 2

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work_a_little)
            assert await admission.wait_for_place()
    assert [place.gave_way for place in places] == [False, False, True]
    assert guests[2].told is not None
    assert guests[2].told.code == 503
    assert trio.current_time() == pytest.approx(10.0)


async def test_a_session_with_a_channel_never_gives_way_and_newcomers_are_to_be_told(autojump_clock: MockClock) -> None:
    admission = Admission(Limits(connections=1))
    with (place := served(admission)).occupy(Guest(channels=1)):
        assert not await admission.wait_for_place(patience=10.0)
    assert trio.current_time() == pytest.approx(10.0)
    assert not place.gave_way


async def test_a_connection_without_a_session_that_can_be_asked_never_gives_way(autojump_clock: MockClock) -> None:
    admission = Admission(Limits(connections=1))
    served(admission)
    assert not await admission.wait_for_place(patience=100.0)


async def test_who_has_not_said_a_word_gives_way_before_who_is_idle(mock_clock: MockClock) -> None:
    admission = Admission(Limits(connections=2))
    idle, silent = served(admission), served(admission)
    with idle.occupy(Guest()), silent.occupy(Guest()):
        silent.await_word()
        mock_clock.jump(1.0)
        assert admission.make_room()
    assert (idle.gave_way, silent.gave_way) == (False, True)


async def test_a_silent_peer_for_whom_we_have_opened_a_channel_does_not_give_way(mock_clock: MockClock) -> None:
    admission = Admission(Limits(connections=1))
    place = served(admission)
    place.await_word()
    with place.occupy(Guest(channels=1)):
        mock_clock.jump(1.0)
        assert not admission.make_room()


async def test_a_connection_that_gives_way_ends_without_an_error_and_leaves_its_place(
    autojump_clock: MockClock,
) -> None:
    admission = Admission(Limits(half_open=1))

    async def stay_silent() -> None:
        with admitted(admission).held():
            assert current_place() is not None
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay_silent)
        await trio.testing.wait_all_tasks_blocked()
        assert await admission.wait_for_place()
    assert len(admission) == 0


async def test_handshakes_start_in_order_and_not_all_at_the_same_time(autojump_clock: MockClock) -> None:
    admission, started = Admission(Limits()), list[int]()
    places = [admitted(admission) for _ in range(3 * AT_ONCE)]

    async def start(number: int) -> None:
        await admission.start(places[number])
        started.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(len(places)):
            nursery.start_soon(start, number)
            await trio.testing.wait_all_tasks_blocked()
        assert started == [*range(AT_ONCE)]
        places[7].establish()
        await trio.testing.wait_all_tasks_blocked()
        assert started == [*range(AT_ONCE + 1)]
    assert started == [*range(3 * AT_ONCE)], "those that wait for their peers hold nobody up for long"
    assert trio.current_time() == pytest.approx(2.0)


async def test_who_waits_for_its_turn_is_not_dropped_for_that(autojump_clock: MockClock) -> None:
    admission = Admission(Limits(half_open=AT_ONCE + 1, handshake=10.0))
    places = [admitted(admission) for _ in range(AT_ONCE + 1)]
    for place in places[:-1]:
        await admission.start(place)
    with suppress(trio.TooSlowError), trio.fail_after(0.9):
        await admission.start(places[-1])
    assert places[-1].standing is Standing.WAITING
    assert places[-1].scope.deadline > 1000


@pytest.mark.parametrize(("before", "after"), [*product(Standing, Standing)])
async def test_a_place_only_moves_as_the_table_says(before: Standing, after: Standing) -> None:
    admission = Admission(Limits())
    place = admitted(admission)
    admission._move(place, before)
    admission._move(place, after)
    assert place.standing is (after if after in MOVES[before] else before)
    assert (len(admission), admission.half_open) == (
        place.standing not in {Standing.EVICTED, Standing.LEFT},
        place.standing in {Standing.HALF_OPEN, Standing.WAITING},
    )
