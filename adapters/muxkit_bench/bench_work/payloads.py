"""Payloads: a few different messages of each size, so that lost, doubled and swapped ones are noticed."""

from __future__ import annotations

import random
from functools import lru_cache

MANY = 16


@lru_cache
def payloads(size: int) -> list[bytes]:
    """The same in every process."""
    source = random.Random(size)
    return [source.randbytes(size) for _ in range(MANY)]
