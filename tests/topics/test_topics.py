"""Topics: fan-out, policies for slow subscribers, presence, and updates that outlive the process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.testing

import muxkit
import muxkit.topics
from muxkit.protocols import restream
from muxkit.testing import ChaosPlan, Way, chaos_url

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

    from muxkit.topics import OnLag

ALL = pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
SMALL = muxkit.Limits(channel_bytes=8192, channel_first=4096, channel_floor=2048, outbox=8192)


class Price(msgspec.Struct):
    name: str
    cents: int


JSON = muxkit.Json(Price)


def price(cents: int, padding: int = 0) -> Price:
    return Price("tea" + "x" * padding, cents)


async def cents(updates: muxkit.Subscription[Price], count: int) -> list[int]:
    return [(await updates.__anext__()).cents for _ in range(count)]


@ALL
async def test_every_subscriber_gets_every_update_in_order(protocol: str) -> None:
    topic = muxkit.Topic(Price)
    async with muxkit.open_server(muxkit.by_name({"prices": topic}), f"{protocol}+mem://topic") as server:
        async with muxkit.connect(server.url) as one, muxkit.connect(server.url) as two:
            async with one.subscribe("prices", codec=JSON) as a, two.subscribe("prices", codec=JSON) as b:
                assert topic.subscribers == 2
                for number in range(1, 6):
                    assert await topic.publish(price(number)) == number
                assert await cents(a, 5) == await cents(b, 5) == [1, 2, 3, 4, 5]
                topic.publish_nowait(price(6))
                assert await cents(a, 1) == [6]
                topic.close()
                assert [update.cents async for update in b] == [6]


@ALL
async def test_a_subscriber_that_leaves_is_forgotten(protocol: str, autojump_clock: MockClock) -> None:
    topic = muxkit.Topic(Price)
    async with muxkit.open_server(muxkit.by_name({"prices": topic}), f"{protocol}+mem://leave") as server:
        async with muxkit.connect(server.url) as session:
            async with session.subscribe("prices", codec=JSON):
                assert topic.subscribers == 1
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert topic.subscribers == 0


async def test_an_update_is_encoded_once_for_all_subscribers() -> None:
    class Counting(muxkit.Json[Price]):
        encoded = 0

        def encode(self, value: Price, /) -> bytes:
            Counting.encoded += 1
            return super().encode(value)

    topic = muxkit.Topic(Counting(Price))
    async with muxkit.open_server(muxkit.by_name({"prices": topic}), "bpmux+mem://once") as server:
        async with muxkit.connect(server.url) as session:
            async with session.subscribe("prices", codec=JSON) as a, session.subscribe("prices", codec=JSON) as b:
                await topic.publish(price(1))
                assert await cents(a, 1) == await cents(b, 1) == [1]
    assert Counting.encoded == 1


async def test_updates_after_a_number_come_first_as_far_as_they_are_kept() -> None:
    topic = muxkit.Topic(Price, keep=4)
    async with muxkit.open_server(muxkit.by_name({"prices": topic}), "bpmux+mem://since") as server:
        async with muxkit.connect(server.url) as session:
            for number in range(1, 7):
                await topic.publish(price(number))
            async with session.subscribe("prices", codec=JSON, since=4) as updates:
                assert await cents(updates, 2) == [5, 6]
                position = updates.position
            await topic.publish(price(7))
            async with session.subscribe("prices", codec=JSON, since=position) as updates:
                assert await cents(updates, 1) == [7]
            async with session.subscribe("prices", codec=JSON, since=1, on_lag="drop") as updates:
                assert await cents(updates, 4) == [4, 5, 6, 7]
                assert updates.lost == 2
            async with session.subscribe("prices", codec=JSON, since=1) as updates:
                with pytest.raises(muxkit.Lagged, match="2 updates were lost"):
                    await updates.__anext__()


async def test_a_position_of_an_earlier_run_begins_with_what_is_kept() -> None:
    topic = muxkit.Topic(Price)
    async with muxkit.open_server(muxkit.by_name({"prices": topic}), "bpmux+mem://run") as server:
        async with muxkit.connect(server.url) as session:
            await topic.publish(price(1))
            async with session.subscribe("prices", codec=JSON, since="900@another") as updates:
                assert await cents(updates, 1) == [1]


@pytest.mark.parametrize("policy", ["end", "drop", "latest"])
async def test_a_slow_subscriber_neither_stops_nor_grows_the_server_nor_its_neighbours(
    policy: OnLag, autojump_clock: MockClock
) -> None:
    topic = muxkit.Topic(Price, keep=10)
    handler = muxkit.by_name({"prices": topic})
    async with muxkit.open_server(handler, "bpmux+mem://slow", limits=SMALL) as server:
        async with muxkit.connect(server.url, limits=SMALL) as session, muxkit.connect(server.url) as other:
            async with (
                session.subscribe("prices", codec=JSON, on_lag=policy) as slow,
                other.subscribe("prices", codec=JSON) as quick,
            ):
                for number in range(1, 201):
                    await topic.publish(price(number, padding=200))
                    assert await cents(quick, 1) == [number]
                seen: list[int] = []
                with suppress(muxkit.Lagged):
                    while 200 not in seen:
                        seen += await cents(slow, 1)
                assert seen == sorted(set(seen))
                assert len(seen) < 190
                match policy:
                    case "end":
                        assert seen[-1] + slow.lost == 190
                    case "drop":
                        assert slow.lost == 200 - len(seen)
                    case _:
                        assert slow.lost == 0  # what is passed over was not wanted, so it isn't reported as lost
                        assert seen[-1] == 200
                        assert not {198, 199} & {*seen}


async def test_publishers_wait_for_a_subscriber_with_that_policy(autojump_clock: MockClock) -> None:
    topic = muxkit.Topic(Price, keep=5, allow_wait=True)
    handler = muxkit.by_name({"prices": topic})
    async with muxkit.open_server(handler, "bpmux+mem://wait", limits=SMALL) as server:
        async with muxkit.connect(server.url, limits=SMALL) as session:
            async with session.subscribe("prices", codec=JSON, on_lag="wait") as slow, trio.open_nursery() as nursery:

                async def publish() -> None:
                    for number in range(1, 301):
                        await topic.publish(price(number, padding=200))

                nursery.start_soon(publish)
                await trio.sleep(10)
                assert topic.head < 300
                with pytest.raises(trio.WouldBlock):
                    topic.publish_nowait(price(0))
                assert await cents(slow, 300) == [*range(1, 301)]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"on_lag": "wait"}, 403, "doesn't wait for its subscribers"),
        ({"on_lag": "sleep"}, 400, "invalid header 'on-lag': got 'sleep'"),
        ({"since": "yesterday"}, 400, "invalid header 'since'"),
        ({"codec": muxkit.MessagePack(Price)}, 415, "unknown codec 'msgpack': this topic has 'json'"),
    ],
)
async def test_a_subscription_that_the_topic_cannot_serve_is_refused(
    options: dict[str, Any], code: int, text: str
) -> None:
    async with muxkit.open_server(muxkit.by_name({"prices": muxkit.Topic(Price)}), "bpmux+mem://no") as server:
        async with muxkit.connect(server.url) as session:
            with pytest.raises(muxkit.ChannelCancelled) as caught:
                async with session.subscribe("prices", **({"codec": JSON} | options)):
                    pass
    assert caught.value.code == code
    assert text in caught.value.reason


async def test_presence_tells_who_is_there_and_who_joins_and_leaves(autojump_clock: MockClock) -> None:
    topic = muxkit.Topic(str)
    handler = muxkit.by_name({"chat": topic, "chat/presence": topic.presence})
    people = muxkit.tokens({"alice": "a", "bob": "b"})
    codec = muxkit.Json(muxkit.topics.Presence)
    async with muxkit.open_server(handler, "bpmux+mem://chat", authorize=people) as server:
        async with muxkit.connect(server.url, token="a") as alice, muxkit.connect(server.url, token="b") as bob:
            async with alice.subscribe("chat", codec=muxkit.Json(str), member="Al"):
                async with bob.subscribe("chat/presence", codec=codec) as presence:
                    seen = [await presence.__anext__()]
                    async with bob.subscribe("chat", codec=muxkit.Json(str), member="Bob"):
                        seen.append(await presence.__anext__())
                        assert [member.user for member in topic.members] == ["alice", "bob"]
                    seen.append(await presence.__anext__())
    told = [(each.member.name, each.member.user, each.is_here) for each in seen]
    assert told == [("Al", "alice", True), ("Bob", "bob", True), ("Bob", "bob", False)]


async def test_over_relink_a_subscriber_misses_nothing_across_cuts(autojump_clock: MockClock) -> None:
    topic = muxkit.Topic(Price, keep=10_000)
    cuts: list[object] = []
    async with muxkit.open_server(muxkit.by_name({"prices": topic}), "relink+mem://cuts") as server:
        plan = ChaosPlan(cut_after=(2_000, 4_000), cut_ways=(Way.BOTH,))
        async with chaos_url(server.url, plan, seed=7, on_cut=cuts.append) as chaos:
            async with muxkit.connect(chaos.url) as session:
                async with session.subscribe("prices", codec=JSON) as updates:
                    for number in range(1, 301):
                        await topic.publish(price(number))
                        assert await cents(updates, 1) == [number]
    assert len(cuts) > 2


async def test_a_journal_replays_after_a_restart(tmp_path: Path, autojump_clock: MockClock) -> None:
    position = "0"
    for run in range(3):
        async with restream.open_store(f"sqlite:{tmp_path / 'prices.db'}") as store:
            async with muxkit.Topic(Price, keep=2, journal=store, name="prices") as topic:
                assert topic.head == 5 * run
                handler = muxkit.by_name({"prices": topic})
                async with muxkit.open_server(handler, f"bpmux+mem://journal{run}") as server:
                    async with muxkit.connect(server.url) as session:
                        for number in range(1, 6):
                            await topic.publish(price(5 * run + number))
                        async with session.subscribe("prices", codec=JSON, since=position) as updates:
                            assert await cents(updates, 5) == [*range(5 * run + 1, 5 * run + 6)]
                            position = updates.position
                        async with session.subscribe("prices", codec=JSON, since=0) as updates:
                            assert await cents(updates, 5 * run + 5) == [*range(1, 5 * run + 6)]


async def test_a_closed_topic_takes_no_updates() -> None:
    topic = muxkit.Topic(Price)
    topic.close()
    with pytest.raises(trio.ClosedResourceError):
        await topic.publish(price(1))


def test_a_journal_needs_a_name_and_json() -> None:
    store: Any = object()
    with pytest.raises(ValueError, match="journal"):
        muxkit.Topic(Price, journal=store)


async def test_a_topic_opens_the_journal_whose_place_it_is_given(tmp_path: Path) -> None:
    place = f"sqlite:{tmp_path / 'prices.db'}"
    for run in range(2):
        topic = muxkit.Topic(Price, journal=place, name="prices")
        with pytest.raises(RuntimeError, match="a journal that isn't open"):
            await topic.publish(price(0))
        async with topic:
            assert await topic.publish(price(run)) == run + 1
            async with muxkit.open_server(muxkit.by_name({"prices": topic}), "bpmux+mem://place") as server:
                async with (
                    muxkit.connect(server.url) as session,
                    session.subscribe("prices", codec=JSON, since=0) as updates,
                ):
                    assert await cents(updates, run + 1) == [*range(run + 1)]
