"""The cells of the table: each job at each number of channels."""

from __future__ import annotations

from typing import Literal

import attrs

from muxkit_bench.bench_work.tasks import Task

KIB = 1024
SMALL = 64  # bytes
BATCH = 64  # messages that `send_many` takes, and that the coalesced baseline puts into one `send_all`
LEAST = 64  # small messages on each channel, so that the order and the receipt weigh little
NEIGHBOUR = 2.0  # times the length of other passes, for its 99th percentile
CHANNELS = (1, 100, 1000)
FLAT = (100, 10_000)  # channels, for the cost that must not grow with them
LEAST_FLAT = 32  # small messages on each of so many channels, all at once
IDLE = 10_000
AMONG = (100, 1000, 10_000)  # other channels that are open

Job = Literal[
    "bulk", "small", "receive_many", "send_many", "flat", "among", "rtt", "storm", "openclose", "idle", "neighbour"
]
JOBS: tuple[Job, ...] = (
    "bulk",
    "small",
    "receive_many",
    "send_many",
    "flat",
    "among",
    "rtt",
    "storm",
    "openclose",
    "idle",
    "neighbour",
)

EXPLAINED: dict[Job, str] = {
    "bulk": "messages of 64 and 256 KiB in one direction",
    "small": "64-byte messages, one `send` and one `receive` each",
    "receive_many": "the same, received with `receive_many`: all that have come, at once",
    "send_many": f"64-byte messages, {BATCH} to a `send_many`; received with `receive_many`",
    "flat": "64-byte messages by 100 tasks, each 64 of them on one of its channels after the other",
    "among": "one channel sends, 64-byte messages or 64 KiB ones, while so many others are open, which had an echo "
    "each; raw: as many connections up to 1,000, since the ends of 10,000 that linger in the kernel use up the ports",
    "rtt": "64-byte echoes, one at a time",
    "storm": "64-byte echoes on all channels at once, each in turn with the server",
    "openclose": "open, one 64-byte echo, orderly close",
    "idle": "memory that an open channel takes, the larger side",
    "neighbour": "64-byte echoes beside a channel that sends 64 KiB messages as fast as it can",
}


@attrs.frozen(kw_only=True)
class Cell:
    """A job at a number of channels."""

    job: Job
    channels: int
    """Or how many are opened at a time, or are open beside the measured one."""
    unit: str
    """The unit of the figure."""
    higher_is_better: bool = True
    counted: str = ""
    """The unit of CPU time; empty if it says nothing."""
    size: int = SMALL
    least: int = 1

    @property
    def key(self) -> str:
        return f"{self.title}/{self.channels}"

    @property
    def title(self) -> str:
        """The job and its size, without the number of channels."""
        if self.job not in ("bulk", "among"):
            return self.job
        return f"{self.job} {f'{self.size // KIB} KiB' if self.size >= KIB else f'{self.size} B'}"

    @property
    def baseline(self) -> str:
        """The form of the raw connection that it is compared with."""
        return "coalesced" if self.job == "send_many" else "each"

    def task(self, *, seconds: float, count: int, coalesced: bool) -> Task:
        """Make the task of a client process; `coalesced` if a batch replaces single messages."""
        is_small = self.job in ("small", "receive_many", "send_many")
        return Task(
            job="small" if is_small else self.job,
            channels=self.channels,
            size=self.size,
            batch=BATCH if self.job == "send_many" or coalesced else 1,
            each=self.job == "small",
            seconds=seconds * (NEIGHBOUR if self.job == "neighbour" else 1.0),
            count=count,
            least=self.least,
        )


def cells(jobs: tuple[Job, ...], *, is_quick: bool = False) -> list[Cell]:
    """Make the cells of these jobs, in the order of the table."""
    some = (1, 10) if is_quick else CHANNELS
    found: list[Cell] = []
    for job in JOBS:
        if job in jobs:
            found += _cells_of(job, some, is_quick)
    return found


def _cells_of(job: Job, some: tuple[int, ...], is_quick: bool) -> list[Cell]:
    match job:
        case "bulk":
            sizes = [(64 * KIB, number) for number in some] + [(256 * KIB, number) for number in some[:2]]
            return [_bulk(job, number, size) for size, number in sizes]
        case "small":
            flat = [] if is_quick else [attrs.evolve(_small(job, FLAT[1]), least=LEAST_FLAT)]
            return [*(_small(job, number) for number in some), *flat]
        case "receive_many":
            return [_small(job, number) for number in some[:2]]
        case "send_many":
            return [_small(job, number) for number in some]
        case "flat":
            return [attrs.evolve(_small(job, number), least=1) for number in ((1, 20) if is_quick else FLAT)]
        case "among":
            others = (10, 50) if is_quick else AMONG
            return [*(_small(job, number) for number in others), *(_bulk(job, number, 64 * KIB) for number in others)]
        case "rtt":
            return [Cell(job=job, channels=1, unit="µs", higher_is_better=False, counted="round trip")]
        case "storm":
            return [Cell(job=job, channels=number, unit="echoes/s", counted="echo", least=4) for number in some[1:]]
        case "openclose":
            at_a_time = (1, 4) if is_quick else (1, 64)
            return [Cell(job=job, channels=number, unit="channels/s", counted="channel") for number in at_a_time]
        case "idle":
            return [Cell(job=job, channels=IDLE // 20 if is_quick else IDLE, unit="bytes", higher_is_better=False)]
        case "neighbour":
            return [Cell(job=job, channels=2, unit="µs", higher_is_better=False)]


def _bulk(job: Job, channels: int, size: int) -> Cell:
    return Cell(job=job, channels=channels, unit="MiB/s", counted="MiB", size=size, least=4)


def _small(job: Job, channels: int) -> Cell:
    return Cell(job=job, channels=channels, unit="messages/s", counted="message", least=LEAST)
