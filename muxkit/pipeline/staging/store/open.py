"""Open the staging store that an address names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from muxkit.pipeline.staging.store.rows import StagingLimits
from muxkit.pipeline.staging.store.rules import Rules
from muxkit.storage import Kind, kind_of

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from muxkit.pipeline.staging.store.rules import Now
    from muxkit.pipeline.staging.store.store import Staging

LIMITS = StagingLimits()


def open_staging(
    where: str, *, limits: StagingLimits = LIMITS, now: Now = time.time
) -> AbstractAsyncContextManager[Staging]:
    """Open `memory:`, `sqlite:PATH` or `postgresql://…`; leaving the context stores everything and closes it."""
    rules = Rules(limits, now)
    kind, place = kind_of(where)
    # Imported where needed: most programs use one of them.
    if kind is Kind.MEMORY:
        from muxkit.pipeline.staging.store.memory import open_memory

        return open_memory(rules)
    if kind is Kind.SQLITE:
        from muxkit.pipeline.staging.store.sqlite import open_sqlite

        return open_sqlite(Path(place), rules)
    from muxkit.pipeline.staging.store.postgres import open_postgres

    return open_postgres(place, rules)
