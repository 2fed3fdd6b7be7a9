"""What does a pipeline ask of servers? How a stream stands, a range of it, how much comes next, and to forget the rest.

Nothing here knows Spark. Each question is a connection of its own; an older one of the same session is taken over.
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
from muxkit.pipeline._errors import DataLoss, OptionError, StreamUnavailable
from muxkit.pipeline._options import SourceOptions, Tls, Verify
from muxkit.pipeline._refusals import Refusal, acknowledged
from muxkit.pipeline._talk import SILENCE, talk
from muxkit.pipeline._tls import link_options
from muxkit.protocols import restream
from muxkit.protocols.restream.client import dial_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from muxkit.pipeline._offsets import Span
    from muxkit.protocols.restream import ClientEngine, ClientEvent, Json, Received, Verifier
    from muxkit.runtime import Dial

    Take = Callable[[list[Received]], Awaitable[None]]

LATER: Final = (Refusal.BUSY, Refusal.TROUBLE)
LOST: Final = (Refusal.GONE, Refusal.BEYOND, Refusal.UNKNOWN)

_log = logging.getLogger("muxkit")


class Silent(Enum):
    """Why a server has not said how a stream stands."""

    UNKNOWN = "it knows no such session"
    PLAIN = "it answers no status requests"


Answer = restream.Status | Silent


class Client:
    """Servers of restream, as options say how to reach them. It keeps nothing: one may be made in each process."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._config = restream.ClientConfig(ack_every=None, line=options.message_bytes)

    async def status(self, server: str, uuid: str) -> Answer:
        """How a stream stands there."""
        wish = _Status(uuid, self._options)
        await talk(self._dial(server), wish)
        assert wish.answer is not None
        return wish.answer

    async def fetch(self, span: Span, take: Take) -> None:
        """All messages of a range, in order and each once, to `take`; it is waited for.

        Raises `DataLoss` if the server does not have them any more. Nothing is acknowledged.
        """
        if span.count:
            await talk(self._dial(span.server), _Range(span, take, self._options, self._config))

    async def count(
        self, server: str, uuid: str, begin: int, *, most: int, most_bytes: int | None = None
    ) -> tuple[int, int]:
        """Read ahead: the last id up to which there are messages now, and how many bytes they have.

        At most `most` messages, and not more than the one with which they pass `most_bytes`. Raises `DataLoss` as
        `fetch` does.
        """
        wish = _Count(uuid, begin, most, most_bytes, self._options, self._config)
        await talk(self._dial(server), wish)
        return wish.last, wish.bytes

    async def acknowledge(self, server: str, uuid: str, id: int) -> None:
        """Let the server forget everything up to this message. That it was forgotten before is no error."""
        await talk(self._dial(server), _Acknowledge(uuid, id, self._options, self._config))

    def _dial(self, server: str) -> Dial:
        tls = self._options.tls
        return _dial(server, tls, tuple(_written(path) for path in (tls.ca_file, tls.cert_file, tls.key_file)))


@lru_cache(maxsize=1024)
def _dial(server: str, tls: Tls, written: tuple[float, ...]) -> Dial:
    """Kept by the process, which has many tasks: finding a transport takes longer than a small read.

    Not longer than the files are as they were: a query may live to see its certificate renewed.
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


# ---------------------------------------------------------------------------- what is wished for


class _Wish:
    """What most of them have in common."""

    option = "statusTimeout"
    silence = SILENCE
    acknowledges = False

    def __init__(self, stream: str, timeout: float) -> None:
        self.stream = stream
        self.timeout = timeout

    def quiet(self) -> bool:
        return False

    def hung_up(self) -> bool:
        return False


class _Status(_Wish):
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

    def refused(self, text: str, refusal: Refusal) -> bool:
        if refusal in LATER:
            return False
        self.answer = Silent.UNKNOWN if refusal is Refusal.UNKNOWN else Silent.PLAIN
        return True


class _Reading(_Wish):
    """A session from a message on, over any number of connections."""

    option = "readTimeout"

    def __init__(self, uuid: str, begin: int, options: SourceOptions, config: restream.ClientConfig) -> None:
        super().__init__(uuid, options.read_timeout)
        self._config = config
        # Only whoever begins with the first message can know the CRC of all of them.
        checked = options.verify is Verify.NUMBERS and begin == 0
        self._verifier: Verifier = restream.NumbersVerifier() if checked else restream.Unverified()
        self._saved: dict[str, Json] = {}
        self._skip(begin)

    def _skip(self, id: int) -> None:
        """Go on behind this message, whatever was before."""
        self.last = id
        if id:
            self._verifier = restream.Unverified()
        fresh = restream.ClientEngine.stateful(self.stream, None, verifier=self._verifier)
        self._saved = {**fresh.snapshot(), "id": id}

    def engine(self) -> ClientEngine:
        return restream.ClientEngine.restore(self._saved, verifier=self._verifier, config=self._config)

    def _taken(self, engine: ClientEngine, event: Received) -> None:
        """Another connection goes on behind this one."""
        engine.taken(event)
        self.last = event.id
        self._saved = {**engine.snapshot(), "finished": False}

    def refused(self, text: str, refusal: Refusal) -> bool:
        if refusal in LOST:
            raise DataLoss(self.stream, f"messages behind {self.last} were asked for, and the server says: {text}")
        if refusal is Refusal.OTHER:
            raise StreamUnavailable(self.stream, f"messages behind {self.last} were asked for and refused: {text}")
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

    def refused(self, text: str, refusal: Refusal) -> bool:
        if not self._may_lose or refusal not in LOST:
            return super().refused(text, refusal)
        _log.warning("stream %s: messages behind %d are lost, the server says: %s", self.stream, self.last, text)
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

    def quiet(self) -> bool:
        return True

    def hung_up(self) -> bool:
        return True  # a cut looks the same: then the rest is counted next time


class _Acknowledge(_Reading):
    """The last of the messages is read once more: an acknowledgement has no answer, but counts only behind one."""

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

    def refused(self, text: str, refusal: Refusal) -> bool:
        if refusal is Refusal.GONE and (acknowledged(text) or 0) >= self._id:
            return True
        return super().refused(text, refusal)
