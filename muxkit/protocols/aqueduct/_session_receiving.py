"""How does an application receive? Whole messages, and the halves of channels that came with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import NO_QUEUE, Receiving, Step, advance, queue_of
from muxkit.protocols.aqueduct._session_errors import ERRORS, closed, finished
from muxkit.protocols.aqueduct._session_sending import Sender
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, turns

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from types import TracebackType

    from muxkit.protocols.aqueduct._channels import Ticket
    from muxkit.protocols.aqueduct._events import Arrived, Outcome
    from muxkit.protocols.aqueduct._receiving import ReceiverMachine
    from muxkit.protocols.aqueduct._session_core import Core
    from muxkit.protocols.aqueduct._session_errors import ErrorMaker
    from muxkit.protocols.aqueduct._varint import Headers

OWED = 1024  # bytes; half of the smallest window is worth a grant


class Message:
    """A message that came. As a block it owns the halves that came with it: those that nobody takes are closed at its
    end, given up if it ends by an error. A message without attachments needs no block.
    """

    __slots__ = ("_taken", "attachments", "headers", "is_unreliable", "number", "payload")

    def __init__(self, arrived: Arrived, attachments: tuple[Sender | Receiver, ...]) -> None:
        self.payload = arrived.payload
        self.headers: Headers = arrived.headers
        self.number = arrived.number
        """Counted from 0, those in streams and those in datagrams each by themselves."""
        self.is_unreliable = arrived.unreliable
        """It came in a datagram."""
        self.attachments = attachments
        """To look at; to use one, take it."""
        self._taken: set[int] = set()

    def take(self, index: int = 0) -> Sender | Receiver:
        """An attachment that is yours from now on."""
        if not 0 <= index < len(self.attachments):
            raise LocalProtocolError(f"attachment {index} of a message that has {len(self.attachments)}")
        if index in self._taken:
            raise LocalProtocolError(f"attachment {index} was taken before")
        self._taken.add(index)
        return self.attachments[index]

    def sender(self, index: int = 0) -> Sender:
        """The same, if it is one to send on; else `LocalProtocolError`."""
        self._check(index, Sender)
        half = self.take(index)
        assert isinstance(half, Sender)  # was checked
        return half

    def receiver(self, index: int = 0) -> Receiver:
        """The same, if it is one to receive from; else `LocalProtocolError`."""
        self._check(index, Receiver)
        half = self.take(index)
        assert isinstance(half, Receiver)  # was checked
        return half

    def _check(self, index: int, kind: type[object]) -> None:
        if 0 <= index < len(self.attachments) and not isinstance(self.attachments[index], kind):
            what = type(self.attachments[index]).__name__
            raise LocalProtocolError(f"attachment {index} is a {what}, not a {kind.__name__}")

    def close(self) -> None:
        """Close what nobody took."""
        for half in self._take_rest():
            half.close()

    async def aclose(self) -> None:
        """`close`, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            for half in self._take_rest():
                half.abort()

    def _take_rest(self) -> list[Sender | Receiver]:
        return [self.take(index) for index in range(len(self.attachments)) if index not in self._taken]

    def __repr__(self) -> str:
        attached = f", {len(self.attachments)} attached" if self.attachments else ""
        return f"<aqueduct.Message {self.number}, {len(self.payload)} bytes{attached}>"


class _Waiter:
    __slots__ = ("arrived", "task")

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task = task
        self.arrived: Arrived | None = None  # handed over: from then on a cancellation comes too late


