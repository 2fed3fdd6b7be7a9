"""Names of a package that are imported at the first access, because they need Trio or an extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazily(
    package: dict[str, object], places: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the package with these globals, which keep what was fetched.

    `places` maps each name, or several with blanks between them, to their module.
    """
    parent = str(package["__name__"])
    modules = {name: module for names, module in places.items() for name in names.split()}

    def fetch(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {parent!r} has no attribute {name!r}")
        package[name] = found = getattr(import_module(f"{parent}.{modules[name]}"), name)
        return found

    def listed() -> list[str]:
        return sorted({*package, *modules})

    return fetch, listed
