"""What do many measurements say? Percentiles, from a number of samples that does not grow with the time it takes."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 10_000


class Samples:
    """Keeps all values while they are few, and of many a random choice, each as likely as any other."""

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
    """The smallest sample that so many percent of all do not exceed."""
    if not samples:
        return None
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]
