"""What can be chosen for one bpmux connection, apart from the limits?"""

from __future__ import annotations

import attrs

from muxkit.core import U64_MAX


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine; times in seconds."""

    letter: bool = False
    """Opening payloads must be empty, as the document has it; otherwise they are paid from top-level credit."""
    grants: bool = True
    """Grant credit by itself as the application consumes; otherwise every grant is made by hand."""
    pongs: bool = True
    """Answer pings by itself."""
    keepalive: float | None = 20.0
    """Ping when nothing came for so long; None never pings."""
    keepalive_timeout: float = 20.0
    """Give up when nothing comes for so long after such a ping."""
    first_id: int = 1
    """Where the ids of our entities begin."""

    def __attrs_post_init__(self) -> None:
        for name, span in (("keepalive", self.keepalive), ("keepalive_timeout", self.keepalive_timeout)):
            if span is not None and not span > 0:
                raise ValueError(f"Config({name}={span}): must be above 0 s")
        if not 1 <= self.first_id <= U64_MAX:
            raise ValueError(f"Config(first_id={self.first_id}): ids go from 1 to {U64_MAX}")
