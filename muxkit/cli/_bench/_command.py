"""`muxkit bench`: what does it cost, beside raw Trio connections and other multiplexers in the same run?"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import msgspec

from muxkit import _plugins as plugins
from muxkit.cli._bench._awake import can_keep_awake
from muxkit.cli._bench._cells import JOBS, Job, cells
from muxkit.cli._bench._certificate import CERTIFIED, make_certificate
from muxkit.cli._bench._contestants import Contestant, ours, raw
from muxkit.cli._bench._machine import usable_cores
from muxkit.cli._bench._page import page
from muxkit.cli._bench._peers import find_peers, peers_of_checkout
from muxkit.cli._bench._results import Report, dump, load
from muxkit.cli._bench._rounds import Plan
from muxkit.cli._bench._run import measure
from muxkit.cli._bench._table import print_report, print_targets
from muxkit.cli._bench._targets import judge
from muxkit.cli._outcome import CommandFailed, Exit
from muxkit.cli._terminal import console

TRANSPORTS = ("tcp", "unix", "tls", "ws", "wss", "quic", "udp", "mem")
ROUNDS = 7
SECONDS = 0.25  # of a pass
QUICK = 0.02  # the same, only to show that everything works


def _jobs(context: click.Context, option: click.Parameter, value: str | None) -> tuple[Job, ...]:
    if value is None:
        return JOBS
    asked = {name.strip() for name in value.split(",")}
    if unknown := asked - set(JOBS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(JOBS)}")
    return tuple(job for job in JOBS if job in asked)


@click.command()
@click.option("--jobs", callback=_jobs, metavar="NAMES", help=f"Only these, with commas between: {', '.join(JOBS)}.")
@click.option("--rounds", type=click.IntRange(1), help=f"How often everything is measured. [default: {ROUNDS}]")
@click.option(
    "--protocol", "protocols", multiple=True, default=("bpmux",), show_default=True, help="May be given again."
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    default=("tcp",),
    show_default=True,
    help="May be given again.",
)
@click.option(
    "--window",
    type=click.IntRange(4096, 1 << 30),
    metavar="BYTES",
    help="The window of each of our channels, from its begin; to compare protocols. [default: what each has]",
)
@click.option("--seconds", type=click.FloatRange(0.001, 60.0), help=f"How long each pass takes. [default: {SECONDS}]")
@click.option("--seed", default=1, show_default=True, help="Of the order in which they take their turns.")
@click.option("--quick", is_flag=True, help="One round of short passes on few channels: only shows that it works.")
@click.option("--no-pin", is_flag=True, help="Let the system choose the cores.")
@click.option("--awake", is_flag=True, help="Keep the cores from sleeping in between, so that none has to wake up.")
@click.option(
    "--peers",
    "peers_folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Where programs of other multiplexers are. [default: tests/bench of a checkout]",
)
@click.option("--no-peers", is_flag=True, help="Only against raw connections.")
@click.option(
    "--side-env",
    type=click.Path(file_okay=False, path_type=Path),
    help="An environment for what the others need; it is made there if it is not.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write every pass there.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with plots.")
@click.option(
    "--from",
    "files",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    multiple=True,
    help="Measure nothing, show what --json has written; given again, several runs in one table.",
)
def bench(
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
    json_file: Path | None,
    html_file: Path | None,
    files: tuple[Path, ...],
) -> int:
    """Measure messages, bytes, round trips and memory, beside raw connections in the same run.

    Both ends are processes of their own. All payload is verified before the clock runs, all counts while it does.
    Exits with 1 if anything else came than was sent.
    """
    if awake and not can_keep_awake():
        raise CommandFailed("--awake: only Linux has work that gives way to all other", Exit.USAGE)
    if files:
        reports = [_load(path) for path in files]
    else:
        with tempfile.TemporaryDirectory(prefix="muxkit-") as scratch:
            contestants, left_out = _ours_and_raw(protocols, transports, Path(scratch), window)
            if not no_peers:
                found = find_peers(peers_folder or peers_of_checkout(), side_env)
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
            )
            reports = [measure(plan, left_out, console())]
        if json_file is not None:
            json_file.write_bytes(dump(reports[0]))
    if html_file is not None:
        html_file.write_text(page(reports), encoding="utf-8")
    out = console()
    for report in reports:
        print_report(out, report)
    print_targets(out, judge(reports), len(reports))
    return Exit.FAILED if any(report.failures for report in reports) else Exit.OK


def _ours_and_raw(
    protocols: tuple[str, ...], transports: tuple[str, ...], scratch: Path, window: int | None
) -> tuple[list[Contestant], list[str]]:
    """Every protocol over every transport, the baselines, and who cannot take part."""
    contestants: dict[str, Contestant] = {}
    left_out: list[str] = []
    usable = []
    for transport in dict.fromkeys(transports):
        try:
            if transport in CERTIFIED:
                make_certificate(scratch)
            usable.append(transport)
        except CommandFailed as failure:
            left_out.append(f"{transport}: {failure.sentence}")
    for protocol in dict.fromkeys(protocols):
        for transport in usable:
            if not _fit(protocol, transport):
                left_out.append(f"{protocol}+{transport}: {protocol} does not speak over what {transport} carries")
                continue
            one = ours(protocol, transport, scratch, window=window)
            contestants[one.name] = one
    for transport in ["tcp", *usable]:  # the others are compared with TCP
        contestants.update((one.name, one) for one in raw(transport))
    return list(contestants.values()), left_out


def _fit(protocol: str, transport: str) -> bool:
    """Can it speak over that? One that is missing fails when it is started, and says so."""
    try:
        links = getattr(plugins.load(plugins.PROTOCOLS, protocol), "links", plugins.STREAMS)
        return plugins.link_kind(plugins.load(plugins.TRANSPORTS, transport)) in links
    except plugins.PluginError:
        return True


def _load(path: Path) -> Report:
    try:
        return load(path.read_bytes())
    except (msgspec.MsgspecError, ValueError) as error:
        raise CommandFailed(f"{path} is no report of muxkit bench: {error}", Exit.USAGE) from error
