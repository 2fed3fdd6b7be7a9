"""The settings of bpmux that aren't limits."""

from __future__ import annotations

import attrs
from attrs.validators import optional

from muxkit._limits import Limits
from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, between
from muxkit.core import U64_MAX


@attrs.frozen(kw_only=True)
class Config:
    """The settings of a bpmux session. Times are in seconds."""

    letter: bool = False
    """Whether the payloads of openings must be empty, as the specification demands. Otherwise they use the credit of
    the top level."""
    grants: bool = True
    """Whether to grant credit automatically when the application consumes messages. Otherwise the application must
    grant all credit with `give_credit`."""
    pongs: bool = True
    """Whether to answer pings automatically."""
    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """Send a ping if nothing has been received for this time. None never sends such pings."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=ABOVE_ZERO)
    """End the connection if nothing has been received for this time after such a ping."""
    first_id: int = attrs.field(default=1, validator=between(1, U64_MAX))
    """The first id that this side assigns to a channel or request that it opens."""
    initial_credit: int | None = attrs.field(default=None, validator=optional(between(0, U64_MAX)))
    """How many bytes the peer may send on each sink and duplex that it opens, before this side grants credit for it.

    This is an extension of the protocol. Each side announces its number, in chunks that other implementations take for
    ordinary grants. It takes effect only if both sides announce a number.

    None stands for the largest possible number, the lower of `Limits.channel_floor` and `Limits.channel_first`. But
    with `letter=True` or `grants=False`, it stands for 0. With 0, nothing is announced, and channels begin without
    credit, as in the specification.
    """

    peer_credit: int = attrs.field(default=0, validator=between(0, U64_MAX))
    """The `initial_credit` that the peer is known to announce. This side uses it before the announcement arrives.

    The first message of a connection can then be sent immediately, which saves a round trip. The payloads of openings
    may use the same number of bytes. If the peer announces less, the connection ends with an error. 0 waits for the
    announcement.

    `muxkit.reconnecting` sets this from the second session on.
    """

    def first_credit(self, limits: Limits) -> int:
        """Return the number that `initial_credit` stands for.

        Raises:
            ValueError: If `initial_credit` is larger than the limits allow.
        """
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
