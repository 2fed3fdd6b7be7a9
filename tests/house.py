"""Measures the layout of the library. `python tests/house.py [FOLDER]` lists every break of a rule."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("muxkit", "adapters/muxkit_adapters", "adapters/pyspark_muxkit")


@attrs.frozen
class Module:
    """A source file: where it is, what it is called, and which modules it imports anywhere in its text."""

    path: Path
    name: str
    is_package: bool
    tree: ast.Module
    lines: int

    @property
    def is_private(self) -> bool:
        return any(part.startswith("_") for part in self.name.split("."))

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


def modules_in(root: Path = ROOT) -> dict[str, Module]:
    """Read every module of the library."""
    found = {}
    for source in SOURCES:
        base = root / source
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base.parent).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text()
            found[name] = Module(path, name, is_package, ast.parse(text), text.count("\n"))
    return found


def imports_of(module: Module, modules: dict[str, Module]) -> set[str]:
    """Give the modules that this one imports: at the top, for type checkers only, or inside a function."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return {name for name in found if name in modules and name != module.name}


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Give each group of modules in which every one imports every other, by way of others or at once."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def layout_faults(modules: dict[str, Module]) -> list[str]:
    """Give a line for each circle of imports, and for each private module that another package imports."""
    graph = {name: imports_of(module, modules) for name, module in modules.items()}
    faults = [f"circle: {' '.join(group)}" for group in circles_of(graph)]
    for name, others in graph.items():
        for other in others:
            parts = other.split(".")
            at = next((n for n, part in enumerate(parts) if part.startswith("_")), None)
            if at is None or other.endswith("__main__"):
                continue
            home = ".".join(parts[:at])
            if not (name == home or name.startswith(home + ".")):
                faults.append(f"private: {name} imports {other}")
    return sorted(faults)


def main(folders: list[str]) -> int:
    modules = modules_in()
    chosen = [str(ROOT / folder) for folder in folders] or [str(ROOT)]
    names = {name for name, module in modules.items() if any(str(module.path).startswith(each) for each in chosen)}
    dotted = [".".join(Path(folder).parts).replace("adapters.muxkit", "muxkit") for folder in folders] or [""]
    layout = [
        fault
        for fault in layout_faults(modules)
        if any(each in fault or each.replace(".", "/") in fault for each in dotted)
    ]
    print(*layout, sep="\n")
    lines = [modules[name].lines for name in names]
    if lines:
        print(f"{len(lines)} modules, {sum(lines)} lines, median {statistics.median(lines):.0f}; {len(layout)} faults")
    return 1 if layout else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
