"""Measures protocols over a long line, and prints the two tables: MiB/s, and round trips until the first answer.

Server and client are processes of their own. The relay between them runs in the process of the command, which has
nothing else to do meanwhile.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muxkit.cli.doctor import make_certificate
from muxkit.cli.terminal import CommandFailed, printable
from muxkit.testing import ChaosPlan, chaos_packet_relay, chaos_relay
from muxkit_bench.children import Child, child
from muxkit_bench.contestants.contestant import CERTIFICATE, CERTIFIED, KEY
from muxkit_bench.demo.processes import Failed, Ready
from muxkit_bench.lines.ends import Event, Found, Plan, understand

ENDS: Final = "muxkit_bench.lines.ends"
SECONDS: Final = 4.0  # of each bulk transfer
QUICK: Final = 0.2  # the same with --quick
CHANNELS: Final = (1, 8, 100)
OVER_PACKETS: Final = frozenset({"udp", "dtls", "quic"})
DEFAULTS: Final = ("bpmux+tcp", "yamux+tcp", "relink+tcp", "e3x+tcp", "e3x+udp", "aqueduct+tcp", "aqueduct+quic")
MIB: Final = 1024 * 1024


@attrs.frozen(kw_only=True)
class Weather:
    """What the line is like."""

    round_trip: float
    rate: float | None
    loss: float

    @property
    def title(self) -> str:
        """The line in words, as the title of a table."""
        parts = [f"a round trip of {self.round_trip * 1e3:g} ms"]
        if self.rate is not None:
            parts.append(f"{self.rate / MIB:,.0f} MiB/s each way")
        if self.loss:
            parts.append(f"{self.loss:.2%} of packets lost")
        return ", ".join(parts)


@attrs.frozen
class Line:
    """What was found for one protocol over one transport."""

    scheme: str
    found: Found | None
    failure: str = ""


async def measure_lines(schemes: Sequence[str], weather: Weather, seconds: float, out: Console) -> list[Line]:
    """Measure each protocol and transport, one after the other."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="muxkit-") as folder:
        if any(scheme.partition("+")[2] in CERTIFIED for scheme in schemes):
            make_certificate(Path(folder) / CERTIFICATE, Path(folder) / KEY)
        for scheme in schemes:
            out.print(Text(f"measuring {scheme}", style="dim"))
            try:
                lines.append(Line(scheme, await _measure(scheme, weather, seconds, folder)))
            except CommandFailed as failure:
                lines.append(Line(scheme, None, failure.sentence))
    return lines


async def _measure(scheme: str, weather: Weather, seconds: float, folder: str) -> Found:
    plan = Plan(seconds=seconds, channels=CHANNELS, folder=folder)
    chaos = ChaosPlan(delay=weather.round_trip / 2, rate=weather.rate, loss=weather.loss)
    over_packets = scheme.partition("+")[2] in OVER_PACKETS
    async with child("the server process", ENDS, "server", scheme, folder) as server:
        ready = await _next_event(server)
        assert isinstance(ready, Ready)
        where = re.search(r"127\.0\.0\.1:\d+", ready.url)
        if where is None:
            raise CommandFailed(f"{scheme}: expected a transport with an address of IP, got {ready.url}")
        relay = chaos_packet_relay if over_packets else chaos_relay
        async with relay(where[0], chaos) as between:
            url = ready.url.replace(where[0], between.address, 1)
            async with child("the client process", ENDS, "client", url, msgspec.json.encode(plan).decode()) as client:
                found = await _next_event(client)
                assert isinstance(found, Found)
                return found


async def _next_event(one: Child) -> Event:
    """Read the next event of a process; raises `CommandFailed` if it has failed or ended."""
    line = await one.next_line()
    if line is None:
        await one.end()
        raise CommandFailed(f"{one.name} {one.end_in_words}")
    event = understand(line)
    if isinstance(event, Failed):
        raise CommandFailed(f"{one.name}: {event.sentence}", event.exit)
    return event


# ---------------------------------------------------------------------------- the tables


def print_lines(out: Console, lines: Sequence[Line], weather: Weather) -> None:
    """Print both tables, and what failed."""
    out.print(_throughput(lines, weather))
    out.print(_round_trips(lines, weather))
    for line in lines:
        if line.found is None:
            out.print(Text(printable(f"FAILED: {line.scheme}: {line.failure}"), style="bold red"))


def _throughput(lines: Sequence[Line], weather: Weather) -> Table:
    table = Table(title=f"MiB/s over {weather.title}")
    for title in ("protocol", *map(_title, _columns()), "keystroke ms, idle", "beside one", "MiB of client / server"):
        table.add_column(title, justify="left" if title == "protocol" else "right")
    for line in lines:
        if (found := line.found) is not None:
            last = found.bulk[-1]
            memory = " / ".join(
                "–" if size is None else f"{size / MIB:.0f}" for size in (last.client_memory, last.server_memory)
            )
            table.add_row(
                line.scheme,
                *(f"{bulk.rate / MIB:,.1f}" for bulk in found.bulk),
                f"{found.keystroke * 1e3:.0f}",
                f"{found.bulk[0].keystroke * 1e3:.0f}",
                memory,
            )
    return table


def _columns() -> list[tuple[int, bool]]:
    return [*((channels, False) for channels in CHANNELS), (1, True)]


def _title(column: tuple[int, bool]) -> str:
    channels, beside_stalled = column
    if beside_stalled:
        return "one beside a stalled reader"
    return "one channel" if channels == 1 else f"{channels} channels"


def _round_trips(lines: Sequence[Line], weather: Weather) -> Table:
    table = Table(title=f"Round trips until the answer, over {weather.title}")
    for title in ("protocol", "new session and channel", "new channel, 1 KB", "new channel, 100 KB", "leaving"):
        table.add_column(title, justify="left" if title == "protocol" else "right")
    for line in lines:
        if (found := line.found) is not None:
            times = (found.session, found.small, found.large, found.leaving)
            table.add_row(line.scheme, *(f"{time / weather.round_trip:.1f}" for time in times))
    return table


def as_fields(lines: Sequence[Line], weather: Weather) -> dict[str, object]:
    """Return everything that was found, for JSON."""
    return {
        "line": attrs.asdict(weather),
        "found": {line.scheme: line.found for line in lines if line.found is not None},
        "failed": {line.scheme: line.failure for line in lines if line.found is None},
    }
