"""The machine of a run: what is needed to compare its figures with those of another."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from muxkit_bench.report.results import Machine

PACKAGES = ("muxkit", "trio", "attrs", "msgspec", "trio-websocket")
_CPUINFO = Path("/proc/cpuinfo")


def this_machine(pinned: list[int], *, awake: bool) -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        cores=len(usable_cores()) or os.cpu_count() or 1,
        pinned=pinned,
        awake=awake,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages={name: found for name in PACKAGES if (found := _version(name))},
        load_before=load(),
    )


def where(machine: Machine) -> str:
    """Describe the cores in words."""
    cores = f"server on core {machine.pinned[0]}, client on {machine.pinned[1]}" if machine.pinned else "not pinned"
    return f"{cores}, {'kept awake' if machine.awake else 'free to sleep'}"


def usable_cores() -> list[int]:
    """Return the cores that a process may be pinned to; none where the system cannot."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def load() -> list[float]:
    """Return the load of the last 1, 5 and 15 minutes, if the system has it."""
    return [round(average, 2) for average in os.getloadavg()] if sys.platform != "win32" else []


def _processor() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
