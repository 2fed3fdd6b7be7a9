"""Temporary DuckDB databases, which keep rows on the disk if memory doesn't suffice."""

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
    """Open an empty database in a temporary directory, which is deleted at the end of the block.

    Args:
        threads: the number of threads. By default all processors are used.
        memory: the limit of the memory, such as `"1GiB"`. By default most of the machine's memory may be used.
    """
    import duckdb  # imported here, because Spark reads and decodes captures without it

    with tempfile.TemporaryDirectory(prefix="muxkit-", ignore_cleanup_errors=True) as folder:
        settings: dict[str, str | bool | int | float | list[str]] = {"temp_directory": folder}
        if threads is not None:
            settings["threads"] = threads
        if memory is not None:
            settings["memory_limit"] = memory
        with duckdb.connect(str(Path(folder, "captures.duckdb")), config=settings) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            yield connection
