"""The settings of a Relink endpoint, apart from the limits."""

from __future__ import annotations

from typing import Final

import attrs

U32_MAX: Final = 2**32 - 1
LARGEST_ID_SIZE: Final = 8
LONGEST_NAME: Final = 255  # bytes


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an endpoint; both sides must agree on the first five. Times in seconds."""

    endpoint: str = ""
    """The name that one listener tells its services apart by; at most 255 bytes of UTF-8."""
    connector_id_size: int = 2
    """Bytes of a channel id in the connector's channels, 0 to 8. With 0 there is one channel, 0."""
    listener_id_size: int = 2
    """The same for the listener's channels."""
    connector_transactions: bool = False
    """The connector's messages wait at the listener until they are committed or rolled back."""
    listener_transactions: bool = False
    """The same for the listener's messages."""
    require_link: bool = False
    """A connector that comes back wants its old link or none."""
    versions: tuple[int, ...] = (0,)
    """The versions of the protocol to offer or to accept; 0 is the only one that has packets."""
    window: int = 65_536
    """Messages of one channel that may be unanswered; the bytes of a window are `Limits.short_window`."""
    targets: int = 1024
    """Channels that one multicast packet may name."""
    parts: int = 65_536
    """Parts that one message may have."""
    ack_delay: float = 0.1
    """How long `received` and `consumed` wait for more of them."""
    keepalive: float | None = 20.0
    """Ping when nothing came for so long; None never pings."""
    keepalive_timeout: float = 20.0
    """Give up the connection when nothing comes for so long after such a ping."""
    first_sequence: int = 0
    """The number of a channel's first message. Both sides must agree; the document says 0, tests start elsewhere."""

    def __attrs_post_init__(self) -> None:
        size = len(self.endpoint.encode())
        if size > LONGEST_NAME:
            raise ValueError(f"Config(endpoint=…) has {size} bytes; at most {LONGEST_NAME} fit")
        for name in ("connector_id_size", "listener_id_size"):
            if not 0 <= getattr(self, name) <= LARGEST_ID_SIZE:
                raise ValueError(f"Config({name}={getattr(self, name)}): 0 to {LARGEST_ID_SIZE} bytes")
        for name in ("window", "targets", "parts"):
            if not 1 <= getattr(self, name) <= U32_MAX:
                raise ValueError(f"Config({name}={getattr(self, name)}): 1 to {U32_MAX}")
        if not self.versions or not all(0 <= version <= 255 for version in self.versions):
            raise ValueError(f"Config(versions={self.versions}): numbers from 0 to 255, at least one")
        if not 0 <= self.first_sequence <= U32_MAX:
            raise ValueError(f"Config(first_sequence={self.first_sequence}): 0 to {U32_MAX}")
        for name in ("ack_delay", "keepalive", "keepalive_timeout"):
            span = getattr(self, name)
            if span is not None and not span > 0:
                raise ValueError(f"Config({name}={span}): must be above 0 s")
