"""What does a protocol plugin look like from outside? One interface for each kind of link, no base class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

EventT_co = TypeVar("EventT_co", covariant=True)

Buffer = bytes | memoryview


class Engine(Protocol[EventT_co]):
    """Rules without I/O: bytes and times go in, events and bytes come out."""

    def events(self) -> Sequence[EventT_co]:
        """What happened since the last call, oldest first."""

    def next_deadline(self) -> float | None:
        """When `handle_deadline` wants to be called, on the clock that `now` comes from."""

    def handle_deadline(self, now: float) -> None:
        """Act on what is due; harmless when early."""


@runtime_checkable
class CountsFrames(Protocol):
    """An engine that says how many frames it has parsed, so that its pump can bound the work of one turn.

    Not every frame makes an event: without this a flood of those that make none counts by its bytes only.
    """

    @property
    def frames(self) -> int: ...


class StreamEngine(Engine[EventT_co], Protocol[EventT_co]):
    """Speaks over an ordered byte stream: TCP, TLS, Unix sockets, WebSockets.

    `receive_*` never raises: a bad peer gives one last event that holds the `RemoteProtocolError`, then
    silence. Output is pulled, so that what to write is chosen at the last moment.
    """

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Take in what the transport brought."""

    def receive_eof(self, now: float) -> None:
        """The peer will send nothing more."""

    def has_output(self) -> bool:
        """Is there anything to write? Cheap."""

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        """Take out about `limit` bytes to write now; a frame that was begun is finished."""
