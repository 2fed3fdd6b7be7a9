"""How many messages may wait to be read? Credit counts bytes, and a short message costs more than it has."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit._limits import Limits
    from muxkit.protocols.aqueduct._incoming import Incoming
    from muxkit.protocols.aqueduct._receiving import ReceiverMachine

MESSAGE_COST: Final = 256  # bytes that a message takes beside its own, about


class Crowd:
    """Counts the messages from streams that nobody has read; above the bounds their streams are not parsed on.

    What is not parsed is bytes, and their credit bounds those. The bounds are `Limits.channel_bytes` for one
    receiver and `Limits.connection_bytes` for all, with 256 bytes for each message. A receiver that has nothing to
    be read may always have one more, so those that are not read never hold up those that are.
    """

    def __init__(self, limits: Limits) -> None:
        self.unread = 0
        self.most = max(1, limits.connection_bytes // MESSAGE_COST)
        self.most_of_one = max(1, limits.channel_bytes // MESSAGE_COST)
        self.on_done: Callable[[Incoming], None] = lambda incoming: None
        # Those that wait because of what others have not read.
        self._waiting: OrderedDict[ReceiverMachine, None] = OrderedDict()

    def came(self, receiver: ReceiverMachine) -> None:
        """One more to be read."""
        receiver.unread_messages += 1
        self.unread += 1

    def left(self, receiver: ReceiverMachine) -> None:
        """One was read; `let_in` if somebody waits for it."""
        receiver.unread_messages -= 1
        self.unread -= 1

    def holds_back(self, incoming: Incoming, receiver: ReceiverMachine) -> bool:
        """Must this stream wait before it brings one more? Then it is called again."""
        if not self._is_full(receiver):
            return False
        receiver.held[incoming] = None
        if receiver.unread_messages < self.most_of_one:
            self._waiting.setdefault(receiver)
        return True

    def waits_for(self, receiver: ReceiverMachine) -> bool:
        """Is there somebody to be let in, now that this one has read?"""
        return bool(receiver.held or self._waiting)

    def let_in(self, receiver: ReceiverMachine) -> None:
        """Go on with the streams that may: those of this receiver, then those of others that waited for it."""
        if 2 * receiver.unread_messages <= self.most_of_one:
            self._go_on(receiver)
        while self._waiting and self.unread < self.most:
            first, _ = self._waiting.popitem(last=False)
            self._go_on(first)

    def dismiss(self, receiver: ReceiverMachine) -> None:
        """It is gone: what its streams still bring is ignored."""
        self._waiting.pop(receiver, None)
        held, receiver.held = receiver.held, OrderedDict()
        for incoming in held:
            incoming.go_on()
            self.on_done(incoming)

    def _go_on(self, receiver: ReceiverMachine) -> None:
        while receiver.held and not self._is_full(receiver):
            incoming, _ = receiver.held.popitem(last=False)
            incoming.go_on()
            self.on_done(incoming)

    def _is_full(self, receiver: ReceiverMachine) -> bool:
        unread = receiver.unread_messages
        return unread > 0 and (unread >= self.most_of_one or self.unread >= self.most)
