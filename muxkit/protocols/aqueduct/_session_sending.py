"""How does an application send? The sending half of a channel, which may have come in a message or stay behind one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Sending, Step, advance
from muxkit.protocols.aqueduct._channels import Ticket
from muxkit.protocols.aqueduct._events import Outcome
from muxkit.protocols.aqueduct._sending import Mode
from muxkit.protocols.aqueduct._session_errors import ERRORS, closed
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, SendHalf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.aqueduct._sending import Promise, SenderMachine
    from muxkit.protocols.aqueduct._session_core import Core
    from muxkit.protocols.aqueduct._varint import Headers

    Pairs = Sequence[tuple[bytes, bytes]]

EMPTY = 1  # byte: the headers of a message that has none


class Receipt:
    """What became of one message."""

    __slots__ = ("_core", "_known", "_promise")

    def __init__(self, core: Core, promise: Promise) -> None:
        self._core = core
        self._promise = promise
        self._known: trio.Event | None = None
        promise.owner = self

    @property
    def known(self) -> bool | None:
        """True if it arrived, False if not, None while nobody can say."""
        return self._promise.arrived

    async def arrived(self) -> bool:
        """Wait until it is known; False as well if nobody will ever say that it did, though the connection lives.

        That it arrived says nothing about who has read it. Raises `LinkLost` if the connection goes first.
        """
        await trio.lowlevel.checkpoint()
        if self._promise.arrived is None:
            self._core.raise_if_lost()
            if self._known is None:
                self._known = trio.Event()
            self._core.receipts[self] = None
            await self._known.wait()
        if self._promise.arrived is None:
            self._core.raise_if_lost()
        return bool(self._promise.arrived)

    def settled(self) -> None:
        """For the connection: the waiting is over."""
        self._core.receipts.pop(self, None)
        if self._known is not None:
            self._known.set()

    def __repr__(self) -> str:
        became = {None: "not known yet", True: "arrived", False: "lost"}[self.known]
        return f"<aqueduct.Receipt: {became}>"


class Sender(SendHalf):
    """Sends messages; as a block it finishes when it is left, without waiting for the peer."""

    __slots__ = ("__weakref__", "_core", "_engine", "_ticket", "headers", "machine", "sent")

    def __init__(
        self, core: Core, machine: SenderMachine, *, headers: Headers = (), ticket: Ticket | None = None
    ) -> None:
        super().__init__(core.room, core.did)
        self._core = core
        self._engine = core.engine
        self._ticket = ticket  # of the other half, while that is here
        self.machine = machine
        self.headers = headers
        """What the side that made the channel said about it."""
        self.sent = 0
        """Messages that the connection has taken."""
        machine.owner = self

    # --- for the application

    async def send(
        self,
        message: bytes,
        *,
        headers: Pairs = (),
        attachments: Sequence[Ticket] = (),
        mode: Mode = Mode.ORDERED,
    ) -> None:
        """Send one message; returns when the connection has it.

        Cancelled means not sent, and the tickets are still yours. Waits while too much of this channel is unsent or
        unanswered, in line behind earlier senders; with `Mode.UNRELIABLE` never: then the oldest give way. Checks for
        cancellation in every call, yields at the latest on every 64th call or 16 KiB, and always when it had to wait.

        Raises `trio.ClosedResourceError` after `finish`, `cancel` or `aclose`, `NoReceiver` when nobody will read it,
        `LostInTransit` when the other half did not arrive, `LinkLost` when the connection is gone, and
        `LocalProtocolError` for what cannot be sent, or when the other half was not sent yet.
        """
        await self._transmit(message, headers, attachments, mode, receipt=False)

    async def send_tracked(
        self,
        message: bytes,
        *,
        headers: Pairs = (),
        attachments: Sequence[Ticket] = (),
        mode: Mode = Mode.ORDERED,
    ) -> Receipt:
        """The same as `send`, with a receipt by which to learn whether it arrived."""
        promise = await self._transmit(message, headers, attachments, mode, receipt=True)
        assert promise is not None  # since one was asked for
        return Receipt(self._core, promise)

    def cancel(self) -> None:
        """Give up: what has not arrived may be lost, and the receiver learns that. Too late once all was finished."""
        self.abort()

    def abort(self) -> None:
        """The same as `cancel`."""
        super().abort()
        if self.machine.id is None:
            self.confirmed()

    def __repr__(self) -> str:
        return f"<aqueduct.Sender {self._core.name_of(self.machine)}: {self.state.value}>"

    # --- for the connection

    def push(self, message: bytes, attachments: Sequence[Ticket]) -> None:
        """Hand a message to the engine at once; there must be room for it."""
        self._engine.send(self.machine, message, attachments=attachments)
        self._count()
        self._core.handed_over(attachments)

    def ended(self, outcome: Outcome) -> None:
        """The engine says how it ended."""
        if outcome in (Outcome.FINISHED, Outcome.CANCELLED) and self.state is not Sending.OPEN:
            self.confirmed()
        else:
            self.stopped(ERRORS[outcome])

    def admits(self, size: int) -> bool:
        return self._engine.admits(self.machine, size + EMPTY)

    def watch(self, size: int) -> None:
        # What is not handed over has nothing on its way, so it admits everything and is never watched.
        self._engine.watch(self.machine, size + EMPTY)

    def check_size(self, size: int) -> None:
        if size > self._engine.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self._engine.limits.message})")

    # --- inside

    async def _transmit(
        self, message: bytes, headers: Pairs, attachments: Sequence[Ticket], mode: Mode, *, receipt: bool
    ) -> Promise | None:
        await trio.lowlevel.checkpoint_if_cancelled()
        payload = message if type(message) is bytes else _as_bytes(message)
        for ticket in attachments:
            if not isinstance(ticket, Ticket):
                raise LocalProtocolError(f"only the ticket of a new channel can be sent, not a {type(ticket).__name__}")
        if self.state is not Sending.OPEN:
            await self._refuse()
        size = self._engine.size_of(payload, headers, attachments)
        has_turn = False
        if mode is not Mode.UNRELIABLE and not self.may_send(size):
            while not has_turn:
                await self.wait_turn(size)
                has_turn = self.admits(size)
                if not has_turn:  # a datagram that was too large took the room
                    self.end_turn()
        try:
            promise = self._engine.send(
                self.machine, payload, headers=headers, attachments=attachments, mode=mode, receipt=receipt
            )
            self._count()
            self._core.handed_over(attachments)
        finally:
            if has_turn:
                self.end_turn()
        self._core.did()
        self._since_yield += max(size, YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return promise

    def _push(self, message: bytes) -> None:
        self._engine.send(self.machine, message)
        self._count()

    def _count(self) -> None:
        self.sent += 1
        self._core.messages_sent += 1
        if self.machine.oneshot:
            self.state = advance(self.state, Step.FINISH)
            self._close_gate(closed)

    def _close(self, payload: bytes) -> None:
        super()._close(payload)
        if self.machine.id is None:
            self.confirmed()

    def _finish(self, payload: bytes) -> None:
        if payload:
            raise LocalProtocolError("an end says nothing in Aqueduct: send a message before it")
        if self.machine.id is None:
            self._void()
        else:
            self._engine.finish(self.machine)

    def _abort(self) -> None:
        if self.machine.id is None:
            self._void()
        elif self.machine.is_cancellable:
            self._engine.cancel(self.machine, trio.current_time())

    def _void(self) -> None:
        """The other half is of no use any more."""
        if self._ticket is not None:
            self._ticket.spent = True


def _as_bytes(message: object) -> bytes:
    if isinstance(message, (bytes, bytearray, memoryview)):
        return bytes(message)
    raise TypeError(f"a message is bytes, not {type(message).__name__}")
