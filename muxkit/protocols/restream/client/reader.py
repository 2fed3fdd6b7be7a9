"""A stream as a receive channel that reconnects."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.client.driver import ClientDriver, StreamRefused
from muxkit.protocols.restream.engine import (
    Failed,
    Finished,
    HungUp,
    Mode,
    Received,
    ReceivedValue,
    Refused,
    Silent,
    StatusReceived,
)
from muxkit.protocols.restream.wire import INLINE_DIGITS
from muxkit.runtime import Ended, LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from muxkit._observer import Observer
    from muxkit.protocols.restream.client.driver import ClientPolicy, OnFailed, Stop
    from muxkit.protocols.restream.engine import ClientEngine, ClientEvent
    from muxkit.protocols.restream.wire import Json
    from muxkit.runtime import Dial, Outage

Item = Received | ReceivedValue | StatusReceived
ItemT = TypeVar("ItemT")

NO_CONNECTION: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class Reader(trio.abc.ReceiveChannel[ItemT]):
    """A stream as a receive channel over any number of connections; made by `numbers`, `stream`, `integers`.

    It reconnects without a limit: deadlines are the caller's, with `fail_after` or Trio's own. A cancelled `receive`
    has taken nothing. Several tasks may receive; each message goes to one of them.
    """

    def __init__(
        self,
        engine: ClientEngine,
        convert: Callable[[Item], ItemT],
        dial: Dial,
        *,
        policy: ClientPolicy,
        observer: Observer | None,
        on_failed: OnFailed | None,
    ) -> None:
        self._engine = engine
        self._convert = convert
        self._policy = policy
        self._driver = ClientDriver(dial, self, policy, observer=observer, on_failed=on_failed)
        engine.frames_at_once = policy.ahead
        self._waiting: deque[Item] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()  # the driver, while `ahead` items wait
        self._taken = trio.lowlevel.ParkingLot()  # the task that acknowledges in time, while there is nothing to
        self._last_taken = engine.last_id
        self._end: Callable[[], Exception] | None = trio.EndOfChannel if engine.over else None
        self._is_closed = False
        self._life = trio.CancelScope()
        self._ended = trio.Event()

    # --- for the application

    @property
    def connections(self) -> int:
        """The number of connections so far, with the present one."""
        return self._driver.connections

    @property
    def outage(self) -> Outage:
        """The recent failures to connect."""
        return self._driver.outage

    @property
    def uuid(self) -> str:
        """The uuid of the session; empty for a stateless stream."""
        return self._engine.uuid

    @property
    def last_id(self) -> int:
        """The id of the last message that was received here; 0 before the first."""
        return self._last_taken

    @property
    def acknowledged(self) -> int:
        """The id up to which messages are acknowledged."""
        return self._engine.acknowledged

    @property
    def is_connected(self) -> bool:
        return self._driver.is_connected

    async def receive(self) -> ItemT:
        """Return the next item, in order; each once.

        Raises `trio.EndOfChannel` after the last one, when everything is verified; `StreamRefused` when the server
        sends an error, `RemoteProtocolError` when it breaks a rule or the check, `LinkLost` when there can be no
        connection at all: each only after all items that came before it were received.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        was_there = bool(self._waiting)
        while self._is_closed or not self._waiting:
            if self._is_closed:
                raise trio.ClosedResourceError("this stream was closed")
            if self._end is not None:
                raise self._end()
            await self._arrived.park()
        item = self._take()
        if was_there:
            await trio.lowlevel.cancel_shielded_checkpoint()
        if isinstance(item, ReceivedValue) and len(item.value) > INLINE_DIGITS:
            with trio.CancelScope(shield=True):  # the item is taken, and this is bounded work
                return await trio.to_thread.run_sync(self._convert, item)
        return self._convert(item)

    def snapshot(self) -> dict[str, Json]:
        """Return the position of the stream as JSON, for `resume=` in another process.

        A server deletes what was acknowledged: to be able to restore, use `ClientConfig(ack_every=None)` and call
        `acknowledge` after saving.
        """
        return self._engine.snapshot()

    def acknowledge(self, id: int | None = None) -> None:
        """Let the server delete all messages up to this id, or all that were received here; does not wait."""
        if id is None:
            if self._engine.mode is Mode.STATEFUL and self._last_taken <= self._engine.acknowledged:
                return
            id = self._last_taken
        self._engine.acknowledge(id)
        self._driver.ring()

    def fail_after(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """`trio.fail_after`, but its TooSlowError has the last failure to connect as its cause."""
        return self.outage.fail_after(seconds)

    async def aclose(self) -> None:
        """Write the acknowledgement that is owed and close, in at most `ClientPolicy.linger` seconds."""
        self._is_closed = True
        self._arrived.unpark_all()
        try:
            if self._engine.config.ack_every is not None and self._engine.mode is Mode.STATEFUL:
                self.acknowledge()
            if self._driver.is_connected:
                self._driver.leave()
            elif not self._driver.is_done:
                self._life.cancel()
            with trio.move_on_after(self._policy.linger):
                await self._ended.wait()
        finally:
            self._life.cancel()

    # --- tasks, started by the context manager that makes it

    async def run(self) -> None:
        """Connect again and again."""
        try:
            with self._life:
                if not self._engine.over:
                    await self._driver.run()
        except NO_CONNECTION as error:  # one that another attempt cannot repair
            self._stop(partial(_no_connection, error))
        finally:
            self._ended.set()

    async def acknowledge_in_time(self) -> None:
        """Acknowledge received messages `ack_after` seconds later, also while nothing more comes."""
        after, every = self._policy.ack_after, self._engine.config.ack_every
        if after is None or every is None or self._engine.mode is not Mode.STATEFUL:
            return
        told = self._last_taken
        while True:
            while self._last_taken == told:
                await self._taken.park()
            await trio.sleep(after)
            told = self._last_taken
            if not self._engine.over:
                self.acknowledge()

    # --- for its driver

    def engine(self) -> ClientEngine:
        return self._engine

    async def take(self, events: Sequence[ClientEvent]) -> Ended | None:
        for event in events:
            match event:
                case Received() | ReceivedValue() | StatusReceived():
                    self._waiting.append(event)
                case Refused(text):
                    self._stop(partial(StreamRefused, text))
                case Failed(error):
                    self._stop(partial(_copy_of, error))
                case Finished():
                    self._stop(trio.EndOfChannel)
                case HungUp() | Silent():
                    pass  # the connection is lost next
        self._arrived.unpark_all()
        if self._engine.over:
            return Ended.DONE
        while len(self._waiting) >= self._policy.ahead:
            await self._room.park()
        return None

    def stopped(self, stop: Stop) -> bool:
        return False

    # --- inside

    def _take(self) -> Item:
        item = self._waiting.popleft()
        if not isinstance(item, StatusReceived):
            self._engine.taken(item)
        if isinstance(item, Received):
            self._last_taken = item.id
            self._taken.unpark_all()
        if self._room and len(self._waiting) < self._policy.ahead:
            self._room.unpark_all()
        if self._engine.has_output():
            self._driver.ring()
        return item

    def _stop(self, end: Callable[[], Exception]) -> None:
        """Nothing more will come; the first reason counts."""
        if self._end is None:
            self._end = end
        self._arrived.unpark_all()


def _copy_of(error: RemoteProtocolError) -> RemoteProtocolError:
    """Return an equal error for another task: one exception raised in two would mix their tracebacks."""
    return RemoteProtocolError(error.message, rule=error.rule, offset=error.offset, limit=error.limit)


def _no_connection(cause: Exception) -> LinkLost:
    error = LinkLost(f"there can be no connection: {cause}", by="network")
    error.__cause__ = cause
    return error
