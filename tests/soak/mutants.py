"""The suite finds small faults in the core, the runtime and the protocols: 200 mutants, drawn with one seed.

    python -m tests.soak.mutants                         map, draw, run and report
    python -m tests.soak.mutants map                     only run the suite once, to learn which test runs which line
    python -m tests.soak.mutants draw                    only list the mutants
    python -m tests.soak.mutants run --only relink       try the mutants of one part
    python -m tests.soak.mutants report --write NAME     print the score by part, and store it in tests/data/mutants

Each mutant is one small fault in `muxkit/core`, `muxkit/runtime` or a protocol, such as `<=` for `<` or a missing call.
The number of mutants in each part is in proportion to its lines of code. For each mutant the tests that cover its line
are run, until one of them fails. A mutant that fails no test survives: either it changes nothing that matters, or a
test is missing.

Everything happens in a copy of the tree below the work folder, and every step can be interrupted and started again. A
mutant whose result is known isn't run twice. To draw anew on changed code, use another work folder, and
`--like tests/data/mutants/NAME.json` for the same numbers by part as in a run before; `report --against` compares both.

At most 400 tests, or 120 s of tests as measured under coverage, are tried on one mutant: those of the same part first,
cheap ones first, and every test function once before any with other parameters. A mutant that survives this cap, though
more tests run its line, is counted as `survived the cap`. A test that fails on the original code as well kills nothing.
The program ends with 1 only if a mutant couldn't be tried. It takes two to four hours.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import attrs

from tests.soak._mutation_tests import Choice, Coverings, TimedTest, choose
from tests.soak._mutations import Mutant, code_lines, draw, read_parts, shares

ROOT: Final = Path(__file__).resolve().parent.parent.parent
SUMMARIES: Final = ROOT / "tests" / "data" / "mutants"
PROTOCOLS: Final = ("bpmux", "relink", "aqueduct", "e3x", "restream")
FIRST_BATCH: Final = 25  # tests, which a process starts faster with than with all of them; most mutants die here
MEMORY: Final = 6 << 30  # bytes of address space, because a mutant may fill a list for ever
LEAST_TIMEOUT: Final = 30.0  # s for a single test
START: Final = 120.0  # s that starting pytest may take on a busy machine

Fate = Literal["killed", "timeout", "survived", "survived the cap", "not covered"]
FATES: Final[tuple[Fate, ...]] = ("killed", "timeout", "survived", "survived the cap", "not covered")


@attrs.frozen
class Plan:
    """What is mutated, and by which tests the mutants are found."""

    package: str
    parts: Mapping[str, str]
    """The folder of each part's sources."""
    close: Mapping[str, str]
    """The folder of each part's own tests."""
    groups: Mapping[str, Sequence[str]]
    """The paths of all tests to use, in groups that are run one by one for the map."""


def muxkit_plan(root: Path) -> Plan:
    """Everything below `muxkit/core`, `muxkit/runtime` and `muxkit/protocols`, and the tests that use it."""
    folders = {"core": "core", "runtime": "runtime", **{name: f"protocols/{name}" for name in PROTOCOLS}}
    # Tests of pages, of the command line and of Spark hardly ever find what the others do not, and are slow.
    others = ("adapters", "forward", "metrics", "on_asyncio", "recorded", "system", "testing", "trace")
    # These look at files, or build packages.
    apart = {"ci", "compile", "house", "project", "readme", "setup", "site"}
    tests = root / "tests"
    groups: dict[str, list[str]] = {}
    for folder in (*folders.values(), *others):
        if (tests / folder).is_dir():
            groups[folder] = [f"tests/{folder}"]
    for name, above in (("root", tests), ("protocols", tests / "protocols")):
        files = sorted(path for path in above.glob("test_*.py") if path.stem.removeprefix("test_") not in apart)
        groups[name] = [str(path.relative_to(root)) for path in files]
    return Plan(
        package="muxkit",
        parts={part: f"muxkit/{folder}" for part, folder in folders.items()},
        close={part: f"tests/{folder}" for part, folder in folders.items()},
        groups={name: paths for name, paths in groups.items() if paths},
    )


@attrs.frozen
class Result:
    """What became of one mutant."""

    id: str
    part: str
    mutant: str
    fate: Fate
    by: str
    """The test that failed, or ""."""
    tried: int
    """Tests that were run until then, at most."""
    covering: int
    seconds: float


