"""Requests of the pipeline to restream servers: status, a range of messages, a count, an acknowledgement.

It does not need Spark. Each request has a connection of its own, which takes over the session's older ones.
"""

from __future__ import annotations

import logging
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from muxkit import PluginError
from muxkit.pipeline.client.requests import SILENCE_TIMEOUT, Refusal, acknowledged, run_request
from muxkit.pipeline.errors import DataLoss, OptionError, StreamUnavailable
from muxkit.pipeline.options import SourceOptions, Tls, Verify, link_options
from muxkit.protocols import restream
from muxkit.protocols.restream.client import dial_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from muxkit.pipeline.source.offsets import Span
    from muxkit.protocols.restream import ClientEngine, ClientEvent, Json, Received, Verifier
    from muxkit.runtime import Dial

    Take = Callable[[list[Received]], Awaitable[None]]

LATER: Final = (Refusal.BUSY, Refusal.TROUBLE)
LOST: Final = (Refusal.GONE, Refusal.BEYOND, Refusal.UNKNOWN)

_log = logging.getLogger("muxkit")


class NoStatus(Enum):
    """Why a server gave no status of a stream."""

    UNKNOWN = "it knows no such session"
    PLAIN = "it answers no status requests"


Answer = restream.Status | NoStatus


class Client:
    """A client of the servers that the options name. It keeps no state, so each process may make one."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._config = restream.ClientConfig(ack_every=None, line=options.message_bytes)

    async def status(self, server: str, uuid: str) -> Answer:
        """Ask a server for the status of a stream."""
        task = _Status(uuid, self._options)
        await run_request(self._dial(server), task)
        assert task.answer is not None
        return task.answer

    async def fetch(self, span: Span, take: Take) -> None:
        """Pass all messages of a range to `take`, in order and each once, and await it.

        Raises `DataLoss` if the server has deleted them. Nothing is acknowledged.
        """
        if span.count:
            await run_request(self._dial(span.server), _Range(span, take, self._options, self._config))

    async def count(
        self, server: str, uuid: str, begin: int, *, most: int, most_bytes: int | None = None
    ) -> tuple[int, int]:
        """Read ahead: return the id of the last message that is there now, and the bytes of all.

        Stops after `most` messages, or after the one with which they pass `most_bytes`. Raises `DataLoss` as `fetch`
        does.
        """
        task = _Count(uuid, begin, most, most_bytes, self._options, self._config)
        await run_request(self._dial(server), task)
        return task.last, task.bytes

    async def acknowledge(self, server: str, uuid: str, id: int) -> None:
        """Let the server delete everything up to this message. It is no error if that was done before."""
        await run_request(self._dial(server), _Acknowledge(uuid, id, self._options, self._config))

    def _dial(self, server: str) -> Dial:
        tls = self._options.tls
        return _dial(server, tls, tuple(_written(path) for path in (tls.ca_file, tls.cert_file, tls.key_file)))


@lru_cache(maxsize=1024)
def _dial(server: str, tls: Tls, written: tuple[float, ...]) -> Dial:
    """Cached by the process for its many tasks, because finding a transport takes longer than a small read.

    `written` are the times of the TLS files: when a certificate is renewed, the cached entry no longer applies.
    """
    try:
        return dial_of(server, link_options(server, tls))
    except (PluginError, ValueError, TypeError) as error:
        raise error if isinstance(error, OptionError) else OptionError("servers", f"{server}: {error}") from error


def _written(path: str | None) -> float:
    try:
        return 0.0 if path is None else Path(path).stat().st_mtime
    except OSError:
        return 0.0


# ---------------------------------------------------------------------------- the tasks


class _Task:
    """What most tasks share."""

    option = "statusTimeout"
    silence = SILENCE_TIMEOUT
    acknowledges = False

    def __init__(self, stream: str, timeout: float) -> None:
        self.stream = stream
        self.timeout = timeout

    def on_silence(self) -> bool:
        return False

    def on_hang_up(self) -> bool:
        return False


class _Status(_Task):
    def __init__(self, uuid: str, options: SourceOptions) -> None:
        super().__init__(uuid, options.status_timeout)
        self.answer: Answer | None = None

    def engine(self) -> ClientEngine:
        return restream.ClientEngine.status(self.stream)

    async def take(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        for event in events:
            if isinstance(event, restream.StatusReceived):
                self.answer = event.status
        return True

    def on_refusal(self, text: str, refusal: Refusal) -> bool:
        if refusal in LATER:
            return False
        self.answer = NoStatus.UNKNOWN if refusal is Refusal.UNKNOWN else NoStatus.PLAIN
        return True


class _Reading(_Task):
    """Reads a session from a message on, over any number of connections."""

    option = "readTimeout"

    def __init__(self, uuid: str, begin: int, options: SourceOptions, config: restream.ClientConfig) -> None:
        super().__init__(uuid, options.read_timeout)
        self._config = config
        # The CRC covers all messages, so it can be checked only from the first one on.
        checked = options.verify is Verify.NUMBERS and begin == 0
        self._verifier: Verifier = restream.NumbersVerifier() if checked else restream.Unverified()
        self._saved: dict[str, Json] = {}
        self._skip(begin)

    def _skip(self, id: int) -> None:
        """Continue after this message."""
        self.last = id
        if id:
            self._verifier = restream.Unverified()
        fresh = restream.ClientEngine.stateful(self.stream, None, verifier=self._verifier)
        self._saved = {**fresh.snapshot(), "id": id}

    def engine(self) -> ClientEngine:
        return restream.ClientEngine.restore(self._saved, verifier=self._verifier, config=self._config)

    def _taken(self, engine: ClientEngine, event: Received) -> None:
        """Note that the next connection continues after this message."""
        engine.taken(event)
        self.last = event.id
        self._saved = {**engine.snapshot(), "finished": False}

    def on_refusal(self, text: str, refusal: Refusal) -> bool:
        if refusal in LOST:
            raise DataLoss(self.stream, f"messages after {self.last} were asked for, and the server says: {text}")
        if refusal is Refusal.OTHER:
            raise StreamUnavailable(self.stream, f"messages after {self.last} were asked for and refused: {text}")
        return False


class _Range(_Reading):
    def __init__(self, span: Span, take: Take, options: SourceOptions, config: restream.ClientConfig) -> None:
        super().__init__(span.uuid, span.begin, options, config)
        self._end = span.end
        self._take = take
        self._may_lose = not options.fail_on_data_loss

    async def take(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        end = self._end
        wanted = [event for event in events if isinstance(event, restream.Received) and event.id <= end]
        if wanted:
            await self._take(wanted)
            self._taken(engine, wanted[-1])
        if any(isinstance(event, restream.Finished) for event in events) and self.last < end:
            raise DataLoss(self.stream, f"it ends with message {self.last}, and {end} was known")
        return self.last >= end

    def on_refusal(self, text: str, refusal: Refusal) -> bool:
        if not self._may_lose or refusal not in LOST:
            return super().on_refusal(text, refusal)
        _log.warning("stream %s: messages after %d are lost, the server says: %s", self.stream, self.last, text)
        gone = acknowledged(text) if refusal is Refusal.GONE else None
        if gone is None or not self.last < gone < self._end:
            return True
        self._skip(gone)
        return False


class _Count(_Reading):
    def __init__(
        self,
        uuid: str,
        begin: int,
        most: int,
        most_bytes: int | None,
        options: SourceOptions,
        config: restream.ClientConfig,
    ) -> None:
        super().__init__(uuid, begin, options, config)
        self.silence = options.prefetch_wait
        self.bytes = 0
        self._end = begin + most
        self._most_bytes = most_bytes
        self._encode = msgspec.json.Encoder().encode

    async def take(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        await trio.lowlevel.checkpoint()
        for event in events:
            if not isinstance(event, restream.Received):
                continue
            self.bytes += len(self._encode(event.data))
            self._taken(engine, event)
            if event.id >= self._end or (self._most_bytes is not None and self.bytes >= self._most_bytes):
                return True
        return False

    def on_silence(self) -> bool:
        return True

    def on_hang_up(self) -> bool:
        return True  # a lost connection looks the same; the rest is then counted next time


class _Acknowledge(_Reading):
    """Reads the last message once more, then acknowledges it: an acknowledgement counts only after a read."""

    option = "ackTimeout"
    acknowledges = True

    def __init__(self, uuid: str, id: int, options: SourceOptions, config: restream.ClientConfig) -> None:
        super().__init__(uuid, id - 1, options, config)
        self.timeout = options.ack_timeout
        self._id = id

    async def take(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        for event in events:
            if isinstance(event, restream.Received) and event.id == self._id:
                engine.taken(event)
                engine.acknowledge(self._id)
                return True
        return False

    def on_refusal(self, text: str, refusal: Refusal) -> bool:
        if refusal is Refusal.GONE and (acknowledged(text) or 0) >= self._id:
            return True
        return super().on_refusal(text, refusal)
