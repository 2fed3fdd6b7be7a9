"""Which store does an address mean? The one door to all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, overload

from muxkit.protocols.restream.store.codec import Codec
from muxkit.protocols.restream.store.protocol import KEEP, StoreLimits
from muxkit.protocols.restream.store.rules import Rules
from muxkit.runtime import protect_package, protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from muxkit.protocols.restream.store.protocol import Data, Now, SessionStore, State

LIMITS = StoreLimits()
KINDS = "memory:, sqlite:PATH or postgresql://…"


@overload
def open_store(
    where: str, *, keep: float = KEEP, limits: StoreLimits = ..., now: Now = ...
) -> AbstractAsyncContextManager[SessionStore[object, object]]: ...


@overload
def open_store(
    where: str, state: type[State], data: type[Data], *, keep: float = KEEP, limits: StoreLimits = ..., now: Now = ...
) -> AbstractAsyncContextManager[SessionStore[State, Data]]: ...


def open_store(
    where: str,
    state: type[object] = object,
    data: type[object] = object,
    *,
    keep: float = KEEP,
    limits: StoreLimits = LIMITS,
    now: Now = time.time,
) -> AbstractAsyncContextManager[object]:
    """Open `memory:`, `sqlite:PATH` or `postgresql://…`; leaving the context closes it, when all is stored.

    `state` and `data` are the types that the application stores, anything that msgspec can decode into; without them
    it gets back dicts, lists, strings and numbers. `keep` is how many seconds a session outlives its connection.
    """
    if not keep >= 0:
        raise ValueError(f"keep {keep} is not a number of seconds")
    return _open(where, Rules(Codec(state, data), limits, keep, now))


@protected_manager
async def _open(where: str, rules: Rules[State, Data]) -> AsyncIterator[SessionStore[State, Data]]:
    # Imported where needed: most programs use one of them.
    kind, colon, rest = where.partition(":")
    if kind == "memory" and colon and not rest:
        from muxkit.protocols.restream.store.memory import open_memory

        async with open_memory(rules) as memory:
            yield memory
    elif kind == "sqlite" and rest:
        from muxkit.protocols.restream.store.sqlite import open_sqlite

        async with open_sqlite(Path(rest), rules) as sqlite:
            yield sqlite
    elif kind in ("postgresql", "postgres") and rest:
        from muxkit.protocols.restream.store.postgres import open_postgres

        async with open_postgres(where, rules) as postgres:
            yield postgres
    else:
        raise ValueError(f"{where!r} names no store: {KINDS}")


protect_package("muxkit.protocols.restream")
