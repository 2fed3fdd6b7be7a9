"""A stream survives cuts and bad links between a client and a real server, over every transport."""

from __future__ import annotations

import random
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from muxkit import Limits
from muxkit.protocols import restream
from muxkit.protocols.restream import ClientConfig, ClientPolicy, Served, ServerConfig, StreamRefused
from muxkit.protocols.restream.applications import next_value
from muxkit.protocols.restream.store import open_store
from muxkit.runtime import Backoff
from muxkit.testing import ChaosPlan, Way, chaos_dial
from muxkit.testing._chaos import BOTH_WAYS
from muxkit_adapters import memory
from tests.adapters._links import Certificates
from tests.soak.restream_cuts import KINDS, survive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock

    from muxkit.protocols.restream.store import SessionStore

SEED = 4711


def chain(count: int) -> list[int]:
    """Return the numbers that a server with this seed makes."""
    values = [next_value(SEED)]
    while len(values) < count:
        values.append(next_value(values[-1]))
    return values


@attrs.define
class Running:
    """A real server and its store."""

    served: Served
    store: SessionStore[object, object]

    @property
    def url(self) -> str:
        return self.served.url


@asynccontextmanager
async def serving(url: str = "restream+tcp://127.0.0.1:0", **options: Any) -> AsyncIterator[Running]:
    """Serve with Trio's clock, so that sessions expire in virtual time."""
    async with open_store("memory:", now=trio.current_time) as store, trio.open_nursery() as nursery:

        async def serve(task_status: trio.TaskStatus[Served]) -> None:
            await restream.serve(url, store, random32=lambda: SEED, task_status=task_status, **options)

        served: Served = await nursery.start(serve)
        yield Running(served, store)
        nursery.cancel_scope.cancel()


@pytest.mark.clause("restream-S16", "restream-S19", "restream-S20")
@pytest.mark.requirement("R-51", "R-47")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_hundred_cuts_at_random_bytes_lose_repeat_and_invent_nothing(kind: str) -> None:
    figures = await survive(kind, 100, seed=1)
    assert (figures.gaps, figures.repeats, figures.wrong) == (0, 0, 0)
    assert figures.cuts >= 100
    assert 10 <= figures.resets < figures.cuts


