"""The client of a staging server. It stages rows, commits them, and reconnects after a loss.

Every request can be repeated without harm, so after a loss no rows are missing and nothing is done twice. The client
keeps the rows that the server hasn't stored yet, at most `window` bytes per channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import trio

import muxkit
from muxkit.core import without_secrets
from muxkit.pipeline.errors import StagingError, StagingRequestInvalid, StagingUnavailable
from muxkit.pipeline.staging import records
from muxkit.runtime import Backoff, background, can_heal

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", records.Begun, records.Committed, records.Aborted, records.BatchProgress)

OUTAGE_LIMIT: Final = 60.0  # s
ANSWER_TIMEOUT: Final = 30.0  # s for an answer, and for sending a block
WINDOW: Final = 1 << 20  # bytes
TTL: Final = 86_400.0  # s

# Errors after which a new connection may succeed.
PASSING = (
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    trio.TooSlowError,
    StagingUnavailable,
)


@attrs.frozen(kw_only=True)
class Written:
    """The result of writing one transaction."""

    rows: int
    """The number of rows that were given."""
    wanted: bool
    """False if the batch was already committed, so that the rows were dropped."""


class StagingClient:
    """A client of one staging server. It is connected only during a request.

    Args:
        url: the URL of the server.
        token: a token that the server may require.
        patience: the seconds of consecutive failures after which `StagingUnavailable` is raised.
        channels: how many channels write rows simultaneously.
        window: bytes of rows per channel that the server hasn't stored yet.
        backoff: the pauses between attempts to reconnect.
        answer_within: seconds to wait for an answer, and for sending a block.
        options: other keywords of `muxkit.connect`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        patience: float = OUTAGE_LIMIT,
        channels: int = 1,
        window: int = WINDOW,
        backoff: Backoff | None = None,
        answer_within: float = ANSWER_TIMEOUT,
        **options: Any,
    ) -> None:
        self.url = url
        self.shown: str = without_secrets(url)
        """The URL for logs and errors, without secrets."""
        self.token = token
        self.channels = channels
        self.window = window
        self.answer_within = answer_within
        self.connections: int = 0
        """The number of connections so far."""
        self._patience = patience
        self._backoff = backoff or Backoff(most=5.0)
        self._options = options
        self._failures = 0
        self._failing_since: float | None = None

    async def write(
        self,
        txn: str,
        key: records.Key,
        batch: int,
        blocks: AsyncIterator[records.Block],
        *,
        encoding: records.Encoding,
        ttl: float = TTL,
        once: bool = False,
    ) -> Written:
        """Stage a transaction and prepare it.

        If the batch is already committed, the remaining blocks are consumed and dropped. If this call is cancelled, the
        transaction stays staged until it expires, and the call may be repeated.

        Args:
            txn: the name of the transaction.
            key: the stream and the application.
            batch: the number of the batch.
            blocks: the rows, from row 0 and without gaps.
            encoding: the encoding of the rows.
            ttl: the seconds without a change after which the server deletes the transaction.
            once: True if the application has only this batch. The server then deletes the application later.

        Returns:
            How many rows were given, and whether they were wanted.

        Raises:
            StagingUnavailable: if the server can't be used for `patience` seconds.
            StagingError: if the server refuses the transaction. An exception of `blocks` is raised unchanged.
        """
        begin = records.Begin(
            stream=key.stream,
            app=key.app,
            token=self.token,
            txn=txn,
            batch=batch,
            encoding=encoding,
            ttl=ttl,
            once=once,
        )
        return await _Writing(self, begin, blocks).run()

    async def commit(self, key: records.Key, batch: int, parts: Mapping[str, int]) -> records.Committed:
        """Commit transactions as one batch: either all of them, in this order, or none.

        Args:
            key: the stream and the application.
            batch: the number of the batch.
            parts: the number of rows of each transaction, by its name.

        Returns:
            The result. Its `duplicate` is True if this batch or a later one was already committed.

        Raises:
            NotCommitted: if a transaction isn't prepared or has another number of rows.
            StagingUnavailable: if the server can't be used for `patience` seconds. The batch may have been committed.
        """
        asked = records.Committing(
            stream=key.stream, app=key.app, token=self.token, batch=batch, parts=list(parts.items())
        )
        return await self._ask(asked, records.Committed, f"{key}, batch {batch}")

    async def abort(self, key: records.Key, batch: int, txns: Sequence[str]) -> int:
        """Drop transactions of a batch, and return how many there were. A committed batch isn't changed."""
        asked = records.Abort(stream=key.stream, app=key.app, token=self.token, batch=batch, txns=list(txns))
        return (await self._ask(asked, records.Aborted, f"{key}, batch {batch}")).dropped

    async def standing(self, key: records.Key) -> records.BatchProgress:
        """Return the progress of an application."""
        return await self._ask(
            records.Ask(stream=key.stream, app=key.app, token=self.token), records.BatchProgress, str(key)
        )

    # ------------------------------------------------------------------------ one request

    async def _ask(self, asked: records.AnyQuestion, expected: type[AnswerT], about: str) -> AnswerT:
        return await self.persist(lambda session: self.exchange(session, asked, expected), about)

    async def exchange(self, session: muxkit.Session, asked: records.AnyQuestion, expected: type[AnswerT]) -> AnswerT:
        """Send one request on a new channel, and return the answer."""
        with trio.fail_after(self.answer_within):
            async with session.open() as channel:
                await channel.send(records.encode(asked))
                got = records.answer(await channel.receive())
        if not isinstance(got, expected):
            raise _strange(got)
        return got

    # ------------------------------------------------------------------------ connections

    async def persist(self, run: Callable[[muxkit.Session], Awaitable[T]], about: str) -> T:
        """Call `run` with one connection after another, until it succeeds or fails permanently."""
        while True:
            done: list[T] = []
            reached = False
            try:
                async with muxkit.connect(self.url, **self._options) as session:
                    reached = True
                    self.connections += 1
                    done.append(await run(session))
                return done[0]
            except PASSING as error:
                if done:  # only closing the connection failed
                    return done[0]
                trouble = error
            except (ValueError, TypeError, muxkit.PluginError) as error:
                if reached:
                    raise
                raise StagingError(f"{about}: this cannot be an address (option url): {error}") from error
            await self._pause(trouble, about)

    def progress(self) -> None:
        """Record progress, so that earlier failures no longer count."""
        self._failures = 0
        self._failing_since = None

    async def _pause(self, trouble: Exception, about: str) -> None:
        now = trio.current_time()
        if self._failing_since is None:
            self._failing_since = now
        self._failures += 1
        failing = now - self._failing_since
        # A server without room reports that in an answer, or closes the channel. Neither means a bad connection.
        may_pass = isinstance(trouble, StagingUnavailable | trio.EndOfChannel) or can_heal(trouble)
        if failing >= self._patience or not may_pass:
            because = str(trouble) or type(trouble).__name__
            raise StagingUnavailable(
                f"{about}: {self.shown} could not be used for {failing:.0f} s ({self._failures} attempts): {because}; "
                "is the server running? The option patience says how long to try"
            ) from trouble
        await trio.sleep(min(self._backoff.wait(self._failures), self._patience - failing))


