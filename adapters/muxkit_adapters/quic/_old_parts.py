"""What do we put in the place of aioquic's own collections? Limits that it cannot raise, and lists without the idle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioquic.quic.connection import Limit
from aioquic.quic.stream import QuicStream

if TYPE_CHECKING:
    from collections.abc import Iterable

STREAMS_AT_ONCE = 256  # the peer may open so many ahead: one frame can make us build no more


class Granted(Limit):
    """A limit that aioquic reads, and would raise; only `granted` does."""

    def __init__(self, like: Limit, granted: int) -> None:
        self.granted = granted
        super().__init__(like.frame_type, like.name, granted)

    @property
    def value(self) -> int:
        return self.granted

    @value.setter
    def value(self, value: int) -> None:
        pass


class GrantedStreams(Granted):
    """How many streams the peer may open: what is open at once is bounded, and how far he may run ahead."""

    def __init__(self, like: Limit, most: int) -> None:
        self.most = most
        self.done = 0
        super().__init__(like, min(most, STREAMS_AT_ONCE))

    @property
    def value(self) -> int:
        return min(self.done + self.most, self.used + STREAMS_AT_ONCE)

    @value.setter
    def value(self, value: int) -> None:
        pass

    @property
    def is_due(self) -> bool:
        """Would aioquic tell the peer now? Not before that gives him more than he has left."""
        return self.sent - self.used < self.value - self.sent


class Streams(dict[int, QuicStream]):
    """The streams by number. `values()`, through which aioquic goes for each packet, has those to be told of credit."""

    def __init__(self) -> None:
        super().__init__()
        self.due: dict[int, QuicStream] = {}
        self.given_up: set[int] = set()

    def values(self) -> Any:  # noqa: ANN401 - of a dict it is a view, here it is a list
        return [*self.due.values()]

    def pop(self, stream_id: int, *default: Any) -> Any:  # noqa: ANN401 - as a dict has it
        self.due.pop(stream_id, None)
        self.given_up.discard(stream_id)
        return super().pop(stream_id, *default)


class StreamQueue(list[QuicStream]):
    """The streams that have something to write, or to be forgotten; each once."""

    def __init__(self, streams: Iterable[QuicStream] = ()) -> None:
        super().__init__()
        self._ids: set[int | None] = set()
        self.extend(streams)

    def append(self, stream: QuicStream) -> None:
        if stream.stream_id not in self._ids:
            self._ids.add(stream.stream_id)
            super().append(stream)

    def extend(self, streams: Iterable[QuicStream]) -> None:
        for stream in streams:
            self.append(stream)
