"""Fixtures with an empty place for a staging store of each kind; a pytest plugin of the test files that name it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.pipeline._staging_world import place_of
from tests.protocols.restream.stores import quick_directory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from muxkit.pipeline import Staging
    from tests.pipeline._staging_world import Place
    from tests.protocols.restream.stores import Clock


@pytest.fixture
def staging_path() -> Iterator[Path]:
    """The path of a file that does not exist yet."""
    with quick_directory() as directory:
        yield directory / "staged.db"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    """An empty place of each kind."""
    return place_of(request, request.param)


@pytest.fixture(params=["sqlite", "postgres"])
def lasting_place(request: pytest.FixtureRequest) -> Place:
    """An empty place of each kind that outlives its process."""
    return place_of(request, request.param)


@pytest.fixture
async def staging(place: Place) -> AsyncIterator[Staging]:
    """An open store of each kind."""
    async with place.open() as opened:
        yield opened


@pytest.fixture
def staging_clock(place: Place) -> Clock:
    """The clock of `staging`."""
    return place.clock
