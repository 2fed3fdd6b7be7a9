"""Small faults in Python source: every place that can be mutated, and a seeded sample of them.

`candidates` reads a file with `ast` and lists its mutations, each as one replacement of a piece of the source, so that
everything else in the file stays as it is. The kinds are those of mutmut and cosmic-ray:

- comparison: `<` becomes `<=`, `==` becomes `!=`, `in` becomes `not in`, `is` becomes `is not`, and the reverse
- arithmetic: `+` becomes `-`, `*` becomes `//`, `<<` becomes `>>`, `&` becomes `|`, and the reverse, also as `+=`
- boolean: `and` becomes `or`, `not x` becomes `x`
- condition: the test of an `if`, a `while`, a conditional expression or a comprehension is negated, which also swaps
  the branches of an `if` that has two
- constant: an integer grows or shrinks by 1, or one above 100 doubles or halves; `True` becomes `False`
- call: `min` becomes `max`, `any` becomes `all`
- removal: a call, an assignment, a `raise` or a `del` inside a function becomes `pass`, unless the assignment is the
  first of a local variable or of an attribute in `__init__`: any test would fail for lack of the name
- jump: `break` becomes `continue`, and the reverse
- return: a function returns the empty value of its annotated type, or None

Annotations, `assert` statements, docstrings, `__all__`, `__slots__` and blocks under `TYPE_CHECKING` are left alone.
No mutation changes a string, because the wording of a message isn't behaviour.
"""

from __future__ import annotations

import ast
import bisect
import io
import itertools
import random
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import attrs

