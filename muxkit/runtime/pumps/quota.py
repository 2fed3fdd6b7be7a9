"""Find out whether a cgroup limits how much processor time this process may use.

The kernel stops a container or a systemd unit with a CPU quota for the rest of a period (usually 100 ms) as soon as its
processes have used up their share. Spinning spends that share on nothing, so a reader that spins to save 50 µs can lose
50 ms later. `turns.py` therefore turns the spin off under a quota, and `muxkit doctor` reports it.

The quota is in `cpu.max` of cgroup version 2, and in `cpu.cfs_quota_us` and `cpu.cfs_period_us` of version 1.
The limits of all enclosing groups apply, so the smallest one counts. macOS and Windows have no cgroups and therefore no
quota.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many processors' worth of time this process may use, or None if nothing limits it.

    `root` is the folder that holds `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    mounted = root / "sys/fs/cgroup"
    found: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            found += (quota for folder in _enclosing(mounted, group) if (quota := _version_2(folder)) is not None)
        elif "cpu" in controllers.split(","):
            mount = next((each for each in (mounted / controllers, mounted / "cpu") if each.is_dir()), mounted)
            found += (quota for folder in _enclosing(mount, group) if (quota := _version_1(folder)) is not None)
    return min(found, default=None)


def _enclosing(mount: Path, group: str) -> Iterator[Path]:
    """Yield the folder of a group and those of the groups around it.

    Inside a container the path may be the one that the host sees, which doesn't exist here. The container's own group
    is then the top of the mount.
    """
    folder = mount / group.lstrip("/")
    yield folder
    while folder != mount and folder != folder.parent:
        folder = folder.parent
        yield folder


def _version_2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _version_1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None  # -1 is no limit


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
