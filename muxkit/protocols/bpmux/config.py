"""Settings of a bpmux engine beside the limits."""

from __future__ import annotations

import attrs
from attrs.validators import optional

from muxkit._limits import Limits
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
    initial_credit: int | None = attrs.field(default=None, validator=optional(between(0, U64_MAX)))
    """Bytes of credit that each sink and duplex of the peer has from the start, if the peer has this setting as well.

    Both ends announce theirs in a way that other implementations take for usual grants, and each uses what the other
    announced. None stands for the largest possible number, the lower of `Limits.channel_floor` and
    `Limits.channel_first`, or for 0 together with `letter=True` or `grants=False`. With 0 all credit is granted, as in
    the document, and nothing is announced.
    """

    peer_credit: int = attrs.field(default=0, validator=between(0, U64_MAX))
    """A first credit that the peer is known to announce, to be used before the announcement has come.

    The first message of a connection then waits for nothing, which saves the round trip until a server has spoken. The
    same number of bytes is used for the payloads of openings. A peer that announces less breaks the connection.
    `muxkit.reconnecting` sets it from the second session on. 0 waits for the announcement.
    """

    def first_credit(self, limits: Limits) -> int:
        """Return the number that `initial_credit` stands for. Raises ValueError if the limits allow only less."""
        largest = min(limits.channel_floor, limits.channel_first)
        if self.initial_credit is None:
            return largest if self.grants and not self.letter else 0
        if self.initial_credit > largest:
            raise ValueError(
                f"Config(initial_credit={self.initial_credit}) is above {largest}, the lower of "
                f"Limits(channel_floor={limits.channel_floor}, channel_first={limits.channel_first})"
            )
        return self.initial_credit

    def __attrs_post_init__(self) -> None:
        if self.peer_credit and (self.letter or not self.grants or self.initial_credit == 0):
            raise ValueError(
                f"Config(peer_credit={self.peer_credit}): needs a first credit of this side, which it has not with "
                "letter=True, grants=False or initial_credit=0"
            )
        if self.initial_credit and (self.letter or not self.grants):
            other = "letter=True" if self.letter else "grants=False"
            raise ValueError(f"Config(initial_credit={self.initial_credit}): cannot be together with {other}")
