"""Durable topics: the part of a restream store that a topic uses, so that updates outlive the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Stored(Protocol):
    """An update as the store has it."""

    @property
    def id(self) -> int: ...
    @property
    def data(self) -> Any: ...  # noqa: ANN401 - any JSON


class Standing(Protocol):
    """The progress of the stream of a topic."""

    @property
    def head(self) -> int: ...
    @property
    def acknowledged(self) -> int: ...
    @property
    def incarnation(self) -> str: ...


class Journal(Protocol):
    """A store of restream, opened by `restream.open_store`, which keeps the updates of a topic as one session."""

    async def register(self, uuid: str, state: Any, *, attached: bool, keep: float) -> Standing: ...  # noqa: ANN401
    async def status(self, uuid: str) -> Standing: ...
    async def append(self, uuid: str, data: Any) -> Stored: ...  # noqa: ANN401 - any JSON
    async def replay(self, uuid: str, after: int, most: int = ...) -> Sequence[Stored]: ...
    async def ack(self, uuid: str, id: int) -> object: ...
