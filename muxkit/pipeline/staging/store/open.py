"""Open the staging store that an address names."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from muxkit.pipeline.staging.store.rows import StagingLimits
from muxkit.pipeline.staging.store.rules import Rules
from muxkit.storage import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from muxkit.pipeline.staging.store.rules import Now
    from muxkit.pipeline.staging.store.store import Staging

LIMITS = StagingLimits()


def open_staging(
    where: str, *, limits: StagingLimits = LIMITS, now: Now = time.time
) -> AbstractAsyncContextManager[Staging]:
    """Open `memory:`, `sqlite:PATH` or `postgresql://…`; leaving the context stores everything and closes it."""
    return _open(where, Rules(limits, now))


@asynccontextmanager
async def _open(where: str, rules: Rules) -> AsyncIterator[Staging]:
    # Imported where needed: most programs use one of them.
    kind, place = kind_of(where)
    if kind is Kind.MEMORY:
        from muxkit.pipeline.staging.store.memory import open_memory

        async with open_memory(rules) as memory:
            yield memory
    elif kind is Kind.SQLITE:
        from muxkit.pipeline.staging.store.sqlite import open_sqlite

        async with open_sqlite(Path(place), rules) as sqlite:
            yield sqlite
    else:
        from muxkit.pipeline.staging.store.postgres import open_postgres

        async with open_postgres(place, rules) as postgres:
            yield postgres
