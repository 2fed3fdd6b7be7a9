"""Public names of a package that are imported when a program first uses them.

A program that only runs an engine shouldn't import Trio, and Spark imports `muxkit.pipeline` whenever it looks for data
sources. So the packages with a public API write their names as imports in a block:

    with lazily(globals()):
        from muxkit._door import connect as connect

Type checkers, editors and documentation tools read these as the imports that they are. (`connect as connect` means that
the name is public.) At run time the block imports nothing. It records for each name which module has it, and gives the
package a `__getattr__`, a `__dir__` and an `__all__`. The first use of a name imports its module and stores the name in
the package, so that later uses cost nothing.

To record the imports, the block replaces `builtins.__import__` while it runs, which is a few microseconds. Imports of
other modules, in other threads, are passed on. PEP 810 (`lazy from muxkit._door import connect`) will replace this
module once Python 3.15 is the oldest supported version.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

_LOCK: Final = Lock()  # one block at a time, or two blocks could restore the `__import__` of each other


class _Later:
    """The value of a public name within the block: the module from which it will be imported."""

    def __init__(self, module: str) -> None:
        self.module = module


class _Module:
    """What an import statement in the block gets instead of the module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Later:
        return _Later(self._name)


class lazily:
    """A block of imports that happen when a program first uses their names.

    Args:
        package: The `globals()` of the package.
        extras: The packages that may not be installed, with the extra of muxkit that brings them. If one of them is
            missing, the error names the extra.
    """

    def __init__(self, package: dict[str, object], *, extras: Mapping[str, str] | None = None) -> None:
        self._package = package
        self._extras = extras or {}
        self._places: dict[str, str] = {}

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._import: Callable[..., ModuleType] = builtins.__import__
        builtins.__import__ = self._record  # type: ignore[assignment]  # it also returns a `_Module`

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        builtins.__import__ = self._import
        _LOCK.release()
        self._places = {name: value.module for name, value in self._package.items() if isinstance(value, _Later)}
        for name in self._places:
            del self._package[name]
        self._package |= {"__all__": sorted(self._places), "__getattr__": self._fetch, "__dir__": self._listed}

    def _record(
        self,
        name: str,
        importer: Mapping[str, object] | None = None,
        names: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType | _Module:
        """Import for everyone else, as `builtins.__import__`. For the package, only note the name of the module."""
        if importer is not self._package:
            return self._import(name, importer, names, fromlist, level)
        return _Module(name)

    def _fetch(self, name: str) -> object:
        """Import a public name, as the `__getattr__` of the package."""
        parent = str(self._package["__name__"])
        if name not in self._places:
            raise AttributeError(f"module {parent!r} has no attribute {name!r}")
        place = self._places[name]
        is_submodule = place == parent  # `from muxkit.protocols.relink import events as events`
        try:
            module = import_module(f"{parent}.{name}" if is_submodule else place)
        except ModuleNotFoundError as error:
            extra = self._extras.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            text = f"{parent}.{name} needs {error.name}, which is not installed: pip install 'muxkit[{extra}]'"
            raise ModuleNotFoundError(text, name=error.name) from error
        self._package[name] = found = module if is_submodule else getattr(module, name)
        return found

    def _listed(self) -> list[str]:
        """List the public names, as the `__dir__` of the package, without what the package imports for itself."""
        return sorted({*self._places, *(name for name in self._package if name.startswith("__"))})