class Campaign:
    """A work folder: the copy of the tree, the map of its tests, and the results."""

    def __init__(self, work: Path, root: Path, plan: Plan) -> None:
        self.tree: Path = work / "tree"
        self._work = work
        self._root = root
        self._plan = plan
        self._results = work / "results.jsonl"
        self.coverings: Coverings = Coverings(work / "map", self.tree, plan.package)

    def copy_tree(self) -> None:
        """Copy all files that git knows, or would add, unless that was done before."""
        if self.tree.exists():
            return
        unfinished = self._work / "tree.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        for name in self._names():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._root / name, unfinished / name)
        unfinished.rename(self.tree)

    def outdated(self) -> list[str]:
        """Return the files of the mutated parts that are others in the copy than in the checkout."""
        folders = tuple(f"{folder}/" for folder in self._plan.parts.values())
        copied = {str(path.relative_to(self.tree)) for path in self.tree.rglob("*.py")}
        return [
            name
            for name in sorted(copied.union(self._names()))
            if name.startswith(folders) and _text_of(self.tree / name) != _text_of(self._root / name)
        ]

    def _names(self) -> list[str]:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self._root, capture_output=True, text=True, check=True).stdout
        return [name for name in listed.split("\0") if name and (self._root / name).is_file()]

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(self.tree), str(self.tree / "adapters"), str(ROOT)]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}

    def map(self) -> None:
        """Run the tests of each group once, to learn which lines they run."""
        for group, paths in self._plan.groups.items():
            if not self.coverings.is_collected(group):
                print(f"map {group}: {self.coverings.collect(group, paths, self.environment)}", flush=True)

    def draw(self, *, seed: int, count: int, like: Mapping[str, int] | None = None) -> list[Mutant]:
        """Draw mutants from the copy: `count` in proportion to code lines, or as many for each part as `like` says."""
        sources = read_parts(self.tree, self._plan.parts)
        sizes = {part: sum(map(code_lines, files.values())) for part, files in sources.items()}
        return draw(sources, quotas=like or shares(sizes, count), seed=seed)

    # --- trying

    def results(self) -> dict[str, Result]:
        """Return the known results by the ids of the mutants."""
        if not self._results.exists():
            return {}
        results = [Result(**json.loads(line)) for line in self._results.read_text().splitlines()]
        return {result.id: result for result in results}

    def run(self, mutants: Iterable[Mutant]) -> None:
        """Try every mutant that has no result yet, then drop kills by tests that fail without a mutant, and repeat."""
        mutants = [*mutants]
        self._check_ids(mutant for mutant in mutants if mutant.id not in self.results())
        flaky: set[str] = set()
        while True:
            for mutant in mutants:
                if mutant.id not in self.results():
                    result = self._try(mutant, flaky)
                    with self._results.open("a") as file:
                        file.write(json.dumps(attrs.asdict(result)) + "\n")
                    print(f"{result.fate}: {mutant} ({result.by or f'{result.tried} tests'})", flush=True)
            failing = self._failing_without_mutant() - flaky
            if not failing:
                return
            flaky |= failing
            kept = [result for result in self.results().values() if result.by not in failing]
            self._results.write_text("".join(json.dumps(attrs.asdict(result)) + "\n" for result in kept))

    def _failing_without_mutant(self) -> set[str]:
        """Return which of the tests that killed a mutant also fail on the original code."""
        killers = sorted({result.by for result in self.results().values() if result.fate in ("killed", "timeout")})
        tests = [TimedTest(id, 1.0) for id in killers if "::" in id]
        failing: set[str] = set()
        while tests:
            fate, by = self._run_tests(tests)
            if fate == "survived":
                break
            if "::" not in by:
                raise RuntimeError(f"the tests fail on the original code: {by}")
            failing.add(by)
            tests = [test for test in tests if test.id != by]
        return failing

    def _try(self, mutant: Mutant, flaky: set[str]) -> Result:
        began = time.monotonic()
        choice = self._choice(mutant, flaky)
        with self._mutated(mutant):
            fate, by = self._fate(choice)
        return Result(
            id=mutant.id,
            part=mutant.part,
            mutant=str(mutant),
            fate=fate,
            by=by,
            tried=len(choice.tests),
            covering=choice.covering,
            seconds=round(time.monotonic() - began, 1),
        )

    def _choice(self, mutant: Mutant, flaky: Container[str] = ()) -> Choice:
        covering = [test for test in self.coverings.of(mutant) if test.id not in flaky]
        return choose(covering, self._plan.close[mutant.part])

    def _fate(self, choice: Choice) -> tuple[Fate, str]:
        if not choice.tests:
            return "not covered", ""
        for batch in (choice.tests[:FIRST_BATCH], choice.tests[FIRST_BATCH:]):
            if batch:
                fate, by = self._run_tests(batch)
                if fate != "survived":
                    return fate, by
        return ("survived the cap" if len(choice.tests) < choice.covering else "survived"), ""

    def _mutated(self, mutant: Mutant) -> _Mutated:
        return _Mutated(self.tree / mutant.path, mutant)

    def _run_tests(self, tests: Sequence[TimedTest]) -> tuple[Fate, str]:
        """Run tests until one fails; return the fate of the mutant that is in the tree, and the test that failed."""
        timeout = max(LEAST_TIMEOUT, 5 * max(test.seconds for test in tests))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "--no-header", "-p", "no:cacheprovider"]
        arguments, output = self._work / "pytest.arguments", self._work / "pytest.out"
        arguments.write_text("".join(f"{test.id}\n" for test in tests))
        command += [f"--timeout={timeout:.0f}", f"@{arguments}"]
        with output.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_limit_memory,
            )
            try:
                code = process.wait(START + timeout + 5 * sum(test.seconds for test in tests))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_group(process)
        text = output.read_text(errors="replace")
        if code == 0:
            return "survived", ""
        if code is None:
            return "timeout", ""
        by = next(_failed_in(text, tests), "")
        if code == 1 and by:
            return ("timeout" if "Timeout (>" in text else "killed"), by
        return "killed", f"exit code {code} of pytest"

    def _check_ids(self, mutants: Iterable[Mutant]) -> None:
        """Raise RuntimeError if a test of the map doesn't exist, which would look like a killed mutant."""
        ids = {test.id for mutant in mutants for test in self._choice(mutant).tests}
        if not ids:
            return
        files = sorted({id.partition("::")[0] for id in ids})
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider", *files]
        done = subprocess.run(command, cwd=self.tree, env=self.environment, capture_output=True, text=True)
        if missing := ids - set(done.stdout.splitlines()):
            raise RuntimeError(f"{len(missing)} tests of the map don't exist, such as {min(missing)}; make it again")


