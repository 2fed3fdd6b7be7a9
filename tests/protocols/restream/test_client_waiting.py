"""The pauses of a client between attempts to connect, and the errors when its caller gives up."""

from __future__ import annotations

import logging
import math
import random
import ssl
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.protocols import restream
from muxkit.protocols.restream import ClientPolicy
from muxkit.runtime import Backoff
from muxkit_adapters.tls import HandshakeFailed
from tests.protocols.restream._helpers import EXAMPLE
from tests.protocols.restream.test_client import HOLD, REFUSED, Script, messages, whole

if TYPE_CHECKING:
    from trio.testing import MockClock

pytestmark = pytest.mark.requirement("R-51")


class Least(random.Random):
    """A source of randomness that draws the smallest value."""

    def uniform(self, a: float, b: float) -> float:
        return a


def policy(dice: random.Random, **changes: Any) -> ClientPolicy:
    return ClientPolicy(backoff=Backoff(first=1.0, least=5.0, most=30.0, random=dice), **changes)


@pytest.mark.clause("restream-C05")
async def test_after_a_failed_attempt_it_waits_for_five_seconds_at_least(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [REFUSED, REFUSED, whole()])
    async with restream.numbers(script.dial, count=5, policy=policy(Least())) as numbers:
        assert [number async for number in numbers] == EXAMPLE
    assert script.pauses == [5.0, 5.0]


@pytest.mark.clause("restream-C05", "restream-C06")
@pytest.mark.seeds(5, soak=500)
async def test_the_random_part_grows_up_to_its_bound(
    seed: int, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [*[REFUSED] * 12, whole()])
    async with restream.numbers(script.dial, count=5, policy=policy(random.Random(seed))) as numbers:
        await numbers.receive()
    for failures, pause in enumerate(script.pauses):
        assert 5.0 <= pause <= min(30.0, 5.0 + 2.0**failures) + 1e-6
    assert len(set(script.pauses)) == 12


