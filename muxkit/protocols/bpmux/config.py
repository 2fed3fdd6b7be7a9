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

    def __attrs_post_init__(self) -> None:
        for name, span in (("keepalive", self.keepalive), ("keepalive_timeout", self.keepalive_timeout)):
            if span is not None and not span > 0:
                raise ValueError(f"Config({name}={span}): must be above 0 s")
        if not 1 <= self.first_id <= U64_MAX:
            raise ValueError(f"Config(first_id={self.first_id}): ids go from 1 to {U64_MAX}")