class _Mutated:
    """Puts a mutant into the tree for a block. After a crash the next one finds the original beside the mutant."""

    SUFFIX: Final = ".original"

    def __init__(self, path: Path, mutant: Mutant) -> None:
        self._path = path
        self._original = path.with_name(path.name + self.SUFFIX)
        self._mutant = mutant

    def __enter__(self) -> None:
        source = self._path.read_text(encoding="utf-8")
        mutated = self._mutant.apply(source)
        os.replace(self._path, self._original)  # keeps its time, so that bytecode of the original stays valid
        self._path.write_text(mutated, encoding="utf-8")
        # Bytecode is looked up by the second in which its source was written: one that no other mutant has.
        second = int.from_bytes(bytes.fromhex(self._mutant.id)[:3], "big")
        os.utime(self._path, (second, second))

    def __exit__(self, *_: object) -> None:
        os.replace(self._original, self._path)


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def restore(tree: Path) -> None:
    """Undo a mutant that an interrupted run has left in the tree."""
    for original in tree.rglob(f"*{_Mutated.SUFFIX}"):
        os.replace(original, original.with_name(original.name.removesuffix(_Mutated.SUFFIX)))


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what the tests started and left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failed_in(text: str, tests: Sequence[TimedTest]) -> Iterator[str]:
    for line in text.splitlines():
        for start in ("FAILED ", "ERROR "):
            if line.startswith(start):
                told = line.removeprefix(start)
                yield from (test.id for test in tests if told == test.id or told.startswith(f"{test.id} - "))


# ---------------------------------------------------------------------------- the report


