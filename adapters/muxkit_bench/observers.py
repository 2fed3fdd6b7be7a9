"""What observers cost in processor time: `python -m muxkit_bench.observers`.

Each job runs between two sessions of this process without an observer and with each kind of observer on both sides, in
turn, round after round; the least of the rounds counts, as other programs on the machine only add to it. With
Prometheus and OpenTelemetry the metrics are also collected once in each run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

import muxkit
from muxkit.metrics import Metrics
from muxkit.trace import Trace

SMALL: Final = 100  # bytes
LARGE: Final = 64 * 1024
WARM_UP: Final = 0.1  # of a run, before it is timed

Work = Callable[[muxkit.Session, int], Awaitable[None]]


@attrs.frozen
class Job:
    """What is done so many times."""

    name: str
    unit: str
    times: int
    work: Work


async def _small(session: muxkit.Session, times: int) -> None:
    await _send(session, bytes(SMALL), times)


async def _bulk(session: muxkit.Session, times: int) -> None:
    await _send(session, bytes(LARGE), times)


async def _send(session: muxkit.Session, message: bytes, times: int) -> None:
    async with session.open("sink") as channel:
        for _ in range(times):
            await channel.send(message)
        await channel.finish()
        async for _ in channel:
            pass


async def _round_trips(session: muxkit.Session, times: int) -> None:
    async with session.open("echo") as channel:
        message = bytes(SMALL)
        for _ in range(times):
            await channel.send(message)
            await channel.receive()


async def _channels(session: muxkit.Session, times: int) -> None:
    for _ in range(times):
        async with session.open("echo") as channel:
            await channel.send(b"tea")
            await channel.receive()


JOBS: Final = (
    Job("small messages", "100 B, one way", 20_000, _small),
    Job("bulk", "64 KiB, one way", 2_000, _bulk),
    Job("round trips", "100 B there and back", 5_000, _round_trips),
    Job("channels", "open, one round trip, close", 1_000, _channels),
)


class _Silent(muxkit.BaseObserver):
    """Wants to be told of everything and does nothing."""


@contextmanager
def _traced() -> Iterator[muxkit.Observer]:
    with tempfile.TemporaryDirectory() as folder:
        yield Trace(folder)


@attrs.frozen
class Kind:
    """A kind of observer, and what collects from it."""

    name: str
    observer: Callable[[], muxkit.Observer | None] | None = None
    """Makes it; None for a trace, which needs a folder."""
    collect: Callable[[muxkit.Observer], object] | None = None


def _scrape(observer: muxkit.Observer) -> None:
    from muxkit.metrics.prometheus import render

    assert isinstance(observer, Metrics)
    render(observer)


def _instrumented() -> muxkit.Observer:
    from muxkit.metrics.otel import instrument

    metrics = Metrics()
    instrument(metrics)
    return metrics


def _collect(observer: muxkit.Observer) -> None:
    assert isinstance(observer, Metrics)
    observer.collect()


KINDS: Final = (
    Kind("none", lambda: None),
    Kind("BaseObserver", _Silent),
    Kind("Trace"),
    Kind("Metrics", Metrics),
    Kind("Metrics, Prometheus", Metrics, _scrape),
    Kind("Metrics, OpenTelemetry", _instrumented, _collect),
)


async def _echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)
    await channel.finish()


async def _swallow(channel: muxkit.Channel) -> None:
    async for _ in channel:
        pass
    await channel.finish()


async def seconds_of(protocol: str, job: Job, kind: Kind, observer: muxkit.Observer | None, times: int) -> float:
    """Return the processor time of one run, for each time that the job was done."""
    handler = muxkit.by_name({"echo": _echo, "sink": _swallow})
    async with muxkit.open_server(handler, f"{protocol}+mem://observed", observer=observer) as server:
        async with muxkit.connect(server.url, observer=observer) as session:
            await job.work(session, max(1, int(times * WARM_UP)))
            began = time.process_time()
            await job.work(session, times)
            if kind.collect is not None and observer is not None:
                kind.collect(observer)
            return (time.process_time() - began) / times


def measure(protocol: str, *, rounds: int, share: float) -> dict[str, dict[str, float]]:
    """Return the least processor time in seconds by job and kind of observer; `share` of the usual number of times."""
    found: dict[str, dict[str, float]] = {job.name: {} for job in JOBS}
    for _ in range(rounds):
        for job in JOBS:
            times = max(1, int(job.times * share))
            for kind in KINDS:
                if kind.observer is None:
                    with _traced() as trace:
                        took = trio.run(seconds_of, protocol, job, kind, trace, times)
                else:
                    took = trio.run(seconds_of, protocol, job, kind, kind.observer(), times)
                found[job.name][kind.name] = min(took, found[job.name].get(kind.name, took))
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Return the figures as a table of Markdown: microseconds, and how many times the first column's."""
    names = [kind.name for kind in KINDS]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for job in JOBS:
        costs = found[job.name]
        cells = [f"{costs[name] * 1e6:.1f} µs ({costs[name] / costs[names[0]]:.2f})" for name in names]
        lines.append(f"| {job.name}: {job.unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m muxkit_bench.observers", description=__doc__)
    parser.add_argument("--protocol", default="bpmux", choices=("bpmux", "relink", "aqueduct", "e3x"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of times")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.protocol, rounds=given.rounds, share=given.share)
    print(json.dumps(found) if given.json else table(found))


if __name__ == "__main__":
    main()
