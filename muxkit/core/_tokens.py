"""How often may that happen? A token bucket whose clock is an argument."""

from __future__ import annotations


class TokenBucket:
    """Allows `burst` at once and `rate` a second after that. A clock that goes back gives nothing."""

    __slots__ = ("_at", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = burst
        self.tokens = burst
        self._at: float | None = None

    def has_token(self, now: float) -> bool:
        """Would `take` succeed?"""
        if self._at is None:
            self._at = now
        elif now > self._at:
            self.tokens = min(self.burst, self.tokens + (now - self._at) * self.rate)
            self._at = now
        return self.tokens >= 1

    def take(self, now: float) -> bool:
        """One more; False when there were too many."""
        if not self.has_token(now):
            return False
        self.tokens -= 1
        return True
