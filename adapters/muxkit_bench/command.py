"""`muxkit bench`: the cost of channels, beside raw Trio connections and other multiplexers in the same run."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
import trio
from click.core import ParameterSource

from muxkit.cli.chaos import RATE, SECOND_UNITS, SHARE, Quantity
from muxkit.cli.terminal import CommandFailed, Exit, console, printable
from muxkit_bench.contestants.choice import line_up
from muxkit_bench.contestants.compiled import compiled_python
from muxkit_bench.contestants.peers import find_peers, peers_of_checkout
from muxkit_bench.lines import run as lines
from muxkit_bench.lines.run import Weather
from muxkit_bench.report.outputs import Outputs
from muxkit_bench.report.results import Report, load
from muxkit_bench.report.table import print_report, print_targets
from muxkit_bench.report.targets import judge
from muxkit_bench.run.awake import can_keep_awake
from muxkit_bench.run.cells import JOBS, Job, cells
from muxkit_bench.run.machine import usable_cores
from muxkit_bench.run.measure import TERMINATED, measure, tidy_when_terminated
from muxkit_bench.run.rounds import Plan

BESIDE_FROM = ("files", "html_file")  # the options that go with --from
BESIDE_RTT = ("round_trip", "rate", "loss", "protocols", "transports", "seconds", "quick", "json_file")
REASONS = {"--from": "--from measures nothing", "--rtt": "--rtt has jobs of its own"}
SECONDS_OF_RTT = Quantity(0.001, 10.0, SECOND_UNITS, "seconds")
ROUNDS = 7
SECONDS = 0.25  # of a pass
QUICK = 0.02  # the same with --quick


def _jobs(context: click.Context, option: click.Parameter, value: str | None) -> tuple[Job, ...]:
    if value is None:
        return JOBS
    asked = {name.strip() for name in value.split(",")}
    if unknown := asked - set(JOBS):
        names = ", ".join(repr(printable(name)) for name in sorted(unknown))
        raise click.BadParameter(f"{names} is no job: there are {', '.join(JOBS)}")
    return tuple(job for job in JOBS if job in asked)


@click.command()
@click.option("--jobs", callback=_jobs, metavar="NAMES", help=f"Only these, separated by commas: {', '.join(JOBS)}.")
@click.option("--rounds", type=click.IntRange(1), help=f"How many rounds. [default: {ROUNDS}]")
@click.option(
    "--protocol",
    "protocols",
    multiple=True,
    default=("bpmux",),
    show_default=True,
    help="A protocol that `muxkit plugins` lists; may be repeated.",
)
@click.option(
    "--transport",
    "transports",
    multiple=True,
    default=("tcp",),
    show_default=True,
    help="A transport that `muxkit plugins` lists; may be repeated.",
)
@click.option(
    "--window",
    type=click.IntRange(4096, 1 << 30),
    metavar="BYTES",
    help="The window of each channel of muxkit, from its start; to compare protocols. [default: that of each protocol]",
)
@click.option("--seconds", type=click.FloatRange(0.001, 60.0), help=f"Seconds of each pass. [default: {SECONDS}]")
@click.option("--seed", default=1, show_default=True, help="The seed of the order of measurements.")
@click.option("--quick", is_flag=True, help="One round of short passes on few channels, only to show that it works.")
@click.option("--no-pin", is_flag=True, help="Let the system choose the cores.")
@click.option("--awake", is_flag=True, help="Keep the cores busy, so that none has to wake up.")
@click.option(
    "--peers",
    "peers_folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="The folder with programs of other multiplexers. [default: tests/bench of a checkout]",
)
@click.option("--no-peers", is_flag=True, help="Compare with raw connections only.")
@click.option(
    "--side-env",
    type=click.Path(file_okay=False, path_type=Path),
    help="A virtual environment for what those programs need; created if it does not exist.",
)
@click.option(
    "--compiled",
    "compiled_env",
    type=click.Path(file_okay=False, path_type=Path),
    help="A virtual environment with the compiled build, to measure beside this one; a checkout makes it.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write every pass to this file."
)
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with plots.")
@click.option(
    "--from",
    "files",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    multiple=True,
    help="Measure nothing; show files that --json has written, several runs in one table.",
)
@click.option(
    "--rtt",
    "round_trip",
    type=SECONDS_OF_RTT,
    metavar="SECONDS",
    help="Measure over a line with this round trip instead, such as 80ms: what it carries, and what costs round trips.",
)
@click.option("--rate", type=RATE, help="With --rtt: bytes per second of that line, such as 1gbit.")
@click.option("--loss", type=SHARE, default=0.0, help="With --rtt: the share of UDP packets that it loses, such as 1%.")
@click.pass_context
def bench(
    context: click.Context,
    jobs: tuple[Job, ...],
    rounds: int | None,
    protocols: tuple[str, ...],
    transports: tuple[str, ...],
    window: int | None,
    seconds: float | None,
    seed: int,
    quick: bool,
    no_pin: bool,
    awake: bool,
    peers_folder: Path | None,
    no_peers: bool,
    side_env: Path | None,
    compiled_env: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    files: tuple[Path, ...],
    round_trip: float | None,
    rate: float | None,
    loss: float,
) -> int:
    """Measure messages, bytes, round trips and memory, beside raw connections in the same run.

    Both ends are processes of their own. All payload is verified before the clock runs, all counts while it does.
    Exits with 1 if anything else came than was sent. Ctrl-C shows the rounds that are complete.
    """
    if round_trip is not None:
        _refuse_beside(context, "--rtt", BESIDE_RTT)
        schemes = _schemes(context, protocols, transports)
        weather = Weather(round_trip=round_trip, rate=rate, loss=loss)
        return _measure_lines(schemes, weather, seconds or (lines.QUICK if quick else lines.SECONDS), json_file)
    if rate is not None or loss:
        raise click.UsageError("--rate and --loss describe the line of --rtt, which is missing")
    outputs = Outputs(json_file, html_file)
    if awake and not can_keep_awake():
        raise CommandFailed("--awake: only Linux has a scheduling class that gives way to all others", Exit.USAGE)
    if files:
        _refuse_beside(context, "--from", BESIDE_FROM)
    outputs.check()
    if files:
        reports, stopped = [_load(path) for path in files], None
    else:
        with tidy_when_terminated(), tempfile.TemporaryDirectory(prefix="muxkit-") as scratch:
            compiled = None if compiled_env is None else compiled_python(compiled_env)
            taking_part = line_up(protocols, transports, Path(scratch), window, compiled)
            contestants, left_out = taking_part.contestants, taking_part.left_out
            if not no_peers:
                found = find_peers(peers_folder or peers_of_checkout(), side_env, Path(scratch))
                contestants += found.contestants
                left_out += found.left_out
            cores = usable_cores()
            pinned = [] if no_pin or len(cores) < 2 else cores[:2]
            plan = Plan(
                cells=cells(jobs, is_quick=quick),
                contestants=contestants,
                rounds=rounds or (1 if quick else ROUNDS),
                seconds=seconds or (QUICK if quick else SECONDS),
                seed=seed,
                cores=pinned,
                awake=(pinned or cores) if awake else [],
                quick=quick,
            )
            report, stopped = measure(plan, left_out, console())
            reports = [] if report is None else [report]
    if reports:
        try:
            _print(reports)
        finally:  # standard output may be closed
            outputs.write(reports)
    if stopped == signal.SIGINT:
        raise CommandFailed("interrupted", Exit.INTERRUPTED)
    if stopped is not None:
        return TERMINATED
    return Exit.FAILED if any(report.failures for report in reports) else Exit.OK


def _print(reports: list[Report]) -> None:
    out = console()
    for report in reports:
        print_report(out, report)
    print_targets(out, judge(reports), len(reports))


def _measure_lines(schemes: Sequence[str], weather: Weather, seconds: float, json_file: Path | None) -> int:
    out = console()
    found = trio.run(lines.measure_lines, schemes, weather, seconds, out)
    lines.print_lines(out, found, weather)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.encode(lines.as_fields(found, weather)))
    return Exit.OK if all(line.found is not None for line in found) else Exit.FAILED


def _schemes(context: click.Context, protocols: tuple[str, ...], transports: tuple[str, ...]) -> list[str]:
    """Return each protocol over each transport that it can use; a usual choice if none was named."""
    if all(context.get_parameter_source(name) is ParameterSource.DEFAULT for name in ("protocols", "transports")):
        return [*lines.DEFAULTS]
    with tempfile.TemporaryDirectory(prefix="muxkit-") as scratch:
        names = [one.name for one in line_up(protocols, transports, Path(scratch), None).contestants]
    return [name for name in names if not name.startswith("raw ")]


def _refuse_beside(context: click.Context, chosen: str, allowed: Sequence[str]) -> None:
    useless = [
        option.opts[0]
        for option in context.command.params
        if option.name not in allowed and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    if useless:
        raise click.UsageError(f"{REASONS[chosen]}: {', '.join(useless)} cannot be given beside it")


def _load(path: Path) -> Report:
    try:
        return load(path.read_bytes())
    except (msgspec.MsgspecError, ValueError) as error:
        raise CommandFailed(f"{path} is no report of muxkit bench: {error}", Exit.USAGE) from error
