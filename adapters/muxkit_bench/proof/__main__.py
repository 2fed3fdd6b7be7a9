"""`python -m muxkit_bench.proof`: a Spark query reads restream servers, both are killed, and every row is counted.

It also writes the report about some captured traffic.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import muxkit
from muxkit_bench.proof.run import Plan, Proof, ProofFailed, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from muxkit_bench.proof.data import Verdict

LINE_EVERY: Final = 5.0  # s, where nothing can be printed over
TRAFFIC: Final = 2.0  # s that are captured
REFUSING: Final = 3.0  # s that a server's port is closed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m muxkit_bench.proof", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--count", type=int, default=8_000, help="messages of each stream")
    parser.add_argument("--sink", choices=["batches", "file"], default="batches")
    parser.add_argument("--keep", type=Path, help="where everything is written and kept; else it is removed at the end")
    parser.add_argument("--page", type=Path, default=Path("muxkit-captures.html"), help="where the report goes")
    options = parser.parse_args(arguments)
    out = Console(markup=False, emoji=False, highlight=False)
    with _folder(options.keep) as folder:
        plan = Plan(folder=folder / "proof", streams=options.streams, count=options.count, sink=options.sink)
        try:
            verdict, kills = prove(plan, out)
        except ProofFailed as error:
            out.print(f"failed: {error}")
            _show_log(plan.folder, out)
            return 1
        out.print(str(verdict), soft_wrap=True)
        page = capture(folder / "captures", options.page)
        out.print(f"a report about {TRAFFIC:g} s of captured traffic: {page}", soft_wrap=True)
    out.print(
        f"{'ok' if verdict.is_right else 'FAILED'}: {kills} kills, each row {'once' if verdict.is_right else '?'}"
    )
    return 0 if verdict.is_right else 1


def prove(plan: Plan, out: Console) -> tuple[Verdict, int]:
    """Kill both sides at marked moments, then let the query finish."""
    whole = plan.streams * plan.count
    with _display(whole, out) as (say, told), Proof(plan, say, told) as proof:
        say(f"{plan.servers} restream servers, {plan.streams} streams of {plan.count:,} messages; starting Spark")
        proof.start_driver()
        proof.kill_driver("before-read")
        say("starting Spark again")
        proof.start_driver()
        proof.hold("mid-read")
        proof.wait_held("mid-read")
        *others, last = range(plan.servers)
        for number in others:
            proof.kill_server(number, "mid-read")
        port = proof.close_server(last, "mid-read")
        proof.release("mid-read")
        say(f"port {port} of server {last} refuses connections for {REFUSING:g} s")
        time.sleep(REFUSING)
        proof.reopen_server(last, port)
        proof.kill_driver("after-sink")
        say("starting Spark again")
        proof.start_driver()
        proof.kill_driver("before-ack")
        say("starting Spark for the last time")
        verdict = proof.finish()
        told(proof.progress())
        return verdict, len(proof.kills)


def capture(folder: Path, page: Path) -> Path:
    """Record some traffic, and write the page about it."""
    from muxkit import pipeline

    with pipeline.Capture(folder) as recorder:
        trio.run(_traffic, recorder)
    page.parent.mkdir(parents=True, exist_ok=True)
    return pipeline.report(folder, page)


async def _traffic(recorder: muxkit.Observer) -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async def talk(session: muxkit.Session, size: int, pause: float) -> None:
        async with session.open() as channel:
            while True:
                await channel.send(bytes(size))
                await channel.receive()
                await trio.sleep(pause)

    async with trio.open_nursery() as nursery:
        served = await nursery.start(partial(muxkit.serve, muxkit.each_channel(echo), "bpmux+tcp://127.0.0.1:0"))
        async with muxkit.connect(served.url, observer=recorder) as session:
            with trio.move_on_after(TRAFFIC):
                async with trio.open_nursery() as talks:
                    for size, pause in ((100, 0.01), (5_000, 0.005), (60_000, 0.0)):
                        talks.start_soon(talk, session, size, pause)
                    while True:
                        await session.ping()
                        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="muxkit-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _display(whole: int, out: Console) -> Iterator[tuple[Callable[[str], None], Callable[[Standing], None]]]:
    """Yield two functions: one prints a line, one shows how far the query is, as a bar on a terminal."""
    if out.is_terminal and sys.stdout.isatty():
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=out) as progress:
            task = progress.add_task("", total=whole)
            yield out.print, lambda now: progress.update(task, completed=now.written, description=str(now))
        return
    began = last = time.monotonic()

    def told(now: Standing) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            out.print(f"{last - began:5.0f} s  of {whole:,}: {now}", soft_wrap=True)

    yield lambda line: out.print(f"{time.monotonic() - began:5.0f} s  {line}", soft_wrap=True), told


def _show_log(folder: Path, out: Console) -> None:
    log = folder / "driver.log"
    if log.exists():
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]:
            out.print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