@pytest.mark.requirement("R-51", "R-50")
@pytest.mark.seeds(8, soak=500)
async def test_in_any_weather_every_number_comes_once(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    plan = ChaosPlan(
        delay=dice.choice((0.0, 0.05)),
        jitter=dice.choice((0.0, 0.1)),
        cut_after=(0, dice.choice((300, 2_000))),
        reset=0.3,
        cut_ways=dice.choice(((Way.BACK,), BOTH_WAYS)),
        stall=0.2,
        refuse=0.2,
        refuse_for=dice.choice((1.0, 12.0)),
    )
    config = ClientConfig(ack_every=dice.choice((None, 1, 7)))
    policy = ClientPolicy(
        ahead=dice.choice((1, 3, 64)), backoff=Backoff(first=1.0, least=5.0, random=random.Random(seed))
    )
    name = f"weather-{seed}"
    # On such a link a client may be absent for more than 30 s, and its first line stalled while the server is heard.
    # The errors about either would end the stream.
    patient = Limits(handshake=100.0, stall=100.0)
    async with (
        serving(f"restream+mem://{name}", limits=patient, expiry=600.0),
        chaos_dial(lambda: memory.connect(name), plan, seed) as chaos,
    ):
        async with restream.numbers(chaos.dial, count=300, config=config, policy=policy) as numbers:
            with numbers.fail_after(3600):
                got = [number async for number in numbers]
        assert got == chain(300)
        assert chaos.cuts > 0 or Way.THERE in plan.cut_ways


TRANSPORTS = [
    "tcp",
    "tls",
    "ws",
    "wss",
    "mem",
    pytest.param("unix", marks=pytest.mark.skipif(sys.platform == "win32", reason="has none")),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_transport_carries_it(transport: str, tmp_path: Path) -> None:
    address = {"mem": "restream-client", "unix": str(tmp_path / "socket")}.get(transport, "127.0.0.1:0")
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if transport in ("tls", "wss"):
        certificates = Certificates()
        ours, theirs = {"ssl_context": certificates.client()}, {"ssl_context": certificates.server()}
    async with serving(f"restream+{transport}://{address}", **theirs) as running:
        async with restream.integers(running.url, **ours) as integers:
            assert len({await integers.receive() for _ in range(100)}) == 100
        async with restream.numbers(running.url, count=300, **ours) as numbers:
            assert [number async for number in numbers] == chain(300)
        await running.served.shutdown(grace=10)
        status = await running.store.status(numbers.uuid)
        assert (status.head, status.final) == (300, True)
        # Where a link has no half-close, the server is gone when the last acknowledgement comes.
        assert status.acknowledged == 300 or transport in ("tls", "ws", "wss")


@pytest.mark.clause("restream-G01", "restream-S31")
async def test_the_last_message_is_acknowledged_as_well(autojump_clock: MockClock) -> None:
    async with serving("restream+mem://last-word") as running:
        async with restream.numbers(running.url, count=3) as numbers:
            assert [number async for number in numbers] == chain(3)
        await trio.testing.wait_all_tasks_blocked()
        assert (await running.store.status(numbers.uuid)).acknowledged == 3


async def read_on(numbers: restream.Reader[int]) -> None:
    while True:
        await numbers.receive()


@pytest.mark.clause("restream-C07", "restream-S25")
async def test_who_stays_away_for_too_long_is_told(autojump_clock: MockClock) -> None:
    plan = ChaosPlan()
    name = "expiry"
    async with serving(f"restream+mem://{name}", pace=1.0):
        async with chaos_dial(lambda: memory.connect(name), plan) as chaos:
            async with restream.numbers(chaos.dial, count=300) as numbers:
                assert [await numbers.receive() for _ in range(3)] == chain(3)
                chaos.refuse(120)
                chaos.cut_all()
                with pytest.raises(StreamRefused, match=r"session .* (has expired|is not known)"):
                    await read_on(numbers)


@pytest.mark.clause("restream-S26")
async def test_what_was_acknowledged_by_hand_can_be_resumed_and_nothing_before_it(autojump_clock: MockClock) -> None:
    by_hand = ClientConfig(ack_every=None)
    async with serving("restream+mem://by-hand", pace=100.0) as running:
        async with restream.numbers(running.url, count=9, config=by_hand) as numbers:
            got = [await numbers.receive() for _ in range(3)]
            saved = numbers.snapshot()
            numbers.acknowledge()
            got += [await numbers.receive() for _ in range(3)]
        async with restream.numbers(running.url, resume=saved, config=by_hand) as numbers:
            assert got[:3] + [number async for number in numbers] == chain(9)
            numbers.acknowledge()
        await trio.testing.wait_all_tasks_blocked()
        async with restream.numbers(running.url, resume=saved) as numbers:
            with pytest.raises(StreamRefused, match="before message 9, which was acknowledged"):
                await numbers.receive()


async def test_a_newer_reader_of_a_session_ends_the_older_one(autojump_clock: MockClock) -> None:
    async with serving("restream+mem://takeover", pace=10.0) as running:
        async with restream.numbers(running.url, count=500, config=ClientConfig(ack_every=None)) as older:
            await older.receive()
            async with restream.numbers(running.url, resume=older.snapshot()) as newer:
                assert await newer.receive() == chain(2)[1]
                with pytest.raises(StreamRefused, match="taken over"):
                    await read_on(older)


async def test_a_server_tells_how_a_session_stands_if_it_may(autojump_clock: MockClock) -> None:
    async with serving("restream+mem://status", config=ServerConfig(status=True)) as running:
        async with restream.numbers(running.url, count=5) as numbers:
            assert [number async for number in numbers] == chain(5)
        await trio.testing.wait_all_tasks_blocked()
        found = await restream.status(running.url, numbers.uuid)
        assert (found.head, found.acknowledged, found.final) == (5, 5, True)
        with pytest.raises(StreamRefused):
            await restream.status(running.url, restream.new_uuid())
