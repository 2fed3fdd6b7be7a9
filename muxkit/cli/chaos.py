"""`muxkit chaos`: a relay in front of a server that delays, limits and cuts connections, by a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import attrs
import click
import trio

from muxkit.cli.terminal import CommandFailed, Exit, printable, say
from muxkit.core import counted
from muxkit.testing import (
    ChaosPacketRelay,
    ChaosPlan,
    ChaosRelay,
    ChaosStats,
    Cut,
    CutReport,
    PacketStats,
    Way,
    chaos_packet_relay,
    chaos_relay,
    parse_place,
)

SECOND_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
RATE_UNITS: Final = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
SHARE_UNITS: Final = {"%": 0.01}


class Quantity(click.FloatRange):
    """A number, which may have a unit behind it. NaN is outside of every range."""

    def __init__(self, least: float, most: float, units: Mapping[str, float], name: str) -> None:
        super().__init__(least, most)
        self._units = units
        self.name = name

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text, factor = str(value).strip().lower(), 1.0
        # The longest unit first, because "ms" ends with "s".
        for unit in sorted(self._units, key=len, reverse=True):
            if text.endswith(unit):
                text, factor = text.removesuffix(unit), self._units[unit]
                break
        try:
            number = float(text) * factor
        except ValueError:
            number = math.nan
        if number != number:
            units = ", ".join(self._units)
            self.fail(f"{printable(str(value))!r}: expected a number, or one with a unit ({units})", param, ctx)
        bounded: float = super().convert(number, param, ctx)
        return bounded


SECONDS = Quantity(0.0, 1e6, SECOND_UNITS, "seconds")
RATE = Quantity(1.0, 1e12, RATE_UNITS, "bytes per second")
SHARE = Quantity(0.0, 1.0, SHARE_UNITS, "share")
SEEDS = 1_000_000  # seeds to draw from: short enough to be typed again

WORDS = {Cut.END: "ended", Cut.RESET: "reset", Cut.STALL: "stalled"}
DIRECTIONS = {Way.THERE: "to the target", Way.BACK: "to the client", Way.BOTH: "in both directions"}
EITHER = "either"
UDP = "udp://"


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        parse_place("tcp" + value.removeprefix("udp") if value.startswith(UDP) else value)
    except ValueError as error:
        raise click.BadParameter(printable(str(error))) from None
    return value


def _range(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    least, dash, most = value.partition("-")
    if not dash:
        most = least
    if not all(part.isascii() and part.isdigit() for part in (least, most)) or int(least) > int(most):
        raise click.BadParameter(f"{printable(value)!r}: expected bytes as MIN-MAX, such as 0-100000")
    return int(least), int(most)


@click.command()
@click.argument("listen", callback=_address)
@click.argument("target", callback=_address)
@click.option("--delay", type=SECONDS, default=0.0, help="Delay each byte by so many seconds, such as 0.04 or 40ms.")
@click.option("--jitter", type=SECONDS, default=0.0, help="Delay it by up to so many more seconds.")
@click.option(
    "--rate", type=RATE, help="Bytes per second, for each direction of a connection, such as 125000000 or 1gbit."
)
@click.option("--loss", type=SHARE, default=0.0, help="The share of UDP packets that are lost, such as 0.01 or 1%.")
@click.option(
    "--cut-after",
    callback=_range,
    metavar="MIN-MAX",
    help="Cut each connection after a number of bytes that is drawn from this range.",
)
@click.option(
    "--way",
    type=click.Choice([*(way.value for way in Way), EITHER]),
    default=Way.BOTH.value,
    show_default=True,
    help=(
        "Count these bytes to the target (there), to the client (back), in both directions together, or in one "
        "direction that is drawn for each connection (either)."
    ),
)
@click.option("--reset", type=SHARE, default=0.0, help="The share of cuts that are resets.")
@click.option("--stall", type=SHARE, default=0.0, help="The share of cuts that deliver nothing and close nothing.")
@click.option("--refuse", type=SHARE, default=0.0, help="The share of cuts after which connections are refused.")
@click.option("--refuse-for", type=SECONDS, default=1.0, show_default=True, help="Refuse them for so many seconds.")
@click.option("--seed", type=int, help="Decides what happens to each connection. [default: random, and printed]")
@click.option("--for", "duration", type=SECONDS, help="End after so many seconds. [default: at Ctrl-C]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
def chaos(
    listen: str, target: str, way: str, seed: int | None, duration: float | None, as_json: bool, **given: Any
) -> int:
    """Relay connections from LISTEN to TARGET over a bad network.

    An address is host:port, or the path of a Unix socket; port 0 chooses a free one. With udp:// before both
    addresses packets are relayed, and no connections. Without options the network is perfect. Cuts that are neither
    resets nor stalls are orderly ends. With the same seed the n-th connection is cut in the same way at the same byte.
    There is no encryption and no password: every client that reaches LISTEN reaches TARGET.
    """
    try:
        plan = ChaosPlan(cut_ways=(Way.THERE, Way.BACK) if way == EITHER else (Way(way),), **given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if listen.startswith(UDP) != target.startswith(UDP):
        raise click.UsageError(f"{printable(listen)} and {printable(target)}: expected udp:// before both, or neither")
    if listen.startswith(UDP) and plan.cut_after is not None:
        raise click.UsageError("--cut-after: packets have no connection that could be cut")
    if plan.loss and not listen.startswith(UDP):
        raise click.UsageError("--loss: a stream loses nothing; write udp:// before both addresses")
    report = _Report(random.randrange(SEEDS) if seed is None else seed, plan, as_json)
    try:
        trio.run(_relay, listen, target, plan, report, math.inf if duration is None else duration)
    finally:
        report.total()
    return Exit.OK


async def _relay(listen: str, target: str, plan: ChaosPlan, report: _Report, duration: float) -> None:
    relay: AbstractAsyncContextManager[ChaosRelay | ChaosPacketRelay]
    try:
        if listen.startswith(UDP):
            relay = chaos_packet_relay(target, plan, report.seed, listen=listen)
        else:
            relay = chaos_relay(target, plan, report.seed, listen=listen, on_cut=report.cut)
        async with relay as report.relay:
            report.listening(target)
            with trio.move_on_after(duration):
                await trio.sleep_forever()
    except BrokenPipeError:  # standard output is closed
        raise
    except OSError as error:
        raise CommandFailed(f"{listen}: {error.strerror or error}") from error


class _Report:
    """Prints events as they happen."""

    def __init__(self, seed: int, plan: ChaosPlan, as_json: bool) -> None:
        self.seed = seed
        self._plan = plan
        self.relay: ChaosRelay | ChaosPacketRelay | None = None
        self._as_json = as_json

    def listening(self, target: str) -> None:
        assert self.relay is not None
        address = self.relay.address
        say(
            f"listening on {address} for {target}, seed {self.seed}",
            {"event": "listening", "address": address, "target": target, "seed": self.seed},
            as_json=self._as_json,
        )

    def cut(self, report: CutReport) -> None:
        where = ""
        if report.way is not None:
            counts = {Way.THERE: report.bytes_there, Way.BACK: report.bytes_back}
            count = counts.get(report.way, report.bytes_there + report.bytes_back)
            where = f" after byte {count:,} {DIRECTIONS[report.way]}"
        say(
            f"connection {report.number}: {WORDS[report.how]}{where}, {report.after:.2f} s after it began",
            {
                "event": "cut",
                "connection": report.number,
                "how": report.how.value,
                "way": None if report.way is None else report.way.value,
                "bytes_there": report.bytes_there,
                "bytes_back": report.bytes_back,
                "after": report.after,
            },
            as_json=self._as_json,
        )

    def total(self) -> None:
        if self.relay is None:
            return
        if isinstance(self.relay, ChaosPacketRelay):
            self._total_of_packets(self.relay.stats())
        else:
            self._total_of_connections(self.relay.stats())

    def _total_of_packets(self, stats: PacketStats) -> None:
        say(
            f"{counted(stats.clients, 'client')}; {counted(stats.packets_there, 'packet')} there, "
            f"{stats.packets_back:,} back; {stats.lost:,} lost by plan, {stats.overflowed:,} by a full queue",
            {"event": "total", **attrs.asdict(stats)},
            as_json=self._as_json,
        )

    def _total_of_connections(self, stats: ChaosStats) -> None:
        say(
            f"{counted(stats.connections, 'connection')}, {stats.unreachable:,} of them without a target; "
            f"{counted(stats.cuts, 'cut')} ({stats.ends:,} ended, {stats.resets:,} reset, {stats.stalls:,} stalled); "
            f"{counted(stats.bytes_there, 'byte')} there, {stats.bytes_back:,} back",
            {"event": "total", **attrs.asdict(stats), "cuts": stats.cuts},
            as_json=self._as_json,
        )
        if self._plan.cut_after is not None and stats.connections and not stats.cuts:
            least, most = self._plan.cut_after
            click.echo(
                f"muxkit: nothing was cut: no connection carried as many bytes as --cut-after {least}-{most} drew for "
                "it, counted as --way says",
                err=True,
            )
