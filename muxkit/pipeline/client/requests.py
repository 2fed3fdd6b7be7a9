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
from muxkit.protocols.restream.client import ClientDriver, Closing, Stop
from muxkit.runtime import Ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.restream import ClientEngine, ClientEvent
    from muxkit.runtime import Dial

READ_SIZE: Final = 256 * 1024  # bytes to ask for at once
SILENCE_TIMEOUT: Final = 20.0  # s without a byte after which a connection is dropped and dialled again
CLOSE_TIMEOUT: Final = 5.0  # s that a server may take to close the connection after an acknowledgement
TOO_LONG: Final = "restream-F12"
NO_CONNECTION: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


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
    """Adapts a task to the driver of restream's clients, and limits the time without progress."""

    def __init__(self, dial: Dial, task: ClientTask) -> None:
        self._task = task
        self._engine: ClientEngine | None = None
        self._why: Exception | None = None  # why the last connection brought nothing
        self._scope = trio.CancelScope(deadline=trio.current_time() + task.timeout)
        self._is_done = False
        policy = restream.ClientPolicy(silence=task.silence, linger=CLOSE_TIMEOUT)
        closing = Closing.CONFIRMED if task.acknowledges else Closing.AT_ONCE
        self._driver = ClientDriver(dial, self, policy, read_bytes=READ_SIZE, closing=closing)

    async def run(self) -> None:
        task, driver = self._task, self._driver
        with self._scope:
            try:
                await driver.run()
            except NO_CONNECTION as error:
                raise StreamUnavailable(task.stream, f"there can be no connection: {error}") from error
        if not self._is_done:
            last = driver.outage.last or self._why or driver.loss
            because = "" if last is None else f": {last}"
            raise StreamUnavailable(
                task.stream, f"nothing came within option {task.option}={task.timeout:g} s{because}"
            ) from last

    def engine(self) -> ClientEngine:
        self._engine = self._task.engine()
        return self._engine

    async def take(self, events: Sequence[ClientEvent]) -> Ended | Exception | None:
        task, engine = self._task, self._engine
        assert engine is not None
        came = False
        for event in events:
            match event:
                case restream.Refused(text):
                    told = restream.StreamRefused(text).text
                    self._is_done = task.on_refusal(told, refusal_of(told))
                    return Ended.DONE if self._is_done else _Refused(f"the server refused: {told}")
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
        self._why = None
        self._scope.deadline = math.inf  # time inside `take` does not count
        self._is_done = await task.take(events, engine)
        self._scope.deadline = trio.current_time() + task.timeout
        return Ended.DONE if self._is_done else None

    def stopped(self, stop: Stop) -> bool:
        task = self._task
        self._is_done = (stop is Stop.SILENCE and task.on_silence()) or (stop is Stop.HUNG_UP and task.on_hang_up())
        return self._is_done


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
