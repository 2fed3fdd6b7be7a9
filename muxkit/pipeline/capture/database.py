"""DuckDB databases that last as long as a block, with their rows on the disk where memory does not suffice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb


@contextmanager
def database(*, threads: int | None = None, memory: str | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an empty database in a temporary folder, which is removed at the end of the block.

    `threads` and `memory` (`"1GiB"`) bound what it uses; by default all processors, and most of the memory.
    """
    import duckdb  # here, since Spark reads and decodes captures without it

    with tempfile.TemporaryDirectory(prefix="muxkit-", ignore_cleanup_errors=True) as folder:
        settings: dict[str, str | bool | int | float | list[str]] = {"temp_directory": folder}
        if threads is not None:
            settings["threads"] = threads
        if memory is not None:
            settings["memory_limit"] = memory
        with duckdb.connect(str(Path(folder, "captures.duckdb")), config=settings) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            yield connection