COMPARISONS: Final[Mapping[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: Final[Mapping[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.Pow: ("**", "*"),
}
CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
EMPTY: Final = {"int": "0", "float": "0.0", "bool": "False", "bytes": 'b""', "str": '""'}
LARGE: Final = 100  # above it a change by 1 is hardly ever a fault
UNTOUCHED: Final = frozenset({"__all__", "__slots__"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@attrs.frozen(order=True)
class Mutant:
    """One replacement in one file."""

    path: str
    """Relative to the root of the tree."""
    line: int
    column: int
    start: int
    """Where the replaced bytes begin in the file."""
    before: str
    after: str
    kind: str
    lines: tuple[int, int] = (0, 0)
    """The lines of the statement, or of its header, that run when the mutated place does."""
    in_function: bool = True
    """False for what runs only when the module is imported."""
    part: str = ""
    digest: str = ""
    """Of the file's source, so that a result isn't used for another version of the file."""

    @property
    def id(self) -> str:
        """A short name that stays the same as long as the file does."""
        return sha256(f"{self.path} {self.start} {self.before} {self.after} {self.digest}".encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """Return the mutated source."""
        data, before = source.encode(), self.before.encode()
        assert data[self.start : self.start + len(before)] == before, f"{self}: the source is another one"
        return (data[: self.start] + self.after.encode() + data[self.start + len(before) :]).decode()

    def __str__(self) -> str:
        shown = [" ".join(text.split())[:60] for text in (self.before, self.after)]
        return f"{self.path}:{self.line}:{self.column} [{self.kind}] {shown[0]} -> {shown[1]}"


def code_lines(source: str) -> int:
    """Count the lines that hold code: not blank, not only a comment, not part of a docstring."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        ):
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped)


# ---------------------------------------------------------------------------- every place


def candidates(path: str, source: str) -> list[Mutant]:
    """Return every mutation of a file, in the order of the source. A few don't compile or change nothing."""
    found = _Finder(path, source)
    found.visit_body(ast.parse(source).body)
    return sorted(set(found.mutants))


def is_valid(mutant: Mutant, source: str) -> bool:
    """Return whether the mutated source compiles, and to another syntax tree."""
    mutated = mutant.apply(source)
    try:
        compile(mutated, mutant.path, "exec", dont_inherit=True)  # also refuses a `continue` outside of a loop
    except SyntaxError:
        return False
    return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))


class _Finder:
    """Walks through statements and expressions, and knows in which statement and function it is."""

    def __init__(self, path: str, source: str) -> None:
        self.mutants: list[Mutant] = []
        self._path = path
        self._digest = sha256(source.encode()).hexdigest()[:12]
        self._data = source.encode()
        starts = [0]
        for line in self._data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._lines = (0, 0)
        self._function: Function | None = None
        self._bound: set[str] = set()  # local names that have a value

    # --- positions

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._data[start:end].decode()

    def _add(self, kind: str, start: int, before: str, after: str) -> None:
        line = bisect.bisect_right(self._starts, start)
        self.mutants.append(
            Mutant(
                path=self._path,
                line=line,
                column=start - self._starts[line - 1] + 1,
                start=start,
                before=before,
                after=after,
                kind=kind,
                lines=self._lines,
                in_function=self._function is not None,
                digest=self._digest,
            )
        )

    def _replace(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        self._add(kind, self._span(node)[0], self._text(node), after)

    def _replace_sign(
        self, kind: str, left: ast.expr, right: ast.expr, signs: tuple[str, str], suffix: str = ""
    ) -> None:
        """Replace the operator between two expressions."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._data[start:end].decode()
        words = r"\s+".join(re.escape(word) for word in signs[0].split())
        match = re.search(rf"\b{words}\b" if signs[0][0].isalpha() else words + re.escape(suffix), gap)
        if match is not None and "#" not in gap[: match.start()]:
            self._add(kind, start + len(gap[: match.start()].encode()), match[0], signs[1] + suffix)

    # --- statements

    def visit_body(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._visit_statement(statement)

    def _visit_statement(self, node: ast.stmt) -> None:
        outer = self._lines
        self._lines = (node.lineno, node.end_lineno or node.lineno)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._visit_function(node)
            case ast.ClassDef():
                self.visit_body(node.body)
            case ast.If() if "TYPE_CHECKING" in self._text(node.test):
                pass
            case ast.If() | ast.While():
                self._lines = (node.lineno, node.test.end_lineno or node.lineno)
                self._condition(node.test)
                self._visit(node.test)
                self._visit_blocks(node)
            case ast.For() | ast.AsyncFor():
                self._lines = (node.lineno, node.iter.end_lineno or node.lineno)
                self._visit(node.iter)
                self._visit_blocks(node)
            case ast.With() | ast.AsyncWith():
                self._lines = (node.lineno, node.items[-1].context_expr.end_lineno or node.lineno)
                for item in node.items:
                    self._visit(item.context_expr)
                self._visit_blocks(node)
            case ast.Try() | ast.TryStar():
                self._visit_blocks(node)
                for handler in node.handlers:
                    self.visit_body(handler.body)
            case ast.Match():
                self._lines = (node.lineno, node.subject.end_lineno or node.lineno)
                self._visit(node.subject)
                for case in node.cases:
                    if case.guard is not None:
                        self._lines = (case.guard.lineno, case.guard.end_lineno or case.guard.lineno)
                        self._condition(case.guard)
                        self._visit(case.guard)
                    self.visit_body(case.body)
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case _:
                self._visit_simple(node)
        self._lines = outer

    def _visit_blocks(self, node: ast.stmt) -> None:
        for name in ("body", "orelse", "finalbody"):
            self.visit_body(getattr(node, name, []))

    def _visit_function(self, node: Function) -> None:
        self._lines = (node.lineno, max(node.lineno, node.body[0].lineno - 1))
        for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)):
            self._visit(default)
        outer = self._function, self._bound
        self._function, self._bound = node, {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        self.visit_body(node.body)
        self._function, self._bound = outer

    def _visit_simple(self, node: ast.stmt) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id in UNTOUCHED for target in targets):
            return
        match node:
            case ast.Break():
                self._replace("jump", node, "continue")
            case ast.Continue():
                self._replace("jump", node, "break")
            case ast.Return():
                self._return(node)
            case ast.AugAssign():
                self._remove(node)
                signs = ARITHMETIC.get(type(node.op))
                if signs is not None:
                    self._replace_sign("arithmetic", node.target, node.value, signs, suffix="=")
                self._visit(node.value)
            case ast.Expr():
                if isinstance(node.value, ast.Constant):
                    return
                self._remove(node)
                self._visit(node.value)
            case ast.Assign() | ast.AnnAssign():
                if node.value is not None:
                    if not self._begins(targets):
                        self._remove(node)
                    self._visit(node.value)
            case ast.Raise() | ast.Delete():
                self._remove(node)
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._visit(child)

    def _begins(self, targets: Sequence[ast.expr | None]) -> bool:
        """Return whether an assignment gives a name its first value."""
        names = {each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)}
        is_local = any(not isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
        begins = is_local and not names <= self._bound
        self._bound |= names
        return begins or (self._function is not None and self._function.name == "__init__")

    def _remove(self, node: ast.stmt) -> None:
        if self._function is not None and not any(
            isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node)
        ):
            self._replace("removal", node, "pass")

    def _return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        wanted = self._function.returns if self._function is not None else None
        empty = EMPTY.get(wanted.id, "None") if isinstance(wanted, ast.Name) else "None"
        if self._text(node.value) != empty:
            self._replace("return", node.value, empty)
        self._visit(node.value)

    # --- expressions

    def _condition(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._replace("condition", test, f"not ({self._text(test)})")

    def _visit(self, node: ast.expr) -> None:
        match node:
            case ast.Compare():
                for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                    self._replace_sign("comparison", left, right, COMPARISONS[type(op)])
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                # A union of types outside of functions is an annotation in all but name.
                if self._function is not None or not isinstance(node.op, ast.BitOr):
                    self._replace_sign("arithmetic", node.left, node.right, ARITHMETIC[type(node.op)])
            case ast.BoolOp():
                signs = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self._replace_sign("boolean", left, right, signs)
            case ast.UnaryOp(op=ast.Not()):
                self._replace("boolean", node, f"({self._text(node.operand)})")
            case ast.IfExp():
                self._condition(node.test)
            case ast.Constant(value=bool() as value):
                self._replace("constant", node, str(not value))
            case ast.Constant(value=int() as value):
                larger, smaller = (value * 2, value // 2) if value > LARGE else (value + 1, value - 1)
                self._replace("constant", node, str(larger))
                self._replace("constant", node, str(smaller) if smaller >= 0 else f"({smaller})")
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                self._replace("call", node.func, CALLS[name])
            case ast.Call(func=ast.Name(id="cast" | "TypeVar" | "ParamSpec" | "NewType")):
                return
            case ast.JoinedStr():
                return
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for generator in node.generators:
                    for test in generator.ifs:
                        self._condition(test)
                        self._visit(test)
                    self._visit(generator.iter)
            case _:
                pass
        for child in _expressions_in(node):
            self._visit(child)


def _expressions_in(node: ast.expr) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.keyword):
            yield child.value


# ---------------------------------------------------------------------------- a sample


def read_parts(root: Path, parts: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the sources of each part by their paths; `parts` gives the folder of each."""
    return {
        part: {
            str(path.relative_to(root)): path.read_text(encoding="utf-8")
            for path in sorted((root / folder).rglob("*.py"))
        }
        for part, folder in parts.items()
    }


def shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Divide `count` in proportion to the sizes; the largest remainders get what is left over."""
    total = sum(sizes.values())
    exact = {part: count * size / total for part, size in sizes.items()}
    given = {part: int(share) for part, share in exact.items()}
    for part in sorted(exact, key=lambda part: (given[part] - exact[part], part))[: count - sum(given.values())]:
        given[part] += 1
    return given


def draw(sources: Mapping[str, Mapping[str, str]], *, quotas: Mapping[str, int], seed: int) -> list[Mutant]:
    """Draw the mutants of each part: first a line with code at random, then one of its mutations.

    So a line counts as a line, however much can be mutated in it. No line is drawn twice. The same sources, quotas and
    seed give the same mutants, and a change in one part doesn't move those of the others.
    """
    drawn: list[Mutant] = []
    for part, files in sources.items():
        dice = random.Random(f"mutants {seed} {part}")
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for path, source in files.items():
            for mutant in candidates(path, source):
                by_line.setdefault((path, mutant.line), []).append(attrs.evolve(mutant, part=part))
        lines = dice.sample(sorted(by_line), len(by_line))
        chosen: list[Mutant] = []
        while lines and len(chosen) < quotas[part]:
            options = by_line[lines.pop()]
            valid = (each for each in dice.sample(options, len(options)) if is_valid(each, files[each.path]))
            chosen += itertools.islice(valid, 1)
        drawn += chosen
    return drawn
