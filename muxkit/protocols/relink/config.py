"""The settings of a Relink endpoint, apart from the limits."""

from __future__ import annotations

from typing import Final

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, between

U32_MAX: Final = 2**32 - 1
LARGEST_ID_SIZE: Final = 8
LONGEST_NAME: Final = 255  # bytes


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an endpoint; both sides must agree on the first five. Times in seconds."""

    endpoint: str = ""
    """The name that one listener tells its services apart by; at most 255 bytes of UTF-8."""
    connector_id_size: int = attrs.field(default=2, validator=between(0, LARGEST_ID_SIZE))
    """Bytes of a channel id in the connector's channels, 0 to 8. With 0 there is one channel, 0."""
    listener_id_size: int = attrs.field(default=2, validator=between(0, LARGEST_ID_SIZE))
    """The same for the listener's channels."""
    connector_transactions: bool = False
    """The connector's messages wait at the listener until they are committed or rolled back."""
    listener_transactions: bool = False
    """The same for the listener's messages."""
    require_link: bool = False
    """A connector that comes back wants its old link or none."""
    versions: tuple[int, ...] = (0,)
    """The versions of the protocol to offer or to accept; 0 is the only one that has packets."""
    half_duplex: bool = False
    """A connector waits for the listener's version before it sends its request, as the document says.

    Otherwise it sends both together, if it offers one version, because waiting costs a round trip and changes nothing.
    """
    window: int = attrs.field(default=65_536, validator=between(1, U32_MAX))
    """Messages of one channel that may be unanswered. Their bytes are bounded by `Limits.short_window`, and on a long
    path by `Limits.channel_bytes`."""
    targets: int = attrs.field(default=1024, validator=between(1, U32_MAX))
    """Channels that one multicast packet may name."""
    parts: int = attrs.field(default=65_536, validator=between(1, U32_MAX))
    """Parts that one message may have."""
    ack_delay: float = attrs.field(default=0.1, validator=ABOVE_ZERO)
    """How long `received` and `consumed` wait for more of them."""
    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """Ping when nothing came for so long; None never pings."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=ABOVE_ZERO)
    """Give up the connection when nothing comes for so long after such a ping."""
    first_sequence: int = attrs.field(default=0, validator=between(0, U32_MAX))
    """The number of a channel's first message. Both sides must agree; the document says 0, tests start elsewhere."""

    def __attrs_post_init__(self) -> None:
        size = len(self.endpoint.encode())
        if size > LONGEST_NAME:
            raise ValueError(f"Config(endpoint=…) has {size} bytes; at most {LONGEST_NAME} fit")
        if not self.versions or not all(0 <= version <= 255 for version in self.versions):
            raise ValueError(f"Config(versions={self.versions}): numbers from 0 to 255, at least one")
