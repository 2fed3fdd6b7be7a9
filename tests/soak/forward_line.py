"""`muxkit forward` beside `ssh -L` over a long line: one download, one upload, and a keystroke alone and beside each.

    python -m tests.soak.forward_line [--delay 0.04] [--seconds 4] [NAME ...]

Between the client and the server of each forward runs `muxkit chaos`, which delays every byte by the same time in each
direction and limits no rate. A keystroke is 64 bytes and their echo on a connection that stays open; its figure is the
median. The download and the upload are repeated with more bytes until one takes the given time. The first row has no
forward: the callers reach the target through the relay, so the kernel's own windows are what limits it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from tests.soak.forward_peers import MIB, PEERS, Forwarding, Peer, called, caller, target

KEYSTROKES = 20
FIRST_BULK = 8 * MIB  # each try carries several times as much as the one before
LARGEST_BULK = 4096 * MIB


@attrs.frozen
class Line:
    """What one forward carried over the line."""

    name: str
    down: float
    """MiB per second."""
    up: float
    alone: float
    """Seconds until the echo of a keystroke."""
    beside_down: float
    beside_up: float
    is_right: bool
    """No byte was lost or wrong."""


def measure(peer: Peer, port: int, delay: float, seconds: float) -> Line:
    """Measure one forward."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        forwarding = peer.start(port, Path(folder), stack, delay)
        alone = called("talk", forwarding.port, KEYSTROKES, 1)
        down, beside_down, down_right = _bulk("get", forwarding, seconds)
        up, beside_up, up_right = _bulk("put", forwarding, seconds)
        is_right = down_right and up_right and not alone["wrong"]
        return Line(peer.name, down, up, alone["p50"], beside_down, beside_up, is_right)


def _bulk(role: str, forwarding: Forwarding, seconds: float) -> tuple[float, float, bool]:
    """Return the MiB per second of a long transfer, the time of a keystroke beside it, and whether all was right."""
    size = FIRST_BULK
    while True:
        found = called(role, forwarding.port, size)
        if found["wrong"] or found["took"] >= seconds or size >= LARGEST_BULK:
            break
        size = min(LARGEST_BULK, int(size * max(2.0, 1.2 * seconds / found["took"])))
    with caller(role, forwarding.port, 2 * size) as process:
        beside = called("talk", forwarding.port, KEYSTROKES, 1)
        process.kill()
    return size / MIB / found["took"], beside["p50"], not (found["wrong"] or beside["wrong"])


def run(names: Sequence[str], delay: float, seconds: float) -> list[Line]:
    """Measure the forwards that are named, or all, in turn."""
    lines: list[Line] = []
    with target() as port:
        for peer in PEERS:
            if names and peer.name not in names:
                continue
            try:
                lines.append(measure(peer, port, delay, seconds))
            except FileNotFoundError as missing:
                print(f"{peer.name}: left out, there is no {missing.filename or missing}", flush=True)
    return lines


def table(lines: Sequence[Line]) -> str:
    """Format the lines as a table."""
    rows: list[tuple[str, ...]] = [
        ("forward", "down", "up", "keystroke", "beside down", "beside up"),
        ("", "MiB/s", "MiB/s", *("ms",) * 3),
    ]
    rows += [
        (
            *(line.name, f"{line.down:.1f}", f"{line.up:.1f}"),
            *(f"{time * 1e3:.1f}" for time in (line.alone, line.beside_down, line.beside_up)),
        )
        for line in lines
    ]
    return "\n".join(f"{row[0]:<14}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in rows)


def main() -> None:
    """Print the table; exit with 1 if a byte was lost or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.04, help="seconds, in each direction")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(peer.name for peer in PEERS)}")
    given = parser.parse_args()
    lines = run(given.names, given.delay, given.seconds)
    print(table(lines))
    sys.exit(0 if all(line.is_right for line in lines) else 1)


if __name__ == "__main__":
    main()
