"""Each session has one connection at most, and absent ones are kept within their bounds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing

from muxkit.runtime import Adopted, Forgotten, LinkLost, Registry

if TYPE_CHECKING:
    from trio.testing import MockClock


@attrs.define(eq=False)
class Session:
    name: str
    weight: int = 0
    running: int = 0
    runs: int = 0

    async def run(self, seconds: float = float("inf"), goodbye: float = 0.0) -> None:
        """A connection of it; leaving takes a while even when cancelled."""
        self.running += 1
        self.runs += 1
        assert self.running == 1, "two connections of one session at once"
        try:
            await trio.sleep(seconds)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(goodbye)
            self.running -= 1


@attrs.define
class Shelf:
    """A registry, and what it gave up."""

    most: int = 1024
    most_bytes: int = 1_000_000
    most_age: float = 30.0
    given_up: list[tuple[str, Forgotten]] = attrs.field(factory=list)
    sessions: Registry[str, Session] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.sessions = Registry(
            weigh=lambda session: session.weight,
            forgotten=lambda session, why: self.given_up.append((session.name, why)),
            most=self.most,
            most_bytes=self.most_bytes,
            most_age=self.most_age,
        )

    async def visit(self, name: str, weight: int = 0) -> bool:
        """One short connection; whether its session was made for it."""
        async with self.sessions.adopt(name, make=lambda: Session(name)) as adopted:
            adopted.session.weight = weight
            return adopted.is_new


async def test_a_session_is_made_once_and_found_again() -> None:
    shelf = Shelf()
    assert [await shelf.visit("a"), await shelf.visit("b"), await shelf.visit("a")] == [True, True, False]
    assert [session.name for session in shelf.sessions] == ["a", "b"]
    assert (len(shelf.sessions), shelf.sessions.absent) == (2, 2)


async def test_a_session_that_nobody_knows_is_an_error_without_make() -> None:
    shelf = Shelf()
    with pytest.raises(LookupError):
        async with shelf.sessions.adopt("a"):
            pass
    assert shelf.sessions.find("a") is None


async def test_a_session_with_a_connection_is_not_absent() -> None:
    shelf = Shelf()
    async with shelf.sessions.adopt("a", make=lambda: Session("a")):
        assert shelf.sessions.absent == 0
    assert shelf.sessions.absent == 1


async def test_the_old_connection_has_left_before_the_new_one_begins(autojump_clock: MockClock) -> None:
    shelf, order = Shelf(), list[str]()

    async def connect(name: str, goodbye: float) -> None:
        async with shelf.sessions.adopt("a", make=lambda: Session("a")) as adopted:
            order.append(f"{name} begins")
            try:
                await adopted.session.run(goodbye=goodbye)
            finally:
                order.append(f"{name} leaves")
        assert adopted.was_replaced is (name == "old")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(connect, "old", 2.0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(connect, "new", 0.0)
        await trio.sleep(1)
        assert order == ["old begins"]
        await trio.sleep(2)
        assert order == ["old begins", "old leaves", "new begins"]
        nursery.cancel_scope.cancel()


async def test_of_several_who_wait_only_the_newest_gets_it(autojump_clock: MockClock) -> None:
    shelf, got, lost = Shelf(), list[int](), list[int]()

    async def connect(number: int) -> None:
        try:
            async with shelf.sessions.adopt("a", make=lambda: Session("a")) as adopted:
                got.append(number)
                await adopted.session.run(goodbye=1.0)
        except LinkLost:
            lost.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(connect, number)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(2)
        assert (got, sorted(lost)) == ([0, 4], [1, 2, 3])
        nursery.cancel_scope.cancel()


async def test_without_takeover_the_second_connection_is_told(autojump_clock: MockClock) -> None:
    shelf = Shelf()
    async with shelf.sessions.adopt("a", make=lambda: Session("a")) as adopted:
        with pytest.raises(trio.BusyResourceError):
            async with shelf.sessions.adopt("a", takeover=False):
                pass
        await trio.lowlevel.checkpoint()
        assert not adopted.was_replaced


async def test_what_a_block_raises_comes_out_as_it_is() -> None:
    shelf = Shelf()
    with pytest.raises(KeyError):
        async with shelf.sessions.adopt("a", make=lambda: Session("a")):
            raise KeyError("out of the block")
    assert shelf.sessions.absent == 1


async def test_who_is_cancelled_while_waiting_leaves_the_session_absent(autojump_clock: MockClock) -> None:
    shelf = Shelf()

    async def hold() -> None:
        async with shelf.sessions.adopt("a", make=lambda: Session("a")) as adopted:
            await adopted.session.run(goodbye=5.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            async with shelf.sessions.adopt("a"):
                pass
        assert shelf.sessions.absent == 0
        await trio.sleep(5)
        assert shelf.sessions.absent == 1


async def test_a_session_is_not_given_up_between_two_connections(autojump_clock: MockClock) -> None:
    shelf = Shelf(most=1)
    await shelf.visit("other")

    async def hold() -> None:
        async with shelf.sessions.adopt("a", make=lambda: Session("a")) as adopted:
            await adopted.session.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await trio.testing.wait_all_tasks_blocked()
        async with shelf.sessions.adopt("a") as adopted:
            assert not adopted.is_new
    assert shelf.given_up == [("other", Forgotten.TOO_MANY)]


async def test_who_comes_while_a_connection_leaves_is_newer_than_those_who_wait(autojump_clock: MockClock) -> None:
    shelf, story = Shelf(), list[str]()

    async def hold_and_come_again() -> None:
        async with shelf.sessions.adopt("a", make=lambda: Session("a")) as adopted:
            await adopted.session.run()
        async with shelf.sessions.adopt("a"):
            story.append("has it again")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_and_come_again)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LinkLost, match="newer"):
            async with shelf.sessions.adopt("a"):
                story.append("the one who waited")
        assert story == ["has it again"]
        assert shelf.sessions.absent == 1


async def test_a_session_that_is_over_is_not_kept() -> None:
    shelf = Shelf()
    async with shelf.sessions.adopt("a", make=lambda: Session("a")) as adopted:
        adopted.forget()
    assert len(shelf.sessions) == 0
    assert await shelf.visit("a") is True
    assert shelf.given_up == []


async def test_a_key_is_free_again_when_the_forgotten_session_has_left(autojump_clock: MockClock) -> None:
    shelf, order = Shelf(), list[str]()

    async def hold() -> None:
        async with shelf.sessions.adopt("a", make=lambda: Session("a")) as adopted:
            await adopted.session.run(goodbye=3.0)
        order.append("left")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await trio.testing.wait_all_tasks_blocked()
        shelf.sessions.forget("a")
        assert shelf.sessions.find("a") is None
        with pytest.raises(LookupError):
            async with shelf.sessions.adopt("a"):
                pass
        assert order == ["left"]
        assert await shelf.visit("a") is True


async def test_forgetting_an_absent_session_frees_its_bytes() -> None:
    shelf = Shelf()
    await shelf.visit("a", weight=100)
    assert shelf.sessions.absent_bytes == 100
    shelf.sessions.forget("a")
    shelf.sessions.forget("never heard of")
    assert (len(shelf.sessions), shelf.sessions.absent, shelf.sessions.absent_bytes) == (0, 0, 0)


async def test_absence_is_bounded_in_count_the_longest_goes_first() -> None:
    shelf = Shelf(most=2)
    for name in "abac":
        await shelf.visit(name)
    assert shelf.given_up == [("b", Forgotten.TOO_MANY)]
    assert [session.name for session in shelf.sessions] == ["a", "c"]


async def test_absence_is_bounded_in_bytes() -> None:
    shelf = Shelf(most_bytes=100)
    for name in "abc":
        await shelf.visit(name, weight=40)
    assert shelf.given_up == [("a", Forgotten.TOO_LARGE)]
    assert shelf.sessions.absent_bytes == 80


async def test_one_that_is_too_heavy_alone_pushes_nobody_out() -> None:
    shelf = Shelf(most_bytes=100)
    await shelf.visit("a", weight=40)
    await shelf.visit("b", weight=101)
    assert shelf.given_up == [("b", Forgotten.TOO_LARGE)]


async def test_a_session_may_become_heavier_while_it_is_absent() -> None:
    shelf = Shelf(most_bytes=100)
    await shelf.visit("a", weight=40)
    await shelf.visit("b", weight=40)
    session = shelf.sessions.find("b")
    assert session is not None
    session.weight = 90
    shelf.sessions.reweigh("b")
    shelf.sessions.reweigh("never heard of")
    assert shelf.given_up == [("a", Forgotten.TOO_LARGE)]
    assert shelf.sessions.absent_bytes == 90


async def test_absence_is_bounded_in_time(autojump_clock: MockClock) -> None:
    shelf = Shelf(most_age=30.0)
    await shelf.visit("a")
    await trio.sleep(29)
    assert await shelf.visit("a") is False
    await trio.sleep(29)
    assert shelf.sessions.find("a") is not None
    await trio.sleep(1)
    assert shelf.sessions.find("a") is None
    assert shelf.given_up == [("a", Forgotten.TOO_OLD)]


async def test_expire_gives_up_each_in_its_own_time(autojump_clock: MockClock) -> None:
    times: list[float] = []
    sessions: Registry[str, str] = Registry(forgotten=lambda session, why: times.append(trio.current_time()))
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sessions.expire)
        await trio.testing.wait_all_tasks_blocked()
        for name in "abc":
            async with sessions.adopt(name, make=str):
                pass
            await trio.sleep(0.7)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert [when - start for when in times] == pytest.approx([30.0, 30.7, 31.4])


@pytest.mark.seeds(20, soak=2000)
async def test_connections_that_come_and_go_at_random_never_share_a_session(
    seed: int, autojump_clock: MockClock
) -> None:
    dice = random.Random(seed)
    shelf = Shelf(most=3, most_bytes=300, most_age=5.0)
    held: dict[Adopted[Session], float] = {}

    async def connect() -> None:
        name = dice.choice("abcdef")
        with trio.move_on_after(dice.uniform(0, 5)):
            try:
                async with shelf.sessions.adopt(name, make=lambda: Session(name)) as adopted:
                    held[adopted] = trio.current_time()
                    adopted.session.weight = dice.randint(0, 150)
                    await adopted.session.run(dice.uniform(0, 2), goodbye=dice.choice([0.0, 0.5]))
                    if dice.random() < 0.2:
                        adopted.forget()
            except LinkLost:
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shelf.sessions.expire)
        async with trio.open_nursery() as connections:
            for _ in range(100):
                connections.start_soon(connect)
                await trio.sleep(dice.uniform(0, 0.3))
                if dice.random() < 0.1:
                    shelf.sessions.forget(dice.choice("abcdef"))
                assert shelf.sessions.absent <= 3
                assert shelf.sessions.absent_bytes <= 300
        await trio.sleep(6)
        assert (len(shelf.sessions), shelf.sessions.absent, shelf.sessions.absent_bytes) == (0, 0, 0)
        assert any(adopted.was_replaced for adopted in held)
        nursery.cancel_scope.cancel()
