"""The connection below an Aqueduct session: what Aqueduct adds to the machinery that all protocols share.

Aqueduct runs over a link with streams and datagrams, such as QUIC, or over a byte stream with a `Carrier`. Its halves
come with messages, so a half of the session is made when the application gets the message that brings it, or when the
first message of the half comes before that (`half_of`). `OpeningHalf` receives the messages with which the peer opens
two-way channels; `openings` describes them. Everything else is `muxkit.runtime.connection.MuxConnection`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakSet

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, frames_of
from muxkit.core import Reason, Receiving, Sending, counted
from muxkit.core.events import Cancelled, Confirmed, Finished, Halves, HungUp, Opened, Stopped
from muxkit.core.halves import Receiver as CoreReceiver
from muxkit.core.halves import Sender as CoreSender
from muxkit.protocols.aqueduct._channels import (
    AqueductReceiveHalf,
    AqueductSendHalf,
    Channel,
    OpeningHalf,
    Receipt,
    Receiver,
    Sender,
    cancelled,
    finished,
    forgotten,
    lost_in_transit,
    no_receiver,
    refused,
)
from muxkit.protocols.aqueduct.carrier import Carrier
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.engine import Engine
from muxkit.protocols.aqueduct.events import Acked, Arrived, Connected, Lost, Nacked, Parted, Unclaimed
from muxkit.protocols.aqueduct.frames import Headers, Pairs, Role, creator_of
from muxkit.protocols.aqueduct.half import EngineHalf, Outcome
from muxkit.protocols.aqueduct.openings import CLIENT_MARKER, decode_opening
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender, Ticket
from muxkit.runtime import (
    Backlog,
    ErrorMaker,
    MultistreamLink,
    MultistreamPump,
    SessionStats,
    Side,
    StreamPump,
    Unsupported,
)
from muxkit.runtime.connection import MuxConnection
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

if TYPE_CHECKING:
    from muxkit.core import StartPace

AnyHalf = AqueductSendHalf | AqueductReceiveHalf
HALVES: Final = (AqueductSendHalf, AqueductReceiveHalf)

BROKEN_OFF: Final = (Outcome.CANCELLED, Outcome.LOST_IN_TRANSIT, Outcome.FORGOTTEN)
"""How a channel ended on which no work is to begin."""


class IncomingChannels(Backlog[Channel]):
    """The two-way channels that the peer opened.

    Taking them decides that the server's entrypoint carries channels. Until then the messages of a client that has
    begun to open some wait in the entrypoint.
    """

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection, pace: StartPace) -> None:
        super().__init__(connection.item_taken, pace)
        self._connection = connection

    def claim(self) -> IncomingChannels:
        self._connection.carry_channels()
        return super().claim()

    def __bool__(self) -> bool:
        return len(self) > 0 or self._connection.has_unread_openings

    def drop_all(self) -> list[Channel]:
        if self._connection.has_unread_openings:
            self._connection.carry_channels()
        return super().drop_all()


class Connection(MuxConnection[Engine, Channel]):
    """The connection of an Aqueduct session."""

    wire_name = "Aqueduct"
    reason_of_error: ClassVar[Reason] = Reason("the other side left the connection by an error", 500)
    refusal_while_closing: ClassVar[Reason] = Reason("the connection is closing", 503)

    def __init__(
        self,
        link: trio.abc.Stream | MultistreamLink,
        role: Role,
        *,
        headers: Pairs,
        config: Config | None,
        limits: Limits | None,
        observer: Observer | None,
    ) -> None:
        clock = trio.lowlevel.current_clock()
        engine = Engine(role, config, headers=headers, limits=limits, observer=frames_of(observer), clock=clock)
        super().__init__(engine, link, "aqueduct", engine.limits, observer)
        self._link: MultistreamLink | None = None
        self._carrier: Carrier | None = None
        self.pump: MultistreamPump[Any] | StreamPump[Any]
        if isinstance(link, MultistreamLink):
            self._link = link
            self.pump = MultistreamPump(link, self.engine, self)
        else:
            self._carrier = Carrier(self.engine)
            self.pump = StreamPump(link, self._carrier, self)
        self._may_be_refused_late: bool = getattr(link, "may_be_refused_late", False)
        self.connected: trio.Event = trio.Event()
        """Set when the peer's headers have come, and when they can't come any more."""
        self.peer_headers: Headers | None = None
        self.receipts: dict[Receipt, None] = {}
        """Those that tasks wait for."""
        self.unsent: WeakSet[AnyHalf] = WeakSet()
        """Halves whose other half was not sent yet."""
        self._is_dispatching = False
        self._is_leaving = False
        self._has_reason = False  # the peer said why it ends the connection
        self._hung_up_cleanly = False
        # Two-way channels
        self.entrypoint: AqueductSendHalf | OpeningHalf
        self._opener: AqueductSendHalf | None = None  # on which this side opens channels
        self._acceptor: OpeningHalf | None = None  # on which the peer opens channels
        self._carries_channels = False
        self._untaken: dict[Channel, Arrived] = {}  # with the messages with which the peer opened them
        self._unconfirmed: set[EngineHalf] = set()  # senders of channels that this side opened
        self.reserved: set[EngineHalf] = {self.engine.entrypoint}
        """Halves that are not the application's."""
        machine = self.engine.entrypoint
        if type(machine) is EngineSender:
            self.entrypoint = AqueductSendHalf(self, machine)
        else:
            assert isinstance(machine, EngineReceiver)  # as there are two kinds
            self.entrypoint = self._acceptor = OpeningHalf(self, machine, opens_channels=False)

    def start(self, nursery: trio.Nursery) -> None:
        super().start(nursery)
        self.engine.start(trio.current_time())

    def new_backlog(self, kind: str = "channels") -> Backlog[Any]:
        backlog = IncomingChannels(self, self.engine.starts)
        self._backlogs.append(backlog)
        return backlog

    # --- what carries the session

    def dispatch_events(self) -> None:
        """Handle what a command made the engine report; the timers are set by the `request_write` that follows."""
        if not (self._is_dispatching or self.is_holding or self.pump.is_lost):
            self.pump.dispatch_events()

    def request_write(self) -> None:
        if self._is_dispatching or self.pump.is_lost:
            return
        if self.engine.state.events:
            self.pump.dispatch_events()
        self.pump.request_write()
        self._rearm()

    def request_write_soon(self) -> None:
        if self._is_dispatching or self.pump.is_lost:
            return
        if self.engine.state.events:
            self.pump.dispatch_events()
        self.pump.request_write_soon()
        self._rearm()

    def _rearm(self) -> None:
        """Make the clock notice a new deadline. This comes after writing, because acks that were written need none."""
        state = self.engine.state
        if state.has_new_deadline:
            state.has_new_deadline = False
            self.pump.rearm()

    def raise_if_lost(self) -> None:
        """Raise why the connection is lost, if it is."""
        if self.pump.is_lost:
            raise self.pump.loss()

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None, told: Reason | None = None) -> None:
        if self._carrier is None or not told:
            super().lose(reason, by=by, cause=cause, told=told)
        else:
            self.pump.lose(reason, by=by, cause=cause, parting=[self._carrier.farewell(told)], farewell=told)

    # --- halves

    def new_sender(self, *, oneshot: bool, headers: Pairs) -> tuple[Sender, Ticket]:
        """Make a channel whose receiver is to be sent to the peer."""
        machine, ticket = self.engine.channel(sends=True, oneshot=oneshot, headers=headers)
        half = AqueductSendHalf(self, machine)
        self.unsent.add(half)
        return Sender(self, half, tuple(headers)), ticket

    def new_receiver(self, *, oneshot: bool, headers: Pairs) -> tuple[Receiver, Ticket]:
        """Make a channel whose sender is to be sent to the peer."""
        machine, ticket = self.engine.channel(sends=False, oneshot=oneshot, headers=headers)
        half = AqueductReceiveHalf(self, machine)
        self.unsent.add(half)
        return Receiver(self, half, tuple(headers)), ticket

    def handed_over(self, tickets: Sequence[Ticket]) -> None:
        """Note that the other halves of channels were sent."""
        for ticket in tickets:
            half = ticket.half.owner
            if isinstance(half, HALVES):
                self.unsent.discard(half)

    def half_of(self, machine: EngineHalf) -> AnyHalf:
        """Return the session's half for one of the engine; it is made when it is first asked for."""
        if isinstance(owner := machine.owner, HALVES):
            return owner
        half: AnyHalf
        if type(machine) is EngineSender:
            half = AqueductSendHalf(self, machine)
        else:
            assert isinstance(machine, EngineReceiver)  # as there are two kinds
            half = AqueductReceiveHalf(self, machine)
        if not machine.has_news:  # or the end comes as an event, after the messages
            self._tell_end(machine, half)
        if self.pump.is_lost:
            half.lost(self.pump.loss)
        return half

    def receiver_half(self, receiver: CoreReceiver[Any]) -> ReceiveHalf[Any] | None:
        assert isinstance(receiver, EngineReceiver)
        half = self.half_of(receiver)
        if self._is_leaving:
            half.close()
        return half if isinstance(half, ReceiveHalf) else None

    def attachments_of(self, arrived: Arrived) -> tuple[AnyHalf, ...]:
        """Return the halves that came with a message, which the application gets."""
        halves = []
        for attachment in arrived.attachments:
            machine = attachment.half
            half = self.half_of(machine)
            self.engine.accept(machine)
            if machine.gone and not machine.has_news:
                machine.owner = None  # or only a garbage collection would free both
            halves.append(half)
        return tuple(halves)

    def faces_of(self, arrived: Arrived) -> tuple[Sender | Receiver, ...]:
        """Return the attachments of a message as applications hold them."""
        pairs = zip(self.attachments_of(arrived), arrived.attachments, strict=True)
        return tuple(
            Sender(self, half, each.headers)
            if isinstance(half, AqueductSendHalf)
            else Receiver(self, half, each.headers)
            for half, each in pairs
        )

    def dispose(self, arrived: Arrived) -> None:
        """Consume a message without using it, and close what came with it."""
        if arrived.receiver.consumed((arrived,), len(arrived.payload)):
            self.request_write()
        for half in self.attachments_of(arrived):
            half.close()

    # --- two-way channels that this side opens

    def carry_channels(self) -> None:
        """Use the entrypoint for two-way channels from now on; raises `LocalProtocolError` if it is used otherwise."""
        if self._carries_channels:
            return
        entrypoint = self.entrypoint
        is_used = entrypoint.has_received if isinstance(entrypoint, OpeningHalf) else entrypoint.machine.has_sent
        if is_used:
            raise LocalProtocolError(
                "the entrypoint is in use: its messages may open channels, or be the program's own"
            )
        self._carries_channels = True
        if isinstance(entrypoint, OpeningHalf):
            entrypoint.open_channels()
            return
        self._open_on(entrypoint)
        if entrypoint.state is Sending.OPEN:
            machine, ticket = self.engine.channel(sends=False)
            self.reserved.add(machine)
            self._acceptor = OpeningHalf(self, machine, opens_channels=True)
            entrypoint.machine.transmit(CLIENT_MARKER, attachments=[ticket])
            self.request_write()

    def check_unused(self) -> None:
        """Raise `LocalProtocolError` if the entrypoint carries two-way channels."""
        if self._carries_channels:
            raise LocalProtocolError("this connection carries two-way channels, which need its entrypoint")

    def _open_on(self, opener: AqueductSendHalf) -> None:
        self._opener = opener
        self.engine.opener = opener.machine

    async def open_channel(self, opening: bytes) -> Channel:
        self.budget.thread.check()
        self.carry_channels()
        opener = await self._wait_for_turn(self.engine.size_of_opening(opening))
        try:
            channel = self.new_channel(self.engine.open_channel(opening), opening)
            self._unconfirmed.add(channel.sending.machine)
            return channel
        finally:
            opener.end_turn()
            self.opened()

    async def _wait_for_turn(self, size: int) -> AqueductSendHalf:
        """Wait until a channel may be opened; the caller opens it before its next checkpoint, then ends the turn."""
        while True:
            await self.wait_to_open()
            opener = self._opener
            assert opener is not None  # or there would be no slot
            if opener.may_send(size):
                return opener
            self.openers.wake_waiters()  # the next opener in line may need less room
            try:
                await opener.wait_turn(size)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                continue  # `closed` says why
            if opener.state is Sending.OPEN and self.free_slots() > 0:
                return opener
            opener.end_turn()

    def free_slots(self) -> int:
        if self.closed() is not None:
            return super().free_slots()
        if self._opener is None:
            return 0
        known_to_peer = self.engine.most_ours // 2 - len(self._unconfirmed)
        return min(self.engine.places, known_to_peer)

    def closed(self) -> Exception | None:
        """Return why no channel can be opened any more, or None: our opener decides, whatever else is draining."""
        if (loss := self.loss) is not None:
            return loss()
        if self._is_leaving:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the connection")
        if self._opener is not None:
            return None if self._opener.state is Sending.OPEN else refused()
        return None if self._acceptor is not None and self._acceptor.state is Receiving.OPEN else refused()

    def new_channel(self, channel: Halves, opening: bytes) -> Channel:
        assert isinstance(channel.sender, EngineSender)
        assert isinstance(channel.receiver, EngineReceiver)  # a channel has both
        return Channel(
            self, AqueductSendHalf(self, channel.sender), AqueductReceiveHalf(self, channel.receiver), opening
        )

    # --- two-way channels that the peer opens

    @property
    def has_unread_openings(self) -> bool:
        """True if the client has begun to open channels, and this side has not used its entrypoint at all."""
        entrypoint = self.entrypoint
        if self._carries_channels or not isinstance(entrypoint, OpeningHalf) or entrypoint.has_received:
            return False
        first = entrypoint.first_unread
        return first is not None and first.payload == CLIENT_MARKER

    def entrypoint_unread(self) -> None:
        """A message waits on the entrypoint, which nobody uses yet."""
        if self.has_unread_openings:
            self._unclaimed.arrived()

    def take_opening(self, arrived: Arrived) -> None:
        """Take a message with which the peer opens a channel, or the first one of a client."""
        match self.attachments_of(arrived):
            case (AqueductSendHalf() as sending,) if self._opener is None:
                arrived.receiver.consumed((arrived,), len(arrived.payload))
                self.reserved.add(sending.machine)
                self._open_on(sending)
                self.openers.wake_waiters()
                if self.is_draining:
                    sending.close()
            case (AqueductReceiveHalf() as receiving, AqueductSendHalf() as sending):
                self._take_channel(arrived, sending, receiving)
            case _:
                self.dispose(arrived)

    def _take_channel(self, arrived: Arrived, sending: AqueductSendHalf, receiving: AqueductReceiveHalf) -> None:
        opening = decode_opening(arrived.payload, arrived.headers)
        refusal = self.refusal_of(self.incoming, opening)
        if refusal is not None and self.is_draining:  # the peer could not know, so it isn't charged for that
            sending.abort(refusal.text, code=refusal.code)
            self.dispose(arrived)
            return
        channel = Channel(self, sending, receiving, opening)
        self._untaken[channel] = arrived
        if refusal is not None:
            self.decline(channel, refusal)
            return
        self.offer(self.incoming, channel)
        if receiving.machine.outcome in BROKEN_OFF:  # it ended before the message came that brought it
            self.incoming.drop(channel)
            self._drop(channel)
            if receiving.machine.outcome is Outcome.CANCELLED:  # one that is forgotten so early was not counted
                self.engine.starts.spared()

    def openings_ended(self) -> None:
        """The peer opens no more channels."""
        if not self.pump.is_lost:  # else `stop_opening` follows
            self.incoming.ended()
            self.openers.wake_waiters()

    def full_limit(self) -> str | None:
        """Return None: the engine ends a connection whose peer opens more than `Limits` allow."""
        return None

    def took(self, item: Channel) -> None:
        self._consume_opening(item)
        self.request_write_soon()

    def _consume_opening(self, channel: Channel) -> None:
        """Renew the credit of the message with which the peer opened a channel."""
        arrived = self._untaken.pop(channel)
        arrived.receiver.consumed((arrived,), len(arrived.payload))

    def decline(self, item: Channel, reason: Reason) -> None:
        self.took(item)
        item.abort(reason.text, code=reason.code)

    def _drop(self, channel: Channel) -> None:
        self._consume_opening(channel)
        channel.close()

    def drop_broken_off(self, half: CoreSender | CoreReceiver[Any]) -> None:
        owner = half.owner
        channel = owner.channel if isinstance(owner, AqueductReceiveHalf) else None
        if channel is not None and self.drop_waiting(channel) is not None:
            assert isinstance(channel, Channel)
            self._drop(channel)

    def channel_aborted(self, channel: Any) -> None:  # noqa: ANN401 - a `Channel`
        id = channel.sending.machine.id
        if id is not None and creator_of(id) != self.engine.role:
            self.engine.charge_failure()

    # --- events

    def handle_written(self) -> None:
        super().handle_written()
        self._rearm()  # what was written may have to be announced to the peer after a delay
        if self.gone:  # the end of a receiver that was closed here is not an event
            self.gone.unpark_all()
        self.openers.wake_waiters()  # a written end makes room for other channels

    def handle_events(self, events: Sequence[Any]) -> None:
        before, self._is_dispatching = self._is_dispatching, True
        try:
            super().handle_events(events)
        finally:
            self._is_dispatching = before

    def handle_event(self, event: object) -> None:
        # How a half ended is in its outcome, so one method handles all ends.
        match event:
            case Finished() | Cancelled():
                self._handle_end(event.receiver)
            case Confirmed():
                self._handle_end(event.half)
            case Stopped():
                self._handle_end(event.sender)
            case _:
                super().handle_event(event)

    def handle_own_event(self, event: object) -> None:
        match event:
            case Lost():
                self._handle_end(event.half)
            case Acked() | Nacked():
                if isinstance(event.receipt.owner, Receipt):
                    event.receipt.owner.resolve()
            case Unclaimed():
                if isinstance(event.half.owner, AqueductReceiveHalf):
                    event.half.owner.discard_unread()
            case Connected():
                self.peer_headers = event.headers
                self.connected.set()
            case Parted():
                self._has_reason = True
                self.pump.told(event.reason)
            case _:
                super().handle_own_event(event)

    def handle_opened(self, event: Opened) -> None:
        raise AssertionError("no event of Aqueduct opens a channel: channels come with messages")

    def _handle_end(self, machine: object) -> None:
        """A half has ended, for the reason in its outcome."""
        assert isinstance(machine, (EngineSender, EngineReceiver))
        machine.has_news = False
        self._unconfirmed.discard(machine)
        half = machine.owner
        if isinstance(half, HALVES):
            self._tell_end(machine, half)
        if type(machine) is EngineReceiver:
            if isinstance(half, AqueductReceiveHalf) and machine.outcome is Outcome.FORGOTTEN and not machine.attached:
                half.discard_unread()  # its attachment will never come
            if machine.outcome in BROKEN_OFF:
                self.drop_broken_off(machine)
        self.half_ended(machine)
        if isinstance(half, HALVES) and not (machine.taken and machine.gone):
            machine.owner = half  # the message that brings the half will ask for it

    def _tell_end(self, machine: EngineHalf, half: AnyHalf) -> None:
        """End the session's half if the one of the engine has ended."""
        outcome = machine.outcome
        if type(machine) is EngineSender:
            outcome = machine.outcome_told or outcome
        if outcome is None:
            return
        if isinstance(half, AqueductReceiveHalf):
            half.ended(self._error_of(outcome, half))
        elif outcome in (Outcome.FINISHED, Outcome.CANCELLED) and half.state is not Sending.OPEN:
            half.confirmed()
        else:
            half.stopped(self._error_of(outcome, half))

    def _error_of(self, outcome: Outcome, half: AnyHalf) -> ErrorMaker:
        """Return what makes the error for a half that has ended."""
        if outcome is Outcome.FINISHED:
            return finished
        if outcome is Outcome.CANCELLED:
            return partial(cancelled, half.reason if isinstance(half, AqueductReceiveHalf) else b"")
        channel = half.channel
        if outcome is Outcome.NO_RECEIVER:
            # The error holds the other half and not the channel, which would be a cycle of references.
            return partial(no_receiver, channel.receiving if isinstance(channel, Channel) else None)
        if outcome is Outcome.FORGOTTEN:
            return forgotten
        # The message that opens a two-way channel may cross the peer's word that it takes no more: that is the reason.
        return lost_in_transit if channel is None else self._lost_opening

    def _lost_opening(self) -> Exception:
        """Make the error for a two-way channel whose opening did not arrive."""
        is_refused = self._opener is not None and self._opener.state is not Sending.OPEN
        return refused() if is_refused else lost_in_transit()

    def handle_hung_up(self, event: HungUp) -> None:
        self._hung_up_cleanly = event.is_clean and not self._has_reason
        live = counted(self.live_channels, "half", "halves", were=True)
        what = "" if event.is_clean else f" while {live} open" if self.live_channels else " in mid-message"
        self.pump.lose(f"the peer hung up{what}", by="peer")

    def handle_lost(self) -> None:
        super().handle_lost()
        for machine in self.engine.halves:  # nothing can happen to them any more, so let go of the session's halves
            owner = machine.owner
            if machine.taken and isinstance(owner, HALVES):
                owner.channel = machine.owner = None
        self.engine.receive_closed(trio.current_time(), clean=False)
        for receipt in [*self.receipts]:
            receipt.resolve()
        self.connected.set()

    def ends_in_order(self) -> bool:
        return self._hung_up_cleanly

    # --- leaving

    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        for machine in self.engine.halves:
            yield self.half_of(machine)
        yield from [*self.unsent]

    def awaits_confirmation(self) -> bool:
        return any(
            isinstance(half, SendHalf) and not half.was_given_up for half in map(self.half_of, self.engine.halves)
        )

    async def say_goodbye(self) -> None:
        """Wait for the first word of a server that may still refuse this client: its headers or its refusal."""
        if self._may_be_refused_late:
            await self.connected.wait()

    def close_all(self) -> None:
        self._is_leaving = True
        super().close_all()

    def abort_all(self) -> None:
        for machine in self.engine.halves:
            if machine not in self.reserved:
                self.half_of(machine).abort()
        self.request_write()

    def announce_shutdown(self) -> None:
        if self._acceptor is not None:
            self._acceptor.refuse_more()

    # --- pings, numbers

    async def ping_about(self, key: object) -> float:
        """Return the round trip that the link has measured, in seconds; `Unsupported` if it measures none."""
        self.budget.thread.check()
        await trio.lowlevel.checkpoint()
        self.raise_if_lost()
        round_trip = self._round_trip
        if round_trip is None:
            raise Unsupported("Aqueduct has no ping, and this link has measured no round trip")
        return round_trip

    @property
    def _round_trip(self) -> float | None:
        return None if self._link is None else self._link.round_trip

    @property
    def live_channels(self) -> int:
        """Live halves of the application's channels."""
        return self.engine.channels - sum(not half.gone for half in self.reserved)

    def stats(self) -> SessionStats:
        return attrs.evolve(super().stats(), round_trip=self._round_trip)

    def state_text(self) -> str:
        return "lost" if self.pump.is_lost else counted(self.live_channels, "half", "halves")
