"""The page of all log lines, `docs/reference/logs.md`, taken from the sources. `python tests/logs.py` writes it.

What a line means stands in a comment above the call that logs it:

    # log: A session began: its protocol, its number in this process and its peer.
    log.info("%s opened", name, extra=fields)

A text that says little by itself is shown in other words, `# log "PATH: PROBLEM": ..`, and of a line whose level varies
the levels are told, `# log INFO, DEBUG: ..`. Where the same text is logged in several places, one of them is enough.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "logs.md"
SOURCES = ("muxkit", "adapters/muxkit_adapters", "adapters/pyspark_muxkit", "adapters/pytest_muxkit")
LOGGERS = {"log", "_log", "logger", "_LOG"}
LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
THROUGH = ("muxkit/runtime/_failures.py", "%s: %s")  # what `log_failure` logs for its callers, which are read instead
COMMENT = re.compile(r'# log(?: "(?P<shown>[^"]+)")?(?: (?P<levels>[A-Z]+(?:, [A-Z]+)*))?: (?P<means>.+)')
ORDER = {"ERROR": 0, "WARNING": 1, "INFO": 2, "DEBUG": 3}

HEAD = """\
# Log lines

muxkit logs with the standard `logging` and adds no handler of its own. Programs that serve should show INFO and above;
DEBUG tells of what is usual, and has the tracebacks whose texts may quote what a peer sent. No line of another level
holds payload, tokens or passwords.

