"""The receiving half of a channel in a protocol with credit in bytes: its window, and loans for large messages.

A protocol derives its receiver from `WindowReceiver`, calls `arrived` for the bytes that use credit, and says in
`grant` how its document writes a grant. The window renews itself while the application consumes. A message that is
larger than the window borrows the rest of its credit from the connection's `Reassembly`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

from muxkit.core.halves import Receiver
from muxkit.core.mux_state import MuxState
from muxkit.core.receive_windows import ReceiveWindow

PARTS_OF_WINDOW: Final = 8
"""The application may take an eighth of the window before the engine hears of it, so that grants stay timely."""


class WindowReceiver(Receiver[bytes]):
    """Counts what the peer may send and what the application has consumed."""

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
        """Count bytes that the peer sent; raises `RemoteProtocolError` if that is more than its credit."""
        self.window.arrived(size)
        self._shared.held += size

    def needs(self, missing: int) -> None:
        """Lend the peer what it lacks to finish a message that still needs `missing` bytes of credit."""
        self.window.unfinished = missing
        shortfall, reassembly = self.window.shortfall(), self._shared.reassembly
        if shortfall and not reassembly.waits(self) and reassembly.borrow(self, shortfall):
            self._lend(shortfall)

    def retire(self) -> None:
        """No more data will come: grant nothing, and give back what was lent."""
        self._shared.reassembly.leave(self)
        self._repay(self.window.retire())

    def _lend(self, amount: int) -> None:
        self.window.lend(amount)
        self.grant(amount)

    def _repay(self, amount: int) -> None:
        """Give back what was lent, and serve the receivers that wait for it."""
        reassembly = self._shared.reassembly
        reassembly.repay(amount)
        while (receiver := reassembly.next_waiting()) is not None:
            assert isinstance(receiver, WindowReceiver)  # as only these borrow
            shortfall = receiver.window.shortfall()
            if not shortfall:
                reassembly.leave(receiver)
            elif reassembly.serve(receiver, shortfall):
                receiver._lend(shortfall)
            else:
                break
