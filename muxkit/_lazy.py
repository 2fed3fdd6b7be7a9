"""Names of a package that are imported at the first access, because they need Trio or an extra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module


def lazily(
    package: dict[str, object], places: Mapping[str, str], *, extras: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the package with these globals, which keep what was fetched.

    `__dir__` lists what the package exports, and nothing that it imports for itself.

    `places` maps each name, or several with blanks between them, to their module. `extras` maps packages that
    need not be installed to the extra that brings them.
    """
    parent = str(package["__name__"])
    modules = {name: module for names, module in places.items() for name in names.split()}

    def fetch(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {parent!r} has no attribute {name!r}")
        try:
            module = import_module(f"{parent}.{modules[name]}")
        except ModuleNotFoundError as error:
            extra = (extras or {}).get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            told = f"{parent}.{name} needs {error.name}, which is not installed: pip install 'muxkit[{extra}]'"
            raise ModuleNotFoundError(told, name=error.name) from error
        package[name] = found = getattr(module, name)
        return found

    def listed() -> list[str]:
        public = package.get("__all__") or modules
        assert isinstance(public, Iterable)
        return sorted({*public, *(name for name in package if name.startswith("__"))})

    return fetch, listed
