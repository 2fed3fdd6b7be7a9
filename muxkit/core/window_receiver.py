"""The receiving half of a channel, for protocols that grant credit in bytes.

A protocol's receiver derives from `WindowReceiver` and implements `grant`, which queues a frame with a grant of credit.
It calls `arrived` for the bytes that have used credit. `WindowReceiver` decides when to grant how much: it renews the
window while the application consumes messages, and lends additional credit for messages that are larger than the
window (see `Reassembly`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

from muxkit.core.halves import Receiver
from muxkit.core.mux_state import MuxState
from muxkit.core.receive_windows import ReceiveWindow

PARTS_OF_WINDOW: Final = 8
"""The session calls `consumed` after the application has taken 1/8 of the window at the latest. A grant, which is for a
quarter of the window or more, is therefore never late by much."""


class WindowReceiver(Receiver[bytes]):
    """Counts the bytes that the peer may send, and those that the application hasn't consumed."""

    __slots__ = ("_shared", "owner", "window")

    def __init__(self, shared: MuxState, first: int | None = None) -> None:
        self.owner: object | None = None
        self.window: ReceiveWindow = ReceiveWindow(shared.limits.channel_bytes, shared.budget)
        self.window.start(shared.now, first)
        self._shared = shared

    @property
    def credit_in(self) -> int:
        return self.window.credit

    @property
    def held(self) -> int:
        return self.window.held

    @property
    def lag(self) -> int:
        window = self.window
        return 0 if window.lent else window.target // PARTS_OF_WINDOW

    @abstractmethod
    def grant(self, amount: int) -> None:
        """Queue a grant for the peer."""

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        self._shared.held -= size
        grant, repaid = self.window.consumed(size, self._shared.now)
        if repaid:
            self._repay(repaid)
        if grant:
            self.grant(grant)
        return grant > 0 or repaid > 0

    def arrived(self, size: int) -> None:
        """Count bytes that the peer has sent. Raises `RemoteProtocolError` if they exceed its credit."""
        self.window.arrived(size)
        self._shared.held += size

    def needs(self, missing: int) -> None:
        """Lend the credit that the peer lacks to complete a message. `missing` is the number of missing bytes.

        If not enough is left to lend, this half waits until other loans have been repaid.
        """
        self.window.unfinished = missing
        shortfall, reassembly = self.window.shortfall(), self._shared.reassembly
        if shortfall and not reassembly.waits(self) and reassembly.borrow(self, shortfall):
            self._lend(shortfall)

    def retire(self) -> None:
        """Stop granting credit, because no more data will arrive, and return the loans."""
        self._shared.reassembly.leave(self)
        self._repay(self.window.retire())

    def _lend(self, amount: int) -> None:
        self.window.lend(amount)
        self.grant(amount)

    def _repay(self, amount: int) -> None:
        """Return an amount to the budget for loans, and lend it to the receivers that wait."""
        reassembly = self._shared.reassembly
        reassembly.repay(amount)
        while (receiver := reassembly.next_waiting()) is not None:
            assert isinstance(receiver, WindowReceiver)  # nothing else borrows in protocols that use this class
            shortfall = receiver.window.shortfall()
            if not shortfall:
                reassembly.leave(receiver)
            elif reassembly.serve(receiver, shortfall):
                receiver._lend(shortfall)
            else:
                break
