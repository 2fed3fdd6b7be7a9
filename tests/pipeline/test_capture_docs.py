"""Do the programs on the pages about captures and fleets run as they stand there?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "how-to"


def programs(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_first_program_records_and_makes_the_page(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(programs("captures.md")[0])
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(Path("captures", "report.html"))), done.stderr
    page = (tmp_path / "captures" / "report.html").read_text(encoding="utf-8")
    assert "to the echo" in page
    assert "out-sink 1" in page


def test_a_simulation_of_ones_own_runs_in_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(programs("fleet.md")[-1])
    command = [sys.executable, "-m", "muxkit.pipeline.fleet", "mine:openings", "0-9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "10 seeds of mine:openings" in done.stdout
    assert "0 failed" in done.stdout
