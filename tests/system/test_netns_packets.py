"""UDP and DTLS find the packet size of a path, and work where it reports none; real routers in network namespaces."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.adapters._packets import Authority

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


@pytest.fixture(scope="module")
def see(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the programs at the ends saw of a path."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs network namespaces: {', '.join(missing)} is not installed")
    probe = [*UNSHARE, "sh", "-c", "mount -t tmpfs none /run && ip link add x type veth peer name y"]
    answer = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode:
        pytest.skip(f"needs network namespaces, which this machine does not grant: {answer.stderr.strip()}")
    authority = Authority(tmp_path_factory.mktemp("netns"))
    certificate = authority.issue("10.2.0.2")

    def run(path: str) -> dict[str, Any]:
        program = [sys.executable, str(HERE / "netns_peer.py"), "here", str(authority.ca), str(certificate)]
        command = [*UNSHARE, "sh", str(HERE / "netns.sh"), path, *program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen

    return run


@pytest.mark.requirement("R-45")
def test_a_narrower_path_becomes_a_lower_limit_and_an_error_with_both_numbers(
    see: Callable[[str], dict[str, Any]],
) -> None:
    seen = see("report")
    assert seen["echo"]
    assert seen["before"] == [1400, 1500]
    assert not seen["large"]
    assert seen["after"] == [1280 - 28, 1280]
    assert seen["error"] == [1400, 1280 - 28]
    assert seen["what fits"]
    assert seen["by default"]
    assert seen["by default, encrypted"]


@pytest.mark.requirement("R-45")
def test_a_path_that_swallows_large_packets_works_with_the_size_that_is_the_default(
    see: Callable[[str], dict[str, Any]],
) -> None:
    seen = see("swallow")
    assert seen["before"] == seen["after"] == [1400, 1500]
    assert not seen["large"]
    assert "error" not in seen
    assert seen["by default"]
    assert seen["by default, encrypted"]


@pytest.mark.requirement("R-48")
def test_a_path_that_is_too_slow_loses_packets_and_changes_none(see: Callable[[str], dict[str, Any]]) -> None:
    seen = see("slow")
    numbers = seen["burst"]
    assert 0 < len(numbers) < 200
    assert numbers == sorted(set(numbers))
    assert set(numbers) <= set(range(200))
    assert seen["large"]
    assert seen["by default, encrypted"]
