"""The file with which a program on the driver asks the source of a query to begin no more batches.

The planner of a query runs in another process than the program that started the query, and Spark gives them no way to
talk. Both run on the driver, so they share a file: `stop_query` creates it, and the planner writes into it as soon as
no batch is running.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

CONFIRMATION: Final = "between two batches\n"


class StopFile:
    """A file whose existence is a request, and whose content confirms it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def request(self) -> None:
        """Ask the source to begin no more batches."""
        self._path.touch()

    def remove(self) -> None:
        """Let the source go on."""
        self._path.unlink(missing_ok=True)

    @property
    def is_requested(self) -> bool:
        """True if the source must not begin a batch."""
        return self._path.exists()

    def confirm(self) -> None:
        """Tell the program that no batch is running, and that none will begin."""
        self._path.write_text(CONFIRMATION, encoding="utf-8")

    @property
    def is_confirmed(self) -> bool:
        """True if no batch is running."""
        return self._path.stat().st_size > 0
