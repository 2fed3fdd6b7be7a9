"""Build hook for `MUXKIT_COMPILE=1 pip install .`: compile the engines to machine code with mypyc, from the same
sources.

Hatchling calls this for each wheel. Without the variable it does nothing, and the wheel runs everywhere. With it the
wheel holds one shared library for each module named below, beside its source, and fits one Python on one system.
"""

from __future__ import annotations

import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WANTED = os.environ.get("MUXKIT_COMPILE", "") not in ("", "0")
# The C compiler's optimisation level. Level 3 makes nothing faster than 2. Level 0 compiles in a third of the time.
LEVEL = os.environ.get("MUXKIT_COMPILE_LEVEL", "2")

# Where messages pass: the core and the engines, which have no coroutines. Left out: what awaits, since a compiled
# coroutine has no frame in which Trio finds that Ctrl-C has to wait (docs/explanation/decisions, 21); `_engine` of the
# core, which declares protocols and runs nothing; the errors, which restream and applications subclass; the settings,
# whose attrs fields mypyc does not understand; restream, whose JSON has a recursive type that msgspec could not resolve
# any more, whose errors mypyc takes for others when they are caught, and whose engine others subclass.
PACKAGES = ("core", "protocols/bpmux", "protocols/relink", "protocols/e3x", "protocols/aqueduct", "protocols/yamux")
NOT_COMPILED = {"core/_engine.py"}


def requirements(root: Path, dependencies: list[str]) -> list[str]:
    """What compiling needs, at the versions that it is tested with.

    The project's own dependencies are among it: without their types mypy does not understand the classes that attrs
    makes, and an isolated build holds nothing that is not asked for.
    """
    pins = {}
    for line in (root / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            pins[_plain(line)] = line
    return [pins[_plain(name)] for name in ("mypy", "setuptools", *dependencies)]


def _plain(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


TRIO_SIDE = ("_channels.py", "_connection.py", "_session.py")  # files of a protocol that use Trio


def sources(root: Path) -> list[str]:
    """Give the modules without I/O, by their paths below the root."""
    package = root / "muxkit"
    files = [file for name in PACKAGES for file in sorted((package / name).rglob("*.py"))]
    return [
        str(file.relative_to(root))
        for file in files
        if file.name not in ("__init__.py", "_config.py", "config.py")
        and not {"_session", "dial"} & {*file.parts}
        and not (file.name in TRIO_SIDE and "protocols" in file.parts)
        and str(file.relative_to(package)) not in NOT_COMPILED
    ]


def compile_into(root: Path, scratch: Path) -> list[Path]:
    """Run mypyc and the C compiler; gives the libraries, laid out below `scratch/lib` as they are to be installed."""
    from mypyc.build import mypycify
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    class BuildInParallel(build_ext):
        def build_extension(self, ext: Extension) -> None:
            """Compile the C files of one library side by side, and leave the linking to setuptools."""

            def compile_one(source: str) -> list[str]:
                return self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    include_dirs=ext.include_dirs,
                    extra_postargs=ext.extra_compile_args,
                    depends=ext.depends,
                )

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for objects in pool.map(compile_one, ext.sources):
                    ext.extra_objects = [*ext.extra_objects, *objects]
            ext.sources = []
            super().build_extension(ext)

    before = Path.cwd()
    os.chdir(root)  # mypyc names modules by their paths
    try:
        options = ["--config-file=", "--explicit-package-bases", "--ignore-missing-imports"]
        # With one C file for each module, the compiler needs half the processor time that one large file takes, and
        # several files can be compiled at the same time. The machine code is as fast.
        target = str(scratch / "c")
        extensions = mypycify(
            [*options, *sources(root)], opt_level=LEVEL, debug_level="0", target_dir=target, multi_file=True
        )
        # A distribution of its own, for setuptools must not read this project's pyproject.toml.
        command = BuildInParallel(Distribution({"name": "muxkit-engines", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(scratch / "lib"), str(scratch / "objects")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    return sorted((scratch / "lib").rglob("*.*"))


class CustomBuildHook(BuildHookInterface):
    """What hatchling looks for."""

    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        return requirements(Path(self.root), self.metadata.core.dependencies) if WANTED else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not WANTED or version == "editable":
            return
        self._scratch = tempfile.TemporaryDirectory()
        libraries = compile_into(Path(self.root), Path(self._scratch.name))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        base = Path(self._scratch.name) / "lib"
        build_data["force_include"].update({str(file): str(file.relative_to(base)) for file in libraries})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
