"""`muxkit fleet`: seeded simulations of the protocols, run by the thousand."""

from __future__ import annotations

import time

import click

from muxkit.cli.terminal import CommandFailed, Exit, printable
from muxkit_bench.fleet import UnknownSimulation, find, named_simulations, parse_seeds, simulate, simulate_all


def _simulation(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        find(value)
    except UnknownSimulation as error:
        raise click.BadParameter(printable(str(error))) from None
    return value


def _seeds(context: click.Context, parameter: click.Parameter, value: str) -> range:
    try:
        return parse_seeds(value)
    except ValueError as error:
        raise click.BadParameter(printable(str(error))) from None


@click.group()
def fleet() -> None:
    """Seeded simulations of the protocols, on virtual time."""


@fleet.command("list")
def list_() -> int:
    """List the simulations of installed packages."""
    for name in named_simulations():
        click.echo(f"{name:16}{(find(name).__doc__ or '').splitlines()[0]}")
    return Exit.OK


@fleet.command("run")
@click.argument("simulation", callback=_simulation)
@click.argument("seeds", callback=_seeds)
@click.option("--processes", type=click.IntRange(1, 1024), default=1, show_default=True)
def run_(simulation: str, seeds: range, processes: int) -> int:
    """Run SIMULATION over SEEDS, such as 0-999. SIMULATION is one of `muxkit fleet list` or package.module:function."""
    began = time.perf_counter()
    failed = 0
    for outcome in simulate_all(simulation, seeds, processes=processes):
        if not outcome.ok:
            failed += 1
            click.echo(printable(f"seed {outcome.seed}: {outcome.error}"))
            click.echo(f"  again: {outcome.replay}")
    took = time.perf_counter() - began
    click.echo(f"{len(seeds):,} seeds in {took:.1f} s, {len(seeds) / took:,.0f} per second: {failed:,} failed")
    return Exit.FAILED if failed else Exit.OK


@fleet.command()
@click.argument("simulation", callback=_simulation)
@click.argument("seed", type=int)
def replay(simulation: str, seed: int) -> int:
    """Run SIMULATION with one SEED again, and print the full traceback if it fails.

    The output of muxkit's simulations ends with a digest of the run: the same seed gives the same digest.
    """
    outcome = simulate(simulation, seed)
    if outcome.ok:
        click.echo(printable(f"{simulation}, seed {seed}: ok: {outcome.summary or ''}"))
        return Exit.OK
    for line in (outcome.trace or "").splitlines():
        click.echo(printable(line), err=True)
    raise CommandFailed(f"seed {seed}: {outcome.error}")
