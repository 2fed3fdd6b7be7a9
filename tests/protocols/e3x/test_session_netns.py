"""e3x fills a real bottleneck with a short queue and repairs its losses; a router in network namespaces."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.test_netns_packets import UNSHARE

ROOT = Path(__file__).resolve().parents[3]
LINE = 4_000_000 / 8  # bytes a second


@pytest.mark.requirement("R-48")
def test_a_slow_line_with_a_short_queue_is_used_and_nothing_is_lost() -> None:
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs network namespaces: {', '.join(missing)} is not installed")
    probe = [*UNSHARE, "sh", "-c", "mount -t tmpfs none /run && ip link add x type veth peer name y"]
    answer = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode:
        pytest.skip(f"needs network namespaces, which this machine does not grant: {answer.stderr.strip()}")
    program = [sys.executable, "-W", "ignore", "-m", "tests.protocols.e3x._netns_peer", "here"]
    command = [*UNSHARE, "sh", str(ROOT / "tests" / "system" / "netns.sh"), "slow", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["answer"] == "right"
    assert seen["lost"] > 0, "the queue holds five packets"
    assert seen["rate"] < LINE
