"""A bpmux engine on a byte stream, with what all channels of a session share: the pump, the outbox and the pings."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from muxkit.protocols.bpmux.engine import Engine, Event, Kind
from muxkit.runtime import ChannelStopped, OutboxBudget, StreamPump

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.bpmux.config import Config
    from muxkit.protocols.bpmux.engine import Entity
    from muxkit.runtime import ErrorMaker

SENDING = (Kind.SINK_OUT, Kind.SINK_IN, Kind.REQUEST_OUT, Kind.REQUEST_IN)  # entities whose queues hold payload


class Connection:
    """Runs an engine over a byte stream; `on_events` receives the engine's events, `on_lost` is called once."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        config: Config,
        limits: Limits,
        observer: Observer | None,
        *,
        on_events: Callable[[Sequence[Event]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.engine = Engine(config, limits=limits, observer=observer)
        self.budget = OutboxBudget(limits.outbox, self.engine.waiting)
        self.pump: StreamPump[Event] = StreamPump(
            stream,
            self.engine,
            on_events=on_events,
            on_written=self.budget.wake_waiting,
            on_lost=on_lost,
            queued=self._queued,
            outbox=self.engine.waiting,
            observer=observer,
        )
        self.request_write = self.pump.request_write
        self.round_trip: float | None = None
        """Seconds, smoothed; None before the first pong."""
        self._pings: dict[Entity, deque[_Ping]] = {}

    def _queued(self) -> int:
        """Return the bytes of messages that the engine holds, with those that wait for credit."""
        queues = (entity.outgoing for kind in SENDING for entity in self.engine.entities(kind).values())
        return sum(queue.queued + queue.opening_left for queue in queues if queue is not None)

    # --- pings

    async def ping(self, entity: Entity) -> float:
        """Send a ping about an entity and wait for the pong; return the seconds between them."""
        if self.pump.is_lost or entity.gone:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        if self.pump.is_lost:
            raise self.pump.loss()
        answer = trio.Event()
        self.engine.ping(entity)
        ping = self.expect_pong(entity, answer)
        self.request_write()
        await answer.wait()
        if ping.took is None:
            raise ping.error()
        return ping.took

    def expect_pong(self, entity: Entity, answer: trio.Event | None = None) -> _Ping:
        """Measure the time until the next pong about an entity that is not expected yet."""
        ping = _Ping(answer)
        self._pings.setdefault(entity, deque()).append(ping)
        return ping

    def pong_arrived(self, entity: Entity) -> None:
        """Match a pong with the oldest ping about its entity."""
        waiting = self._pings.get(entity)
        if not waiting:
            return
        ping = waiting.popleft()
        if not waiting:
            del self._pings[entity]
        ping.took = took = trio.current_time() - ping.sent_at
        self.round_trip = took if self.round_trip is None else 0.875 * self.round_trip + 0.125 * took
        if ping.answer is not None:
            ping.answer.set()

    def fail_pings(self, entity: Entity) -> None:
        """Wake the tasks that wait for a pong about an entity that is gone."""
        if entity in self._pings:
            self._fail_pings(entity, _ended_before_the_pong)

    def fail_all_pings(self, error: ErrorMaker) -> None:
        """Wake all tasks that wait for a pong."""
        for entity in [*self._pings]:
            self._fail_pings(entity, error)

    def _fail_pings(self, entity: Entity, error: ErrorMaker) -> None:
        for ping in self._pings.pop(entity):
            ping.error = error
            if ping.answer is not None:
                ping.answer.set()


class _Ping:
    """A ping without its pong yet; `answer` is None for a keepalive ping of the engine."""

    __slots__ = ("answer", "error", "sent_at", "took")

    def __init__(self, answer: trio.Event | None) -> None:
        self.answer = answer
        self.sent_at = trio.current_time()
        self.took: float | None = None
        self.error: ErrorMaker = _ended_before_the_pong


def _ended_before_the_pong() -> Exception:
    return ChannelStopped("the channel ended before the answer to the ping came")
