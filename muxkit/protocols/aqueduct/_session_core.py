"""What ties the engine to Trio? One connection: its pump, the halves that wait for events, leaving and losing it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Literal, Protocol
from weakref import WeakSet

import trio

from muxkit.core import Sending
from muxkit.protocols.aqueduct import _events as events
from muxkit.protocols.aqueduct._carrier import Carrier
from muxkit.protocols.aqueduct._engine import Engine
from muxkit.protocols.aqueduct._events import Outcome
from muxkit.protocols.aqueduct._ids import Role, label
from muxkit.protocols.aqueduct._sending import SenderMachine
from muxkit.protocols.aqueduct._session_receiving import Message, Receiver
from muxkit.protocols.aqueduct._session_sending import Receipt, Sender
from muxkit.runtime import MultistreamLink, MultistreamPump, OutboxBudget, StreamPump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.aqueduct._channels import Half, Ticket
    from muxkit.protocols.aqueduct._config import Config
    from muxkit.protocols.aqueduct._events import Arrived, Event
    from muxkit.protocols.aqueduct._receiving import ReceiverMachine
    from muxkit.protocols.aqueduct._session_errors import ErrorMaker
    from muxkit.protocols.aqueduct._varint import Headers
    from muxkit.runtime import LinkLost

    Pairs = Sequence[tuple[bytes, bytes]]

_log = logging.getLogger("muxkit")


class Pump(Protocol):
    """What a connection needs of whoever moves its bytes."""

    peer: str
    bytes_sent: int

    async def run(self) -> None: ...
    @property
    def is_lost(self) -> bool: ...
    @property
    def is_violated(self) -> bool: ...
    def lose(
        self, reason: str, *, by: Literal["peer", "local", "network"], cause: BaseException | None = None
    ) -> None: ...
    def loss(self) -> LinkLost: ...
    async def flushed(self) -> None: ...
    async def hang_up(self) -> None: ...
    def dispatch_events(self) -> None: ...
    def rearm(self) -> None: ...
    def request_write(self) -> None: ...


class _Nothing:
    """The engine itself counts what waits for the transport."""

    used = 0


class Core:
    """An engine at work, and who has which half of it."""

    def __init__(
        self,
        link: trio.abc.Stream | MultistreamLink,
        role: Role,
        *,
        headers: Pairs,
        config: Config,
        limits: Limits,
        observer: Observer | None,
    ) -> None:
        self.engine = Engine(role, config, headers=headers, limits=limits, observer=observer, now=trio.current_time())
        self.limits = self.engine.limits
        self.room = OutboxBudget(sys.maxsize, _Nothing())
        self.pump = self._pump(link, observer)
        self.round_trip: Callable[[], float | None] | None = None
        if isinstance(link, MultistreamLink):
            self.round_trip = lambda: link.round_trip
        self.moved = trio.lowlevel.ParkingLot()  # those who wait for channels to come or go
        self.receipts: dict[Receipt, None] = {}  # those that somebody waits for
        self.messages_sent = 0
        self.messages_received = 0
        self.is_leaving = False
        self.on_goodbye: Callable[[ErrorMaker | None], None] = lambda error: None
        self.base: set[Half] = {self.engine.entrypoint}  # channels that are not the application's
        self.peer_headers: Headers | None = None
        self.greeted = trio.Event()  # those have come, or never will
        self._kept: WeakSet[Sender | Receiver] = WeakSet()  # halves whose other half was not sent yet
        self._is_dispatching = False
        self._actions: dict[type, Callable[..., None]] = {
            events.Arrived: self._on_arrived,
            events.Ended: self._on_ended,
            events.Unclaimed: self._on_unclaimed,
            events.Acked: self._on_settled,
            events.Nacked: self._on_settled,
            events.Writable: self._on_writable,
            events.Connected: self._on_connected,
            events.HungUp: self._on_hung_up,
            events.Silent: self._on_silent,
            events.Failed: self._on_failed,
        }

    def _pump(self, link: trio.abc.Stream | MultistreamLink, observer: Observer | None) -> Pump:
        if isinstance(link, MultistreamLink):
            return MultistreamPump(
                link,
                self.engine,
                on_events=self._dispatch,
                on_written=self._written,
                on_lost=self._lost,
                queued=lambda: self.engine.outbox,
                observer=observer,
            )
        return StreamPump(
            link,
            Carrier(self.engine),
            on_events=self._dispatch,
            on_written=self._written,
            on_lost=self._lost,
            queued=lambda: self.engine.outbox,
            observer=observer,
        )

    # --- halves

    def new_sender(self, *, oneshot: bool = False, headers: Pairs = ()) -> tuple[Sender, Ticket]:
        """A channel whose receiver is to be sent away."""
        machine, ticket = self.engine.channel(sends=True, oneshot=oneshot, headers=headers)
        half = Sender(self, machine, headers=tuple(headers), ticket=ticket)
        self._kept.add(half)
        return half, ticket

    def new_receiver(self, *, oneshot: bool = False, headers: Pairs = ()) -> tuple[Receiver, Ticket]:
        """A channel whose sender is to be sent away."""
        machine, ticket = self.engine.channel(sends=False, oneshot=oneshot, headers=headers)
        half = Receiver(self, machine, headers=tuple(headers), ticket=ticket)
        self._kept.add(half)
        return half, ticket

    def handed_over(self, tickets: Sequence[Ticket]) -> None:
        """They are on their way now, and the halves that stayed here can be used."""
        for ticket in tickets:
            half = ticket.half.owner
            if isinstance(half, Sender | Receiver):
                self._kept.discard(half)

    def face_of(self, machine: Half) -> Sender | Receiver:
        """What the application has, or will have, of a half."""
        owner = machine.owner
        if isinstance(owner, Sender | Receiver):
            return owner
        half = Sender(self, machine) if isinstance(machine, SenderMachine) else Receiver(self, machine)
        if machine.outcome is not None and not machine.is_told:  # else the event comes, behind the messages
            half.ended(machine.outcome)
        elif self.pump.is_lost:
            half.lost(self.pump.loss)
        return half

    def sender_of(self, machine: Half) -> Sender:
        half = self.face_of(machine)
        assert isinstance(half, Sender)  # as is the machine
        return half

    def receiver_of(self, machine: Half) -> Receiver:
        half = self.face_of(machine)
        assert isinstance(half, Receiver)  # as is the machine
        return half

    def attachments_of(self, arrived: Arrived) -> tuple[Sender | Receiver, ...]:
        """The halves that came with a message, which the application is to have."""
        if not arrived.attachments:
            return ()
        halves = []
        for attachment in arrived.attachments:
            half = self.face_of(attachment.half)
            half.headers = attachment.headers
            self.engine.accept(attachment.half)
            halves.append(half)
        return tuple(halves)

    def message(self, arrived: Arrived) -> Message:
        return Message(arrived, self.attachments_of(arrived))

    def name_of(self, machine: Half) -> str:
        return "not sent yet" if machine.id is None else label(machine.id)

    # --- commands

    def consumed(self, arrived: Arrived) -> None:
        """The application has it. `did` is to follow, once for several."""
        if self.engine.consumed(arrived, trio.current_time()):
            self.did()

    def dispose(self, arrived: Arrived) -> None:
        """Nobody will have it, nor what came with it."""
        self.consumed(arrived)
        for half in self.attachments_of(arrived):
            half.close()

    def close(self, machine: ReceiverMachine) -> None:
        if not (self.pump.is_lost or self.engine.over or machine.gone):
            self.engine.close(machine, trio.current_time())

    def did(self) -> None:
        """Something was asked of the engine: it may have something to tell, to write, or to wait for."""
        if self._is_dispatching or self.pump.is_lost:
            return
        self.pump.dispatch_events()
        self.pump.rearm()
        self.pump.request_write()

    def _written(self) -> None:
        """What was written may have to be counted for the peer, in a moment."""
        self.pump.rearm()

    # --- the end

    def raise_if_lost(self) -> None:
        if self.pump.is_lost:
            raise self.pump.loss()

    @property
    def live(self) -> int:
        """Halves of the application's channels."""
        return len(self.engine.halves) - sum(not half.gone for half in self.base)

    def _faces(self) -> Iterator[Sender | Receiver]:
        for machine in self.engine.halves:
            yield self.face_of(machine)
        yield from [*self._kept]

    def _lost(self) -> None:
        loss = self.pump.loss
        for half in self._faces():
            half.lost(loss)
        self.engine.receive_closed(trio.current_time(), clean=False)
        for receipt in [*self.receipts]:
            receipt.settled()
        self.greeted.set()
        self.on_goodbye(loss)
        self.moved.unpark_all()

    async def leave(self, linger: float) -> None:
        """Finish everything, wait until the peer has heard it, hang up; at most `linger` seconds.

        A rule that the peer broke is told here at the latest: behind its orderly end no other call raises.
        """
        told = [sender for half in self._faces() if isinstance(sender := half, Sender) and sender.sent]
        with trio.move_on_after(linger) as scope:
            self.goodbye()
            while not self.pump.is_lost and any(not sender.given_up for sender in self._live_senders()):
                await self.moved.park()
            await self.pump.flushed()
            if not any(sender.is_unheard for sender in told):
                await self.pump.hang_up()
        if scope.cancelled_caught:
            self.pump.lose(f"the peer did not take leave within {linger} s", by="peer")
        if self.pump.is_violated or any(sender.is_unheard for sender in told):
            raise self.pump.loss()

    def _live_senders(self) -> list[Sender]:
        return [self.sender_of(machine) for machine in self.engine.senders.values()]

    def goodbye(self) -> None:
        """Finish what we send, stop what we receive."""
        if self.pump.is_lost:
            return
        self.is_leaving = True
        self.on_goodbye(None)
        for half in [*self._faces()]:
            half.close()
        self.did()

    def cut_all(self) -> None:
        """Give up every channel of the application that is still alive."""
        for machine in self.engine.halves:
            if machine not in self.base:
                self.face_of(machine).abort()
        self.did()

    # --- events

    def _dispatch(self, happened: Sequence[Event]) -> None:
        before, self._is_dispatching = self._is_dispatching, True
        try:
            for event in happened:
                self._actions[type(event)](event)
        finally:
            self._is_dispatching = before

    def _on_arrived(self, arrived: Arrived) -> None:
        self.messages_received += 1
        receiver = self.receiver_of(arrived.receiver)
        if self.is_leaving:
            receiver.close()
        receiver.deliver(arrived)

    def _on_ended(self, event: events.Ended) -> None:
        half = self.face_of(event.half)
        half.ended(event.outcome)
        # A receiver that nobody was given and whose channel is no more: nobody ever will be.
        if isinstance(half, Receiver) and not event.half.attached and event.outcome is Outcome.FORGOTTEN:
            half.drop()
        if self.moved:
            self.moved.unpark_all()

    def _on_unclaimed(self, event: events.Unclaimed) -> None:
        if isinstance(event.half.owner, Receiver):
            event.half.owner.drop()

    def _on_settled(self, event: events.Acked | events.Nacked) -> None:
        if isinstance(event.receipt.owner, Receipt):
            event.receipt.owner.settled()

    def _on_writable(self, event: events.Writable) -> None:
        if isinstance(event.sender.owner, Sender) and event.sender.owner.state is Sending.OPEN:
            event.sender.owner.window_changed()

    def _on_connected(self, event: events.Connected) -> None:
        self.peer_headers = event.headers
        self.greeted.set()

    def _on_hung_up(self, event: events.HungUp) -> None:
        if event.clean:
            self.on_goodbye(None)
        what = "" if event.clean else f" while {self.live} halves were open" if self.live else " in mid-message"
        self.pump.lose(f"the peer hung up{what}", by="peer")

    def _on_silent(self, event: events.Silent) -> None:
        self.pump.lose(f"nothing was heard for {event.seconds:.0f} s", by="network")

    def _on_failed(self, event: events.Failed) -> None:
        # The protocol has no error frame: over a byte stream only this log can say why.
        _log.warning("%s broke a rule, the connection was closed: %s", self.pump.peer or "a peer", event.error)
        self.pump.lose(str(event.error), by="peer", cause=event.error)
