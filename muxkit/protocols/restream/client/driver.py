"""The driver of a client's engine: one connection after another, until its task has all that it wants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Literal, Protocol

import attrs
import trio

from muxkit._errors import MuxError
from muxkit._info import SessionInfo
from muxkit._observer import Facts, Observer, facts_of, frames_of, measured
from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, AT_LEAST_ONE
from muxkit.core import printable
from muxkit.protocols.restream.engine import (
    ClientEngine,
    ClientEvent,
    ListingReceived,
    Received,
    ReceivedBlock,
    ReceivedValue,
    StatusReceived,
    StreamState,
)
from muxkit.protocols.restream.wire import ErrorCode
from muxkit.runtime import Backoff, Dial, Ended, LinkLost, Outage, SessionStats, background, describe, peer_of, redial

OnFailed = Callable[[Exception, float], None]


MIN_PAUSE: Final = 5.0  # s, "it should wait at least 5 seconds before retrying"
IDLE_SILENCE: Final = 300.0  # s, for streams that may be idle
MAX_FUTILE: Final = 8  # connections in a row that brought nothing, after which dialling waits as after a failure
READ_BYTES: Final = 64 * 1024  # to ask for at once
PROGRESS: Final = (
    Received,
    ReceivedBlock,
    ReceivedValue,
    StatusReceived,
    ListingReceived,
)  # events after which a connection is good
BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError)


def _backoff() -> Backoff:
    return Backoff(first=1.0, least=MIN_PAUSE, most=30.0)


@attrs.frozen(kw_only=True)
class ClientPolicy:
    """How a stream is kept going over one connection after another; times in seconds."""

    backoff: Backoff = attrs.field(factory=_backoff)
    """The pauses after failed attempts to connect. After a lost connection there is none."""
    ahead: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Reading pauses while this many messages wait for the application."""
    ack_after: float | None = attrs.field(default=1.0, validator=ABOVE_ZERO_OR_NONE)
    """The longest time until a received message is acknowledged; None: only as `ClientConfig(ack_every=)` says."""
    silence: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """A connection that brings nothing for this time is closed and dialled again; None: never. A session whose client
    is absent expires after 30 s, so this should be less."""
    linger: float = attrs.field(default=5.0, validator=ABOVE_ZERO)
    """For the last acknowledgement and the closing handshake."""

    def __attrs_post_init__(self) -> None:
        if self.backoff.least < MIN_PAUSE:
            raise ValueError(
                f"ClientPolicy(backoff=Backoff(least={self.backoff.least:g})): restream asks for at least "
                f"{MIN_PAUSE:g} s after a failed attempt to connect"
            )


class StreamRefused(MuxError, trio.BrokenResourceError):
    """The server sent an error that is final: the stream is over, and must not be resumed.

    `reason` is at most 512 characters of the server's text, with everything escaped that a terminal would obey. `code`
    says what can be done about it; None from a server that gives none.
    """

    def __init__(self, text: str, *, peer: str = "", code: ErrorCode | None = None) -> None:
        self.reason: str = printable(text)
        self.text: str = self.reason
        """The same."""
        self.peer = peer
        self.code = code
        super().__init__(f"{peer}: the server refused: {self.reason}" if peer else f"the server refused: {self.reason}")


class Stop(Enum):
    """Why a connection brings nothing more."""

    SILENCE = "silence"
    """Nothing came for `ClientPolicy.silence`."""
    HUNG_UP = "hung up"
    """The server closed the connection in order."""
    LOST = "lost"
    """The connection broke."""


class Closing(Enum):
    """How a connection is closed when the task is done."""

    AT_ONCE = "at once"
    ACKNOWLEDGED = "acknowledged"
    """After the application has taken the last message of the stream, and its acknowledgement is written."""
    CONFIRMED = "confirmed"
    """After the server has closed its end, so it has read all that was written."""


class DriverTask(Protocol):
    """What a driver works for."""

    def engine(self) -> ClientEngine:
        """Return the engine for the next connection: a new one, or the one that all connections share."""

    async def take(self, events: Sequence[ClientEvent]) -> Ended | Exception | None:
        """Handle events; nothing is read meanwhile. DONE ends the run, an error makes this a failed attempt."""

    def stopped(self, stop: Stop) -> bool:
        """Return True if the task has all it wants although the connection ends like this."""


