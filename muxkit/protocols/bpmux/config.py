"""Settings of a bpmux session. The limits on memory and channels are in `muxkit.Limits`.

In bpmux, a receiver grants *credit*, which is the number of bytes that the sender may send. Each channel has credit of
its own. The connection has credit too, at the "top level" in the specification's words, which pays for requests.
"""

from __future__ import annotations

import attrs
from attrs.validators import optional

from muxkit._limits import Limits
from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, between
from muxkit.core import U64_MAX


@attrs.frozen(kw_only=True)
class Config:
    """Settings of a bpmux session. Times are in seconds. The defaults suit almost all programs."""

    letter: bool = False
    """Follow the letter of the specification: a message that opens a channel carries no payload.

    By default, such a message may carry a payload, which is paid with credit of the top level.
    """
    grants: bool = True
    """Grant credit automatically when the application receives messages.

    With False, the application has to grant all credit by calling `give_credit`.
    """
    pongs: bool = True
    """Answer the peer's pings automatically."""
    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """Send a ping if nothing has arrived for this time. With None, the session never does."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=ABOVE_ZERO)
    """End the connection if nothing has arrived for this time after such a ping."""
    first_id: int = attrs.field(default=1, validator=between(1, U64_MAX))
    """The id of the first channel or request of this side. Later ones count up from it."""
    initial_credit: int | None = attrs.field(default=None, validator=optional(between(0, U64_MAX)))
    """How many bytes the peer may send on a new channel before this side has granted any credit for it.

    In the specification, channels begin without credit, so the first message of each channel waits for a round trip.
    This setting is an extension that avoids the wait. When a session begins, each side announces its number. The
    announcement has the form of an ordinary grant of credit, so that other implementations of bpmux accept it. The
    numbers take effect if both sides announce one.

    The default, None, announces the largest number that the limits allow, which is the lower of `Limits.channel_floor`
    and `Limits.channel_first`. 0 announces nothing and follows the specification. With `letter=True` or
    `grants=False`, None means 0.
    """

    peer_credit: int = attrs.field(default=0, validator=between(0, U64_MAX))
    """Send this many bytes on each new channel before the peer has announced its `initial_credit`.

    That saves a round trip at the beginning of a session, if you know what the peer will announce. For example,
    `muxkit.reconnecting` knows it from the second session with the same peer on, and sets this automatically. The
    payloads of messages that open channels may have the same number of bytes in all. If the peer announces less, the
    connection ends with an error. With 0, the session waits for the announcement.
    """

    def first_credit(self, limits: Limits) -> int:
        """Return the number of bytes that this side announces, which is `initial_credit` if that isn't None.

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
                f"Config(peer_credit={self.peer_credit}): expected this side to announce an initial_credit as well; "
                "remove letter=True, grants=False or initial_credit=0"
            )
        if self.initial_credit and (self.letter or not self.grants):
            other = "letter=True" if self.letter else "grants=False"
            raise ValueError(f"Config(initial_credit={self.initial_credit}): expected 0 or None, as {other} is set")
