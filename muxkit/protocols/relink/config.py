"""Settings of a Relink endpoint. The limits on memory and channels are in `muxkit.Limits`."""

from __future__ import annotations

from typing import Final

import attrs

from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE, between

U32_MAX: Final = 2**32 - 1
LARGEST_ID_SIZE: Final = 8
# The longest name of an endpoint in bytes.
LONGEST_NAME: Final = 255


@attrs.frozen(kw_only=True)
class Config:
    """Settings of an endpoint. Times are in seconds.

    Both sides must use the same values for `endpoint`, the sizes of ids, the transactions and `first_sequence`.
    """

    endpoint: str = ""
    """The name of the endpoint. One listener can have several endpoints. The name has at most 255 bytes of UTF-8."""
    connector_id_size: int = attrs.field(default=2, validator=between(0, LARGEST_ID_SIZE))
    """The size of ids of the connector's channels, from 0 to 8 bytes. With 0 bytes there is only channel 0."""
    listener_id_size: int = attrs.field(default=2, validator=between(0, LARGEST_ID_SIZE))
    """The size of ids of the listener's channels, from 0 to 8 bytes. With 0 bytes there is only channel 0."""
    connector_transactions: bool = False
    """Use transactions for the connector's messages: the listener holds them until they are committed."""
    listener_transactions: bool = False
    """Use transactions for the listener's messages: the connector holds them until they are committed."""
    require_link: bool = False
    """When a connector reconnects and the listener no longer has the link, end instead of getting a new link."""
    versions: tuple[int, ...] = (0,)
    """The versions of the protocol to offer or to accept. Only version 0 is defined."""
    half_duplex: bool = False
    """Let a connector wait for the listener's version before it sends its request, as the document demands.

    By default a connector that offers a single version sends both together. Waiting would cost a round trip and
    couldn't change the request.
    """
    window: int = attrs.field(default=65_536, validator=between(1, U32_MAX))
    """How many messages of one channel may be sent and not yet consumed or answered.

    Their bytes are limited as well, by `Limits.short_window`, or on a path with a long round trip by
    `Limits.channel_bytes`.
    """
    targets: int = attrs.field(default=1024, validator=between(1, U32_MAX))
    """How many channels a multicast packet may name."""
    parts: int = attrs.field(default=65_536, validator=between(1, U32_MAX))
    """How many parts a message may have."""
    ack_delay: float = attrs.field(default=0.1, validator=ABOVE_ZERO)
    """How long the acknowledgements `received` and `consumed` are delayed, so that several can be combined.

    They may go earlier with a message.
    """
    keepalive: float | None = attrs.field(default=20.0, validator=ABOVE_ZERO_OR_NONE)
    """Send a ping if no bytes have arrived for this long. None disables these pings."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=ABOVE_ZERO)
    """Give up the connection if no bytes arrive for this long after a keepalive ping."""
    first_sequence: int = attrs.field(default=0, validator=between(0, U32_MAX))
    """The number of a channel's first message. Both sides must use the same value.

    The document demands 0. Tests use other values to reach the point where the numbers wrap.
    """

    def __attrs_post_init__(self) -> None:
        size = len(self.endpoint.encode())
        if size > LONGEST_NAME:
            raise ValueError(f"Config(endpoint=…) has {size} bytes; at most {LONGEST_NAME} fit")
        if not self.versions or not all(0 <= version <= 255 for version in self.versions):
            raise ValueError(f"Config(versions={self.versions}): numbers from 0 to 255, at least one")
