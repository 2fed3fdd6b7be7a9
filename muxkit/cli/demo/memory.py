"""How much memory did this process take at most?"""

from __future__ import annotations

import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_memory() -> int | None:
    """Bytes of resident memory, at their highest; None where the system does not say."""
    if STATUS.exists():
        # Not `ru_maxrss`: on Linux a new process inherits that from the one that started it.
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
