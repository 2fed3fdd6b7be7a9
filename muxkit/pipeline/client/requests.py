"""One request to a restream server, repeated over new connections until it succeeds or its time is over.

The protocol has errors as text only; `refusal_of` is the one place that interprets it.
"""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

import trio

from muxkit.pipeline.errors import StreamBroken, StreamUnavailable
from muxkit.protocols import restream
from muxkit.runtime import Backoff, Ended, Outage, redial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.restream import ClientEngine, ClientEvent
    from muxkit.runtime import Dial

READ_SIZE: Final = 256 * 1024  # bytes to ask for at once
SILENCE_TIMEOUT: Final = 20.0  # s without a byte after which a connection is dropped and dialled again
CLOSE_TIMEOUT: Final = 5.0  # s that a server may take to close the connection after an acknowledgement
MAX_FUTILE: Final = 8  # connections in a row without progress, after which dialling pauses
TOO_LONG: Final = "restream-F12"
BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError)
NO_CONNECTION: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)

# restream asks for at least five seconds after an attempt that failed.
BACKOFF: Final = Backoff(first=1.0, least=5.0, most=30.0)


class ClientTask(Protocol):
    """A request: which engine each connection gets, and what its events mean."""

    stream: str
    """For errors."""
    option: str
    """The option that limits the time without progress, and its seconds."""
    timeout: float
    silence: float
    """s without a byte after which `on_silence` is called."""
    acknowledges: bool
    """The server must read the last line: the connection is not closed before the server has closed it."""

    def engine(self) -> ClientEngine:
        """Make the engine of the next connection, which continues where the last one stopped."""

    async def take(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        """Handle events; return True if the request is complete."""

    def on_silence(self) -> bool:
        """Handle `silence` seconds without a byte; return True if the request is complete."""

    def on_refusal(self, text: str, refusal: Refusal) -> bool:
        """Handle an error of the server: raise, or return True if the request is complete, False to try again."""

    def on_hang_up(self) -> bool:
        """Handle an orderly close; return True if the request is complete."""


class _Refused(ConnectionError):
    """The server refused, so this attempt counts as failed."""


async def run_request(dial: Dial, task: ClientTask) -> None:
    """Run one request, reconnecting until it is complete.

    Raises `StreamUnavailable` when nothing came for `timeout` seconds (time inside `take` does not count), or when no
    connection is possible; `StreamBroken` when the server breaks a rule; and what the task raises.
    """
    await _Request(dial, task).run()


class _Request:
    def __init__(self, dial: Dial, task: ClientTask) -> None:
        self._dial = dial
        self._task = task
        self._outage = Outage()
        self._why: Exception | None = None  # why the last connection brought nothing
        self._scope = trio.CancelScope(deadline=trio.current_time() + task.timeout)
        self._came = 0
        self._futile = 0  # connections in a row that brought nothing
        self._is_done = False

    async def run(self) -> None:
        task = self._task
        with self._scope:
            try:
                await redial(self._dial, self._join, backoff=BACKOFF, outage=self._outage)
            except NO_CONNECTION as error:
                raise StreamUnavailable(task.stream, f"there can be no connection: {error}") from error
        if not self._is_done:
            last = self._outage.last or self._why
            because = "" if last is None else f": {last}"
            raise StreamUnavailable(
                task.stream, f"nothing came within option {task.option}={task.timeout:g} s{because}"
            ) from last

    async def _join(self, link: trio.abc.Stream) -> Ended | Exception:
        engine = self._task.engine()
        before = self._came
        try:
            ended = await self._run_connection(link, engine)
            if ended is Ended.DONE:
                self._is_done = True
                if self._task.acknowledges:
                    await _close(link, engine)
        except BROKEN as error:
            self._why = error
            ended = Ended.LOST
        if ended is not Ended.LOST:
            return ended
        self._futile = 0 if self._came > before else self._futile + 1
        return Ended.WORKED if self._futile <= MAX_FUTILE else Ended.LOST

    async def _run_connection(self, link: trio.abc.Stream, engine: ClientEngine) -> Ended | Exception:
        task = self._task
        engine.connection_made(trio.current_time())
        while True:
            if engine.has_output():
                await link.send_all(b"".join(engine.buffers_to_send()))
            data: bytes | bytearray | None = None
            with trio.move_on_after(task.silence):
                data = await link.receive_some(READ_SIZE)
            if data is None:
                if task.on_silence():
                    return Ended.DONE
                self._why = ConnectionError(f"nothing came for {task.silence:g} s")
                return Ended.LOST
            if data:
                engine.receive_bytes(bytes(data), trio.current_time())
            else:
                engine.receive_eof(trio.current_time())
            ended = await self._handle_events(engine)
            if ended is not None:
                return ended
            if not data:
                if task.on_hang_up():
                    return Ended.DONE
                self._why = ConnectionError("the server hung up")
                return Ended.LOST

    async def _handle_events(self, engine: ClientEngine) -> Ended | Exception | None:
        task, events = self._task, engine.events()
        came = False
        for event in events:
            match event:
                case restream.Refused(text):
                    told = restream.StreamRefused(text).text
                    refusal = refusal_of(told)
                    return Ended.DONE if task.on_refusal(told, refusal) else _Refused(f"the server refused: {told}")
                case restream.Failed(error):
                    hint = "; raise option maxMessageBytes if it is right" if error.rule == TOO_LONG else ""
                    raise StreamBroken(task.stream, f"the server broke a rule: {error}{hint}") from error
                case restream.Silent(seconds):
                    self._why = ConnectionError(f"nothing came for {seconds:g} s while a line was unfinished")
                    return Ended.LOST
                case restream.HungUp():
                    pass
                case _:
                    came = True
        if not came:
            return None
        self._came += 1
        self._why = None
        self._outage.over()
        self._outage.failures = 0
        self._scope.deadline = math.inf  # time inside `take` does not count
        is_all = await task.take(events, engine)
        self._scope.deadline = trio.current_time() + task.timeout
        return Ended.DONE if is_all else None


async def _close(link: trio.abc.Stream, engine: ClientEngine) -> None:
    """Send the rest and wait until the server closes: closing with unread input could discard what was sent."""
    with trio.move_on_after(CLOSE_TIMEOUT):
        while engine.has_output():
            await link.send_all(b"".join(engine.buffers_to_send()))
        if isinstance(link, trio.abc.HalfCloseableStream):
            await link.send_eof()
            while await link.receive_some(READ_SIZE):
                pass


class Refusal(Enum):
    """The kinds of refusal, by what a client can do about them."""

    GONE = "what was asked for was acknowledged, and may be deleted"
    BEYOND = "what was asked for does not exist there"
    UNKNOWN = "there is no such session, or not any more"
    BUSY = "another connection has the session, which may be free later"
    TROUBLE = "the server has a problem, which may be over later"
    OTHER = "anything else, such as a server that does not know the request"


_MEANINGS: Final = (
    (Refusal.GONE, re.compile(r"is before message \d+, which was acknowledged|all up to \d+ are acknowledged")),
    (Refusal.BEYOND, re.compile(r"is beyond the last message")),
    (Refusal.UNKNOWN, re.compile(r"is not known here|has expired|session expired|unknown session", re.IGNORECASE)),
    (Refusal.BUSY, re.compile(r"taken over by a newer connection|has an open connection")),
    (
        Refusal.TROUBLE,
        re.compile(r"cannot use its session store|no room for more messages|the server failed|did not come in time"),
    ),
)
_ACKNOWLEDGED: Final = re.compile(r"before message (\d{1,10}), which was acknowledged|all up to (\d{1,10}) are ack")


def refusal_of(text: str) -> Refusal:
    """Interpret the text of an error line."""
    for refusal, pattern in _MEANINGS:
        if pattern.search(text):
            return refusal
    return Refusal.OTHER


def acknowledged(text: str) -> int | None:
    """Return the id up to which messages are deleted, if the text names it."""
    found = _ACKNOWLEDGED.search(text)
    return None if found is None else int(found[1] or found[2])