class _Writing:
    """Writes one transaction to the server."""

    def __init__(self, client: StagingClient, begin: records.Begin, blocks: AsyncIterator[records.Block]) -> None:
        self._client = client
        self._begin = begin
        self._blocks = blocks
        self._room = client.window * client.channels
        self._waiting: deque[records.Block] = deque()
        self._under_way = 0  # bytes of blocks that the server hasn't stored
        self._rows = 0
        self._wanted = True
        self._all_given = False
        self._given_error: Exception | None = None
        self._trouble: Exception | None = None
        self._moved = trio.lowlevel.ParkingLot()
        self._given = trio.CancelScope()  # cancelled when `blocks` raises
        self._connection = trio.CancelScope()

    async def run(self) -> Written:
        async with background() as nursery:
            nursery.start_soon(self._take)
            begin = self._begin
            with self._given:
                await self._client.persist(self._over, f"{begin.key}, batch {begin.batch}, transaction {begin.txn}")
                while not self._all_given:
                    await self._moved.park()
            if self._given_error is not None:
                raise self._given_error
        return Written(rows=self._rows, wanted=self._wanted)

    async def _take(self) -> None:
        """Take blocks from the caller while the window has room."""
        try:
            async for block in self._blocks:
                size = len(block.body)
                while self._wanted and self._under_way and self._under_way + size > self._room:
                    await self._moved.park()
                self._rows += block.rows
                if self._wanted:
                    self._waiting.append(block)
                    self._under_way += size
                    self._moved.unpark_all()
        except Exception as error:
            self._given_error = error
            self._given.cancel()
        self._all_given = True
        self._moved.unpark_all()

    async def _over(self, session: muxkit.Session) -> None:
        """Stage the remaining blocks over one connection, and prepare the transaction."""
        self._trouble = None
        with trio.CancelScope() as self._connection:
            async with trio.open_nursery() as nursery:
                for _ in range(self._client.channels):
                    nursery.start_soon(self._run_channel, session)
        if self._trouble is not None:
            raise self._trouble
        if self._wanted:
            begin = self._begin
            asked = records.Prepare(
                stream=begin.stream, app=begin.app, token=begin.token, txn=begin.txn, batch=begin.batch, rows=self._rows
            )
            self._wanted = (await self._client.exchange(session, asked, records.Begun)).wanted

    async def _run_channel(self, session: muxkit.Session) -> None:
        """Write on one channel until everything is stored. Blocks that weren't stored return to the queue."""
        flying: deque[records.Block] = deque()
        try:
            await self._write(session, flying)
        except Exception as error:
            if self._trouble is None:
                self._trouble = error
            self._connection.cancel()
        finally:
            self._waiting.extendleft(reversed(flying))

    async def _write(self, session: muxkit.Session, flying: deque[records.Block]) -> None:
        async with session.open() as channel:
            with trio.fail_after(self._client.answer_within):
                await channel.send(records.encode(self._begin))
            await self._read_answer(channel, flying)
            while self._wanted:
                if self._waiting:
                    flying.append(self._waiting.popleft())
                    await self._send(channel, flying)
                elif flying:
                    await self._read_answer(channel, flying)
                elif self._all_given:
                    break
                else:
                    await self._moved.park()

    async def _send(self, channel: muxkit.Channel, flying: deque[records.Block]) -> None:
        try:
            with trio.fail_after(self._client.answer_within):
                await channel.send(records.encode_block(flying[-1]))
        except muxkit.ChannelStopped:
            # The server doesn't want more rows. Its answers contain the reason.
            while self._wanted:
                await self._read_answer(channel, flying)

    async def _read_answer(self, channel: muxkit.Channel, flying: deque[records.Block]) -> None:
        with trio.fail_after(self._client.answer_within):
            got = records.answer(await channel.receive())
        self._client.progress()
        match got:
            case records.Begun(wanted=True):
                return
            case records.Begun():
                self._wanted = False
                flying.clear()
                self._waiting.clear()
                self._under_way = 0
            case records.Stored(blocks=count) if count <= len(flying):
                for _ in range(count):
                    self._under_way -= len(flying.popleft().body)
            case _:
                raise _strange(got)
        self._moved.unpark_all()


def _strange(got: records.Answer) -> StagingError:
    return StagingRequestInvalid(f"the server answered with {type(got).__name__}, which answers nothing that was asked")
