"""The manual page is what the help of the commands says now."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from muxkit.cli.manual import manual

PAGE = Path(__file__).resolve().parents[2] / "docs" / "man" / "muxkit.1"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == manual(), "python -m muxkit.cli.manual > docs/man/muxkit.1"


def test_it_has_every_command_and_the_options_of_all() -> None:
    page = manual()
    for name in ("doctor", "forward", "open", "pipe", "recv", "send", "serve", "restream read", "fleet run"):
        assert f'.SS "muxkit {name}"' in page
    assert page.count(".B \\-\\-token\\-file") >= 6


def test_groff_finds_nothing_to_warn_of() -> None:
    program = shutil.which("groff")
    if program is None:
        return
    done = subprocess.run([program, "-man", "-Tutf8", "-ww", str(PAGE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
