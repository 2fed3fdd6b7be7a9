"""The contestants of the benchmark: protocols over transports, raw connections, and the certificate that they trust."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from muxkit_bench.run.cells import Cell

MOST = 16_000  # channels
RAW_MOST = 1000  # connections
RAW_IDLE = 1000
QUIC_MOST = 1000  # channels: ten thousand take minutes to open, one packet or more for each
OTHERS_LEAST = 16  # messages on each channel
MODULE = ["-P", "-m"]
WINDOW = "MUXKIT_BENCH_WINDOW"  # environment variable: the window of all channels, in bytes


@attrs.frozen(kw_only=True)
class Contestant:
    """A program for both ends, and what it can do."""

    name: str
    title: str
    command: list[str]
    address: str
    """The address of its server; `{}` is replaced by a name, since two servers may run at once."""
    baseline: str
    extra: Mapping[str, str] = attrs.field(factory=dict)
    """For its environment."""
    most: int = MOST
    """Channels at the same time."""
    idle: int | None = None
    """Channels of the job idle, if not the usual number."""
    is_ours: bool = False
    is_alone: bool = False
    """Both ends are in one process."""
    coalesces: bool = False
    """Batches messages by hand."""

    @property
    def is_raw(self) -> bool:
        return self.name.startswith("raw ")

    def takes_part(self, cell: Cell) -> bool:
        if cell.job == "idle":
            return not self.coalesces
        if self.coalesces:
            return cell.job in ("small", "send_many") and cell.channels <= self.most
        if self.is_raw and cell.job == "send_many":
            return False  # its coalesced form does
        if cell.job == "flat":
            return self.is_ours and cell.channels <= self.most
        if cell.job == "receive_many" and not (self.is_ours or self.is_raw):
            return False
        return cell.channels <= self.most

    def fitted(self, cell: Cell) -> Cell:
        """Adapt a cell: slow contestants get less work."""
        if cell.job == "idle" and self.idle:
            return attrs.evolve(cell, channels=min(self.idle, cell.channels))
        return cell if self.is_ours or self.is_raw else attrs.evolve(cell, least=min(cell.least, OTHERS_LEAST))


def ours(
    protocol: str, transport: str, folder: Path, *, window: int | None = None, compiled: Path | None = None
) -> Contestant:
    """Make a contestant of muxkit. `folder` is for sockets and the certificate; `window` is that of each channel.

    `compiled` is the interpreter of an environment with the compiled build, if that one is meant.
    """
    form = "" if compiled is None else ", compiled"
    match transport:
        case "unix":
            address = f"unix://{folder / protocol}{'-compiled' if compiled else ''}-{{}}"
        case "mem":
            address = "mem://{}"
        case _:
            address = f"{transport}://127.0.0.1:0"
    return Contestant(
        name=f"{protocol}+{transport}{form}",
        title=f"{protocol} over {transport}{form}",
        command=[str(compiled or sys.executable), *MODULE, "muxkit_bench.contestants.muxkit_program"],
        address=f"{protocol}+{address}",
        baseline=_baseline(transport),
        extra={FOLDER: str(folder)} | ({} if window is None else {WINDOW: str(window)}),
        most=QUIC_MOST if transport == "quic" else MOST,
        idle=QUIC_MOST if transport == "quic" else None,
        is_ours=True,
        is_alone=transport == "mem",
    )


def raw(transport: str, folder: Path) -> list[Contestant]:
    """Make the baselines of a transport; `folder` is for sockets."""
    name = _baseline(transport)
    kind = name.removeprefix("raw ")
    one = Contestant(
        name=name,
        title=f"raw Trio over {kind}, a connection for each channel",
        command=[sys.executable, *MODULE, "muxkit_bench.contestants.trio_program"],
        address=f"unix:{folder / 'raw'}-{{}}" if kind == "unix" else kind,
        baseline=name,
        most=RAW_MOST,
        idle=RAW_IDLE,
    )
    many = attrs.evolve(one, name=f"{name}, coalesced", title=f"{one.title}, 64 messages to a send_all", coalesces=True)
    return [one, many]


def _baseline(transport: str) -> str:
    return "raw unix" if transport == "unix" else "raw tcp"


FOLDER = "MUXKIT_BENCH_FOLDER"  # the variable that tells the processes where the certificate is
CERTIFICATE = "certificate.pem"
KEY = "key.pem"
CERTIFIED = frozenset({"tls", "wss", "quic", "dtls"})  # transports that need one