class Receiver(trio.abc.ReceiveChannel[Message]):
    """Receives messages; several tasks may, and get them in the order in which they came to wait.

    Iterating ends when the sender has finished.
    """

    __slots__ = (
        "__weakref__", "_core", "_divert", "_error", "_line", "_mailbox", "_owed", "_since_yield", "_ticket",
        "headers", "machine", "state", "taken",
    )  # fmt: skip

    def __init__(
        self, core: Core, machine: ReceiverMachine, *, headers: Headers = (), ticket: Ticket | None = None
    ) -> None:
        self._core = core
        self._ticket = ticket  # of the other half, while that is here
        self._mailbox: deque[Arrived] = NO_QUEUE
        self._line: list[_Waiter] = []  # mostly one
        self._error: ErrorMaker = finished
        self._divert: Callable[[Arrived | None], None] | None = None
        self._since_yield = 0  # bytes
        self._owed = 0  # bytes consumed since somebody looked whether that is worth a grant
        self.machine = machine
        self.headers = headers
        """What the side that made the channel said about it."""
        self.state = Receiving.OPEN
        self.taken = 0
        """Messages that the application has received."""
        machine.owner = self

    # --- for the application

    async def receive(self) -> Message:
        """The next message. Cancelled means that none was taken.

        Checks for cancellation in every call, yields at the latest on every 64th call or 16 KiB, and always when it
        had to wait. What came before the end is given first. May be waited for before the other half was sent.

        Raises `Finished`, a `trio.EndOfChannel`, at the clean end, `Cancelled` when the sender gave up, `LostInTransit`
        when the other half did not arrive, `LinkLost` when the connection is gone, `trio.ClosedResourceError` after
        `aclose`.
        """
        return self._core.message(await self.next())

    async def receive_many(self, limit: int | None = None) -> list[Message]:
        """Wait for at least one message, then give all that have come, at most `limit`; one checkpoint."""
        return [self._core.message(arrived) for arrived in await self.next_many(limit)]

    async def aclose(self) -> None:
        """Want no more: what has come is dropped, its attachments are closed, and the peer is told to send no more."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        if self.state is not Receiving.CLOSED:
            self._tell()
            self.state = advance(self.state, Step.STOP)
        self._error = closed
        self.drop()
        self._wake_all()
        self._core.did()

    def abort(self) -> None:
        """The same as `close`: to a reader, giving up and wanting no more are one thing."""
        self.close()

    @property
    def unread(self) -> int:
        """Messages that wait to be received."""
        return len(self._mailbox)

    def __repr__(self) -> str:
        name = self._core.name_of(self.machine)
        return f"<aqueduct.Receiver {name}: {self.state.value}, {len(self._mailbox)} unread>"

    # --- for the connection

    async def next(self) -> Arrived:
        """The next message, as the engine gave it."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._mailbox:
            arrived = await self._wait()
            self._took(arrived)
            return arrived
        arrived = self._mailbox.popleft()
        self._took(arrived)
        self._since_yield += max(len(arrived.payload), YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return arrived

    async def next_many(self, limit: int | None) -> list[Arrived]:
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: must be at least 1")
        await trio.lowlevel.checkpoint_if_cancelled()
        has_waited = not self._mailbox
        many = [await self._wait()] if has_waited else []
        while self._mailbox and (limit is None or len(many) < limit):
            many.append(self._mailbox.popleft())
        for arrived in many:
            self._took(arrived)
        if not has_waited:
            await self._yield()
        return many

    def divert(self, to: Callable[[Arrived | None], None]) -> None:
        """From now on messages go there at once, and None at the end; what waits goes first."""
        self._divert = to
        while self._mailbox:
            to(self._mailbox.popleft())
        if self.state is not Receiving.OPEN:
            to(None)

    def deliver(self, arrived: Arrived) -> None:
        """A message came."""
        if self.state is not Receiving.OPEN:
            self._core.dispose(arrived)
        elif self._divert is not None:
            self._divert(arrived)
        elif self._line:  # then nothing lies in the mailbox
            waiter = self._line.pop(0)
            waiter.arrived = arrived
            trio.lowlevel.reschedule(waiter.task)
        else:
            self._mailbox = queue_of(self._mailbox)
            self._mailbox.append(arrived)

    def ended(self, outcome: Outcome) -> None:
        """The engine says how it ended."""
        self.over(ERRORS[outcome])

    def lost(self, error: ErrorMaker) -> None:
        """The connection is gone."""
        self.over(error)

    def take_no_more(self) -> None:
        """Tell the peer to send no more; what has come can still be received."""
        if self.state is Receiving.OPEN:
            self._tell()
            self.over(finished)
            self._core.did()

    def over(self, error: ErrorMaker) -> None:
        """No more will come; `error` says why, once everything was taken."""
        if self.state is Receiving.OPEN:
            self.state = advance(self.state, Step.ENDED)
            self._error = error
            self._drain()
            if self._line:
                turns().wake(self._wake_all)
            if self._divert is not None:
                self._divert(None)

    def drop(self) -> None:
        """Nobody will receive what lies here."""
        while self._mailbox:
            self._core.dispose(self._mailbox.popleft())

    # --- inside

    async def _wait(self) -> Arrived:
        if self.state is not Receiving.OPEN:
            await trio.lowlevel.cancel_shielded_checkpoint()  # a loop around it must not keep everybody waiting
            raise self._error()
        waiter = _Waiter(trio.lowlevel.current_task())
        self._line.append(waiter)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._line.remove(waiter)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._since_yield = 0
        if waiter.arrived is None:
            raise self._error()
        return waiter.arrived

    def _took(self, arrived: Arrived) -> None:
        self.taken += 1
        # One that had a stream of its own may allow the peer to open one more.
        is_worth_it = not self._mailbox or (arrived.incoming is not None and arrived.incoming.fin)
        self._owed += arrived.cost
        self._core.consumed(arrived)
        if is_worth_it or self._owed >= OWED:
            self._owed = 0
            self._core.did()
        if self.state is Receiving.DRAINING:
            self._drain()

    def _drain(self) -> None:
        if not self._mailbox:
            self.state = advance(self.state, Step.DRAINED)

    def _tell(self) -> None:
        if self.machine.id is not None:
            self._core.close(self.machine)
        elif self._ticket is not None:
            self._ticket.spent = True

    def _wake_all(self) -> None:
        while self._line:
            trio.lowlevel.reschedule(self._line.pop(0).task)

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()
