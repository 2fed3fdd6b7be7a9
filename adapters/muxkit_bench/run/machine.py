"""The machine of a run: what is needed to compare its figures with those of another."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from muxkit_bench.report.results import Machine

PACKAGES = ("muxkit", "trio", "attrs", "msgspec", "trio-websocket")
_CPUINFO = Path("/proc/cpuinfo")
_ECHO = """
import os, socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for core in sys.argv[2:]:
    os.sched_setaffinity(0, {int(core)})
while data := connection.recv(1):
    connection.send(data)
"""
_PATIENCE = 30.0  # s until the other process has started
_PINGS = 2000  # raw round trips; the median of 2,000 takes a tenth of a second
_COPIED = 64 * 1024 * 1024  # bytes, more than the caches of a core hold
_COPIES = 8


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
        wake_up=measure_wake_up(pinned),
        copy_rate=measure_copy(),
    )


def measure_wake_up(pinned: list[int]) -> float:
    """Return the seconds of a round trip of one byte, over TCP, between two processes that block in `recv`.

    Nearly all of it is the kernel waking up the other process, so it says how much a round trip costs at least.
    """
    usual = os.sched_getaffinity(0) if pinned else set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-I", "-c", _ECHO, str(listener.getsockname()[1]), *map(str, pinned[:1])]
        with subprocess.Popen(command) as echo:
            try:
                listener.settimeout(_PATIENCE)
                ours, _ = listener.accept()
                with ours:
                    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if pinned:
                        os.sched_setaffinity(0, {pinned[1]})
                    return statistics.median(_ping(ours) for _ in range(_PINGS))
            finally:
                if pinned:
                    os.sched_setaffinity(0, usual)
                echo.kill()


def _ping(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.send(b".")
    connection.recv(1)
    return time.perf_counter() - began


def measure_copy() -> float:
    """Return how many bytes per second this machine copies from one place of its memory to another."""
    source, target = memoryview(bytearray(_COPIED)), memoryview(bytearray(_COPIED))
    times = []
    for _ in range(_COPIES):
        began = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began)
    return _COPIED / min(times)


def describe(machine: Machine) -> str:
    """Describe what figures of two machines cannot be compared without."""
    measured = ""
    if machine.wake_up:
        measured = (
            f"; a round trip between two blocking processes takes {machine.wake_up * 1e6:.1f} µs, "
            f"and the memory copies {machine.copy_rate / 2**30:.1f} GiB/s"
        )
    return f"{machine.processor}, {machine.cores} cores, {machine.system}{measured}"


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