class ClientDriver:
    """Connects, reads, writes and reconnects for a task."""

    def __init__(
        self,
        dial: Dial,
        task: DriverTask,
        policy: ClientPolicy,
        *,
        observer: Observer | None = None,
        on_failed: OnFailed | None = None,
        read_bytes: int = READ_BYTES,
        closing: Closing = Closing.ACKNOWLEDGED,
    ) -> None:
        self.connections: int = 0
        """The number of connections so far, with the present one."""
        self.outage: Outage = Outage()
        """The recent failures to connect."""
        self.loss: LinkLost | None = None
        """Why the last connection was lost, if it was."""
        self.peer: str = ""
        """The other end of the last connection."""
        self.task = task
        self.policy = policy
        self.observer: Observer | None = frames_of(observer)
        self.info: SessionInfo = SessionInfo(protocol="restream", peer="")
        self.facts: Facts | None = facts_of(observer)
        self._counts = [0, 0, 0, 0]  # of connections that are over: bytes and messages received, then sent
        self._lost_at: float | None = None  # the connection before, while there is none
        self.read_bytes = read_bytes
        self.closing = closing
        self._dial = dial
        self._on_failed = on_failed
        self._connection: _Connection | None = None
        self.is_done: bool = False
        """There is no next connection."""
        self._is_leaving = False
        self._futile = 0  # connections in a row that brought nothing

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def run(self) -> None:
        """Connect again and again until the task is done; raises the error of an attempt that cannot succeed."""
        with measured(self.facts, self):
            await redial(
                self._dial,
                self._run_connection,
                backoff=self.policy.backoff,
                on_failed=self._on_failed,
                outage=self.outage,
            )

    def stats(self) -> SessionStats:
        """What all connections together have sent and received."""
        now = [0, 0, 0, 0] if self._connection is None else self._connection.counts()
        bytes_received, messages_received, bytes_sent, messages_sent = map(sum, zip(self._counts, now, strict=True))
        return SessionStats(
            bytes_received=bytes_received,
            bytes_sent=bytes_sent,
            messages_received=messages_received,
            messages_sent=messages_sent,
            channels=1 if self.is_connected else 0,
            queued=0,
            round_trip=None,
        )

    def ring(self) -> None:
        """Write what the engine has to write."""
        if self._connection is not None:
            self._connection.rung.unpark_all()

    def leave(self) -> None:
        """Read no more; write what is owed, then end. There is no next connection."""
        self._is_leaving = True
        if self._connection is not None:
            self._connection.leave()

    async def _run_connection(self, stream: trio.abc.Stream) -> Ended | Exception:
        self.connections += 1
        self.peer = peer_of(stream)
        self.info = describe(stream, "restream")
        if self.facts is not None and self._lost_at is not None:
            self.facts.resumed(trio.current_time() - self._lost_at)
            self._lost_at = None
        connection = self._connection = _Connection(stream, self)
        try:
            ended = await connection.run()
        finally:
            self._counts = [before + more for before, more in zip(self._counts, connection.counts(), strict=True)]
            self._connection = None
        self.loss = connection.loss
        self._futile = 0 if connection.has_brought else self._futile + 1
        self.is_done = self._is_leaving or ended is Ended.DONE
        if self.is_done:
            return Ended.DONE
        if self.facts is not None and self._lost_at is None:
            self._lost_at = trio.current_time()
            self.facts.outage()
        if ended is Ended.LOST and self._futile <= MAX_FUTILE:
            return Ended.WORKED
        return ended


