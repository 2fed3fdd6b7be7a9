"""What senders, receivers and channels need of their link: its engine and connection, their tables, and the errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import trio

from muxkit._errors import MuxError
from muxkit._limits import Limits
from muxkit._observer import Facts
from muxkit.core import Reason, counted
from muxkit.protocols.relink.engine.engine import LinkEngine
from muxkit.protocols.relink.engine.events import Acknowledged, Arrived, EpochChanged, Event, LinkReplaced
from muxkit.runtime import ChannelCancelled, ChannelStopped, ErrorMaker, LinkLost, OutboxBudget, Reading, StreamPump
from muxkit.runtime import Session as CommonSession


class Out(Protocol):
    """What sends on one channel of ours, as the link sees it."""

    def _acknowledged(self, event: Acknowledged) -> None:
        """The peer has the messages through this one, or has done more with them."""

    def _closed(self) -> None:
        """The peer confirmed the end of the channel."""

    def _window_changed(self) -> None:
        """There may be room."""

    def _lost(self, error: ErrorMaker) -> None: ...


class In(Protocol):
    """What receives from one channel of the peer, as the link sees it."""

    def _opened(self) -> bool:
        """The channel's first message came; False if this one belonged to an earlier life of the channel."""

    def _arrived(self, event: Arrived) -> None: ...
    def _peer_closed(self) -> None:
        """The peer closed the channel: no more comes in this life of it."""

    def _peer_shut_down(self) -> None:
        """The peer opens no more channels."""

    def _lost(self, error: ErrorMaker) -> None: ...


class Core:
    """The engine of a link, the connection that it has at the moment, if any, and who uses its channels."""

    def __init__(
        self,
        engine: LinkEngine,
        on_events: Callable[[Sequence[Event]], None],
        session: CommonSession,
        facts: Facts | None,
    ) -> None:
        self.engine = engine
        self.session = session
        self.limits: Limits = engine.limits
        self.budget: OutboxBudget = OutboxBudget(engine.limits.outbox, engine.waiting, facts=facts)
        self.outs: dict[int, Out] = {}
        self.successors: dict[int, Out] = {}  # senders that wait until the channel's present use is closed
        self.ins: dict[int, In] = {}
        self.peer_channels: dict[int, bool] = {}  # open on the peer's side; True once the peer has closed it
        self.pump: StreamPump[Event] | None = None
        self.error: ErrorMaker | None = None  # why the link is over
        self.moved: Final = trio.lowlevel.ParkingLot()  # tasks that wait for any change
        self.on_weight: Callable[[], None] = lambda: None  # while absent: more is held, or less
        self.on_cancelled: Callable[[Any], None] = lambda channel: None  # the peer gave up a channel
        self.on_goodbye: Callable[[Reason, Any], None] = lambda told, channel: None  # the peer ends the link
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


# --- the errors of links and their channels


class LinkChanged(LinkLost):
    """The listener no longer has our link: everything that was under way on it is gone.

    `change` is the engine's event, with both epochs and link ids; `lost` counts messages of ours that were not
    answered, so their fate is unknown. The session itself goes on with the new link, unless there is
    none (`change.link_id` is 0, which only happens with `Config(require_link=True)`).
    """

    def __init__(self, change: LinkReplaced, *, peer: str = "") -> None:
        why = "it is another instance" if isinstance(change, EpochChanged) else "it does not know the old one"
        what = (
            f"the listener has another link for us, since {why}"
            if change.link_id
            else "the listener has no link for us"
        )
        super().__init__(
            f"{what}; {counted(change.lost, 'message', were=True)} not answered",
            by="peer",
            peer=peer,
            hint="If it ended the old one because of a rule or a limit, its log says which",
        )
        self.change = change
        self.lost: int = change.lost


class LinkRefused(LinkLost):
    """The peer ended one connection after another as soon as the link went on over it, so the link was given up.

    Neither side got anything done on the last `connections` connections, each of which was over within a second. The
    protocol has no word for a refusal: the peer's log may have the reason. The cause is the loss of the last one.
    """

    def __init__(self, connections: int, last: BaseException, *, peer: str = "", unsent: int = 0) -> None:
        what = f"{connections} connections in a row were ended at once and brought nothing forward: the peer may refuse"
        super().__init__(f"{what} to go on with the link; the last one: {last}", by="peer", peer=peer, unsent=unsent)
        self.connections = connections
        self.__cause__: BaseException | None = last


class NotCommitted(MuxError):
    """The peer could not process a message that was committed: it answered `uncommitted`."""

    def __init__(self, channel: int, number: int) -> None:
        super().__init__(f"channel {channel}: the peer answered message {number} with uncommitted")
        self.channel = channel
        self.number = number


class RolledBackError(MuxError):
    """The message was rolled back on our side, so there is no answer to it."""

    def __init__(self, channel: int, number: int) -> None:
        super().__init__(f"channel {channel}: message {number} was rolled back")
        self.channel = channel
        self.number = number


# Of the common channels


def cancelled(told: Reason) -> Exception:
    return ChannelCancelled("the peer gave up on this channel before it was done", told=told)


def stopped(told: Reason) -> Exception:
    return ChannelStopped("the peer does not receive on this channel any more", told=told)


def refused() -> Exception:
    return ChannelStopped("no channel can be opened any more: the peer is closing the link")
