"""The command line `muxkit`: its commands, the short ones as a whole, and the exit code of every error."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from importlib.metadata import entry_points
from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

import muxkit
from muxkit._plugins import Plugin, installed
from muxkit.cli.chaos import chaos
from muxkit.cli.doctor import doctor, version_line
from muxkit.cli.forward import forward
from muxkit.cli.interactive import open_
from muxkit.cli.pipe import pipe
from muxkit.cli.reading import read
from muxkit.cli.serve import serve
from muxkit.cli.serving import serve_restream, serve_stage
from muxkit.cli.terminal import CommandFailed, Exit, console, failure_of, printable
from muxkit.cli.transfer.commands import recv, send
from muxkit.cli.watching.top import top
from muxkit.cli.watching.trace import trace
from muxkit.pipeline.fleet import UnknownSimulation, find, named_simulations, parse_seeds, simulate, simulate_all

ADDED = "muxkit.commands"  # the group of entry points
CAPTURE_NEEDS = {"duckdb": "duckdb", "pyarrow": "duckdb", "pyspark": "spark", "pandas": "spark", "numpy": "spark"}
RAW_PROTOCOLS = ("aqueduct", "bpmux", "e3x", "relink")  # whose bytes `muxkit.pipeline` can decode
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


class Commands(click.Group):
    """The commands of the library, and those that other packages add by entry points; one of these is imported late."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(entry.name for entry in entry_points(group=ADDED))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        found = [] if own is not None else [*entry_points(group=ADDED, name=cmd_name)]
        if not found:
            return own
        try:
            added: click.Command = found[0].load()
        except ImportError as error:
            return _unavailable(cmd_name, error)
        return added


def _unavailable(name: str, error: ImportError) -> click.Command:
    """Stand in for a command whose package is named and cannot be imported."""
    problem = printable(f"{name} is not installed: {error}")

    def fail() -> None:
        raise CommandFailed(problem, Exit.USAGE)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, context_settings=anything, callback=fail, add_help_option=False, help=problem)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(muxkit.__version__, prog_name="muxkit", message=version_line())
def commands() -> None:
    """Many flow-controlled channels over one connection.

    Exit codes: 0 ok, 1 it failed, 2 usage, 3 could not connect, 4 the peer broke the protocol, 5 timed out,
    130 interrupted.
    """


@commands.group()
def restream() -> None:
    """Streams that survive lost connections: no message is lost, repeated or invented."""


@commands.group()
def stage() -> None:
    """The staging server of a Spark sink: many tasks stage rows, which are committed as one transaction."""


restream.add_command(read)
restream.add_command(serve_restream)
stage.add_command(serve_stage)
commands.add_command(chaos)
commands.add_command(doctor)
commands.add_command(forward)
commands.add_command(open_)
commands.add_command(pipe)
commands.add_command(recv)
commands.add_command(send)
commands.add_command(serve)
commands.add_command(top)
commands.add_command(trace)


# ---------------------------------------------------------------------------- the process


def run() -> int:
    """Run the command of this process's arguments; return the exit code."""
    try:
        # Without click's standalone mode, which knows the exit codes 0, 1 and 2 only.
        done = commands.main(prog_name="muxkit", standalone_mode=False)
        return done if isinstance(done, int) else Exit.OK
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return _say("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of standard output is gone; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except BaseException as error:
        failure = failure_of(error)
        if failure is None:
            raise
        return _say(failure.sentence, failure.exit)


def _say(sentence: str, code: Exit) -> Exit:
    print(f"muxkit: {printable(sentence)}", file=sys.stderr)
    return code


# ---------------------------------------------------------------------------- muxkit plugins


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(as_json: bool) -> None:
    """List the protocols and transports that are installed.

    A URL names one of each: bpmux+tcp://127.0.0.1:7000 is the protocol bpmux over the transport tcp.
    """
    found = installed()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([_as_fields(plugin) for plugin in found])).decode())
    else:
        console().print(_table(found))


# Escaped in JSON too: JSON leaves control characters above 127 unchanged.
def _as_fields(plugin: Plugin) -> dict[str, str | None]:
    fields = (plugin.kind, plugin.name, plugin.package, plugin.target, plugin.problem)
    kind, name, package, target, problem = (None if field is None else printable(field) for field in fields)
    return {"kind": kind, "name": name, "package": package, "target": target, "problem": problem}


