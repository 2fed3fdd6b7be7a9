"""The updates that a topic keeps, in a ring: each has a number, and finding one takes one step."""

from __future__ import annotations


class Ring:
    """The newest updates, up to a number of them and a number of bytes.

    `first` and `head` are the numbers of the oldest and the newest update that it has. While it is empty, `first` is
    one more than `head`.
    """

    def __init__(self, keep: int, keep_bytes: int) -> None:
        self._slots: list[bytes] = [b""] * keep
        self._keep = keep
        self._most_bytes = keep_bytes
        self._bytes = 0
        self.first: int = 1
        self.head: int = 0

    def start_after(self, head: int) -> None:
        """Begin with the number after `head`, while nothing was added yet."""
        self.first, self.head = head + 1, head

    @property
    def is_full(self) -> bool:
        """True if another update takes the place of the oldest one."""
        return self.head - self.first + 1 >= self._keep or self._bytes >= self._most_bytes

    def add(self, message: bytes) -> None:
        """Add the update after `head`, and drop old ones that have no place any more."""
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
        """Return the updates with these numbers, both included; all of them must be there."""
        return [self._slots[number % self._keep] for number in range(first, last + 1)]
