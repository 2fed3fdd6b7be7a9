"""Payloads that both ends compute from a seed, so that each can verify what it receives."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INDEX = 8  # bytes; each message begins with its number
STEP = 7919  # bytes between two messages in the block; a prime, so that they seldom repeat

ECHO_SIZES = (16, 64, 9, 256, 100, 1024, 512, 8)  # bytes
BULK_SIZES = (65_536,)


class Payloads:
    """The messages of one direction of one channel: the same seed and sizes give the same messages."""

    def __init__(self, seed: int, sizes: Sequence[int]) -> None:
        if min(sizes) < INDEX:
            raise ValueError(f"sizes={sizes}: a message holds its number, {INDEX} bytes")
        self._sizes = sizes
        self._room = 2 * max(sizes)
        self._block = random.Random(seed).randbytes(self._room + max(sizes))

    def message(self, number: int) -> bytes:
        start = number * STEP % self._room
        size = self._sizes[number % len(self._sizes)] - INDEX
        return number.to_bytes(INDEX, "big") + self._block[start : start + size]


class Checked:
    """Counts the messages that were right, and notes what was wrong with others."""

    MOST = 5  # problems that are kept

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.problems: list[str] = []

    def check(self, where: str, number: int, came: bytes, expected: bytes) -> None:
        """Compare the `number`th message of a channel with the one that the seed gives."""
        if came == expected:
            self.messages += 1
            self.bytes += len(came)
        else:
            self.note(f"{where}, message {number}: {_difference(came, expected)}")

    def note(self, problem: str) -> None:
        if len(self.problems) < self.MOST:
            self.problems.append(problem)


def _difference(came: bytes, expected: bytes) -> str:
    if came[:INDEX] != expected[:INDEX]:
        return f"number {int.from_bytes(came[:INDEX], 'big')} came in its place, {len(came)} bytes"
    if len(came) != len(expected):
        return f"{len(came)} bytes came, not {len(expected)}"
    first = next(position for position, (one, other) in enumerate(zip(came, expected, strict=True)) if one != other)
    return f"it differs from byte {first} of {len(expected)} on"