def _table(found: list[Plugin]) -> Table:
    table = Table()
    for title in ("kind", "name", "package", "state"):
        table.add_column(title)
    for plugin in found:
        style = "green" if plugin.problem is None else "red" if plugin.extra is None else "yellow"
        state = Text(printable(plugin.problem or "ok"), style=style)
        table.add_row(*(Text(printable(cell)) for cell in (plugin.kind, plugin.name, plugin.package)), state)
    return table


# ---------------------------------------------------------------------------- muxkit capture


@commands.group()
def capture() -> None:
    """Recorded traffic, as `muxkit.pipeline.Capture` writes it."""


@capture.command()
@click.argument("folder", type=FOLDER)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The page. [default: FOLDER/report.html]")
@click.option("--raw", type=click.Choice(RAW_PROTOCOLS), help="Decode raw bytes of this protocol.")
@click.option("--engine", is_flag=True, help="With --raw bpmux: find the rules that peers broke, with a real engine.")
@click.option("--listener", is_flag=True, help="With --raw relink: the bytes were recorded by the listener.")
@click.option("--since", type=click.DateTime(), help="Leave out what is earlier, in UTC.")
@click.option("--until", type=click.DateTime(), help="Leave out what is not earlier, in UTC.")
@click.option("--connection", help="Only this connection, by the name that the program gave it.")
@click.option("--spark", "with_spark", is_flag=True, help="Use Spark, for captures that no one machine holds.")
def report(
    folder: Path,
    out: Path | None,
    raw: str | None,
    engine: bool,
    listener: bool,
    since: datetime | None,
    until: datetime | None,
    connection: str | None,
    with_spark: bool,
) -> int:
    """Write one page about the captures in FOLDER: rates, volumes, credit, round trips, fairness, violations."""
    if engine and raw != "bpmux":
        raise click.UsageError("--engine goes with --raw bpmux")
    if listener and raw != "relink":
        raise click.UsageError("--listener goes with --raw relink")
    kind = "frames" if raw is None else "raw"
    try:
        from muxkit import pipeline

        only = pipeline.Selection(since=since, until=until, connection=connection)
        if not only.open(folder).files("frames" if raw is None else "raw", only):
            raise CommandFailed(f"{folder / kind}: there are no captures", Exit.USAGE)
        how = pipeline.Raw(protocol=raw, engine=engine, side="listener" if listener else "connector") if raw else None
        spark = pipeline.spark_session() if with_spark else None
        try:
            page = pipeline.report(folder, out, raw=how, only=only, spark=spark)
        finally:
            if spark is not None:
                spark.stop()
    except ModuleNotFoundError as error:
        extra = CAPTURE_NEEDS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sentence = f"captures need {error.name}; it comes with: pip install 'muxkit[{extra}]'"
        raise CommandFailed(sentence, Exit.USAGE) from None
    click.echo(printable(str(page)))
    return Exit.OK


# ---------------------------------------------------------------------------- muxkit fleet


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


@commands.group()
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
    """Run SIMULATION over SEEDS, such as 0-999. It is one of `muxkit fleet list`, or package.module:function."""
    began = time.perf_counter()
    failed = 0
    for outcome in simulate_all(simulation, seeds, processes=processes):
        if not outcome.ok:
            failed += 1
            click.echo(printable(f"seed {outcome.seed}: {outcome.error}"))
            click.echo(f"  again: muxkit fleet replay {simulation} {outcome.seed}")
    took = time.perf_counter() - began
    click.echo(f"{len(seeds):,} seeds in {took:.1f} s, {len(seeds) / took:,.0f} a second: {failed:,} failed")
    return Exit.FAILED if failed else Exit.OK


@fleet.command()
@click.argument("simulation", callback=_simulation)
@click.argument("seed", type=int)
def replay(simulation: str, seed: int) -> int:
    """Run SIMULATION with one SEED again, and print the whole trace of what it raises.

    What a simulation of muxkit tells ends with a digest of what happened: the same seed gives the same digest.
    """
    outcome = simulate(simulation, seed)
    if outcome.ok:
        click.echo(printable(f"{simulation}, seed {seed}: ok: {outcome.summary or ''}"))
        return Exit.OK
    for line in (outcome.trace or "").splitlines():
        click.echo(printable(line), err=True)
    raise CommandFailed(f"seed {seed}: {outcome.error}")
