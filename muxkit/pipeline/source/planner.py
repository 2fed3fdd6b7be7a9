"""The driver's part of the source: it finds streams, asks servers for their state, and plans and acknowledges batches.

The planner lives in one process while a query runs, and is made again when the query restarts. The offsets contain
everything that must survive a restart. Workers get only spans.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from functools import partial
from typing import Final, TypeVar

import attrs
import trio

from muxkit.core import without_secrets
from muxkit.pipeline.concurrency import for_each_limited
from muxkit.pipeline.errors import DataLoss, OptionError, StreamUnavailable
from muxkit.pipeline.options import MOST_ID, AckMode, Planning, Reference, SourceOptions, Start
from muxkit.pipeline.source.client import TOGETHER, Answer, Client, NoStatus
from muxkit.pipeline.source.discovery import Discovery, Subscription
from muxkit.pipeline.source.offsets import EVERYTHING, JsonOffset, Offset, Position, Span, Wanted, share
from muxkit.pipeline.stopping import StopFile
from muxkit.protocols import restream

MISSING_AFTER: Final = 10.0  # s without an answer after which a server counts as missing
PROBE_INTERVAL: Final = 5.0  # s between two attempts to reach a missing server
PROBE_TIMEOUT: Final = 1.0  # s that such an attempt may take, because the other streams wait for it
ALL_AWAY_PAUSE: Final = 1.0  # s; without this pause, Spark would ask again immediately
REST: Final = 40  # pause after a look that found nothing, as a multiple of its duration; keeps idle queries cheap
LONGEST_REST: Final = 2.0  # s
STOPPING_PAUSE: Final = 0.1  # s between two looks of a query that is about to be stopped
PREFETCH: Final = 100_000  # messages of a stream to count ahead, unless a limit is lower

ResultT = TypeVar("ResultT")

_log = logging.getLogger("muxkit")


class Planner:
    """Plans the batches of one query. `now` is a clock in seconds."""

    def __init__(
        self, options: SourceOptions, client: Client | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._client = client or Client(options)
        self._streams = StreamPlanner(options, self._client, now)
        self._now = now
        self._answered: dict[str, int] = {}  # the turn in which acknowledging a stream was last attempted
        self._ack_turn = 0
        self._heads: dict[str, Position] = {}  # as of the last status requests
        self._target: dict[str, int] | None = None  # the end of a query with the trigger availableNow
        self._target_is_whole = False  # the target includes the streams without status requests
        self._waiting_since: float | None = None
        # The last planned message, if it was the head, with the incarnation and the bytes of its session at that time.
        self._planned: dict[str, tuple[int, str | None, int]] = {}
        self._rest_until = 0.0  # when an idle query asks the servers again
        # The start after which nothing was found. As long as no stream has changed, nothing is there now either.
        self._settled: Mapping[str, object] | None = None
        self._turn = 0

    def initial(self) -> Mapping[str, object]:
        """Return the first offset. It is constant, so a crash changes nothing. The first batch stores its own start."""
        return Offset().to_json()

    async def prepare_available_now(self) -> None:
        """Fix the end of the query. For servers without status requests, the first count fixes it."""
        self._target = await self._streams.heads()

    async def latest(self, start: Mapping[str, object], *, limited: bool = True) -> Mapping[str, object]:
        """Return the end of the next batch after `start`, or `start` itself if there is nothing to read.

        Without `limited`, the limits of the options don't apply.

        Raises:
            OffsetError: if `start` isn't an offset of this source.
            DataLoss: if unread messages were deleted and the options don't allow that.
            OptionError: if an option turns out to be invalid.
            StreamUnavailable: if a server that is needed doesn't answer.
        """
        if self._options.stop_file is not None and await self._is_stopping(StopFile(self._options.stop_file), start):
            return start
        await trio.sleep(max(0.0, self._rest_until - self._now()))
        began = self._now()
        if not await self._streams.refresh(all_of_them=self._streams.decides(start)) and start == self._settled:
            self._rest(began)
            return start
        before = Offset.from_json(start)
        self._settled = None
        statuses = await self._streams.statuses(before, whole=self._target is not None and not self._target_is_whole)
        self._target_is_whole = self._target is not None
        heads = {status.uuid: Position(status.head, status.incarnation) for status in statuses}
        # If a server doesn't answer, keep the head that it reported last, so that its lag stays visible.
        kept = {uuid: head for uuid, head in self._heads.items() if uuid in before.streams}
        self._heads = {uuid: head for uuid, head in kept.items() if not self._streams.is_removed(uuid)} | heads
        ends = await self._ends(statuses, limited=limited)
        # Return an end even for an empty first batch, so that `latest` still means the same after a crash.
        fixes = not before.streams and self._options.starting is Start.LATEST and bool(statuses)
        if not ends and not fixes:
            self._rest(began)
            if self._streams.is_settled and self._target is None and self._waiting_since is None:
                self._settled = start
            if self._options.acknowledging is AckMode.IDLE:
                # Spark has stored the last batch, but would commit it only together with the next one.
                known = {status.uuid for status in statuses if not status.jumps}
                await self._acknowledge({uuid: each.id for uuid, each in before.streams.items() if uuid in known})
            return start
        for status in statuses:
            if status.written is not None and ends.get(status.uuid, status.begin) == status.head:
                self._planned[status.uuid] = status.head, status.incarnation, status.written
        self._turn += 1
        self._waiting_since = None
        return self._offset(before, statuses, ends).to_json()

    async def everything(self, wanted: Wanted = EVERYTHING) -> list[Span]:
        """Return the spans of a batch query, which reads everything up to `endingOffsets`, or some of it."""
        if self._options.starting is Start.LATEST:
            raise OptionError(
                "startingOffsets", "latest is for streaming queries; a batch query would find nothing after it"
            )
        ending, spans = self._options.ending or {}, []
        await self._streams.refresh(all_of_them=True)
        for status in await self._streams.statuses(Offset(), whole=True, all_of_them=True, only=wanted.streams):
            end = ending.get(status.uuid, status.head)
            if end > status.head:
                raise OptionError("endingOffsets", f"stream {status.uuid} has {status.head} messages, not {end}")
            begin, end = max(status.begin, wanted.after), min(end, wanted.upto)
            if end > begin:
                spans.append(Span(status.uuid, status.server, begin, end, status.incarnation))
        return spans

    def report(self) -> JsonOffset | None:
        """Return the heads that servers last reported, from which Spark computes the lag."""
        return Offset(self._heads).to_json() if self._heads else None

    async def spans(self, start: Mapping[str, object], end: Mapping[str, object]) -> list[Span]:
        """Return the ranges that a batch has to read."""
        before, after = Offset.from_json(start), Offset.from_json(end)
        begins = {uuid: position.id for uuid, position in before.streams.items()} | dict(after.begins)
        wanted = [
            (uuid, begins.get(uuid, 0), position)
            for uuid, position in sorted(after.streams.items())
            if position.id > begins.get(uuid, 0)
        ]
        await self._streams.locate(uuid for uuid, _, _ in wanted)
        servers = self._streams.servers
        return [Span(uuid, servers[uuid], begin, until.id, until.incarnation) for uuid, begin, until in wanted]

    async def commit(self, end: Mapping[str, object]) -> None:
        """Acknowledge a stored batch. Errors are logged, because the next acknowledgement covers this one."""
        streams = Offset.from_json(end).streams
        if self._options.acknowledging is not AckMode.NEVER:
            await self._acknowledge({uuid: position.id for uuid, position in streams.items()})

    async def _is_stopping(self, file: StopFile, start: Mapping[str, object]) -> bool:
        """Return True if the query is about to be stopped.

        Spark asks for the next batch after the last one is complete. So no batch is running now, and none begins as
        long as the file exists.
        """
        if not file.is_requested:
            return False
        await trio.sleep(STOPPING_PAUSE)
        if self._options.acknowledging is AckMode.IDLE and not file.is_confirmed:
            await self.commit(start)  # Spark would commit the last batch only together with the next one
        file.confirm()
        return True

    def _rest(self, began: float) -> None:
        """Pause before the next look, since a look that began at this time has found nothing."""
        self._rest_until = self._now() + min(LONGEST_REST, (self._now() - began) * REST)

    # --- planning

    async def _ends(self, statuses: list[StreamStatus], *, limited: bool) -> dict[str, int]:
        """Choose the end of each stream that has messages for the next batch."""
        if self._target is not None:
            for status in statuses:
                if status.uuid in self._streams.plain:
                    self._target.setdefault(status.uuid, status.head)
                target = self._target.get(status.uuid, status.begin)
                if target < status.head:
                    status.head, status.written = target, None
        lags = {status.uuid: status.lag for status in statuses if status.lag > 0}
        if limited:
            options = self._options
            if self._waits_for_more(sum(lags.values()), options.least_messages):
                return {}
            if options.most_messages is not None:
                lags = share(lags, options.most_messages, turn=self._turn)
            if options.most_bytes is not None:
                waiting = [status for status in statuses if status.uuid in lags]
                lags = await self._fitting(waiting, lags, options.most_bytes)
        return {status.uuid: status.begin + lags[status.uuid] for status in statuses if status.uuid in lags}

    def _waits_for_more(self, count: int, least: int | None) -> bool:
        if self._target is not None or least is None or not 0 < count < least:
            return False
        now = self._now()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < self._options.most_delay

    async def _fitting(self, statuses: list[StreamStatus], lags: dict[str, int], most: int) -> dict[str, int]:
        """Return how many messages fit into `most` bytes, by reading them. At least one message of each stream fits."""
        if not statuses:
            return {}
        waiting = [self._waiting_bytes(status) for status in statuses]
        if None not in waiting and sum(filter(None, waiting)) <= most:
            return lags
        most_of_each = max(1, most // len(statuses))
        fitting: dict[str, int] = {}

        async def count(status: StreamStatus) -> None:
            last = await self._client.count(
                status.server, status.uuid, status.begin, most=lags[status.uuid], most_bytes=most_of_each
            )
            fitting[status.uuid] = last - status.begin

        await for_each_limited(statuses, count, at_once=self._options.connections)
        return {uuid: count for uuid, count in sorted(fitting.items()) if count}

    def _waiting_bytes(self, status: StreamStatus) -> int | None:
        """Return the bytes of the unread messages, from the server's numbers, or None if they aren't known."""
        if status.written is None:
            return None
        if status.begin == 0:
            return status.written
        id, incarnation, written = self._planned.get(status.uuid, (0, None, 0))
        known = id == status.begin and incarnation == status.incarnation
        return status.written - written if known else None

    def _offset(self, before: Offset, statuses: list[StreamStatus], ends: Mapping[str, int]) -> Offset:
        """Return the offset. Streams that ended and were acknowledged are left out, so that it doesn't grow forever."""
        known = self._streams
        streams = {
            uuid: position
            for uuid, position in before.streams.items()
            if not known.is_done(uuid) and not known.is_removed(uuid)
        }
        begins = {}
        for status in statuses:
            if status.uuid in ends or not status.is_over:
                streams[status.uuid] = Position(ends.get(status.uuid, status.begin), status.incarnation)
                if status.jumps:
                    begins[status.uuid] = status.begin
        return Offset(streams, begins)

    # --- acknowledging

    async def _acknowledge_together(self, due: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Acknowledge for a named reader, with many streams per request. Return those to be acknowledged one by one."""
        streams = self._streams
        if not self._options.reader:
            return due
        left, by_server = [], dict[str, dict[str, int]]()
        for uuid, id in due:
            server = streams.servers.get(uuid)
            if server is None or uuid in streams.plain or streams.is_single(server):
                left.append((uuid, id))
            elif not streams.is_away(server):
                by_server.setdefault(server, {})[uuid] = id

        async def tell(request: tuple[str, list[str]]) -> None:
            server, uuids = request
            ids = {uuid: by_server[server][uuid] for uuid in uuids}
            try:
                if not await streams.acknowledge(server, ids):
                    left.extend(ids.items())
            except Exception as error:  # an exception here would end the query
                shown = without_secrets(server)
                # log: An acknowledgement failed. The next batch acknowledges these messages too.
                _log.warning("%s: %d streams are not acknowledged, the next will cover it: %s", shown, len(ids), error)
            self._answered.update(dict.fromkeys(uuids, self._ack_turn))

        requests = [(server, some) for server, ids in by_server.items() for some in _chunks([*ids])]
        with trio.move_on_after(self._options.ack_timeout):
            await for_each_limited(requests, tell, at_once=self._options.connections)
        return left

    async def _acknowledge(self, ids: Mapping[str, int]) -> None:
        streams = self._streams
        due = [(uuid, id) for uuid, id in sorted(ids.items()) if id > streams.acknowledged.get(uuid, 0)]
        # Start with the streams that were skipped last time, or streams that keep moving would starve them.
        due.sort(key=lambda each: self._answered.get(each[0], 0))
        self._ack_turn += 1

        due = await self._acknowledge_together(due)

        async def acknowledge(one: tuple[str, int]) -> None:
            uuid, id = one
            server = streams.servers.get(uuid)
            if server is None or streams.is_away(server):
                return
            try:
                await self._client.acknowledge(server, uuid, id)
                self._answered[uuid] = self._ack_turn
            except Exception as error:  # an exception here would end the query
                self._answered[uuid] = self._ack_turn
                # log: The same for one stream.
                _log.warning("stream %s: message %d is not acknowledged, the next will cover it: %s", uuid, id, error)
                return
            if uuid in streams.plain:  # other servers report it in their status
                streams.acknowledged[uuid] = id

        with trio.move_on_after(self._options.ack_timeout) as scope:
            await for_each_limited(due, acknowledge, at_once=self._options.connections)
        if scope.cancelled_caught:
            left = sum(self._answered.get(uuid) != self._ack_turn for uuid, _ in due)
            # log: The server keeps messages longer than necessary. Nothing is lost.
            _log.warning(
                "%d of %d streams were not acknowledged within ackTimeout=%g s: they come first next time",
                left,
                len(due),
                self._options.ack_timeout,
            )


# ---------------------------------------------------------------------------- the state of streams


@attrs.define
class StreamStatus:
    """The state of one stream when a batch is planned."""

    uuid: str
    server: str
    begin: int
    head: int
    incarnation: str | None = None
    acknowledged: int = 0
    final: bool = False
    written: int | None = None
    """Bytes of all messages up to the head. None if the server doesn't report it, or if the head was lowered."""
    jumps: bool = False
    """The batch doesn't start where the last one ended."""
    skips: bool = False
    """The messages that exist now aren't wanted."""

    @property
    def lag(self) -> int:
        """The number of messages after `begin`."""
        return max(0, self.head - self.begin)

    @property
    def is_over(self) -> bool:
        """True if the stream has ended and the server keeps no messages."""
        return self.final and self.head == self.begin == self.acknowledged


class StreamPlanner:
    """Knows the streams of one query. It only saves requests and warnings, so it may be discarded at any time."""

    def __init__(self, options: SourceOptions, client: Client, now: Callable[[], float] = time.monotonic) -> None:
        self.servers: dict[str, str] = {}
        """The server of each stream that was found."""
        self.plain: set[str] = set()
        """Streams whose server doesn't support status requests."""
        self.acknowledged: dict[str, int] = {}
        """The last acknowledged message by stream: as reported by servers, or for `plain` streams as sent from here."""
        self._options = options
        self._client = client
        self._discovery = Discovery(options, client)
        self._subscription = None if options.pattern is None else Subscription(options.pattern, options.servers)
        self._removed: set[str] = set()  # streams that no server lists any more
        self._heads: dict[str, int] = {}  # the last message of each subscribed stream, as listed last
        self._finished: dict[str, int] = {}  # the last message of streams that have ended
        self._warned: set[str] = set()
        self._now = now
        self._single: set[str] = set()  # servers that answer for one stream at a time
        self._away: dict[str, float] = {}  # servers that don't answer, and when to ask them again

    def decides(self, start: Mapping[str, object]) -> bool:
        """Return True for the start of a query whose first batch decides where each stream begins."""
        options = self._options
        return not start.get("streams") and (
            options.starting_time is not None or options.starting is not Start.EARLIEST
        )

    @property
    def is_settled(self) -> bool:
        """True if `refresh` reports every change of all streams of the query."""
        options = self._options
        has_others = options.streams or options.streams_file is not None or options.directory is not None
        return self._subscription is not None and not has_others and not self._away

    async def refresh(self, *, all_of_them: bool = False) -> bool:
        """Ask each server of a subscription, with one request, for the sessions that have changed.

        Returns:
            False if nothing has changed, so that another look would find the same. True without a subscription.

        Raises:
            OptionError: if a server has no listing.
            StreamUnavailable: if a server that is needed doesn't answer.
        """
        subscription = self._subscription
        if subscription is None:
            return True
        is_needed = all_of_them or self._options.fail_on_missing_server
        changed: list[str] = []

        async def ask(server: str) -> None:
            is_over = False
            while not is_over:
                listing = await self._if_present(
                    server,
                    lambda within: self._client.listing(server, subscription.since(server), within=within),
                    is_needed=is_needed,
                )
                if listing is None or subscription.apply(server, listing):
                    changed.append(server)
                is_over = listing is None or not listing.more

        await for_each_limited(self._options.servers, ask, at_once=self._options.connections)
        return bool(changed)

    async def statuses(
        self, before: Offset, *, whole: bool = False, all_of_them: bool = False, only: Container[str] | None = None
    ) -> list[StreamStatus]:
        """Return the state of all streams that may have messages, in order.

        Args:
            before: the end of the last batch.
            whole: count streams without status requests to their end, and not only as far as one batch may go.
            all_of_them: fail if a server doesn't answer. By default its streams are left out.
            only: the streams that are wanted, or None for all streams of the query.

        Raises:
            DataLoss: if unread messages were deleted and the options don't allow that.
            OptionError: if an option turns out to be invalid.
            StreamUnavailable: if a server that is needed doesn't answer.
        """
        references, answers = await self._look_up()
        if not before.streams:
            _check_named("startingOffsets", self._options.starting, references)
            _check_named("endingOffsets", self._options.ending, references)
        # Where a stream starts is decided only once, in the first batch.
        by_time = not before.streams and self._options.starting_time is not None
        decides = by_time or (not before.streams and self._options.starting is not Start.EARLIEST)
        wanted = [uuid for uuid in references if uuid not in answers and (only is None or uuid in only)]
        answers = {uuid: answer for uuid, answer in answers.items() if only is None or uuid in only}
        answers |= await self._find(references, wanted, all_of_them=all_of_them or decides)
        if all(answer is NoStatus.AWAY for answer in answers.values()) and (answers or self._away):
            await trio.sleep(ALL_AWAY_PAUSE)
        self._note_removed(before, references)
        statuses, uncounted = [], []
        for uuid, answer in sorted(answers.items()):
            status = self._judge(uuid, answer, before)
            if status is not None:
                statuses.append(status)
                if isinstance(answer, NoStatus):
                    uncounted.append(status)
                else:
                    self.acknowledged[uuid] = status.acknowledged
        most = MOST_ID if whole else self._options.most_messages or PREFETCH
        await for_each_limited(uncounted, partial(self._count, most), at_once=self._options.connections)
        if by_time:
            await for_each_limited(statuses, self._find_time, at_once=self._options.connections)
        return statuses

    async def heads(self) -> dict[str, int]:
        """Return the last message of each stream whose server reports it."""
        await self.refresh()
        references, answers = await self._look_up()
        answers |= await self._find(references, [uuid for uuid in references if uuid not in answers])
        return {uuid: answer.head for uuid, answer in answers.items() if not isinstance(answer, NoStatus)}

    async def locate(self, uuids: Iterable[str]) -> None:
        """Find the servers of streams that another process has planned."""
        lost = [uuid for uuid in uuids if uuid not in self.servers]
        if lost:
            if self._subscription is not None:
                await self.refresh(all_of_them=True)
            references, _ = await self._look_up()
            lost = [uuid for uuid in lost if uuid not in self.servers]
            unnamed = [uuid for uuid in lost if uuid not in references]
            if unnamed and len(self._options.servers) != 1 and self._subscription is None:
                raise OptionError("streams", f"a batch has to be read again and has stream {unnamed[0]}: name it")
            await self._find(references, lost, all_of_them=True)

    def is_done(self, uuid: str) -> bool:
        """Return True if the stream has ended and is completely acknowledged."""
        return uuid in self._finished and self._finished[uuid] == self.acknowledged.get(uuid)

    def lose(self, uuid: str, problem: str) -> None:
        """Report that unread messages were deleted. Raises `DataLoss` unless the options allow it."""
        if self._options.fail_on_data_loss:
            raise DataLoss(uuid, problem)
        self._warn(uuid, f"{problem}; going on with what is left")

    def is_removed(self, uuid: str) -> bool:
        """Return True if no server lists this stream any more. It was named by a pattern only."""
        return uuid in self._removed

    # --- subscribing

    async def _look_up(self) -> tuple[dict[str, Reference], dict[str, Answer]]:
        """Return all streams of the query, and the answers that listings gave for some of them, which save requests.

        There is no such answer for a stream in which the reader of the query isn't enrolled yet, because only a status
        request enrols.
        """
        references = await self._discovery.streams()
        answers: dict[str, Answer] = {}
        subscribed = {} if self._subscription is None else self._subscription.sessions()
        for uuid, (server, status) in subscribed.items():
            references[uuid] = Reference(uuid, server)
            self.servers[uuid] = server
            self._heads[uuid] = status.head
            if server in self._away:
                answers[uuid] = NoStatus.AWAY
            elif status.position is not None or not self._options.enrolled:
                answers[uuid] = status
        return references, answers

    def _note_removed(self, before: Offset, references: Mapping[str, Reference]) -> None:
        """Note the streams of the last batch that a server has listed once and lists no longer.

        That is the end of a stream. Raises `DataLoss` if unread messages were known and the options don't allow a loss.
        """
        if self._subscription is None or self._away or not self._subscription.is_complete:
            return
        self._removed -= references.keys()
        for uuid, position in before.streams.items():
            if uuid in references or uuid in self._removed or self._subscription.lists(uuid):
                continue
            head = self._heads.pop(uuid, position.id)
            if head > position.id:
                self.lose(uuid, f"it was removed, and messages {position.id + 1} to {head} were not read")
            self._removed.add(uuid)
            # log: A stream that matched `subscribePattern` was removed from its server. The query goes on without it.
            _log.info("stream %s: it was removed after message %d, and the query goes on without it", uuid, head)

    # --- asking

    def is_away(self, server: str) -> bool:
        """Return True if a server didn't answer when it was last asked."""
        return server in self._away

    async def _find(
        self, references: Mapping[str, Reference], wanted: Iterable[str], *, all_of_them: bool = False
    ) -> dict[str, Answer]:
        is_needed = all_of_them or self._options.fail_on_missing_server
        answers: dict[str, Answer] = {}
        places: dict[str, list[str]] = {}  # the servers that may have a stream, starting with the most likely one
        for uuid in wanted:
            known = references.get(uuid, Reference(uuid)).server or self.servers.get(uuid)
            if self.is_done(uuid):
                answers[uuid] = NoStatus.UNKNOWN
            else:
                places[uuid] = [known] if known else [*self._options.servers]
                self.servers.setdefault(uuid, places[uuid][0])
        while places:
            requests = [(server, some) for server, uuids in _by_server(places).items() for some in _chunks(uuids)]
            found: dict[str, Answer] = {}

            async def ask(request: tuple[str, list[str]], found: dict[str, Answer] = found) -> None:
                found.update(await self._ask(*request, is_needed=is_needed))

            await for_each_limited(requests, ask, at_once=self._options.connections)
            for uuid, answer in found.items():
                server = places[uuid].pop(0)
                if not isinstance(answer, NoStatus) or answer is NoStatus.PLAIN:
                    self.servers[uuid], places[uuid] = server, []
                if answer is NoStatus.PLAIN:
                    if self._options.planning is Planning.STATUS:
                        raise OptionError(
                            "planning",
                            f"{without_secrets(server)} answers no status requests, as planning=status needs",
                        )
                    self.plain.add(uuid)
                if answers.get(uuid) is not NoStatus.AWAY or answer is not NoStatus.UNKNOWN:
                    answers[uuid] = answer
                if not places[uuid]:
                    del places[uuid]
        return answers

    async def acknowledge(self, server: str, ids: Mapping[str, int]) -> bool:
        """Report the reader's progress to a server. Return False if the server accepts it only for single streams."""
        if self.is_single(server):
            return False
        answers = await self._client.statuses(server, [*ids], done=ids)
        for uuid, answer in (answers or {}).items():
            if isinstance(answer, restream.Status) and answer.position is not None:
                self.acknowledged[uuid] = answer.position
            elif answer is NoStatus.UNKNOWN:
                # log: The server doesn't know the stream any more.
                _log.warning(
                    "stream %s: message %d is not acknowledged, the next will cover it: it is not known",
                    uuid,
                    ids[uuid],
                )
        return answers is not None

    def is_single(self, server: str) -> bool:
        """Return True if a server answers for one stream at a time."""
        return server in self._single

    async def _ask(self, server: str, uuids: list[str], *, is_needed: bool) -> dict[str, Answer]:
        """Ask one server about some streams. If the server may be missing, ask it only once in a while."""
        if self._options.planning is Planning.PREFETCH:
            return dict.fromkeys(uuids, NoStatus.PLAIN)
        answers = await self._if_present(
            server, lambda within: self._statuses(server, uuids, within), is_needed=is_needed
        )
        return dict.fromkeys(uuids, NoStatus.AWAY) if answers is None else answers

    async def _if_present(
        self, server: str, request: Callable[[float | None], Awaitable[ResultT]], *, is_needed: bool
    ) -> ResultT | None:
        """Send a request to a server that may be missing. Return None if it is.

        Args:
            server: the URL of the server.
            request: sends the request, and waits for the answer for the given seconds.
            is_needed: raise an error if the server is missing.
        """
        if is_needed:
            answer = await request(None)
            self._away.pop(server, None)
            return answer
        within = min(MISSING_AFTER, self._options.status_timeout)
        if server in self._away:
            if self._now() < self._away[server]:
                return None
            within = min(PROBE_TIMEOUT, within)
            self._away[server] = self._now() + PROBE_INTERVAL  # so that requests for other streams don't wait for it
        try:
            answer = await request(within)
        except StreamUnavailable as error:
            if not error.can_heal:
                raise
            if server not in self._away:
                # log: A server of the source can't be reached. The other streams continue.
                _log.warning(
                    "%s is away, its streams are left out until it answers: %s", without_secrets(server), error
                )
            self._away[server] = self._now() + PROBE_INTERVAL
            return None
        if self._away.pop(server, None) is not None:
            # log: A server answers again after an outage.
            _log.warning("%s answers again, its streams are read again", without_secrets(server))
        return answer

    async def _statuses(self, server: str, uuids: list[str], within: float | None) -> dict[str, Answer]:
        if server not in self._single:
            answers = await self._client.statuses(server, uuids, within=within)
            if answers is not None:
                return answers
            self._single.add(server)
        found: dict[str, Answer] = {}

        async def ask(uuid: str) -> None:
            found[uuid] = await self._client.status(server, uuid, within=within)

        await for_each_limited(uuids, ask, at_once=self._options.connections)
        return found

    async def _find_time(self, status: StreamStatus) -> None:
        """Start with the first message that isn't before the option `startingTimestamp`."""
        moment = self._options.starting_time
        if status.uuid in self.plain:
            raise OptionError(
                "startingTimestamp", f"{without_secrets(status.server)} answers no status requests, which it needs"
            )
        if moment is not None:
            span = Span(status.uuid, status.server, status.begin, status.head, status.incarnation)
            status.begin = await self._client.find(span, moment)

    async def _count(self, most: int, status: StreamStatus) -> None:
        """Count the messages of a stream without status requests."""
        try:
            status.head = await self._client.count(status.server, status.uuid, status.begin, most=most)
        except DataLoss as error:
            gone = error.acknowledged
            if gone is None or gone <= status.begin:
                raise
            if not status.jumps:
                self.lose(status.uuid, _acknowledged_by_others(status.begin, gone))
            status.begin, status.jumps = gone, True
            status.head = await self._client.count(status.server, status.uuid, gone, most=most)
        if status.skips:
            status.begin = status.head

    # --- deciding

    def _judge(self, uuid: str, answer: Answer, before: Offset) -> StreamStatus | None:
        """Decide where a stream continues. Return None if it can't be read."""
        position, is_new = before.streams.get(uuid), not before.streams
        if answer is NoStatus.AWAY:
            return None
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
                begin = starting.get(uuid, begin)
                if begin > answer.head:
                    raise OptionError(
                        "startingOffsets", f"stream {uuid} has {answer.head} messages and cannot begin after {begin}"
                    )
            elif begin == answer.acknowledged > 0:
                self._warn(uuid, f"{begin} messages were acknowledged before this query began, and are not read")
        own = answer.acknowledged if answer.position is None else answer.position
        status = StreamStatus(
            uuid, self.servers[uuid], begin, answer.head, answer.incarnation, own, answer.final, answer.written
        )
        status.jumps = position is None
        problem = _loss(position, begin, answer)
        if problem is not None:
            self.lose(uuid, problem)
            status.begin, status.jumps = answer.acknowledged, True
        if answer.final:
            self._finished[uuid] = answer.head
        return status

    def _miss(self, uuid: str, position: Position | None, *, is_new: bool) -> None:
        """Handle a stream that no server knows: raise, warn, or ignore it if it has ended."""
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
            # log "stream UUID: PROBLEM": A stream is not known to any server, or has changed; the text says what
            # happens. Once for each stream and reason.
            _log.warning("%s", told)


def _by_server(places: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Group streams by the server to ask next."""
    groups: dict[str, list[str]] = {}
    for uuid, servers in places.items():
        groups.setdefault(servers[0], []).append(uuid)
    return groups


def _chunks(uuids: list[str]) -> list[list[str]]:
    return [uuids[first : first + TOGETHER] for first in range(0, len(uuids), TOGETHER)]


def _check_named(option: str, ids: object, references: Mapping[str, Reference]) -> None:
    """Reject offsets for streams that aren't in the query. A typo in a UUID would silently read from elsewhere."""
    unnamed = sorted(ids.keys() - references.keys()) if isinstance(ids, dict) else []
    if unnamed:
        raise OptionError(option, f"stream {unnamed[0]} is none of the {len(references)} streams of this query")


def _loss(position: Position | None, begin: int, answer: restream.Status) -> str | None:
    """Describe what was lost or replaced in a stream, or return None."""
    if position is not None and is_another(position, answer.incarnation):
        return (
            "this is another session of the same name, made anew since; "
            f"message {begin} of the old one was read last, the new one has {answer.head}"
        )
    if begin > answer.head:
        return f"message {begin} was known and {answer.head} is the last one now: the server has gone back"
    if begin < answer.acknowledged:
        return _acknowledged_by_others(begin, answer.acknowledged)
    return None


def is_another(position: Position, incarnation: str | None) -> bool:
    """Return True if a position belongs to another incarnation of its session."""
    return None not in (position.incarnation, incarnation) and position.incarnation != incarnation


def _acknowledged_by_others(begin: int, acknowledged: int) -> str:
    return (
        f"message {begin + 1} is next, and everything up to {acknowledged} was acknowledged, by another query perhaps"
    )
