"""What one end of a link knows: its channels, budgets and phases, and the steps that both directions share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit.core import Deadlines, Scheduler
from muxkit.protocols.relink._control import Control
from muxkit.protocols.relink._events import Event, Writable
from muxkit.protocols.relink._incoming import Incoming
from muxkit.protocols.relink._outgoing import Outgoing
from muxkit.protocols.relink._packets import PART_OVERHEAD, Operation
from muxkit.protocols.relink._timers import Timer

if TYPE_CHECKING:
    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.relink._config import Config

COUNTED_ACKS: Final = 4  # a window of messages
SIZED_ACKS: Final = 2  # a window of bytes
OUTCOMES_MOST: Final = 2**20  # answers that a peer may leave without a sign that it has read them


class Outbox:
    """How many bytes of messages wait for the transport; asked before each message, so it is a plain attribute."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = 0


class Link:
    """Everything that receiving and sending both change."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None, *, is_connector: bool) -> None:
        self.config = config
        self.limits = limits
        self.observer = observer
        sizes = (config.connector_id_size, config.listener_id_size)
        transactions = (config.connector_transactions, config.listener_transactions)
        self.out_id_size, self.in_id_size = sizes if is_connector else sizes[::-1]
        self.out_transactions, self.in_transactions = transactions if is_connector else transactions[::-1]
        self.ack_count = max(1, config.window // COUNTED_ACKS)
        self.ack_bytes = max(1, limits.channel_bytes // SIZED_ACKS)
        self.floor = min(limits.channel_floor, limits.channel_bytes)
        # A peer with the same limits stops when it is over them, so by one message more at most, and by those that
        # he had promised room in his outbox.
        extra = limits.message + limits.outbox + (16 + PART_OVERHEAD) * config.parts + 128
        self.held_most = limits.connection_bytes + extra
        self.outcomes_most = OUTCOMES_MOST
        self.events: list[Event] = []
        self.outbox = Outbox()
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.now = 0.0
        self.over = False
        self.epoch = 0
        self.link_id = 0
        self.wants_shutdown = False
        self.reset()

    def reset(self) -> None:
        """Forget everything that belongs to one link."""
        self.connected = False
        self.resumed = False
        self.peer_resumed = False  # the peer has told what it has, or need not
        self.told_resume = False  # and so have we
        self.shutdown_written = False
        self.peer_shut_down = False
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.unannounced: dict[Outgoing, None] = {}  # the peer has none of their messages, as far as we know
        self.watchers: dict[int, int] = {}
        # A channel's first bytes up to the floor are free; what is over that counts for the link's budget. The sum
        # over all channels does not depend on the order in which messages come, so both sides agree about it.
        self.retained = 0  # bytes in all windows of ours
        self.retained_over = 0  # of them, over the floors
        self.outbox.used = 0
        self.held = 0  # bytes of the peer that the application has not consumed
        self.held_over = 0  # of them, over the floors
        self.outcomes = 0  # answers that are kept because the peer may not know them
        self.closing = 0  # channels of ours that are to be closed
        self.unanswered = 0  # channels of the peer with commits that the application has not answered
        self.scheduler = Scheduler()
        self.control = Control(self)

    # --- phases

    @property
    def is_free(self) -> bool:
        """May messages go out on any channel?"""
        return self.connected and self.peer_resumed

    @property
    def is_resuming(self) -> bool:
        """Is the peer still telling what it has?"""
        return self.connected and not self.peer_resumed

    def connect(self, *, resumed: bool) -> None:
        self.connected = True
        self.resumed = resumed
        self.say("link", "connected")
        self.peer_resumed = self.told_resume = not resumed
        self.shutdown_written = False
        self.scheduler = Scheduler()
        for outgoing in self.outgoing.values():
            outgoing.connect()
            if outgoing.received < outgoing.first:
                self.unannounced[outgoing] = None
            self.schedule(outgoing)
        for incoming in self.incoming.values():
            incoming.connect()
        self.control.connect()

    def disconnect(self) -> None:
        self.connected = False
        for outgoing in self.outgoing.values():
            outgoing.disconnect()
        for incoming in [one for one in self.incoming.values() if one.done]:
            self.forget_incoming(incoming)  # the peer closed it, and learns from our resume that it is over
        self.scheduler = Scheduler()
        for timer in Timer:
            self.deadlines.stop(timer)

    def check_resume(self) -> None:
        if not self.is_resuming:
            raise RemoteProtocolError("a resume on a connection that has none to come", rule="relink-R04")
        for outgoing in self.outgoing.values():
            if outgoing.heard or (outgoing.received < outgoing.first and not outgoing.close_told):
                continue
            unanswered = any(run.operation is Operation.COMMIT for run in outgoing.journal)
            if not outgoing.close_told or unanswered:
                what = f"the resume left out channel {outgoing.channel}, where {outgoing.received} was received"
                raise RemoteProtocolError(what, rule="relink-R02")

    def resume(self) -> None:
        """The peer has told everything: what it did not speak of it does not have, or no longer."""
        self.peer_resumed = True
        for outgoing in [*self.outgoing.values()]:
            if outgoing.free:
                self.schedule(outgoing)
            elif outgoing.close_told and not outgoing.heard:
                # A close goes out only when the peer is known to have had a message: it is over, and not lost.
                outgoing.closed()
            else:
                outgoing.release_to_write()

    @property
    def lost(self) -> int:
        """Messages of ours whose fate nobody knows."""
        return sum(outgoing.outstanding for outgoing in self.outgoing.values())

    # --- shutdown

    @property
    def may_write_shutdown(self) -> bool:
        """Behind the first message of each of our channels, since it says that there will be no more of them."""
        return self.wants_shutdown and not self.shutdown_written and not self.unannounced

    @property
    def is_finished(self) -> bool:
        """Have both sides shut down, with nothing open between them?"""
        if not (self.shutdown_written and self.peer_shut_down):
            return False
        waits = self.retained or self.closing or self.held or self.unanswered
        return not waits and self.control.is_clear

    # --- channels of ours

    def open(self, channel: int) -> Outgoing:
        """Not yet in the table: a channel is open once it has a message."""
        return Outgoing(channel, self)

    def enter(self, outgoing: Outgoing) -> None:
        self.outgoing[outgoing.channel] = outgoing
        self.unannounced[outgoing] = None
        self.say(f"out {outgoing.channel}", "open")

    def forget_outgoing(self, outgoing: Outgoing) -> None:
        del self.outgoing[outgoing.channel]
        self.unannounced.pop(outgoing, None)
        self.closing -= 1
        outgoing.free = False
        self.control.forget(outgoing)
        self.say(f"out {outgoing.channel}", "closed")
        self.wake(outgoing.channel)

    def schedule(self, outgoing: Outgoing) -> None:
        if not outgoing.scheduled and outgoing.is_ready():
            self.scheduler.add(outgoing)

    # --- room

    def admits(
        self, outgoing: Outgoing, cost: int, *, queued: int = 0, messages: int = 0, overdraw: bool = False
    ) -> bool:
        """Does the window have room? `queued` bytes over the floors, `messages` in the channel come before."""
        if outgoing.closing or outgoing.outstanding + messages >= self.config.window:
            return False
        size = outgoing.bytes + messages * cost + cost
        if size <= self.floor:
            return True
        if self.retained_over + queued > self.limits.connection_bytes and not overdraw:
            return False
        return size <= self.limits.channel_bytes or outgoing.outstanding + messages == 0

    def freed(self, outgoing: Outgoing, size: int, over: int) -> None:
        """Messages left the window, `over` of their bytes from above the floor."""
        was_full = self.retained_over > self.limits.connection_bytes
        self.retained -= size
        self.retained_over -= over
        if not self.watchers:
            return
        if was_full and self.retained_over <= self.limits.connection_bytes:
            for channel in [*self.watchers]:
                self.wake(channel)
        else:
            self.wake(outgoing.channel)

    def wake(self, channel: int) -> None:
        """Tell who watches a channel, if there is room by now."""
        cost = self.watchers.get(channel)
        if cost is None:
            return
        if self.admits(self.outgoing.get(channel) or self.open(channel), cost):
            del self.watchers[channel]
            self.events.append(Writable(channel))

    # --- channels of the peer

    def accept(self, channel: int) -> Incoming:
        """The peer's first message on a channel."""
        incoming = self.incoming[channel] = Incoming(channel, self)
        self.say(f"in {channel}", "open")
        return incoming

    def forget_incoming(self, incoming: Incoming) -> None:
        """The channel is over: nothing is ever said of this life of it again."""
        del self.incoming[incoming.channel]
        self.control.forget(incoming)
        self.say(f"in {incoming.channel}", "closed")

    # --- acks that wait

    def owe_acks(self) -> None:
        if self.connected and Timer.ACKS not in self.deadlines:
            ends = self.wants_shutdown and self.peer_shut_down
            self.deadlines.set(Timer.ACKS, self.now if ends else self.now + self.config.ack_delay)

    def say(self, channel: str, state: str) -> None:
        if self.observer is not None:
            self.observer.state(channel, state)
