"""Who may borrow beyond his window? One budget a connection for messages that arrive in parts, first come first served.

A loan is the whole rest of a message at once: two messages that each held half of a loan would wait for each
other for ever.
"""

from __future__ import annotations

from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


class Reassembly(Generic[KeyT]):
    """Loans out of `total`. A borrower that has to wait stands in line; the caller serves the line after each `repay`
    and each `leave`, for as long as `next_waiting` names somebody whom `serve` can help.
    """

    __slots__ = ("_waiting", "left", "served", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self.served = 0  # loans that somebody had to wait for, ever
        self._waiting: dict[KeyT, None] = {}

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._waiting)

    def waits(self, borrower: KeyT) -> bool:
        return borrower in self._waiting

    def borrow(self, borrower: KeyT, amount: int) -> bool:
        """Take `amount` now, or wait in line."""
        if self._waiting or amount > self.left:
            self._waiting.setdefault(borrower)
            return False
        self.left -= amount
        return True

    def repay(self, amount: int) -> None:
        self.left += amount

    def next_waiting(self) -> KeyT | None:
        """Whose turn it is; the caller asks how much he needs by now, and calls `serve` or `leave`."""
        return next(iter(self._waiting), None)

    def serve(self, borrower: KeyT, amount: int) -> bool:
        """Give the first in line what he needs, if it is there."""
        if amount > self.left:
            return False
        self.left -= amount
        self.served += 1
        del self._waiting[borrower]
        return True

    def leave(self, borrower: KeyT) -> None:
        """The borrower is gone, or needs nothing any more."""
        self._waiting.pop(borrower, None)
