"""Session stores: the interface of one, the three that come with muxkit, and their errors."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import overload

from muxkit.protocols.restream.store.rules import KEEP, Codec, Data, Now, Rules, State
from muxkit.protocols.restream.store.rules import LAST_ID as LAST_ID
from muxkit.protocols.restream.store.rules import IdsExhausted as IdsExhausted
from muxkit.protocols.restream.store.rules import MessageGone as MessageGone
from muxkit.protocols.restream.store.rules import NotJson as NotJson
from muxkit.protocols.restream.store.rules import OutOfOrderAck as OutOfOrderAck
from muxkit.protocols.restream.store.rules import Retention as Retention
from muxkit.protocols.restream.store.rules import SessionBusy as SessionBusy
from muxkit.protocols.restream.store.rules import SessionExists as SessionExists
from muxkit.protocols.restream.store.rules import SessionExpired as SessionExpired
from muxkit.protocols.restream.store.rules import SessionFinished as SessionFinished
from muxkit.protocols.restream.store.rules import Status as Status
from muxkit.protocols.restream.store.rules import StoreLimits as StoreLimits
from muxkit.protocols.restream.store.rules import Superseded as Superseded
from muxkit.protocols.restream.store.rules import Transform as Transform
from muxkit.protocols.restream.store.rules import UnknownMessage as UnknownMessage
from muxkit.protocols.restream.store.rules import UnknownSession as UnknownSession
from muxkit.protocols.restream.store.store import SessionStore as SessionStore
from muxkit.protocols.restream.wire import Message as Message
from muxkit.runtime import protect_package
from muxkit.storage import Kind, kind_of
from muxkit.storage import StoreCorrupt as StoreCorrupt
from muxkit.storage import StoreError as StoreError
from muxkit.storage import StoreFailed as StoreFailed
from muxkit.storage import StoreFull as StoreFull
from muxkit.storage import StoreLocked as StoreLocked

LIMITS = StoreLimits()
UNTIL_ACKNOWLEDGED = Retention()


@overload
def open_store(
    where: str, *, keep: float = KEEP, limits: StoreLimits = ..., retention: Retention = ..., now: Now = ...
) -> AbstractAsyncContextManager[SessionStore[object, object]]: ...


@overload
def open_store(
    where: str,
    state: type[State],
    data: type[Data],
    *,
    keep: float = KEEP,
    limits: StoreLimits = ...,
    retention: Retention = ...,
    now: Now = ...,
) -> AbstractAsyncContextManager[SessionStore[State, Data]]: ...


def open_store(
    where: str,
    state: type[object] = object,
    data: type[object] = object,
    *,
    keep: float = KEEP,
    limits: StoreLimits = LIMITS,
    retention: Retention = UNTIL_ACKNOWLEDGED,
    now: Now = time.time,
) -> AbstractAsyncContextManager[object]:
    """Open `memory:`, `sqlite:PATH` or `postgresql://…`; leaving the context stores everything and closes it.

    `state` and `data` are the types that the application stores, any that msgspec can decode into; without them
    it gets back dicts, lists, strings and numbers. `keep` is how many seconds a session outlives its connection,
    `retention` how long messages are kept that are not acknowledged.
    """
    if not keep >= 0:
        raise ValueError(f"keep {keep} is not a number of seconds")
    rules = Rules(Codec(state, data), limits, keep, now, retention)
    kind, place = kind_of(where)
    # Imported where needed: most programs use one of them.
    if kind is Kind.MEMORY:
        from muxkit.protocols.restream.store.memory import open_memory

        return open_memory(rules)
    if kind is Kind.SQLITE:
        from muxkit.protocols.restream.store.sqlite import open_sqlite

        return open_sqlite(Path(place), rules)
    from muxkit.protocols.restream.store.postgres import open_postgres

    return open_postgres(place, rules)


protect_package("muxkit.protocols.restream")

__all__ = [
    "LAST_ID",
    "IdsExhausted",
    "Message",
    "MessageGone",
    "NotJson",
    "OutOfOrderAck",
    "Retention",
    "SessionBusy",
    "SessionExists",
    "SessionExpired",
    "SessionFinished",
    "SessionStore",
    "Status",
    "StoreCorrupt",
    "StoreError",
    "StoreFailed",
    "StoreFull",
    "StoreLimits",
    "StoreLocked",
    "Superseded",
    "Transform",
    "UnknownMessage",
    "UnknownSession",
]
