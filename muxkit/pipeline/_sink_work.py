"""What do a sink's tasks and its driver do? Write a partition; commit a batch, or abort it. Nothing here knows Spark.

With several servers each gets every row, and each commits for itself: what one has and another has not is made up for
when the batch is written again.
"""

from __future__ import annotations

import logging
import uuid
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import trio

from muxkit.pipeline._errors import PipelineError, told_plainly
from muxkit.pipeline._sink_rows import Blocks
from muxkit.pipeline._staging_client import StagingClient
from muxkit.pipeline._tls import link_options
from muxkit.pipeline.staging.store import Block, Key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    import pyarrow as pa

    from muxkit.pipeline._sink_options import SinkOptions
    from muxkit.pipeline.staging.store import Encoding

T = TypeVar("T")

LARGEST_BLOCK: Final = 256 << 10  # bytes
ABORTING: Final = 10.0  # s that an abort tries: what it does not reach is swept

_log = logging.getLogger("muxkit")


@attrs.frozen(kw_only=True)
class Staged:
    """What one task has staged: what the driver has to know to commit it."""

    key: Key
    batch: int
    rows: int
    txn: str | None
    """None: there were no rows, so nothing was begun."""
    urls: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Target:
    """Which batch of which application is written."""

    app: str
    batch: int
    once: bool = False


def write_partition(
    options: SinkOptions, target: Target, task: str, encoding: Encoding, batches: Iterator[pa.RecordBatch]
) -> Staged:
    """Stage and prepare what a task was given, on all servers; `task` is a part of the transaction's name."""
    key = Key(options.stream, target.app)
    maker = Blocks(encoding, min(LARGEST_BLOCK, max(1, options.window // 4)))
    made = (blocks for blocks in map(maker.of, batches) if blocks)
    first = next(made, None)
    if first is None:
        return Staged(key=key, batch=target.batch, rows=0, txn=None, urls=options.urls)
    txn = f"{target.batch}-{task}-{uuid.uuid4().hex}"

    async def write(client: StagingClient, blocks: _Given | trio.MemoryReceiveChannel[Block]) -> None:
        await client.write(txn, key, target.batch, blocks, encoding=encoding, ttl=options.ttl, once=target.once)

    async def main() -> None:
        given = _Given(chain([first], made))
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
            # What fails here cancels all of them before they could take it for the end.
            async for block in given:
                for send in ends:
                    await send.send(block)
            for send in ends:
                send.close()

    with told_plainly():
        trio.run(main)
    return Staged(key=key, batch=target.batch, rows=maker.rows, txn=txn, urls=options.urls)


def commit_batch(options: SinkOptions, parts: Sequence[Staged | None], batch: int) -> None:
    """Commit what the tasks of a batch have staged, on all servers. That it was committed before is no error."""
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
    """Drop what the tasks of a batch have staged. What was committed stays; what cannot be reached is swept later."""
    staged = _with_rows(parts)
    if not staged:
        return
    key = staged[0].key
    txns = [each.txn for each in staged if each.txn is not None]
    hasty = attrs.evolve(options, patience=min(ABORTING, options.patience))

    async def abort(client: StagingClient) -> None:
        await client.abort(key, batch, txns)

    try:
        _on_all(hasty, abort)
    except Exception as error:
        # Why the batch failed is what Spark should tell; that of this only the log has to know.
        _log.warning("%s, batch %d: what was staged could not be dropped, it will be swept: %s", key, batch, error)


def _with_rows(parts: Sequence[Staged | None]) -> list[Staged]:
    return [each for each in parts if each is not None and each.txn is not None]


def _on_all(options: SinkOptions, act: Callable[[StagingClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for url in options.urls:
                nursery.start_soon(act, _client(options, url))

    with told_plainly():
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


class _Given:
    """What a generator without Trio makes, one item after the other, each made in a thread."""

    def __init__(self, made: Iterator[list[Block]]) -> None:
        self._made = made
        self._ready: Iterator[Block] = iter(())

    def __aiter__(self) -> _Given:
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
