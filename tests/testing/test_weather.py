"""The weather does what it says, and the same again for the same seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.testing import WeatherStream, replay, weather_pair

if TYPE_CHECKING:
    from trio.testing import MockClock

Story = list[tuple[float, bytes]]


async def listen(stream: WeatherStream) -> Story:
    story: Story = []
    while data := await stream.receive_some():
        story.append((trio.current_time(), data))
    return story


async def story_of(seed: int) -> Story:
    one, other = weather_pair(seed, latency=0.1, jitter=0.05, bandwidth=10_000)
    start = trio.current_time()
    await one.send_all(bytes(range(256)) * 10)
    await one.send_eof()
    return [(when - start, data) for when, data in await listen(other)]


async def test_fair_weather_passes_trios_own_checks(autojump_clock: MockClock) -> None:
    async def make() -> tuple[WeatherStream, WeatherStream]:
        return weather_pair(1, buffer=1000)

    async def make_clogged() -> tuple[WeatherStream, WeatherStream]:
        one, other = weather_pair(1, buffer=1000)
        await one.send_all(bytes(1000))
        await other.send_all(bytes(1000))
        return one, other

    await trio.testing.check_half_closeable_stream(make, make_clogged)


async def test_the_same_seed_gives_the_same_story(autojump_clock: MockClock) -> None:
    first, again, another = await story_of(5), await story_of(5), await story_of(6)
    assert [data for _, data in first] == [data for _, data in again]
    assert [when for when, _ in first] == pytest.approx([when for when, _ in again])
    assert [data for _, data in first] != [data for _, data in another]


async def test_latency_and_bandwidth_take_their_time(autojump_clock: MockClock) -> None:
    one, other = weather_pair(1, latency=2.0, bandwidth=1000, splits=False)
    start = trio.current_time()
    await one.send_all(bytes(500))
    assert await other.receive_some() == bytes(500)
    assert trio.current_time() - start == pytest.approx(2.5)


async def test_bytes_come_in_random_pieces_but_in_order(autojump_clock: MockClock) -> None:
    story = await story_of(1)
    assert b"".join(data for _, data in story) == bytes(range(256)) * 10
    assert len(story) > 1


async def test_a_sender_waits_when_the_buffer_is_full(autojump_clock: MockClock) -> None:
    one, other = weather_pair(1, buffer=100)
    with trio.move_on_after(1) as scope:
        await one.send_all(bytes(101))
    assert scope.cancelled_caught
    await other.receive_some()
    await one.send_all(b"")


async def test_a_clogged_link_delivers_nothing_until_it_is_free_again(autojump_clock: MockClock) -> None:
    one, other = weather_pair(1)
    one.clog()
    await one.send_all(b"x")
    await other.send_all(b"y")
    assert await one.receive_some() == b"y"
    with trio.move_on_after(100) as scope:
        await other.receive_some()
    assert scope.cancelled_caught
    one.unclog()
    assert await other.receive_some() == b"x"


async def test_a_stalled_link_delivers_so_many_bytes_and_no_more(autojump_clock: MockClock) -> None:
    one, other = weather_pair(1, stall_after=7)
    await one.send_all(bytes(100))
    got = b""
    with trio.move_on_after(100):
        while True:
            got += await other.receive_some()
    assert len(got) == 7
    await other.send_all(b"back")
    assert await one.receive_some(1) == b"b"


async def test_a_half_open_link_swallows_everything_without_a_sign(autojump_clock: MockClock) -> None:
    one, other = weather_pair(1, half_open_after=7)
    await one.send_all(bytes(7))
    for stream in (one, other):
        await stream.send_all(bytes(1_000_000))
    got = b""
    with trio.move_on_after(100):
        while True:
            got += await other.receive_some()
    assert len(got) == 7
    await one.aclose()
    with trio.move_on_after(100) as scope:
        await other.receive_some()
    assert scope.cancelled_caught


async def test_a_link_can_be_made_to_vanish(autojump_clock: MockClock) -> None:
    one, other = weather_pair(1)
    one.vanish()
    await one.send_all(b"x")
    with trio.move_on_after(100) as scope:
        await other.receive_some()
    assert scope.cancelled_caught


@pytest.mark.parametrize("byte", [0, 1, 50, 99])
async def test_a_reset_comes_at_its_byte_and_breaks_both_ends(byte: int, autojump_clock: MockClock) -> None:
    one, other = weather_pair(1, reset_at_byte=byte)
    await one.send_all(bytes(100))
    got = bytearray()

    async def receive() -> None:
        while True:
            got.extend(await other.receive_some())

    with pytest.raises(trio.BrokenResourceError):
        await receive()
    assert len(got) == byte
    with pytest.raises(trio.BrokenResourceError):
        await one.send_all(b"x")
    with pytest.raises(trio.BrokenResourceError):
        await one.receive_some()


@pytest.mark.parametrize("byte", [0, 1, 50, 99])
async def test_a_cut_ends_the_stream_at_its_byte(byte: int, autojump_clock: MockClock) -> None:
    one, other = weather_pair(1, cut_at_byte=byte)
    await one.send_all(bytes(100))
    assert sum(len(data) for _, data in await listen(other)) == byte


async def test_who_closes_with_bytes_unread_resets_the_connection(autojump_clock: MockClock) -> None:
    one, other = weather_pair(1)
    await one.send_all(b"unread")
    await other.aclose()
    with pytest.raises(trio.BrokenResourceError):
        await one.receive_some()


async def test_trio_takes_its_tasks_in_the_same_order_for_the_same_seed(autojump_clock: MockClock) -> None:
    async def order(seed: int) -> list[int]:
        seen: list[int] = []

        async def run(number: int) -> None:
            for _ in range(5):
                await trio.lowlevel.checkpoint()
                seen.append(number)

        with replay(seed):
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(run, number)
        return seen

    assert await order(1) == await order(1)
    assert await order(1) != await order(2)


async def test_a_failure_names_its_seed(autojump_clock: MockClock) -> None:
    with pytest.raises(ValueError, match="x") as caught, replay(77):
        raise ValueError("x")
    assert caught.value.__notes__ == ["with seed=77"]


async def test_a_reset_behind_the_last_byte_wakes_who_waits(autojump_clock: trio.testing.MockClock) -> None:
    one, other = weather_pair(1, reset_at_byte=0)
    with trio.fail_after(1):
        await other.wait_readable()
    with pytest.raises(trio.BrokenResourceError):
        other.receive_nowait(1)
    one, other = weather_pair(1, reset_at_byte=3, splits=False)
    await one.send_all(b"abc")
    assert other.receive_nowait(10) == b"abc"
    with trio.fail_after(1):
        await other.wait_readable()
    with pytest.raises(trio.BrokenResourceError):
        other.receive_nowait(1)
