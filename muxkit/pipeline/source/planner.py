"""The driver's side of a source: asks servers for the state of streams, plans batches, acknowledges.

It lives in one process for as long as a query runs, and is made again when the query restarts: what must survive is in
the offsets. Workers get spans and nothing else.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.pipeline.concurrency import for_each_limited
from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.options import AckMode, SourceOptions, Start
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Offset, Position, Span, share
from muxkit.pipeline.source.streams import StreamPlanner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from muxkit.pipeline.source.offsets import JsonOffset
    from muxkit.pipeline.source.streams import StreamStatus

_log = logging.getLogger("muxkit")


@attrs.frozen
class Limit:
    """Spark's limits of one batch, beside those of the options; `all` overrides both."""

    messages: int | None = None
    bytes: int | None = None
    least: int | None = None
    all: bool = False


class Planner:
    """Plans the batches of one query. `now` is a clock in seconds."""

    def __init__(
        self, options: SourceOptions, client: Client | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._client = client or Client(options)
        self._streams = StreamPlanner(options, self._client)
        self._now = now
        self._heads: dict[str, Position] = {}  # when the servers were last asked
        self._target: dict[str, int] | None = None  # the end of a query with trigger availableNow
        self._target_is_whole = False  # also for streams without status requests
        self._waiting_since: float | None = None
        self._turn = 0

    def initial(self) -> Mapping[str, object]:
        """Return the first offset. It is constant, so a crash changes nothing: the first batch stores its own start."""
        return Offset().to_json()

    async def prepare_available_now(self) -> None:
        """Fix the end of the query: here, or for servers without status requests at the first count."""
        self._target = await self._streams.heads()

    async def latest(self, start: Mapping[str, object], limit: Limit) -> Mapping[str, object]:
        """Return the end of the next batch after `start`, or `start` itself if there is nothing for one."""
        before = Offset.from_json(start)
        statuses = await self._streams.statuses(before, whole=self._target is not None and not self._target_is_whole)
        self._target_is_whole = self._target is not None
        self._heads = {status.uuid: Position(status.head, status.epoch) for status in statuses}
        ends = await self._ends(statuses, limit)
        # An empty batch stores its end, so that `latest` means the same after a crash.
        fixes = not before.streams and self._options.starting is Start.LATEST and bool(statuses)
        if not ends and not fixes:
            if self._options.ack_mode is AckMode.IDLE:
                await self._acknowledge_idle(before, statuses)
            return start
        self._turn += 1
        self._waiting_since = None
        return self._offset(before, statuses, ends).to_json()

    async def everything(self, only: Collection[str] | None = None) -> list[Span]:
        """Return the spans of a batch query, perhaps only of some streams."""
        if self._options.starting is Start.LATEST:
            raise OptionError(
                "startingOffsets", "latest is for streaming queries; a batch query would find nothing after it"
            )
        ending, spans = self._options.ending or {}, []
        for status in await self._streams.statuses(Offset(), only=only, whole=True):
            end = ending.get(status.uuid, status.head)
            if end > status.head:
                raise OptionError("endingOffsets", f"stream {status.uuid} has {status.head} messages, not {end}")
            if end > status.begin:
                spans.append(Span(status.uuid, status.server, status.begin, end))
        return spans

    def report(self) -> JsonOffset | None:
        """Return the heads of the streams when servers were last asked; Spark computes the lag from it."""
        return Offset(self._heads).to_json() if self._heads else None

    async def spans(self, start: Mapping[str, object], end: Mapping[str, object]) -> list[Span]:
        """Return what a batch has to read."""
        before, after = Offset.from_json(start), Offset.from_json(end)
        begins = {uuid: position.id for uuid, position in before.streams.items()} | dict(after.begins)
        wanted = [
            (uuid, begins.get(uuid, 0), position.id)
            for uuid, position in sorted(after.streams.items())
            if position.id > begins.get(uuid, 0)
        ]
        await self._streams.locate(uuid for uuid, _, _ in wanted)
        return [Span(uuid, self._streams.servers[uuid], begin, until) for uuid, begin, until in wanted]

    async def commit(self, end: Mapping[str, object]) -> None:
        """Acknowledge a stored batch. Errors are logged: the next acknowledgement covers this one."""
        if self._options.ack_mode is not AckMode.NEVER:
            await self._acknowledge({uuid: position.id for uuid, position in Offset.from_json(end).streams.items()})

    # --- planning

    async def _ends(self, statuses: list[StreamStatus], limit: Limit) -> dict[str, int]:
        """Choose the end of each stream that has messages for the next batch."""
        if self._target is not None:
            for status in statuses:
                if status.uuid in self._streams.plain:
                    self._target.setdefault(status.uuid, status.head)
                status.head = min(status.head, self._target.get(status.uuid, status.begin))
        lags = {status.uuid: status.lag for status in statuses if status.lag > 0}
        if not limit.all:
            if self._waits_for_more(sum(lags.values()), limit.least or self._options.least_messages):
                return {}
            most = _least(limit.messages, self._options.most_messages)
            if most is not None:
                lags = share(lags, most, turn=self._turn)
            size = _least(limit.bytes, self._options.most_bytes)
            if size is not None:
                lags = await self._fitting([status for status in statuses if status.uuid in lags], lags, size)
        return {status.uuid: status.begin + lags[status.uuid] for status in statuses if status.uuid in lags}

    def _waits_for_more(self, count: int, least: int | None) -> bool:
        if self._target is not None or least is None or not 0 < count < least:
            return False
        now = self._now()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < self._options.most_delay

    async def _fitting(self, statuses: list[StreamStatus], lags: dict[str, int], most: int) -> dict[str, int]:
        """Count how many messages fit into `most` bytes, by reading them; one message of each stream always fits."""
        if not statuses:
            return {}
        most_of_each = max(1, most // len(statuses))
        fitting: dict[str, int] = {}

        async def count(status: StreamStatus) -> None:
            last, _ = await self._client.count(
                status.server, status.uuid, status.begin, most=lags[status.uuid], most_bytes=most_of_each
            )
            fitting[status.uuid] = last - status.begin

        await for_each_limited(statuses, count, at_once=self._options.connections)
        return {uuid: count for uuid, count in sorted(fitting.items()) if count}

    def _offset(self, before: Offset, statuses: list[StreamStatus], ends: Mapping[str, int]) -> Offset:
        """Make the offset, without streams that ended and were acknowledged, so that it does not grow for ever."""
        streams = {uuid: position for uuid, position in before.streams.items() if not self._streams.is_done(uuid)}
        begins = {}
        for status in statuses:
            if status.uuid in ends or not status.is_over:
                streams[status.uuid] = Position(ends.get(status.uuid, status.begin), status.epoch)
                if status.jumps:
                    begins[status.uuid] = status.begin
        return Offset(streams, begins)

    # --- acknowledging

    async def _acknowledge_idle(self, before: Offset, statuses: list[StreamStatus]) -> None:
        """Acknowledge a batch without a successor: Spark has stored it, and would commit it only with the next one."""
        known = {status.uuid for status in statuses if not status.jumps}
        await self._acknowledge({uuid: each.id for uuid, each in before.streams.items() if uuid in known})

    async def _acknowledge(self, ids: Mapping[str, int]) -> None:
        streams = self._streams
        due = [(uuid, id) for uuid, id in sorted(ids.items()) if id > streams.acknowledged.get(uuid, 0)]

        async def acknowledge(one: tuple[str, int]) -> None:
            uuid, id = one
            server = streams.servers.get(uuid)
            if server is None:
                return
            try:
                await self._client.acknowledge(server, uuid, id)
            except Exception as error:  # any error here would end the query
                _log.warning("stream %s: message %d is not acknowledged, the next will cover it: %s", uuid, id, error)
                return
            if uuid in streams.plain:  # the other servers report it in their status
                streams.acknowledged[uuid] = id

        with trio.move_on_after(self._options.ack_timeout):
            await for_each_limited(due, acknowledge, at_once=self._options.connections)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