@pytest.mark.clause("restream-C07")
async def test_a_connection_that_brought_something_makes_the_next_pause_a_first_one_again(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    class Most(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    script = Script(nursery, [*[REFUSED] * 4, messages(1, 1), REFUSED, REFUSED, messages(2, 2), [HOLD]])
    async with restream.numbers(script.dial, count=9, policy=policy(Most())) as numbers:
        assert [await numbers.receive() for _ in range(2)] == [1, 2]
    assert script.pauses[:7] == pytest.approx([6.0, 7.0, 9.0, 13.0, 0.0, 6.0, 7.0])


@pytest.mark.clause("restream-C06")
def test_a_pause_below_five_seconds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Backoff\(least=3\)\): restream asks for at least 5 s"):
        ClientPolicy(backoff=Backoff(least=3.0))


@pytest.mark.clause("restream-C07")
def test_unless_told_several_attempts_fall_into_the_time_that_a_session_survives() -> None:
    backoff = ClientPolicy().backoff
    assert (backoff.least, backoff.most) == (5.0, 30.0)
    worst = sum(min(30.0, 5.0 + 2.0**failures) for failures in range(3))
    assert worst < 30.0
    silence = ClientPolicy().silence
    assert silence is not None
    assert silence < 30.0


@pytest.mark.clause("restream-C03")
async def test_each_drop_is_followed_by_the_next_connection_at_once(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    plays: list[list[object]] = [messages(id, id) for id in range(1, 101)]
    script = Script(nursery, [*plays, [HOLD]])
    began = trio.current_time()
    async with restream.numbers(script.dial, count=999) as numbers:
        assert [await numbers.receive() for _ in range(100)] == [*range(1, 101)]
    assert trio.current_time() == began


async def test_a_failed_attempt_between_two_drops_has_its_wait_and_no_more(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [messages(1, 1), REFUSED, messages(2, 2), messages(3, 3), [HOLD]])
    async with restream.numbers(script.dial, count=9, policy=policy(Least())) as numbers:
        assert [await numbers.receive() for _ in range(3)] == [1, 2, 3]
        await trio.testing.wait_all_tasks_blocked()
    assert script.pauses == [0.0, 5.0, 0.0, 0.0]


async def test_a_server_that_hangs_up_on_everybody_is_not_dialled_without_a_pause(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[]])
    with trio.move_on_after(60):
        async with restream.numbers(script.dial, count=5, policy=policy(Least())) as numbers:
            await numbers.receive()
    assert script.pauses[:8] == [0.0] * 8
    assert script.pauses[8:] == [5.0] * len(script.pauses[8:])
    assert len(script.at) < 30


# --- giving up


async def test_it_gives_up_by_the_callers_deadline_and_says_why_there_was_no_connection(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [REFUSED])
    async with restream.numbers(script.dial, count=5) as numbers:
        with pytest.raises(trio.TooSlowError, match=r"not within 3600 s.*no server answers") as caught:
            with numbers.fail_after(3600):
                await numbers.receive()
        assert caught.value.__cause__ is REFUSED
        assert numbers.outage.failures > 100


async def test_a_deadline_of_trio_gets_a_note_about_it(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script = Script(nursery, [REFUSED])

    async def give_up() -> None:
        async with restream.numbers(script.dial, count=5) as numbers:
            with trio.fail_after(60):
                await numbers.receive()

    with pytest.raises(trio.TooSlowError) as caught:
        await give_up()
    assert caught.value.__notes__ == [f"restream: there was no connection: {REFUSED}"]


async def test_a_deadline_while_there_is_a_connection_blames_no_attempt(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [REFUSED, [*messages(1, 1), HOLD]])
    async with restream.numbers(script.dial, count=5, policy=policy(Least(), silence=None)) as numbers:
        await numbers.receive()
        with pytest.raises(trio.TooSlowError) as caught:
            with numbers.fail_after(60):
                await numbers.receive()
    assert caught.value.__cause__ is None


async def test_a_deadline_of_trio_gets_no_note_while_there_is_a_connection(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [REFUSED, [*messages(1, 1), HOLD]])

    async def give_up() -> None:
        async with restream.numbers(script.dial, count=5) as numbers:
            await numbers.receive()
            with trio.fail_after(1):
                await numbers.receive()

    with pytest.raises(trio.TooSlowError) as caught:
        await give_up()
    assert not hasattr(caught.value, "__notes__")


async def test_each_failed_attempt_can_be_told(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    script, told = Script(nursery, [REFUSED, REFUSED, whole()]), list[tuple[Exception, float]]()
    async with restream.numbers(
        script.dial, count=5, on_failed=lambda error, wait: told.append((error, wait))
    ) as numbers:
        await numbers.receive()
    assert [error for error, _ in told] == [REFUSED, REFUSED]
    assert script.pauses == pytest.approx([wait for _, wait in told])


async def test_an_outage_is_a_warning_at_its_begin_and_at_each_doubling(
    nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """F9, of restream: it dialled for ever without a word."""
    caplog.set_level(logging.INFO, "muxkit")
    script = Script(nursery, [*[REFUSED] * 6, whole()])
    async with restream.numbers(script.dial, count=5, policy=policy(Least())) as numbers:
        assert [number async for number in numbers] == EXAMPLE
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        f"restream: {outage}{REFUSED}; trying again in 5.0 s (no time limit)"
        for outage in ("", *(f"no connection for {seconds} s: " for seconds in (5, 10, 20)))
    ]
    assert caplog.messages[-1] == "restream: connected again after 30 s"


async def test_a_program_that_is_told_of_failures_logs_them_itself(
    nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(nursery, [REFUSED, whole()])
    async with restream.numbers(script.dial, count=5, on_failed=lambda error, wait: None) as numbers:
        await numbers.receive()
    assert caplog.records == []


# --- what no waiting helps against


async def test_a_certificate_that_was_refused_is_raised_where_somebody_waits(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    failure = HandshakeFailed("tls example.org:7000: the certificate was refused")
    failure.__cause__ = ssl.SSLCertVerificationError(1, "expired")
    script = Script(nursery, [messages(1, 2), failure])
    async with restream.numbers(script.dial, count=5) as numbers:
        await trio.testing.wait_all_tasks_blocked()
        assert [await numbers.receive() for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(LinkLost, match=r"no connection: tls example.org:7000") as caught:
                await numbers.receive()
            assert (caught.value.__cause__, caught.value.phase) == (failure, "connect")
    assert len(script.at) == 2


async def test_an_address_that_cannot_be_meant_comes_out_bare() -> None:
    with pytest.raises(ValueError, match=r"192\.0\.2\.1"):
        async with restream.numbers("restream+tcp://192.0.2.1:1", count=5) as numbers:
            await numbers.receive()


async def test_silence_and_late_lines_are_measured_on_the_clock_that_runs_while_we_read(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    script = Script(nursery, [[*messages(1, 3), 15.0, *messages(4, 4), HOLD]])
    async with restream.numbers(script.dial, count=9, policy=policy(Least(), ahead=1, silence=20.0)) as numbers:
        await trio.sleep(1000)
        assert [await numbers.receive() for _ in range(4)] == [1, 2, 3, 4]
        assert numbers.connections == 1
    assert math.isfinite(trio.current_time())
