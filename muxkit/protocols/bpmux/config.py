"""Settings of a bpmux engine beside the limits."""

from __future__ import annotations

import attrs

from muxkit.core import U64_MAX


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine; times in seconds."""

    letter: bool = False
    """Require empty opening payloads, as the document does; otherwise they use top-level credit."""
    grants: bool = True
    """Grant credit automatically as the application consumes; otherwise the application makes every grant."""
    pongs: bool = True
    """Answer pings automatically."""
    keepalive: float | None = 20.0
    """Ping after this long without received bytes; None never pings."""
    keepalive_timeout: float = 20.0
    """End the connection after this long without received bytes behind such a ping."""
    first_id: int = 1
    """The first id that this engine assigns."""
    initial_credit: int = 0
    """Bytes of credit that each sink and duplex of the peer has from the start, if the peer has this setting as well.

    Both ends announce theirs in a way that other implementations take for usual grants, and each uses what the other
    announced. At most `Limits.channel_floor` and `Limits.channel_first`. 0, as in the document: all credit is granted.
    """

    def __attrs_post_init__(self) -> None:
        for name, span in (("keepalive", self.keepalive), ("keepalive_timeout", self.keepalive_timeout)):
            if span is not None and not span > 0:
                raise ValueError(f"Config({name}={span}): must be above 0 s")
        if not 1 <= self.first_id <= U64_MAX:
            raise ValueError(f"Config(first_id={self.first_id}): ids go from 1 to {U64_MAX}")
        if self.initial_credit < 0:
            raise ValueError(f"Config(initial_credit={self.initial_credit}): must not be below 0")
        if self.initial_credit and (self.letter or not self.grants):
            other = "letter=True" if self.letter else "grants=False"
            raise ValueError(f"Config(initial_credit={self.initial_credit}): cannot be together with {other}")
