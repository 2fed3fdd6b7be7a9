"""A restream client survives a thousand cuts, on real sockets, each connection cut at a random byte.

Three kinds of streams go through the relay: the document's numbers with their CRC, the plain integers, and sessions
that are fed. What arrives is compared with what was sent. It ends with 1 if anything is missing, repeated or wrong.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.protocols import restream
from muxkit.protocols.restream.applications import next_value
from muxkit.protocols.restream.store import open_store
from muxkit.testing import ChaosPlan, Way, chaos_relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

COUNT = 2_000  # messages of one stream
PLAN = ChaosPlan(cut_after=(0, 600), reset=0.4)
BACK = attrs.evolve(PLAN, cut_ways=(Way.BACK,))  # for streams that send nothing there but their first line
CONFIG = restream.ClientConfig(ack_every=1)  # so that there is something to cut on the way there as well


@attrs.define
class Figures:
    """What came out."""

    streams: int = 0
    messages: int = 0
    connections: int = 0
    cuts: int = 0
    resets: int = 0
    gaps: int = 0
    repeats: int = 0
    wrong: int = 0
    seconds: float = 0.0

    @property
    def are_right(self) -> bool:
        return (self.gaps, self.repeats, self.wrong) == (0, 0, 0) and self.messages > 0

    def compare(self, got: Sequence[object], sent: Sequence[object]) -> None:
        """What came against what was sent, both in order; each of them is there once."""
        self.streams += 1
        self.messages += len(got)
        self.gaps += len(set(sent) - set(got))
        self.repeats += len(got) - len(set(got))
        self.wrong += [*got] != [*sent]


@asynccontextmanager
async def weather(url: str, plan: ChaosPlan, seed: int, figures: Figures) -> AsyncIterator[str]:
    """The same server through a relay that cuts."""
    scheme, _, address = url.partition("://")
    began = trio.current_time()
    async with chaos_relay(address, plan, seed) as relay:
        yield f"{scheme}://{relay.address}"
        figures.cuts += relay.cuts
        figures.resets += relay.stats().resets
    figures.seconds += trio.current_time() - began


async def read_numbers(seed: int, figures: Figures) -> None:
    """A stream of the document's application: ids, values and, by the verifier, CRC and count."""
    first = seed * 7919 & 0xFFFFFFFF
    sent, value = [], first
    for id in range(1, COUNT + 1):
        value = next_value(value)
        sent.append((id, value))
    async with open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(lambda task_status: restream.serve(
            "restream+tcp://127.0.0.1:0", store, random32=lambda: first, task_status=task_status
        ))  # fmt: skip
        async with weather(served.url, PLAN, seed, figures) as url:
            async with restream.stream(
                url, {"count": COUNT}, verifier=restream.NumbersVerifier(COUNT), config=CONFIG
            ) as stream:
                got = [(message.id, _value_of(message.data)) async for message in stream]
            figures.connections += stream.connections
        figures.compare(got, sent)
        nursery.cancel_scope.cancel()


async def read_integers(seed: int, figures: Figures) -> None:
    """As many integers of a stateless stream."""
    first = seed * 7919 & 0xFFFFFFFF
    rule = restream.Permutation()
    sent = [rule.first(first)]
    while len(sent) < COUNT:
        sent.append(rule.next(sent[-1]))
    async with open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(lambda task_status: restream.serve(
            "restream+tcp://127.0.0.1:0", store, random32=lambda: first, task_status=task_status
        ))  # fmt: skip
        async with weather(served.url, BACK, seed, figures) as url:
            async with restream.integers(url) as integers:
                got = [await integers.receive() for _ in range(COUNT)]
            figures.connections += integers.connections
        figures.compare(got, sent)
        nursery.cancel_scope.cancel()


async def read_fed(seed: int, figures: Figures) -> None:
    """A session that is appended to while it is read."""
    async with open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(lambda task_status: restream.serve(
            "restream+tcp://127.0.0.1:0", store, application=restream.Fed("last"), task_status=task_status
        ))  # fmt: skip

        async def feed() -> None:
            await store.register(uuid, {"seed": seed}, params={"seed": seed}, attached=False)
            for number in range(1, COUNT):
                await store.append(uuid, {"number": number})
            await store.append(uuid, {"number": COUNT, "last": True})

        uuid = restream.new_uuid()
        nursery.start_soon(feed)
        async with weather(served.url, PLAN, seed, figures) as url:
            async with restream.stream(url, uuid=uuid, final_key="last", config=CONFIG) as stream:
                got = [(message.id, _number_of(message.data)) async for message in stream]
            figures.connections += stream.connections
        figures.compare(got, [(number, number) for number in range(1, COUNT + 1)])
        nursery.cancel_scope.cancel()


KINDS = {"numbers": read_numbers, "integers": read_integers, "fed": read_fed}


async def survive(kind: str, cuts: int, seed: int) -> Figures:
    """One stream of this kind after another, until there were so many cuts."""
    figures = Figures()
    while figures.cuts < cuts:
        await KINDS[kind](seed, figures)
        seed += 1
    return figures


def _value_of(data: restream.Json) -> object:
    return data["value"] if isinstance(data, dict) else data


def _number_of(data: restream.Json) -> object:
    return data["number"] if isinstance(data, dict) else data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=1000, help="for each kind of stream")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    right = True
    for kind in KINDS:
        figures = trio.run(survive, kind, arguments.cuts, arguments.seed)
        right = right and figures.are_right
        print(
            f"{kind:<9} {figures.cuts:,} cuts ({figures.resets:,} resets), {figures.connections:,} connections, "
            f"{figures.streams} streams, {figures.messages:,} messages in {figures.seconds:.1f} s: "
            f"{figures.gaps} gaps, {figures.repeats} repeats, {figures.wrong} streams wrong",
            flush=True,
        )
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
