"""The interface of a restream store that topics use to keep their updates across restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Stored(Protocol):
    """A stored update."""

    @property
    def id(self) -> int: ...
    @property
    def data(self) -> Any: ...  # noqa: ANN401 - any JSON


class Standing(Protocol):
    """The state of a topic's stream in the store."""

    @property
    def head(self) -> int: ...
    @property
    def acknowledged(self) -> int: ...
    @property
    def incarnation(self) -> str: ...


class Journal(Protocol):
    """A store of restream, opened by `restream.open_store`. It keeps the updates of a topic as one stream."""

    async def register(self, uuid: str, state: Any, *, attached: bool, keep: float) -> Standing: ...  # noqa: ANN401
    async def status(self, uuid: str) -> Standing: ...
    async def append(self, uuid: str, data: Any) -> Stored: ...  # noqa: ANN401 - any JSON
    async def replay(self, uuid: str, after: int, most: int = ...) -> Sequence[Stored]: ...
    async def ack(self, uuid: str, id: int) -> object: ...
