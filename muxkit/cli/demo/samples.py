"""Percentiles over a bounded number of samples."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 10_000


class Samples:
    """Keeps up to `MOST` values; of more a uniform random sample."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self._seen = 0
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self._seen += 1
        if len(self.kept) < MOST:
            self.kept.append(value)
        elif (place := self._random.randrange(self._seen)) < MOST:
            self.kept[place] = value


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Return the smallest sample that so many percent of all do not exceed."""
    if not samples:
        return None
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]
