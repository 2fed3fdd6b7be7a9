"""Receiving on one entity: the commands of the session.

`Receiver` is an entity on which the peer sends messages. Its window (`muxkit.core.ReceiveWindow`) counts the bytes that
the peer may send, and decides how much credit to grant when the application has consumed messages. The modules `reader`
and `rules` process the chunks that arrive for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from muxkit.core import Reason
from muxkit.core import halves as core
from muxkit.protocols.bpmux.entities import Entity

# The session calls `consumed` once for several messages, after at most 1/16 of the window. That is often enough,
# because a window grants credit in portions of a half or a quarter.
PARTS_OF_WINDOW = 16


class Receiver(Entity, core.Receiver[bytes]):
    """An entity on which the peer sends: a stream that we opened, a sink that the peer opened, or a request of ours.

    It implements the interface for receiving halves that the runtime uses with all protocols.
    """

    __slots__ = ()

    @property
    def credit_in(self) -> int:  # for the same reason as `Sender.credit_out`
        return self.window.credit

    @property
    def held(self) -> int:
        return self.window.held

    @property
    def lag(self) -> int:
        # While credit is lent, each message repays a part of the loan, which others may be waiting for.
        return 0 if self.window.lent else self.window.target // PARTS_OF_WINDOW

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        """Count `size` bytes as consumed by the application. This is allowed after the entity was removed."""
        return self.state.consume(self, size)

    def stop(self, reason: Reason) -> None:
        """Cancel the entity, without the reason. It would need credit, which peers don't grant in this direction."""
        self.end()
