"""What does the next batch hold? The driver's side of a source: asks how streams stand, plans, acknowledges.

It lives in one process for as long as a query runs, and is made anew when the query restarts: what must survive is in
the offsets. Workers get spans and nothing else.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.pipeline.client.client import Client
from muxkit.pipeline.concurrency import each
from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.options.source import AckMode, SourceOptions, Start
from muxkit.pipeline.source.offsets import Offset, Position, Span, share
from muxkit.pipeline.source.streams import Lookout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from muxkit.pipeline.source.offsets import JsonOffset
    from muxkit.pipeline.source.streams import Look

_log = logging.getLogger("muxkit")


@attrs.frozen
class Limit:
    """What Spark lets one batch hold, beside what the options say; `all`: everything, whatever they say."""

    messages: int | None = None
    bytes: int | None = None
    least: int | None = None
    all: bool = False


class Planner:
    """The planning of one query. `now` is any clock in seconds that goes on between two calls."""

    def __init__(
        self, options: SourceOptions, client: Client | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._client = client or Client(options)
        self._lookout = Lookout(options, self._client)
        self._now = now
        self._heads: dict[str, Position] = {}  # as they were when we last looked
        self._target: dict[str, int] | None = None  # where a query ends that takes what is available now
        self._target_is_whole = False  # also of servers that do not say how much there is
        self._waiting_since: float | None = None
        self._turn = 0

    def initial(self) -> Mapping[str, object]:
        """Always the same, so a crash in the first batch changes nothing: that batch says itself where it begins."""
        return Offset().to_json()

    async def prepare_available_now(self) -> None:
        """What comes later is not for this query. Where nobody can be asked, later is after the first look."""
        self._target = await self._lookout.heads()

    async def latest(self, start: Mapping[str, object], limit: Limit) -> Mapping[str, object]:
        """The end of the next batch behind `start`, or `start` itself if there is nothing for one."""
        before = Offset.from_json(start)
        looks = await self._lookout.look(before, whole=self._target is not None and not self._target_is_whole)
        self._target_is_whole = self._target is not None
        self._heads = {look.uuid: Position(look.head, look.epoch) for look in looks}
        ends = await self._ends(looks, limit)
        # An empty batch that says where it ends is what `latest` needs to mean the same after a crash.
        fixes = not before.streams and self._options.starting is Start.LATEST and bool(looks)
        if not ends and not fixes:
            if self._options.ack_mode is AckMode.IDLE:
                await self._acknowledge_idle(before, looks)
            return start
        self._turn += 1
        self._waiting_since = None
        return self._offset(before, looks, ends).to_json()

    async def everything(self, only: Collection[str] | None = None) -> list[Span]:
        """For a batch query: from where it is to begin to where it is to end; perhaps only of some streams."""
        if self._options.starting is Start.LATEST:
            raise OptionError("startingOffsets", "latest is for streams: behind it a batch would find nothing")
        ending, spans = self._options.ending or {}, []
        for look in await self._lookout.look(Offset(), only=only, whole=True):
            end = ending.get(look.uuid, look.head)
            if end > look.head:
                raise OptionError("endingOffsets", f"stream {look.uuid} has {look.head} messages, not {end}")
            if end > look.begin:
                spans.append(Span(look.uuid, look.server, look.begin, end))
        return spans

    def report(self) -> JsonOffset | None:
        """How far the streams were when we last looked; what is behind that is the lag."""
        return Offset(self._heads).to_json() if self._heads else None

    async def spans(self, start: Mapping[str, object], end: Mapping[str, object]) -> list[Span]:
        """What a batch has to read."""
        before, after = Offset.from_json(start), Offset.from_json(end)
        begins = {uuid: position.id for uuid, position in before.streams.items()} | dict(after.begins)
        wanted = [
            (uuid, begins.get(uuid, 0), position.id)
            for uuid, position in sorted(after.streams.items())
            if position.id > begins.get(uuid, 0)
        ]
        await self._lookout.locate(uuid for uuid, _, _ in wanted)
        return [Span(uuid, self._lookout.servers[uuid], begin, until) for uuid, begin, until in wanted]

    async def commit(self, end: Mapping[str, object]) -> None:
        """The batch that ends here is stored: servers may forget it. What fails here is made up for next time."""
        if self._options.ack_mode is not AckMode.NEVER:
            await self._acknowledge({uuid: position.id for uuid, position in Offset.from_json(end).streams.items()})

    # --- planning

    async def _ends(self, looks: list[Look], limit: Limit) -> dict[str, int]:
        """How far each stream comes that has something for the next batch."""
        if self._target is not None:
            for look in looks:
                if look.uuid in self._lookout.plain:
                    self._target.setdefault(look.uuid, look.head)
                look.head = min(look.head, self._target.get(look.uuid, look.begin))
        lags = {look.uuid: look.lag for look in looks if look.lag > 0}
        if not limit.all:
            if self._waits_for_more(sum(lags.values()), limit.least or self._options.least_messages):
                return {}
            most = _least(limit.messages, self._options.most_messages)
            if most is not None:
                lags = share(lags, most, turn=self._turn)
            size = _least(limit.bytes, self._options.most_bytes)
            if size is not None:
                lags = await self._fitting([look for look in looks if look.uuid in lags], lags, size)
        return {look.uuid: look.begin + lags[look.uuid] for look in looks if look.uuid in lags}

    def _waits_for_more(self, count: int, least: int | None) -> bool:
        if self._target is not None or least is None or not 0 < count < least:
            return False
        now = self._now()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < self._options.most_delay

    async def _fitting(self, looks: list[Look], lags: dict[str, int], most: int) -> dict[str, int]:
        """What fits into so many bytes. To know that, the driver reads it; one message of each stream always fits."""
        if not looks:
            return {}
        most_of_each = max(1, most // len(looks))
        fitting: dict[str, int] = {}

        async def count(look: Look) -> None:
            last, _ = await self._client.count(
                look.server, look.uuid, look.begin, most=lags[look.uuid], most_bytes=most_of_each
            )
            fitting[look.uuid] = last - look.begin

        await each(looks, count, at_once=self._options.connections)
        return {uuid: count for uuid, count in sorted(fitting.items()) if count}

    def _offset(self, before: Offset, looks: list[Look], ends: Mapping[str, int]) -> Offset:
        """Streams that ended and were acknowledged are left out: an offset grows with what lives."""
        streams = {uuid: position for uuid, position in before.streams.items() if not self._lookout.is_done(uuid)}
        begins = {}
        for look in looks:
            if look.uuid in ends or not look.is_over:
                streams[look.uuid] = Position(ends.get(look.uuid, look.begin), look.epoch)
                if look.jumps:
                    begins[look.uuid] = look.begin
        return Offset(streams, begins)

    # --- acknowledging

    async def _acknowledge_idle(self, before: Offset, looks: list[Look]) -> None:
        """Nothing came behind a batch, so Spark has stored it, and would only say so with the next one."""
        known = {look.uuid for look in looks if not look.jumps}
        await self._acknowledge({uuid: each.id for uuid, each in before.streams.items() if uuid in known})

    async def _acknowledge(self, ids: Mapping[str, int]) -> None:
        lookout = self._lookout
        due = [(uuid, id) for uuid, id in sorted(ids.items()) if id > lookout.acknowledged.get(uuid, 0)]

        async def acknowledge(one: tuple[str, int]) -> None:
            uuid, id = one
            server = lookout.servers.get(uuid)
            if server is None:
                return
            try:
                await self._client.acknowledge(server, uuid, id)
            except Exception as error:  # whatever it is: an error here would end the query
                _log.warning("stream %s: message %d is not acknowledged, the next will cover it: %s", uuid, id, error)
                return
            if uuid in lookout.plain:  # others say themselves what they have heard
                lookout.acknowledged[uuid] = id

        with trio.move_on_after(self._options.ack_timeout):
            await each(due, acknowledge, at_once=self._options.connections)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
