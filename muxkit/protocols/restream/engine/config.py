"""The settings of both engines, beside the `Limits` that all protocols share."""

from __future__ import annotations

from typing import Final

import attrs

KIB: Final = 1024
FIRST_LINE_EXTRA: Final = 4 * KIB  # bytes beside the longest integer of a line


@attrs.frozen(kw_only=True)
class ServerConfig:
    """The settings of a `ServerEngine`; sizes in bytes, without the line feed."""

    status: bool = False
    """Answer status requests, an extension; without it they are errors, as in the specification."""
    digits: int = 100_000
    """The longest integer of a stateless stream, in decimal digits."""
    line: int = 64 * KIB
    """The longest line after the first."""
    opening: int = 8 * KIB
    """The longest line that opens a session: its `params` are stored as long as the session."""

    def __attrs_post_init__(self) -> None:
        _check("ServerConfig", digits=self.digits, line=self.line, opening=self.opening)

    @property
    def first_line(self) -> int:
        """The longest first line, which may hold the longest integer."""
        return max(self.line, self.digits + FIRST_LINE_EXTRA)


@attrs.frozen(kw_only=True)
class ClientConfig:
    """The settings of a `ClientEngine`; sizes in bytes, without the line feed."""

    ack_every: int | None = 16
    """Acknowledge after this many messages, and the final one; None: only by `acknowledge`."""
    consecutive: bool = True
    """Each id must be the one after the last; otherwise it only has to be higher, as in the specification."""
    digits: int = 100_000
    """The longest integer of a stateless stream, in decimal digits."""
    line: int = 64 * KIB
    """The longest line; in a stateless stream at least what the longest integer needs."""

    def __attrs_post_init__(self) -> None:
        _check("ClientConfig", digits=self.digits, line=self.line)
        if self.ack_every is not None and self.ack_every < 1:
            raise ValueError(f"ClientConfig(ack_every={self.ack_every}): must be at least 1, or None")

    @property
    def value_line(self) -> int:
        """The longest line of a stateless stream."""
        return max(self.line, self.digits + FIRST_LINE_EXTRA)


def _check(config: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{config}({name}={size}): must be at least 1")
