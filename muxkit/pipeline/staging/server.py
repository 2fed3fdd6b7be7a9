"""The staging server: it answers the requests that arrive on the channels of a session.

It works over any protocol with channels. The store makes all decisions, and this module checks and authorizes requests,
passes them to the store, and reports failures of the store to clients without internal details.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, assert_never

import attrs
import trio

import muxkit
from muxkit.pipeline import errors
from muxkit.pipeline.staging import records
from muxkit.pipeline.staging.store import Staging
from muxkit.runtime import background
from muxkit.storage import StoreError, StoreFull

SWEEP_INTERVAL: Final = 5.0  # s

_log = logging.getLogger("muxkit")


@attrs.frozen(kw_only=True)
class Claim:
    """A request to be authorized: the client, and what it wants to do."""

    peer: str
    """The name of the other end, as the transport reports it. May be empty."""
    token: str
    """The client's option `token`. May be empty."""
    stream: str
    app: str
    asks: str
    """`begin`, `prepare`, `commit`, `abort` or `standing`."""


Authorize = Callable[[Claim], Awaitable[bool]]


def tokens(*allowed: str) -> Authorize:
    """Return an `authorize` function for `serve_staging`. A client with one of these tokens may do everything.

    Raises:
        ValueError: if there is no token that isn't empty.
    """
    known = [each.encode() for each in allowed if each]
    if not known:
        raise ValueError("tokens() needs at least one token that is not empty")

    async def authorize(claim: Claim) -> bool:
        given = claim.token.encode()
        # Compare all tokens in constant time, so that the duration reveals nothing about them.
        return sum(hmac.compare_digest(given, each) for each in known) > 0

    return authorize


async def serve_staging(
    url: str,
    store: Staging,
    *,
    authorize: Authorize | None = None,
    limits: muxkit.Limits | None = None,
    observer: muxkit.Observer | None = None,
    task_status: trio.TaskStatus[muxkit.Server] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Serve staging over any protocol with channels, until cancelled. Also sweeps the store regularly.

    Start it with `server = await nursery.start(serve_staging, url, store)`.

    Args:
        url: where to serve.
        store: the staging store.
        authorize: called with each request, and returns whether it is allowed. Without it, clients may do everything.
        limits: the limits of connections and channels.
        observer: receives notifications about the connections.
        task_status: gets the server.
        options: other keywords of `muxkit.serve`.

    Raises:
        ValueError: if the URL is invalid.
        OSError: if the address can't be served.
    """
    service = StagingService(store, authorize=authorize)
    async with background() as nursery:
        nursery.start_soon(service.sweep)
        try:
            await muxkit.serve(
                service.handle, url, limits=limits, observer=observer, task_status=task_status, **options
            )
        except ExceptionGroup as group:  # contains one error, about the address
            raise errors.first_error(group) from None


class StagingService:
    """A staging server without a listener. Pass each session to `handle`, and keep `sweep` running in a task."""

    def __init__(self, store: Staging, *, authorize: Authorize | None = None) -> None:
        self._store = store
        self._authorize = authorize

    async def handle(self, session: muxkit.Session) -> None:
        """Serve one session until it ends."""

        async def serve_channel(channel: muxkit.Channel) -> None:
            try:
                await self._serve_channel(channel, session.info.peer)
            except (errors.StagingError, StoreError) as error:
                # log: A client sent an invalid staging request.
                _log.debug("staging: %s refused: %s", session.info.peer or "a peer", error)
                # The end of this handler closes the channel. A client that is still sending is stopped, and reads this.
                await channel.send(records.encode(_failed(error)))

        await muxkit.each_channel(serve_channel)(session)

    async def sweep(self) -> None:
        """Drop expired transactions every few seconds, until cancelled."""
        while True:
            await trio.sleep(SWEEP_INTERVAL)
            try:
                await self._store.sweep()
            except StoreError as error:
                # log: The store failed while old transactions were deleted. The server tries again.
                _log.warning("sweeping staged transactions: %s", error)

    # --- one channel

    async def _serve_channel(self, channel: muxkit.Channel, peer: str) -> None:
        async for message in channel:
            asked = records.question(message)
            await self._admit(asked, peer)
            if isinstance(asked, records.Begin):
                await self._take_rows(asked, channel)
                return
            await channel.send(records.encode(await self._answer(asked)))

    async def _admit(self, asked: records.AnyQuestion, peer: str) -> None:
        if self._authorize is None:
            return
        asks = str(asked.__struct_config__.tag)
        claim = Claim(peer=peer, token=asked.token, stream=asked.stream, app=asked.app, asks=asks)
        if not await self._authorize(claim):
            raise errors.StagingRefused(
                f"{asked.key}: this server does not allow {asks!r} here; is the option token right?"
            )

    async def _answer(
        self, asked: records.Prepare | records.Committing | records.Abort | records.Ask
    ) -> records.Answer:
        match asked:
            case records.Prepare():
                wanted = await self._store.prepare(asked.txn, asked.key, asked.batch, asked.rows)
                return records.Begun(wanted=wanted)
            case records.Committing():
                parts = dict(asked.parts)
                if len(parts) != len(asked.parts):
                    raise errors.StagingRequestInvalid(
                        f"{asked.key}, batch {asked.batch}: a transaction is named twice"
                    )
                done = await self._store.commit(asked.key, asked.batch, parts)
                if done.duplicate:
                    # log: A client repeated a batch. The server left it unchanged.
                    _log.info("staging: %s, batch %d was committed before", asked.key, asked.batch)
                return done
            case records.Abort():
                return records.Aborted(dropped=await self._store.abort(asked.key, asked.batch, asked.txns))
            case records.Ask():
                return await self._store.progress(asked.key)
            case _:
                assert_never(asked)

    async def _take_rows(self, asked: records.Begin, channel: muxkit.Channel) -> None:
        """Store blocks as they arrive. The channel's window limits how many wait."""
        limits = self._store.limits
        wanted = await self._store.begin(asked.txn, asked.key, asked.batch, asked.encoding, asked.ttl, once=asked.once)
        await channel.send(records.encode(records.Begun(wanted=wanted)))
        while wanted:
            try:
                messages = await channel.receive_many()
            except trio.EndOfChannel:
                return
            blocks: list[records.Block] = []
            for message in messages:
                if not records.is_block(message):
                    raise errors.StagingRequestInvalid(
                        f"{asked.key}, batch {asked.batch}: a question came where rows were expected"
                    )
                blocks.append(records.decode_block(message, limits))
            wanted = await self._store.put(asked.txn, asked.key, asked.batch, blocks)
            await channel.send(
                records.encode(records.Stored(blocks=len(blocks)) if wanted else records.Begun(wanted=False))
            )


def _failed(error: errors.StagingError | StoreError) -> records.Failed:
    match error:
        case errors.StagingError():
            return records.Failed(kind=error.kind, text=str(error))
        case StoreFull(passes=False):
            return records.Failed(kind=errors.StagingFull.kind, text=error.for_client)
        case _:  # including a full disk: a client repeats its request for as long as its option `patience` allows
            # log: The staging store failed. The client repeats the batch.
            _log.warning("staging: %s", error)
            return records.Failed(kind=errors.StagingUnavailable.kind, text=error.for_client)
