"""The files for results, checked before anything is measured."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import attrs

from muxkit.cli.terminal import CommandFailed, Exit
from muxkit_bench.report.page import page
from muxkit_bench.report.results import dump

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from muxkit_bench.report.results import Report


@attrs.frozen
class Outputs:
    """The files that the options name."""

    json: Path | None
    html: Path | None

    def check(self) -> None:
        """Raise `CommandFailed` for a file that cannot be written; change nothing."""
        for option, path in (("--json", self.json), ("--html", self.html)):
            if path is None:
                continue
            try:
                if path.exists():
                    path.open("ab").close()
                else:
                    tempfile.TemporaryFile(dir=path.parent).close()
            except OSError as error:
                raise CommandFailed(f"{option} {path} cannot be written: {error.strerror}", Exit.USAGE) from error

    def write(self, reports: Sequence[Report]) -> None:
        """Write both files, even if one fails; raises `CommandFailed` then."""
        failures = []
        for path, text in ((self.json, dump(reports[0])), (self.html, page(reports).encode())):
            try:
                if path is not None:
                    path.write_bytes(text)
            except OSError as error:
                failures.append(f"{path} could not be written: {error.strerror}")
        if failures:
            raise CommandFailed("; ".join(failures))