Fields are attributes of the record, set with `extra=`, for handlers that write JSON. With OpenTelemetry spans, records
about a channel or a call also have `trace_id` and `span_id`. `%s` and its like stand for what differs. This page is
written from the sources by `python tests/logs.py`.
"""


class Incomplete(Exception):
    """A line has no meaning, or a meaning no line."""


@attrs.frozen
class Meaning:
    """What a comment says of a line."""

    means: str
    shown: str | None
    levels: str | None


@attrs.frozen
class Line:
    """One call that logs."""

    logger: str
    level: str
    text: str
    fields: tuple[str, ...]
    where: str
    meaning: Meaning | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.level, self.text


@cache
def lines() -> tuple[Line, ...]:
    """Every call that logs, in the order of the sources."""
    found: list[Line] = []
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += Module(path).lines()
    return tuple(line for line in found if (line.where, line.text) != THROUGH)


class Module:
    """The log calls of one module."""

    def __init__(self, path: Path) -> None:
        self._where = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        self._text = text.splitlines()
        self._tree = ast.parse(text)
        self._logger = self._name_of_logger()

    def lines(self) -> Iterator[Line]:
        """Yield the calls that log. Raises `Incomplete` for a meaning that stands above none."""
        found = 0
        for statement in ast.walk(self._tree):
            if not isinstance(statement, ast.stmt):
                continue
            for line in self._lines_of(statement):
                meaning = self._meaning_above(statement.lineno)
                found += meaning is not None
                yield attrs.evolve(line, meaning=meaning)
        if found < sum(each.strip().startswith(("# log:", '# log "')) for each in self._text):
            raise Incomplete(f"{self._where}: a meaning stands above no call that logs")

    def _meaning_above(self, number: int) -> Meaning | None:
        """Return what the comment says that ends above this line of the file."""
        comment: list[str] = []
        for text in reversed(self._text[: number - 1]):
            if not text.strip().startswith("# "):
                return None
            comment.insert(0, text.strip())
            if text.strip().startswith("# log"):
                break
        found = COMMENT.fullmatch("# " + " ".join(each.removeprefix("# ") for each in comment))
        return None if found is None else Meaning(found["means"], found["shown"], found["levels"])

    def _lines_of(self, statement: ast.stmt) -> Iterator[Line]:
        """Yield the calls of this statement that log, and none of a statement within it."""
        waiting: list[ast.AST] = [statement]
        while waiting:
            node = waiting.pop()
            waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
            if not isinstance(node, ast.Call):
                continue
            match node.func:
                case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in LOGGERS and attr in LEVELS:
                    yield self._line("ERROR" if attr == "exception" else attr.upper(), node, node.args[0])
                case ast.Attribute(value=ast.Name(id=name), attr="log") if name in LOGGERS:
                    yield self._line("VARIES", node, node.args[1])
                case ast.Name(id="log_failure") if len(node.args) == 3:  # of muxkit.runtime
                    text = ast.literal_eval(node.args[0])
                    yield Line("muxkit", "ERROR", f"{text}: %s", self._keys(node.args[2]), self._where)

    def _line(self, level: str, node: ast.Call, text: ast.expr) -> Line:
        extra = next((each.value for each in node.keywords if each.arg == "extra"), None)
        has_traceback = any(each.arg == "exc_info" for each in node.keywords)
        fields = () if extra is None else self._keys(extra)
        shown: str = ast.literal_eval(text)
        return Line(
            self._logger or ("muxkit.forward" if "/forward/" in self._where else "muxkit.adapters"),
            level,
            shown,
            (*fields, "exc_info") if has_traceback else fields,
            self._where,
        )

    def _name_of_logger(self) -> str | None:
        for node in ast.walk(self._tree):
            match node:
                case ast.Call(func=ast.Attribute(attr="getLogger"), args=[ast.Constant(value=str(name))]) if (
                    name.startswith("muxkit")
                ):
                    return name
        return None

    def _keys(self, value: ast.expr) -> tuple[str, ...]:
        """The fields of `extra`: a dictionary, or a name or function of this module that gives one."""
        match value:
            case ast.Dict(keys=keys, values=values):
                found: list[str] = []
                for key, each in zip(keys, values, strict=True):
                    if key is None:  # the ids of a span, which the introduction of the page names
                        continue
                    assert isinstance(key, ast.Constant)
                    if key.value == "event" and isinstance(each, ast.Constant):
                        found.append(f"event={each.value!s}")
                    elif key.value == "fields" and isinstance(each, ast.Dict):
                        found += [f"fields.{inner}" for inner in self._keys(each)]
                    else:
                        found.append(str(key.value))
                return tuple(found)
            case ast.Name(id=name):
                for node in ast.walk(self._tree):
                    match node:
                        case ast.Assign(targets=[ast.Name(id=other)], value=ast.Dict() as held) if other == name:
                            return self._keys(held)
                return ()  # a parameter: the callers are read instead
            case ast.Call(func=ast.Name(id=name)):
                for node in ast.walk(self._tree):
                    if isinstance(node, ast.FunctionDef) and node.name == name:
                        [result] = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
                        assert result is not None
                        return self._keys(result)
        raise AssertionError(f"{self._where}: what are the fields of {ast.unparse(value)}")


def page() -> str:
    """Return the page as it should be. Raises `Incomplete` for a line without a meaning."""
    told = {line.key: line.meaning for line in reversed(lines()) if line.meaning is not None}
    rows: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {}
    missing: list[str] = []
    for line in lines():
        meaning = line.meaning or told.get(line.key)
        if meaning is None:
            missing.append(f"{line.where}: {line.level} {line.text!r}")
            continue
        level, text = meaning.levels or line.level, meaning.shown or line.text
        fields = ", ".join(f"`{each}`" for each in line.fields if each != "exc_info")
        if "exc_info" in line.fields:
            fields = ", ".join(filter(None, (fields, "traceback")))
        cells = (level, f"`{text}`", fields, meaning.means)
        rows.setdefault(line.logger, {})[level, text] = tuple(each.replace("|", "\\|") for each in cells)
    if missing:
        raise Incomplete("\n".join(("these lines have no meaning, `# log: ..` above the call:", *missing)))
    parts = [HEAD]
    for logger in sorted(rows):
        parts.append(f"\n## `{logger}`\n\n| level | line | fields | meaning |\n|---|---|---|---|\n")
        ordered = sorted(rows[logger].values(), key=lambda cells: (ORDER[cells[0].split(",")[0]], cells[1]))
        parts += [f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in ordered]
    return "".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"docs/reference/{PAGE.name} is stale: run `make conformance` and commit it")
