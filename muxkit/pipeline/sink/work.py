"""The work of a sink's tasks and its driver, without Spark: write a partition, commit a batch, abort it.

With several servers each gets every row and commits for itself: a server that missed a batch gets it when the batch is
written again.
"""

from __future__ import annotations

import logging
import uuid
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import trio

from muxkit.pipeline.errors import PipelineError, ungrouped
from muxkit.pipeline.options import link_options
from muxkit.pipeline.sink.rows import Blocks
from muxkit.pipeline.staging.client import StagingClient
from muxkit.pipeline.staging.records import Block, Key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    import pyarrow as pa

    from muxkit.pipeline.options import SinkOptions
    from muxkit.pipeline.staging.records import Encoding

T = TypeVar("T")

LARGEST_BLOCK: Final = 256 << 10  # bytes
ABORT_TIMEOUT: Final = 10.0  # s that an abort may take; what it does not reach is swept

_log = logging.getLogger("muxkit")


@attrs.frozen(kw_only=True)
class Staged:
    """What one task has staged; the driver needs this to commit it."""

    key: Key
    batch: int
    rows: int
    txn: str | None
    """None if there were no rows, so that nothing was begun."""
    urls: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Target:
    """The application and the batch that are written."""

    app: str
    batch: int
    once: bool = False


def write_partition(
    options: SinkOptions, target: Target, task: str, encoding: Encoding, batches: Iterator[pa.RecordBatch]
) -> Staged:
    """Stage and prepare the rows of a task on all servers; `task` is a part of the transaction's name."""
    key = Key(options.stream, target.app)
    maker = Blocks(encoding, min(LARGEST_BLOCK, max(1, options.window // 4)))
    made = (blocks for blocks in map(maker.of, batches) if blocks)
    first = next(made, None)
    if first is None:
        return Staged(key=key, batch=target.batch, rows=0, txn=None, urls=options.urls)
    txn = f"{target.batch}-{task}-{uuid.uuid4().hex}"

    async def write(client: StagingClient, blocks: _GeneratedBlocks | trio.MemoryReceiveChannel[Block]) -> None:
        await client.write(txn, key, target.batch, blocks, encoding=encoding, ttl=options.ttl, once=target.once)

    async def main() -> None:
        given = _GeneratedBlocks(chain([first], made))
        clients = [_client(options, url) for url in options.urls]
        if len(clients) == 1:
            await write(clients[0], given)
            return
        async with trio.open_nursery() as nursery:
            ends: list[trio.MemorySendChannel[Block]] = []
            for client in clients:
                send, receive = trio.open_memory_channel[Block](0)
                ends.append(send)
                nursery.start_soon(write, client, receive)
            # An error here cancels the writers; none may take it for the end of the rows.
            async for block in given:
                for send in ends:
                    await send.send(block)
            for send in ends:
                send.close()

    with ungrouped():
        trio.run(main)
    return Staged(key=key, batch=target.batch, rows=maker.rows, txn=txn, urls=options.urls)


def commit_batch(options: SinkOptions, parts: Sequence[Staged | None], batch: int) -> None:
    """Commit what the tasks of a batch have staged, on all servers. A batch that was committed before is no error."""
    staged = _with_rows(parts)
    if not staged:
        return
    key = staged[0].key
    strange = [each for each in staged if (each.key, each.batch, each.urls) != (key, batch, options.urls)]
    if strange:
        raise PipelineError(
            f"{key}, batch {batch}: a task has staged for {strange[0].key}, batch {strange[0].batch}; "
            "nothing was committed"
        )
    rows = {each.txn: each.rows for each in staged if each.txn is not None}

    async def commit(client: StagingClient) -> None:
        done = await client.commit(key, batch, rows)
        if done.duplicate:
            _log.warning("%s, batch %d had been committed before on %s: it was left as it is", key, batch, client.url)

    _on_all(options, commit)


def abort_batch(options: SinkOptions, parts: Sequence[Staged | None], batch: int) -> None:
    """Drop what the tasks of a batch have staged. Committed rows stay; what cannot be reached is swept later."""
    staged = _with_rows(parts)
    if not staged:
        return
    key = staged[0].key
    txns = [each.txn for each in staged if each.txn is not None]
    hasty = attrs.evolve(options, patience=min(ABORT_TIMEOUT, options.patience))

    async def abort(client: StagingClient) -> None:
        await client.abort(key, batch, txns)

    try:
        _on_all(hasty, abort)
    except Exception as error:
        # Spark reports why the batch failed; this error only goes to the log.
        _log.warning("%s, batch %d: what was staged could not be dropped, it will be swept: %s", key, batch, error)


def _with_rows(parts: Sequence[Staged | None]) -> list[Staged]:
    return [each for each in parts if each is not None and each.txn is not None]


def _on_all(options: SinkOptions, act: Callable[[StagingClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for url in options.urls:
                nursery.start_soon(act, _client(options, url))

    with ungrouped():
        trio.run(main)


def _client(options: SinkOptions, url: str) -> StagingClient:
    return StagingClient(
        url,
        token=options.token,
        patience=options.patience,
        channels=options.channels,
        window=options.window,
        **link_options(url, options.tls),
    )


class _GeneratedBlocks:
    """The blocks of a generator without Trio; each is made in a thread."""

    def __init__(self, made: Iterator[list[Block]]) -> None:
        self._made = made
        self._ready: Iterator[Block] = iter(())

    def __aiter__(self) -> _GeneratedBlocks:
        return self

    async def __anext__(self) -> Block:
        block = next(self._ready, None)
        while block is None:
            blocks = await trio.to_thread.run_sync(next, self._made, None)
            if blocks is None:
                raise StopAsyncIteration
            self._ready = iter(blocks)
            block = next(self._ready, None)
        return block
