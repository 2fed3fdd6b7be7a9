"""A Relink link survives `kill -9` where it can, and its loss is reported where it cannot.

A work queue with transactions: a queue process listens, a worker process connects through a relay process. The relay is
killed at random moments and another one takes its place, so each time the connection is gone without a word; every job
must be done once, in order, and its answer must be the worker's. Now and then the queue or the worker itself is killed
instead: then the worker must hear that its link is another one, and the queue that its link was given up.

    python -m tests.soak.relink_kills [--kills 100] [--jobs 400] [--seed 1]

Ends with 1 if a job was lost, repeated, disordered or answered otherwise, or a loss was not told.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Keep, LinkChanged
from muxkit.runtime import Backoff, LinkLost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHANNEL = 1
CONFIG = Config(listener_transactions=True, keepalive=None)
BATCH = 5
HARD = 7  # each seventh job is not done at the first attempt
WITHDRAWN = b"withdrawn"
ENDPOINT = "queue"
SOON = Backoff(first=0.005, most=0.05)
AHEAD = 5  # jobs that the worker does at most beyond the one after which its relay is killed


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


# ---------------------------------------------------------------------------- the queue's process


async def queue(address: str, jobs: int, age: float) -> None:
    """Hand out jobs on each link, and say what became of them."""

    async def hand_out(link: relink.Link) -> None:
        say(link=link.id)
        committed: list[int] = []
        refused: list[int] = []
        waiting = [*range(jobs)]
        try:
            async with link.sender(CHANNEL) as sender:
                while waiting:
                    batch, waiting = waiting[:BATCH], waiting[BATCH:]
                    await sender.send(WITHDRAWN)
                    sender.rollback()
                    receipts = [await sender.send(b"%d" % job) for job in batch]
                    sender.commit()
                    for job, receipt in zip(batch, receipts, strict=True):
                        try:
                            await receipt.committed()
                            committed.append(job)
                        except relink.NotCommitted:
                            refused.append(job)
                            waiting.append(job)
                await sender.finish()
            say(committed=committed, refused=refused)
        except LinkLost as error:
            say(lost=str(error), by=error.by, committed=committed)

    async with trio.open_nursery() as nursery:
        listening: relink.Listening = await nursery.start(
            lambda task_status: relink.listen(
                hand_out,
                f"relink+tcp://{address}/{ENDPOINT}",
                config=CONFIG,
                keep=Keep(age=age),
                task_status=task_status,
            )
        )
        say(address=listening.url.partition("://")[2].partition("/")[0])


# ---------------------------------------------------------------------------- the worker's process


async def worker(address: str, pause: float, moments: list[int]) -> None:
    """Do the jobs of one link after the other, and say which; what changes the link is said as well.

    When as many jobs are done as `moments` say, the main process kills the relay of the connection. However late
    that is, the worker does not get far without a new relay; so no relay is killed unused.
    """
    tried: set[int] = set()
    done = 0

    async def work(message: relink.Message) -> None:
        nonlocal done
        job = int(message.data)
        for number, (moment, following) in enumerate(itertools.pairwise(moments)):
            due = done + 1 >= min(moment + AHEAD, following)
            while due and link.connections < number + 2:  # noqa: ASYNC110
                await trio.sleep(0.001)
        await trio.sleep(pause)
        if job % HARD == 0 and job not in tried:
            tried.add(job)
            raise RuntimeError(f"job {job} is too hard today")
        done += 1
        say(done=job)

    async with relink.link(f"relink+tcp://{address}/{ENDPOINT}", config=CONFIG, backoff=SOON, linger=30.0) as link:
        while True:
            try:
                async with link.receiver(CHANNEL) as receiver:
                    await receiver.process(work)
                break
            except LinkChanged as error:
                say(changed=type(error.change).__name__, lost=error.lost)
                tried.clear()
    say(over=True, connections=link.connections)


# ---------------------------------------------------------------------------- the one who kills


class Side:
    """One of these processes, or a relay."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def next(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError("a process ended without a word")
        said: dict[str, object] = json.loads(line)
        return said

    def until(self, name: str) -> dict[str, object]:
        """The next line that says this."""
        while name not in (said := self.next()):
            pass
        return said

    def kill(self) -> None:
        """By its number, without a warning."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def side(*command: str) -> Iterator[Side]:
    it = Side(*command)
    try:
        yield it
    finally:
        if it.process.poll() is None:
            it.kill()
        elif it.process.stdout is not None:
            it.process.stdout.close()


def a_queue(address: str = "127.0.0.1:0", *, jobs: int, age: float = 60.0) -> tuple[str, ...]:
    return (__file__, "--role", "queue", "--at", address, "--jobs", str(jobs), "--age", str(age))


def a_worker(address: str, *, pause: float = 0.001, moments: Sequence[int] = ()) -> tuple[str, ...]:
    return (__file__, "--role", "worker", "--at", address, "--pause", str(pause), "--moments", json.dumps([*moments]))


def a_relay(target: str, address: str = "127.0.0.1:0") -> tuple[str, ...]:
    return ("-m", "muxkit.cli", "chaos", address, target, "--json")


@attrs.define
class Figures:
    """What came out."""

    kills: int = 0
    jobs: int = 0
    refused: int = 0
    connections: int = 0
    rounds: int = 0
    seconds: float = 0.0
    wrong: list[str] = attrs.field(factory=list)


def expected(jobs: int) -> list[int]:
    """The order in which a worker that hears everything once gets them done."""
    waiting, done, tried = [*range(jobs)], list[int](), set[int]()
    while waiting:
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        for job in batch:
            if job % HARD == 0 and job not in tried:
                tried.add(job)
                waiting.append(job)
            else:
                done.append(job)
    return done


def survive(figures: Figures, dice: random.Random, *, jobs: int, kills: int) -> None:
    """One queue and one worker, and relays that are killed between them."""
    with side(*a_queue(jobs=jobs)) as it:
        target = str(it.until("address")["address"])
        relay = Side(*a_relay(target))
        address = str(relay.next()["address"])
        try:
            moments = sorted(dice.sample(range(1, jobs), min(kills, jobs - 1)))
            with side(*a_worker(address, moments=[*moments, jobs])) as other:
                done: list[int] = []
                while "over" not in (said := other.next()):
                    if "done" not in said:
                        figures.wrong.append(f"the worker said {said}")
                        continue
                    done.append(int(str(said["done"])))
                    if moments and len(done) >= moments[0]:
                        moments.pop(0)
                        relay.kill()
                        figures.kills += 1
                        relay = Side(*a_relay(target, address))
                        relay.next()
                figures.connections += int(str(said["connections"]))
            told = it.until("committed")
        finally:
            relay.kill()
    figures.rounds += 1
    figures.jobs += len(done)
    refused = told.get("refused")
    figures.refused += len(refused) if isinstance(refused, list) else 0
    if done != expected(jobs):
        figures.wrong.append(f"{len(done)} jobs were done, {len(set(done))} of them different, for {jobs}")
    if told["committed"] != done:
        figures.wrong.append("the queue was told something else than the worker did")


def lose_the_queue(figures: Figures, dice: random.Random) -> None:
    """The listener dies: the worker hears of another epoch, and goes on with what the next one has."""
    with side(*a_queue(jobs=10_000)) as first:
        address = str(first.until("address")["address"])
        with side(*a_worker(address)) as other:
            for _ in range(dice.randint(1, 100)):
                other.until("done")
            first.kill()
            figures.kills += 1
            with side(*a_queue(address, jobs=20)) as second:
                changed = other.until("changed")
                if changed["changed"] != "EpochChanged":
                    figures.wrong.append(f"the worker was told {changed}")
                done = [int(str(other.until("done")["done"])) for _ in range(20)]
                if done != expected(20):
                    figures.wrong.append(f"the second queue had {done}")
                if second.until("committed")["committed"] != done:
                    figures.wrong.append("the second queue was told something else than the worker did")


def lose_the_worker(figures: Figures, dice: random.Random) -> None:
    """The connector dies: its link is kept for a while and then given up, and the next connector gets its own."""
    with side(*a_queue(jobs=10_000, age=0.5)) as it:
        address = str(it.until("address")["address"])
        with side(*a_worker(address)) as victim:
            link = it.until("link")["link"]
            for _ in range(dice.randint(1, 100)):
                victim.until("done")
            victim.kill()
            figures.kills += 1
            lost = it.until("lost")
            if "absent for longer" not in str(lost["lost"]):
                figures.wrong.append(f"the queue was told {lost}")
        with side(*a_worker(address)) as heir:
            if it.until("link")["link"] == link:
                figures.wrong.append("another process got the link of the one that died")
            heir.until("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    for name, kind in (("role", str), ("at", str), ("age", float), ("pause", float), ("moments", json.loads)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "queue":
        trio.run(queue, options.at, options.jobs, options.age)
        return
    if options.role == "worker":
        trio.run(worker, options.at, options.pause, options.moments)
        return
    dice, figures = random.Random(options.seed), Figures()
    began = time.perf_counter()
    while figures.kills < options.kills and not figures.wrong:
        survive(figures, dice, jobs=options.jobs, kills=min(10, options.kills))
        lose_the_queue(figures, dice)
        lose_the_worker(figures, dice)
    figures.seconds = time.perf_counter() - began
    print(
        f"{figures.kills} processes killed in {figures.seconds:.0f} s: {figures.jobs:,} jobs done over "
        f"{figures.connections} connections, {figures.refused} refused once; {len(figures.wrong)} things wrong"
    )
    for what in figures.wrong:
        print(" ", what)
    sys.exit(bool(figures.wrong))


if __name__ == "__main__":
    main()
