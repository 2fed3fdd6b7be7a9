"""How do the streams stand, and where does each go on? Asks servers, and judges it by what was read before."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

from muxkit.pipeline.client.client import NoStatus
from muxkit.pipeline.client.requests import acknowledged
from muxkit.pipeline.concurrency import for_each_limited
from muxkit.pipeline.errors import DataLoss, OptionError
from muxkit.pipeline.options.source import MOST_ID, Planning, Start
from muxkit.pipeline.options.values import Reference
from muxkit.pipeline.source.discovery import Discovery

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from muxkit.pipeline.client.client import Answer, Client
    from muxkit.pipeline.options.source import SourceOptions
    from muxkit.pipeline.source.offsets import Offset, Position
    from muxkit.protocols import restream

PREFETCH: Final = 100_000  # messages of a stream that are counted ahead at most, where no limit says less

_log = logging.getLogger("muxkit")


@attrs.define
class StreamStatus:
    """What is known of one stream when a batch is planned."""

    uuid: str
    server: str
    begin: int
    head: int
    epoch: int | None = None
    acknowledged: int = 0
    final: bool = False
    jumps: bool = False
    """The batch does not begin where the one before has ended."""
    skips: bool = False
    """What is there now is not wanted."""

    @property
    def lag(self) -> int:
        return max(0, self.head - self.begin)

    @property
    def is_over(self) -> bool:
        """Nothing will come, and nothing is kept."""
        return self.final and self.head == self.begin == self.acknowledged


class StreamPlanner:
    """What one query has seen of its streams. All of it may be forgotten: it saves questions, and warnings."""

    def __init__(self, options: SourceOptions, client: Client) -> None:
        self.servers: dict[str, str] = {}
        """Where a stream was found."""
        self.plain: set[str] = set()
        """Streams whose server answers no status requests."""
        self.acknowledged: dict[str, int] = {}
        """As their servers say; of the plain ones, as we have told them."""
        self._options = options
        self._client = client
        self._discovery = Discovery(options, client)
        self._finished: dict[str, int] = {}  # the last message of streams that have one
        self._warned: set[str] = set()

    async def statuses(
        self, before: Offset, *, only: Collection[str] | None = None, whole: bool = False
    ) -> list[StreamStatus]:
        """All streams of which something may come, or only some, in order. Raises `DataLoss`.

        `whole`: what has to be counted is counted to its end, not just up to what one batch may hold.
        """
        references = await self._discovery.streams()
        if only is not None:
            references = {uuid: each for uuid, each in references.items() if uuid in only}
        answers = await self._find(references, references)
        statuses, uncounted = [], []
        for uuid, answer in sorted(answers.items()):
            status = self._judge(uuid, answer, before)
            if status is not None:
                statuses.append(status)
                if isinstance(answer, NoStatus):
                    uncounted.append(status)
                else:
                    self.acknowledged[uuid] = answer.acknowledged
        most = MOST_ID if whole else self._options.most_messages or PREFETCH
        await for_each_limited(uncounted, partial(self._count, most), at_once=self._options.connections)
        return statuses

    async def heads(self) -> dict[str, int]:
        """The last message of each stream whose server says so."""
        references = await self._discovery.streams()
        answers = await self._find(references, references)
        return {uuid: answer.head for uuid, answer in answers.items() if not isinstance(answer, NoStatus)}

    async def locate(self, uuids: Iterable[str]) -> None:
        """Find the servers of streams that another process has planned for."""
        lost = [uuid for uuid in uuids if uuid not in self.servers]
        if lost:
            references = await self._discovery.streams()
            if len(self._options.servers) != 1:
                for uuid in lost:
                    if uuid not in references:
                        raise OptionError("streams", f"a batch has to be read again and has stream {uuid}: name it")
            await self._find(references, lost)

    def is_done(self, uuid: str) -> bool:
        """Has it ended, with everything acknowledged? Then there is nothing to ask for."""
        return uuid in self._finished and self._finished[uuid] == self.acknowledged.get(uuid)

    def lose(self, uuid: str, problem: str) -> None:
        """Messages are gone that this query has not read."""
        if self._options.fail_on_data_loss:
            raise DataLoss(uuid, problem)
        self._warn(uuid, f"{problem}; going on with what is left")

    # --- asking

    async def _find(self, references: Mapping[str, Reference], wanted: Iterable[str]) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}

        async def ask(uuid: str) -> None:
            answers[uuid] = await self._ask(references.get(uuid, Reference(uuid)))

        await for_each_limited(list(wanted), ask, at_once=self._options.connections)
        return answers

    async def _ask(self, reference: Reference) -> Answer:
        uuid = reference.uuid
        known = reference.server or self.servers.get(uuid)
        if self.is_done(uuid):
            return NoStatus.UNKNOWN
        servers = self._options.servers if known is None else (known,)
        self.servers.setdefault(uuid, servers[0])
        for server in servers:
            answer: Answer = NoStatus.PLAIN
            if self._options.planning is not Planning.PREFETCH:
                answer = await self._client.status(server, uuid)
            if answer is NoStatus.UNKNOWN:
                continue
            if answer is NoStatus.PLAIN:
                if self._options.planning is Planning.STATUS:
                    raise OptionError("planning", f"{server} answers no status requests, which planning=status needs")
                self.plain.add(uuid)
            self.servers[uuid] = server
            return answer
        return NoStatus.UNKNOWN

    async def _count(self, most: int, status: StreamStatus) -> None:
        """Of a server that does not say how many messages there are."""
        try:
            status.head, _ = await self._client.count(status.server, status.uuid, status.begin, most=most)
        except DataLoss as error:
            gone = acknowledged(str(error))
            if gone is None or gone <= status.begin:
                raise
            if not status.jumps:
                self.lose(status.uuid, _acknowledged_by_others(status.begin, gone))
            status.begin, status.jumps = gone, True
            status.head, _ = await self._client.count(status.server, status.uuid, gone, most=most)
        if status.skips:
            status.begin = status.head

    # --- judging

    def _judge(self, uuid: str, answer: Answer, before: Offset) -> StreamStatus | None:
        """Where a stream goes on; None if there is nothing to be had of it."""
        position, is_new = before.streams.get(uuid), not before.streams
        if answer is NoStatus.UNKNOWN:
            self._miss(uuid, position, is_new=is_new)
            return None
        starting = self._options.starting
        latest = position is None and is_new and starting is Start.LATEST
        begin = 0 if position is None else position.id
        if isinstance(answer, NoStatus):
            if position is None and is_new and isinstance(starting, dict):
                begin = starting.get(uuid, 0)
            return StreamStatus(uuid, self.servers[uuid], begin, begin, jumps=position is None, skips=latest)
        if position is None:
            begin = answer.head if latest else answer.acknowledged
            if is_new and isinstance(starting, dict):
                begin = self._chosen(uuid, starting.get(uuid, begin), answer)
        status = StreamStatus(
            uuid, self.servers[uuid], begin, answer.head, answer.epoch, answer.acknowledged, answer.final
        )
        status.jumps = position is None
        problem = _loss(position, begin, answer)
        if problem is not None:
            self.lose(uuid, problem)
            status.begin, status.jumps = answer.acknowledged, True
        if answer.final:
            self._finished[uuid] = answer.head
        return status

    def _chosen(self, uuid: str, begin: int, answer: restream.Status) -> int:
        if begin > answer.head:
            raise OptionError(
                "startingOffsets", f"stream {uuid} has {answer.head} messages and cannot begin behind {begin}"
            )
        return begin

    def _miss(self, uuid: str, position: Position | None, *, is_new: bool) -> None:
        """No server knows this stream."""
        finished = self._finished.get(uuid)
        if position is not None:
            if finished != position.id:
                self.lose(uuid, f"no server knows it (any more), and messages up to {position.id} were read from it")
        elif finished is None:
            if is_new and self._options.fail_on_data_loss and any(each.uuid == uuid for each in self._options.streams):
                raise OptionError("streams", f"no server knows stream {uuid}")
            self._warn(uuid, "no server knows it; it may come later")

    def _warn(self, uuid: str, problem: str) -> None:
        if (told := f"stream {uuid}: {problem}") not in self._warned:
            self._warned.add(told)
            _log.warning("%s", told)


def _loss(position: Position | None, begin: int, answer: restream.Status) -> str | None:
    """What is gone or another now, if something is."""
    before = None if position is None else position.epoch
    if before is not None and answer.epoch is not None and answer.epoch < before:
        return (
            f"its epoch was {before} and is {answer.epoch}, so this is another session of the same name; "
            f"message {begin} was read last, {answer.head} is the last that it has now"
        )
    if begin > answer.head:
        return f"message {begin} was known and {answer.head} is the last one now: the server has gone back"
    if begin < answer.acknowledged:
        return _acknowledged_by_others(begin, answer.acknowledged)
    return None


def _acknowledged_by_others(begin: int, acknowledged: int) -> str:
    return (
        f"message {begin + 1} is next, and everything up to {acknowledged} was acknowledged, by another query perhaps"
    )
