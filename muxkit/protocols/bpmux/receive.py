"""What the peer sends on one entity: how much it may still send, and what the application hasn't consumed.

The window grants credit as the application consumes, half a window at a time (`muxkit.core.ReceiveWindow`). Chunks are
parsed and applied by the reader, for all entities.
"""

from __future__ import annotations

from collections.abc import Sequence

from muxkit.core import Reason
from muxkit.core import halves as core
from muxkit.protocols.bpmux.entities import Entity

PARTS_OF_WINDOW = 16  # while messages wait, the engine hears of so many parts of a window: it grants half of one


class Receiver(Entity, core.Receiver[bytes]):
    """An entity that the peer sends messages on: a stream of ours, a sink of the peer's, or the answer to a request."""

    __slots__ = ()

    @property
    def credit_in(self) -> int:  # here as well, as in `Sender`
        return self.window.credit

    @property
    def held(self) -> int:
        return self.window.held

    @property
    def lag(self) -> int:
        return 0 if self.window.lent else self.window.target // PARTS_OF_WINDOW  # a loan is repaid with each message

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        """Count `size` bytes as taken by the application; harmless after the entity is gone."""
        return self.state.consume(self, size)

    def stop(self, reason: Reason) -> None:
        """End it, which needs no payload: a reason would have to be covered by credit that nobody grants for this."""
        self.end()
