"""What senders, receivers and channels need of their link: its engine, the present connection, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import trio

from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.protocols.relink.config import Config
from muxkit.protocols.relink.engine.engine import LinkEngine
from muxkit.protocols.relink.engine.events import Arrived, Committed, Consumed, Event, Received, Uncommitted
from muxkit.runtime import ErrorMaker, OutboxBudget, Reading, StreamPump

Acknowledged = Received | Consumed | Committed | Uncommitted


class Out(Protocol):
    """What sends on one channel of ours, as the link sees it."""

    def acknowledged(self, event: Acknowledged) -> None:
        """The peer has the messages through this one, or has done more with them."""

    def closed(self) -> None:
        """The peer confirmed the end of the channel."""

    def window_changed(self) -> None:
        """There may be room."""

    def lost(self, error: ErrorMaker) -> None: ...


class In(Protocol):
    """What receives from one channel of the peer, as the link sees it."""

    def opened(self) -> bool:
        """The channel's first message came; False if this one belonged to an earlier life of the channel."""

    def arrived(self, event: Arrived) -> None: ...
    def peer_closed(self) -> None:
        """The peer closed the channel: no more comes in this life of it."""

    def lost(self, error: ErrorMaker) -> None: ...


class Core:
    """The engine of a link, the connection that it has at the moment, if any, and who uses its channels."""

    def __init__(
        self,
        config: Config,
        limits: Limits,
        observer: Observer | None,
        *,
        is_connector: bool,
        on_events: Callable[[Sequence[Event]], None],
    ) -> None:
        self.engine = LinkEngine(config, is_connector=is_connector, limits=limits, observer=observer)
        self.config = config
        self.limits = self.engine.limits
        self.is_connector = is_connector
        ours = (config.connector_transactions, config.connector_id_size)
        theirs = (config.listener_transactions, config.listener_id_size)
        self.out_transactions, self.out_id_size = ours if is_connector else theirs
        self.in_transactions, self.in_id_size = theirs if is_connector else ours
        self.budget = OutboxBudget(limits.outbox, self.engine.waiting)
        self.outs: dict[int, Out] = {}
        self.successors: dict[int, Out] = {}  # senders that wait until the channel's present use is closed
        self.ins: dict[int, In] = {}
        self.peer_channels: dict[int, bool] = {}  # open on the peer's side; True once the peer has closed it
        self.pump: StreamPump[Event] | None = None
        self.error: ErrorMaker | None = None  # why the link is over
        self.moved = trio.lowlevel.ParkingLot()  # tasks that wait for any change
        self.on_weight: Callable[[], None] = _nothing  # while absent: more is held, or less
        self.messages_received = 0
        self.messages_sent = 0
        self.deadline: float | None = None  # of the engine, when the pump's clock was last set
        self._on_events = on_events
        self._is_holding = False  # what is written in this step goes out together

    def request_write(self) -> None:
        """Wake the writer, or weigh the absent link again."""
        if self.pump is None:
            self.on_weight()
        elif not self._is_holding:
            self.pump.request_write()

    @contextmanager
    def written_together(self) -> Iterator[None]:
        """Write what this block, which must not wait, gives the engine with one write at its end."""
        was_holding, self._is_holding = self._is_holding, True
        try:
            yield
        finally:
            self._is_holding = was_holding
            self.request_write()

    def after_command(self) -> None:
        """Dispatch events, wake the writer and set the timer again, after any command to the engine."""
        self.dispatch_events()
        self.request_write()
        if self.pump is not None:
            self.pump.rearm()

    def after_consuming(self) -> None:
        """As `after_command`, after consuming; skips the writer and the timer where nothing changed."""
        engine, pump = self.engine, self.pump
        if events := engine.events():
            self._on_events(events)
            self.dispatch_events()
        if pump is None:
            self.on_weight()
            return
        if engine.owes_control:
            pump.request_write()
        deadline = engine.next_deadline()
        if deadline != self.deadline:
            self.deadline = deadline
            pump.rearm()

    def dispatch_events(self) -> None:
        """Dispatch the engine's events until there are no more."""
        while events := self.engine.events():
            self._on_events(events)

    def raise_if_over(self) -> None:
        if self.error is not None:
            raise self.error()

    def reading(self) -> Reading | None:
        """Return the reader of the present connection, in whose place a receiver may read."""
        return None if self.pump is None else self.pump.reading


def _nothing() -> None:
    pass