class _Connection:
    """One connection of a driver.

    Unlike `StreamPump` it reads nothing while the task handles events, so a slow task slows down the server.
    """

    def __init__(self, stream: trio.abc.Stream, driver: ClientDriver) -> None:
        self.has_brought = False
        self.loss: LinkLost | None = None
        self.rung = trio.lowlevel.ParkingLot()
        self._stream = stream
        self._driver = driver
        self._policy = driver.policy
        self._observer = driver.observer
        self._engine = driver.task.engine()
        self._messages_before = self._engine.messages_received
        self._bytes_sent = 0
        self._began = trio.current_time()
        self._paused = 0.0  # s without reading, during which no line can be late
        self._reading = trio.CancelScope()
        self._was_heard = False
        self._is_leaving = False
        self._is_writing = False
        self._cannot_write = False
        self._wrote = trio.lowlevel.ParkingLot()

    async def run(self) -> Ended | Exception:
        """Run until the connection or the task is over. The caller closes the stream."""
        engine = self._engine
        engine.connection_made(self._now())
        ended: Ended | Exception = Ended.LOST
        try:
            # Nothing comes before the request is written; an ack that cannot be written later is no loss.
            if await self._write_out():
                async with background() as nursery:
                    nursery.start_soon(self._write)
                    ended = await self._read()
                    if ended is Ended.DONE or self._is_leaving:
                        await self._flush()
        finally:
            engine.connection_lost(self._now())
        if self.loss is not None and self._observer is not None and not engine.over:
            self._observer.error(self.loss)
        return ended

    def counts(self) -> list[int]:
        """Return the bytes and the messages received, then those sent; a client sends no messages."""
        engine = self._engine
        return [engine.bytes_received, engine.messages_received - self._messages_before, self._bytes_sent, 0]

    def leave(self) -> None:
        self._is_leaving = True
        self._reading.cancel()
        self._wrote.unpark_all()

    # --- reading

    async def _read(self) -> Ended | Exception:
        engine, task = self._engine, self._driver.task
        with self._reading:
            while True:
                stop = None
                if engine.unparsed:
                    engine.receive_bytes(b"", self._now())
                else:
                    stop = await self._receive()
                if events := engine.events():
                    if any(isinstance(event, PROGRESS) for event in events):
                        self._note_success()
                    began = trio.current_time()
                    ended = await task.take(events)
                    self._paused += trio.current_time() - began
                    if ended is not None:
                        return ended
                if stop is not None:
                    return Ended.DONE if task.stopped(stop) else Ended.LOST
        return Ended.LOST

    def _note_success(self) -> None:
        self.has_brought = True
        self._driver.outage.over()
        self._driver.outage.failures = 0  # the pauses of an old outage could be longer than a session lives

    async def _receive(self) -> Stop | None:
        """Read once, or notice that it takes too long."""
        engine = self._engine
        deadline = engine.next_deadline()
        late = math.inf if deadline is None else deadline + self._paused
        silence = self._policy.silence
        silent = math.inf if silence is None else trio.current_time() + silence
        try:
            with trio.CancelScope(deadline=min(late, silent)):
                data = await self._stream.receive_some(self._driver.read_bytes)
                if data:
                    self._was_heard = True
                    engine.receive_bytes(bytes(data), self._now())
                    return None
                engine.receive_eof(self._now())
                self._lose("the server hung up", by="peer")
                return Stop.HUNG_UP
        except BROKEN as error:
            self._lose("the connection broke", by="network", cause=error)
            return Stop.LOST
        if late <= silent:
            engine.handle_deadline(self._now())
            if engine.over or engine.state is StreamState.CONNECTED:
                return None
            silence = engine.limits.stall
        self._lose(f"nothing came for {silence:g} s", by="network")
        return Stop.SILENCE if late > silent else Stop.LOST

    def _now(self) -> float:
        """Return the time of the engine, which stands still while nothing is read."""
        return trio.current_time() - self._paused

    # --- writing

    async def _write(self) -> None:
        while await self._write_out():
            await self.rung.park()

    async def _write_out(self) -> bool:
        """Write all that the engine has to write; False if the connection is broken."""
        engine, observer = self._engine, self._observer
        self._is_writing = True
        try:
            while buffers := engine.buffers_to_send():
                if observer is not None:
                    for buffer in buffers:
                        observer.transport("out", buffer)
                data = b"".join(buffers)
                await self._stream.send_all(data)
                self._bytes_sent += len(data)
        except BROKEN as error:
            self._cannot_write = True
            self._lose("the connection broke while writing", by="network", cause=error)
            return False
        finally:
            self._is_writing = False
            self._wrote.unpark_all()
        return True

    async def _flush(self) -> None:
        """Write what is owed, as `Closing` says, in at most `ClientPolicy.linger` seconds."""
        if self._driver.closing is Closing.AT_ONCE:
            return
        self.rung.unpark_all()
        with trio.move_on_after(self._policy.linger):
            while not self._cannot_write and (self._is_writing or self._engine.has_output() or self._awaits_ack):
                await self._wrote.park()
            if self._driver.closing is Closing.CONFIRMED and isinstance(self._stream, trio.abc.HalfCloseableStream):
                # Closing with unread bytes could cut off what was written.
                try:
                    await self._stream.send_eof()
                    while await self._stream.receive_some(self._driver.read_bytes):
                        pass
                except BROKEN as error:
                    self._lose("the connection broke", by="network", cause=error)

    @property
    def _awaits_ack(self) -> bool:
        if self._is_leaving or self._driver.closing is not Closing.ACKNOWLEDGED:
            return False
        return self._engine.state is StreamState.FINISHED and self._engine.acknowledged < self._engine.last_id

    def _lose(self, reason: str, *, by: Literal["peer", "network"], cause: BaseException | None = None) -> None:
        hint: str | None = None if self._was_heard else getattr(self._stream, "hint_if_silent", None)
        self.loss = LinkLost(
            reason,
            by=by,
            peer=self._driver.peer,
            after=trio.current_time() - self._began,
            phase="leave" if self._is_leaving else "open" if self._was_heard else "handshake",
            hint=hint,
        )
        self.loss.__cause__ = cause
