"""A bpmux engine on a byte stream, with what all channels of a session share: the pump, the outbox and the pings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from muxkit.protocols.bpmux.engine import Engine, Event, Kind
from muxkit.runtime import OutboxBudget, Pings, StreamPump

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.bpmux.config import Config
    from muxkit.protocols.bpmux.engine import Entity

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
        self.pings: Pings[Entity] = Pings()

    def _queued(self) -> int:
        """Return the bytes of messages that the engine holds, with those that wait for credit."""
        queues = (entity.outgoing for kind in SENDING for entity in self.engine.entities(kind).values())
        return sum(queue.queued + queue.opening_left for queue in queues if queue is not None)

    async def ping(self, entity: Entity) -> float:
        """Send a ping about an entity and wait for the pong; return the seconds between them."""
        if self.pump.is_lost or entity.gone:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        if self.pump.is_lost:
            raise self.pump.loss()
        self.engine.ping(entity)
        ping = self.pings.sent(entity)
        self.request_write()
        return await ping.wait()
