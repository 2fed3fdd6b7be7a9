"""Names of a package that are imported at the first access, because they need Trio or an extra."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazily(
    package: dict[str, object], places: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the package with these globals; `places` maps each name to its module."""
    name = str(package["__name__"])

    def fetch(attribute: str) -> object:
        if attribute not in places:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(import_module(f"{name}.{places[attribute]}"), attribute)

    def listed() -> list[str]:
        return sorted({*package, *places})

    return fetch, listed
