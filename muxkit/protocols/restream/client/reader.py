"""How does an application take a stream? As a receive channel that outlives its connections."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.client.driver import Connection
from muxkit.protocols.restream.client.policy import StreamRefused
from muxkit.protocols.restream.engine.events import (
    Failed,
    Finished,
    HungUp,
    Received,
    ReceivedValue,
    Refused,
    Silent,
    StatusReceived,
)
from muxkit.protocols.restream.engine.snapshot import Mode
from muxkit.protocols.restream.wire.integers import INLINE_DIGITS
from muxkit.runtime import Ended, LinkLost, Outage, redial

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from muxkit._observer import Observer
    from muxkit.protocols.restream.client.policy import ClientPolicy
    from muxkit.protocols.restream.engine.client import ClientEngine
    from muxkit.protocols.restream.wire.json import Json
    from muxkit.runtime import Dial

    OnFailed = Callable[[Exception, float], None]

Item = Received | ReceivedValue | StatusReceived
ItemT = TypeVar("ItemT")

AT_ONCE: Final = 8  # drops in a row that brought nothing, after which dialling again has to wait
NO_CONNECTION: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class Reader(trio.abc.ReceiveChannel[ItemT]):
    """A stream as a receive channel, over as many connections as it takes; made by `numbers`, `stream`, `integers`.

    It dials again by itself and never gives up: deadlines are the caller's, with `fail_after` or Trio's own. A
    cancelled `receive` has taken nothing. Several tasks may receive; each message goes to one of them.
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
        self.connections = 0
        """How many there were, the present one included."""
        self.outage = Outage()
        """What went wrong lately with connecting."""
        self._engine = engine
        self._convert = convert
        self._dial = dial
        self._policy = policy
        self._observer = observer
        self._on_failed = on_failed
        engine.frames_at_once = policy.ahead
        self._waiting: deque[Item] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()  # the connection, while enough waits
        self._untold = trio.lowlevel.ParkingLot()  # who acknowledges in time, while there is nothing new
        self._connection: Connection | None = None
        self._last_taken = engine.last_id
        self._received = 0
        self._futile = 0  # connections in a row that brought nothing
        self._end: Callable[[], Exception] | None = trio.EndOfChannel if engine.over else None
        self._is_closed = False
        self._is_done = engine.over  # no connection will follow
        self._life = trio.CancelScope()
        self._over = trio.Event()

    # --- for the application

    @property
    def uuid(self) -> str:
        """Of the session; empty for a stateless stream."""
        return self._engine.uuid

    @property
    def last_id(self) -> int:
        """Of the last message that was taken; 0 before the first."""
        return self._last_taken

    @property
    def acknowledged(self) -> int:
        """The id up to which the server has been told that we have everything."""
        return self._engine.acknowledged

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def receive(self) -> ItemT:
        """The next one, in order, once.

        Raises `trio.EndOfChannel` behind the last one, when everything is verified; `StreamRefused` when the server
        says an error, `RemoteProtocolError` when it breaks the rules or the check, `LinkLost` when there can be no
        connection at all: each only after everything that came before it was taken.
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
            with trio.CancelScope(shield=True):  # it is taken by now, and this is bounded work
                return await trio.to_thread.run_sync(self._convert, item)
        return self._convert(item)

    def snapshot(self) -> dict[str, Json]:
        """How far the stream is, as JSON, for `resume=` in another process: it goes on behind what was received here.

        A server forgets what was acknowledged. Whoever restores what he saved takes `ClientConfig(ack_every=None)`
        and calls `acknowledge` after saving.
        """
        return self._engine.snapshot()

    def acknowledge(self, id: int | None = None) -> None:
        """Let the server forget everything up to this id, or all that was received here; does not wait."""
        if id is None:
            if self._engine.mode is Mode.STATEFUL and self._last_taken <= self._engine.acknowledged:
                return
            id = self._last_taken
        self._engine.acknowledge(id)
        self._ring()

    def fail_after(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """`trio.fail_after`, except that the cause of its TooSlowError is why there is no connection."""
        return self.outage.fail_after(seconds)

    async def aclose(self) -> None:
        """Write the acknowledgement that is owed and hang up, in at most `ClientPolicy.linger` seconds."""
        self._is_closed = True
        self._arrived.unpark_all()
        try:
            if self._engine.config.ack_every is not None and self._engine.mode is Mode.STATEFUL:
                self.acknowledge()
            if self._connection is not None:
                self._connection.leave()
            elif not self._is_done:
                self._life.cancel()
            with trio.move_on_after(self._policy.linger):
                await self._over.wait()
        finally:
            self._life.cancel()

    # --- its tasks, run by whoever made it

    async def run(self) -> None:
        """Connect, again and again."""
        try:
            with self._life:
                if not self._engine.over:
                    await redial(
                        self._dial,
                        self._join,
                        backoff=self._policy.backoff,
                        on_failed=self._on_failed,
                        outage=self.outage,
                    )
        except NO_CONNECTION as error:  # one that cannot heal
            self._stop(partial(_no_connection, error))
        finally:
            self._over.set()

    async def acknowledge_in_time(self) -> None:
        """What was taken, also while nothing more comes."""
        after, every = self._policy.ack_after, self._engine.config.ack_every
        if after is None or every is None or self._engine.mode is not Mode.STATEFUL:
            return
        told = self._last_taken
        while True:
            while self._last_taken == told:
                await self._untold.park()
            await trio.sleep(after)
            told = self._last_taken
            if not self._engine.over:
                self.acknowledge()

    # --- for its connection

    def hear(self) -> None:
        events = self._engine.events()
        for event in events:
            match event:
                case Received() | ReceivedValue() | StatusReceived():
                    self._waiting.append(event)
                    self._received += 1
                    self.outage.over()
                    self.outage.failures = 0  # the pauses of an old trouble could outlast our session
                case Refused(text):
                    self._stop(partial(StreamRefused, text))
                case Failed(error):
                    self._stop(partial(_again, error))
                case Finished():
                    self._stop(trio.EndOfChannel)
                case HungUp() | Silent():
                    pass  # the connection is lost next
        if events:
            self._arrived.unpark_all()

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < self._policy.ahead

    async def room(self) -> None:
        while not self.has_room:
            await self._room.park()

    # --- inside

    async def _join(self, stream: trio.abc.Stream) -> Ended:
        before = self._received
        self.connections += 1
        self._connection = Connection(stream, self._engine, self, self._policy, self._observer)
        try:
            await self._connection.run()
        finally:
            self._connection = None
        self._is_done = self._engine.over or self._is_closed
        if self._is_done:
            return Ended.DONE
        self._futile = 0 if self._received > before else self._futile + 1
        return Ended.WORKED if self._futile <= AT_ONCE else Ended.LOST

    def _take(self) -> Item:
        item = self._waiting.popleft()
        if not isinstance(item, StatusReceived):
            self._engine.taken(item)
        if isinstance(item, Received):
            self._last_taken = item.id
            self._untold.unpark_all()
        if self._room and self.has_room:
            self._room.unpark_all()
        if self._engine.has_output():
            self._ring()
        return item

    def _ring(self) -> None:
        if self._connection is not None:
            self._connection.ring()

    def _stop(self, end: Callable[[], Exception]) -> None:
        """There is nothing more to come; the first reason counts."""
        if self._end is None:
            self._end = end
        self._arrived.unpark_all()


def _again(error: RemoteProtocolError) -> RemoteProtocolError:
    """A new one for each who asks: a traceback belongs to one of them."""
    return RemoteProtocolError(error.message, rule=error.rule, offset=error.offset, limit=error.limit)


def _no_connection(cause: Exception) -> LinkLost:
    error = LinkLost(f"there can be no connection: {cause}", by="network")
    error.__cause__ = cause
    return error
