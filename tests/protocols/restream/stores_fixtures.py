"""Fixtures with an empty place for a store of each kind; a pytest plugin of the test files that name it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.protocols.restream.stores import Clock, NumberStore, Place, quick_directory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """The path of a file that does not exist yet."""
    with quick_directory() as directory:
        yield directory / "sessions.db"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def place_of_store(request: pytest.FixtureRequest) -> Place:
    """An empty place of each kind."""
    if request.param == "memory":
        where = "memory:"
    elif request.param == "sqlite":
        where = f"sqlite:{request.getfixturevalue('quick_path')}"
    else:
        where = request.getfixturevalue("schema")
    return Place(where, Clock())


@pytest.fixture
async def store(place_of_store: Place) -> AsyncIterator[NumberStore]:
    """An open store of each kind."""
    async with place_of_store.open() as opened:
        yield opened


@pytest.fixture
def clock(place_of_store: Place) -> Clock:
    """The clock of `store`."""
    return place_of_store.clock
