"""A small disk that really gets full: a file system of a few MiB in memory, which only root may mount.

Where it cannot be mounted, the tests that need one are skipped. The tests of a full file, which `StoreLimits(bytes=)`
bounds, run everywhere and cover the same code of the store.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """Mount a disk of `size` bytes and return its directory; skip the test where that is not allowed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    with tempfile.TemporaryDirectory(prefix="muxkit-disk-") as directory:
        options = f"size={size},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"this system allows no mount: {mounted.stderr.strip()}")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


def fill(directory: Path) -> Path:
    """Take all space that is left on a disk, as another program would."""
    ballast = directory / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return ballast
