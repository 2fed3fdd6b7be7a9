"""A ring buffer with the newest updates of a topic."""

from __future__ import annotations


class Ring:
    """The newest updates of a topic, limited in number and in bytes. Updates are numbered, beginning with 1.

    Args:
        keep: The maximum number of updates.
        keep_bytes: The maximum of their total size. The newest update is kept even if it is larger.

    Attributes:
        first: The number of the oldest update, or `head + 1` if the ring is empty.
        head: The number of the newest update.
    """

    def __init__(self, keep: int, keep_bytes: int) -> None:
        self._slots: list[bytes] = [b""] * keep
        self._keep = keep
        self._most_bytes = keep_bytes
        self._bytes = 0
        self.first: int = 1
        self.head: int = 0

    def start_after(self, head: int) -> None:
        """Let the next update have the number after `head`."""
        self.first, self.head = head + 1, head

    @property
    def is_full(self) -> bool:
        """True if the next update replaces the oldest one."""
        return self.head - self.first + 1 >= self._keep or self._bytes >= self._most_bytes

    def add(self, message: bytes) -> None:
        """Add an update, and drop the oldest ones if necessary."""
        while self.first <= self.head and (
            self.head - self.first + 1 >= self._keep or self._bytes + len(message) > self._most_bytes
        ):
            slot = self.first % self._keep
            self._bytes -= len(self._slots[slot])
            self._slots[slot] = b""
            self.first += 1
        self.head += 1
        self._slots[self.head % self._keep] = message
        self._bytes += len(message)

    def between(self, first: int, last: int) -> list[bytes]:
        """Return the updates from `first` to `last`, both included. The ring must have all of them."""
        return [self._slots[number % self._keep] for number in range(first, last + 1)]
