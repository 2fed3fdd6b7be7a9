"""Which tests run a mutant's line, and in which order they are tried.

The map of lines to tests comes from coverage.py: `Coverings` collects it by running the suite folder by folder, each
test as a coverage context of its own. Then it answers which tests execute the lines of a mutant.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import coverage

from tests.soak._mutations import Mutant

MAX_TESTS: Final = 400
"""Tests that are tried on one mutant at most. More of them hardly ever find what these did not."""
MAX_SECONDS: Final = 120.0
"""The time that the tests tried on one mutant may have taken together under coverage, which slows them down."""
MARKS: Final = "not soak and not spark and not alone"


@attrs.frozen
class TimedTest:
    """One test that passed while the map was made."""

    id: str
    seconds: float

    @property
    def function(self) -> str:
        """The id without the parameters."""
        return self.id.partition("[")[0]


@attrs.frozen
class Choice:
    """The tests to try on a mutant."""

    tests: list[TimedTest]
    covering: int
    """How many tests cover the mutant's lines. More than `tests` if the cap left some out."""


def choose(covering: Iterable[TimedTest], close: str) -> Choice:
    """Order the tests that cover a mutant, and cut the list off at the cap.

    Tests below the folder `close` come first. Among these each test function has its turn before any has a second one
    with other parameters, because parameters of the same function mostly find the same faults. Cheap tests come first.
    """
    turns: dict[str, int] = {}
    ranked: list[tuple[bool, int, float, TimedTest]] = []
    tests = sorted(covering, key=lambda test: (test.seconds, test.id))
    for test in tests:
        turn = turns[test.function] = turns.get(test.function, -1) + 1
        ranked.append((not test.id.startswith(f"{close}/"), turn, test.seconds, test))
    chosen: list[TimedTest] = []
    spent = 0.0
    for *_, test in sorted(ranked, key=lambda each: (*each[:3], each[3].id)):
        spent += test.seconds
        if chosen and (len(chosen) == MAX_TESTS or spent > MAX_SECONDS):
            break
        chosen.append(test)
    return Choice(chosen, len(tests))


class Coverings:
    """The map of lines to tests for one tree, in a folder with two files for each group of tests."""

    def __init__(self, folder: Path, tree: Path, package: str) -> None:
        self._folder = folder
        self._tree = tree
        self._package = package
        self._lines: dict[tuple[str, str], Mapping[int, Sequence[str]]] = {}
        self._data: dict[str, coverage.CoverageData] = {}
        self._tests: dict[str, dict[str, TimedTest]] = {}

    # --- collecting

    def is_collected(self, group: str) -> bool:
        return self._times(group).exists()

    def collect(self, group: str, paths: Sequence[str], environment: Mapping[str, str]) -> str:
        """Run the tests of a group under coverage, and return pytest's last line."""
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = self._folder / "coverage.ini"
        settings.write_text(f"[run]\nbranch = false\nsource = {self._package}\n")
        unfinished = self._times(group).with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        unfinished.touch()
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={self._file(group)}"]
        command += ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-p", "tests.soak._contexts", "-m", MARKS]
        done = subprocess.run(
            [*command, *paths],
            cwd=self._tree,
            env={**environment, "MUXKIT_TIMES": str(unfinished)},
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1, 5):  # a test that fails under coverage is left out
            raise RuntimeError(f"the tests of {group} can't be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        unfinished.rename(self._times(group))
        return done.stdout.strip().rpartition("\n")[2]

    def _file(self, group: str) -> Path:
        return self._folder / f"{group.replace('/', '-')}.coverage"

    def _times(self, group: str) -> Path:
        return self._folder / f"{group.replace('/', '-')}.times"

    # --- asking

    def of(self, mutant: Mutant) -> list[TimedTest]:
        """Return the tests that run the mutant's lines, or any line of its file if these run at import."""
        first, last = mutant.lines
        return [
            test
            for group in sorted(path.stem for path in self._folder.glob("*.times"))
            for test in self._covering(group, mutant.path, range(first, last + 1) if mutant.in_function else None)
        ]

    def _covering(self, group: str, path: str, wanted: range | None) -> list[TimedTest]:
        by_line = self._by_line(group, path)
        lines = by_line if wanted is None else wanted
        ids = {id for line in lines for id in by_line.get(line, ())}
        tests = self._passed(group)
        return [tests[id] for id in sorted(ids) if id in tests]

    def _by_line(self, group: str, path: str) -> Mapping[int, Sequence[str]]:
        found = self._lines.get((group, path))
        if found is None:
            if group not in self._data:
                self._data[group] = coverage.CoverageData(basename=str(self._file(group)))
                self._data[group].read()
            files = [file for file in self._data[group].measured_files() if file.endswith(f"/{path}")]
            found = self._data[group].contexts_by_lineno(files[0]) if files else {}
            self._lines[group, path] = found
        return found

    def _passed(self, group: str) -> dict[str, TimedTest]:
        if group not in self._tests:
            records = [json.loads(line) for line in self._times(group).read_text().splitlines()]
            passed = [TimedTest(record["test"], record["seconds"]) for record in records if record["passed"]]
            self._tests[group] = {test.id: test for test in passed}
        return self._tests[group]