@attrs.frozen
class Summary:
    """The results of one run, by part."""

    seed: int
    fates: Mapping[str, Mapping[str, int]]
    mutants: Sequence[Mapping[str, str]]

    @property
    def quotas(self) -> dict[str, int]:
        return {part: sum(counts.values()) for part, counts in self.fates.items()}

    def score(self, part: str | None = None) -> float:
        """Return the share of mutants that a test noticed, of one part or of all."""
        parts = self.fates if part is None else [part]
        found = sum(self.fates[each].get("killed", 0) + self.fates[each].get("timeout", 0) for each in parts)
        return found / max(1, sum(self.quotas[each] for each in parts))

    def table(self, against: Summary | None = None) -> str:
        lines = [f"{'part':10} {'drawn':>6} " + " ".join(f"{fate:>16}" for fate in FATES) + f" {'score':>8}"]
        for part in [*self.fates, None]:
            counts = self.fates[part] if part is not None else sum(map(Counter, self.fates.values()), Counter())
            drawn = self.quotas[part] if part is not None else sum(self.quotas.values())
            score = f"{self.score(part):>8.1%}"
            if against is not None and (part is None or part in against.fates):
                score += f", {against.score(part):.1%} before"
            numbers = " ".join(f"{counts.get(fate, 0):>16}" for fate in FATES)
            lines.append(f"{part or 'all':10} {drawn:>6} {numbers} {score}")
        return "\n".join(lines)

    def to_json(self) -> str:
        mutants = ",\n    ".join(json.dumps(mutant, ensure_ascii=False) for mutant in self.mutants)
        fates = ",\n    ".join(f"{json.dumps(part)}: {json.dumps(counts)}" for part, counts in self.fates.items())
        return (
            f'{{\n  "seed": {self.seed},\n  "fates": {{\n    {fates}\n  }},\n  "mutants": [\n    {mutants}\n  ]\n}}\n'
        )

    @classmethod
    def read(cls, path: Path) -> Summary:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def summarise(mutants: Sequence[Mutant], results: Mapping[str, Result], seed: int) -> Summary:
    """Count the results of the mutants that have one."""
    fates: dict[str, dict[str, int]] = {}
    listed: list[dict[str, str]] = []
    for mutant in mutants:
        result = results.get(mutant.id)
        if result is not None:
            counts = fates.setdefault(mutant.part, {})
            counts[result.fate] = counts.get(result.fate, 0) + 1
            listed.append({"part": mutant.part, "mutant": str(mutant), "fate": result.fate})
    return Summary(seed, fates, listed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="map, draw, run or report; default: all of them")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutants", help="the work folder")
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--count", type=int, default=200, help="mutants in all parts together")
    parser.add_argument("--like", type=Path, metavar="FILE", help="a summary whose numbers of mutants by part to use")
    parser.add_argument("--only", action="append", metavar="PART", help="run only the mutants of this part")
    parser.add_argument("--write", metavar="NAME", help="store the summary as tests/data/mutants/NAME.json")
    parser.add_argument("--against", type=Path, metavar="FILE", help="a summary to compare the score with")
    asked = parser.parse_args()
    stages = asked.stages or ["map", "draw", "run", "report"]
    if unknown := [stage for stage in stages if stage not in ("map", "draw", "run", "report")]:
        parser.error(f"unknown stage {unknown[0]!r}: expected map, draw, run or report")

    work: Path = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    lock = (work / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.error(f"another run uses {work}: wait until it has ended, or use another --work folder")
    campaign = Campaign(work, ROOT, muxkit_plan(ROOT))
    campaign.copy_tree()
    restore(campaign.tree)
    if outdated := campaign.outdated():
        told = f"{len(outdated)} files, such as {outdated[0]}, have changed since"
        print(f"note: {campaign.tree} is an older copy: {told}. Use another --work folder to begin anew.")
    if "map" in stages:
        campaign.map()
    like = Summary.read(asked.like).quotas if asked.like else None
    mutants = campaign.draw(seed=asked.seed, count=asked.count, like=like)
    if "draw" in stages:
        print(*mutants, sep="\n")
    if "run" in stages:
        campaign.run(mutant for mutant in mutants if not asked.only or mutant.part in asked.only)
    if "report" in stages:
        results = campaign.results()
        summary = summarise(mutants, results, asked.seed)
        for mutant in mutants:
            result = results.get(mutant.id)
            if result is not None and result.fate not in ("killed", "timeout"):
                print(f"{result.fate}: {mutant} ({result.tried} of {result.covering} tests)")
        print(summary.table(Summary.read(asked.against) if asked.against else None))
        if asked.write:
            SUMMARIES.mkdir(parents=True, exist_ok=True)
            (SUMMARIES / f"{asked.write}.json").write_text(summary.to_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
