"""Settings of a bpmux engine beside the limits."""

from __future__ import annotations

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, between
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
    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """Ping after this long without received bytes; None never pings."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=ABOVE_ZERO)
    """End the connection after this long without received bytes behind such a ping."""
    first_id: int = attrs.field(default=1, validator=between(1, U64_MAX))
    """The first id that this engine assigns."""
    initial_credit: int = attrs.field(default=0, validator=between(0, U64_MAX))
    """Bytes of credit that each sink and duplex of the peer has from the start, if the peer has this setting as well.

    Both ends announce theirs in a way that other implementations take for usual grants, and each uses what the other
    announced. At most `Limits.channel_floor` and `Limits.channel_first`. 0, as in the document: all credit is granted.
    """

    def __attrs_post_init__(self) -> None:
        if self.initial_credit and (self.letter or not self.grants):
            other = "letter=True" if self.letter else "grants=False"
            raise ValueError(f"Config(initial_credit={self.initial_credit}): cannot be together with {other}")
