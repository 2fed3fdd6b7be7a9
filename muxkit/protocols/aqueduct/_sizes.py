"""What does a message count, and may it be sent at all?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import LocalProtocolError
from muxkit.protocols.aqueduct._varint import encode_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._limits import Limits
    from muxkit.protocols.aqueduct._channels import Ticket
    from muxkit.protocols.aqueduct._config import Config

    Pairs = Sequence[tuple[bytes, bytes]]

NO_HEADERS: Final = encode_headers(())  # and no attachments are written in the same way
ATTACHMENT: Final = 10  # bytes, the id of a channel at most


class Sizes:
    """Measures messages against the bounds of one connection."""

    def __init__(self, config: Config, limits: Limits) -> None:
        self._config = config
        self._most = limits.message

    def encode(self, headers: Pairs) -> bytes:
        """Headers of a message or a channel, if there are not too many."""
        if not headers:
            return NO_HEADERS
        encoded = encode_headers(headers)
        check_headers(encoded, headers, self._config, self._config.headers)
        return encoded

    def of(self, payload: bytes, encoded: bytes, attachments: Sequence[Ticket]) -> int:
        """Bytes of a message that may be sent."""
        size = len(payload) + len(encoded)
        if attachments:
            size += sum(ATTACHMENT + len(ticket.headers) for ticket in attachments)
        if size > self._most:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self._most})")
        return size


def check_headers(encoded: bytes, headers: Pairs, config: Config, most: int) -> None:
    if len(encoded) > most or len(headers) > config.header_pairs:
        raise LocalProtocolError(
            f"{len(headers)} headers in {len(encoded)} bytes against {config.header_pairs} in {most}"
        )
