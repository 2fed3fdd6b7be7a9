"""`muxkit demo`: run a server and a client process on this machine, over one transport after another."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import click
import msgspec
import trio

from muxkit.cli.children import Child, child
from muxkit.cli.demo.events import Event, Failed, Plan, Progress, Ready, Totals, understand
from muxkit.cli.demo.progress import Display, display_for
from muxkit.cli.demo.report import Run, print_json, print_table
from muxkit.cli.outcome import CommandFailed, Exit
from muxkit.cli.terminal import console

if TYPE_CHECKING:
    from collections.abc import Sequence

TRANSPORTS = ("tcp", "unix", "ws") if hasattr(socket, "AF_UNIX") else ("tcp", "ws")
IDLE_MOST = 1.0  # s of round trips on an idle connection
IDLE_PART = 0.25  # of the time under load


@click.command()
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600.0),
    default=4.0,
    show_default=True,
    help="How long the channels work, for each transport.",
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    help=f"Only over this one; may be given again. [default: {', '.join(TRANSPORTS)}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON at the end, and nothing before.")
def demo(seconds: float, transports: tuple[str, ...], as_json: bool) -> int:
    """Run 100 echo channels and one bulk channel on one connection, and verify every byte.

    Two processes on this machine compare what they receive with the contents that a seed gives. The client measures
    round trips under load. Exits with 1 if any payload was lost or changed.
    """
    plan = Plan(seconds=seconds, idle_seconds=min(IDLE_MOST, seconds * IDLE_PART))
    runs: list[Run] = []
    try:
        with display_for(None if as_json else console(), plan) as display:
            trio.run(_run_all, transports or TRANSPORTS, plan, display, runs)
    except CommandFailed as failure:
        if as_json:
            print_json(plan, runs, failure)
        raise
    if as_json:
        print_json(plan, runs)
    else:
        print_table(console(), plan, runs)
    return Exit.OK if all(run.is_verified for run in runs) else Exit.FAILED


async def _run_all(transports: Sequence[str], plan: Plan, display: Display, runs: list[Run]) -> None:
    for transport in transports:
        display.begin(transport)
        runs.append(await _run(transport, plan, display))
        display.end()


async def _run(transport: str, plan: Plan, display: Display) -> Run:
    async with child("the server process", "muxkit.cli.demo.server", transport) as server:
        url = await _url_of(server)
        plan_text = msgspec.json.encode(plan).decode()
        async with child("the client process", "muxkit.cli.demo.client", url, plan_text) as client:
            try:
                found = await _follow(client, display)
            except CommandFailed as failure:
                await server.end()
                if server.has_died:  # its end caused the failure
                    raise CommandFailed(f"{transport}: {server.name} {server.end_in_words}") from failure
                raise CommandFailed(f"{transport}: {failure.sentence}", failure.exit) from failure
        await server.release()
        return Run(transport=transport, url=url, client=found, server=await _follow(server, display))


async def _url_of(server: Child) -> str:
    event = await _next_event(server)
    if isinstance(event, Failed):
        raise CommandFailed(f"{server.name}: {event.sentence}", event.exit)
    assert isinstance(event, Ready)
    return event.url


async def _follow(one: Child, display: Display) -> Totals:
    """Follow a process to its result."""
    while True:
        match await _next_event(one):
            case Progress() as progress:
                display.progress(progress)
            case Totals() as totals:
                return totals
            case Failed(sentence, code):
                raise CommandFailed(f"{one.name}: {sentence}", code)


async def _next_event(one: Child) -> Event:
    """Read the next event of a process; raises `CommandFailed` if it has ended."""
    line = await one.next_line()
    if line is None:
        await one.end()
        raise CommandFailed(f"{one.name} {one.end_in_words}")
    return understand(line)
