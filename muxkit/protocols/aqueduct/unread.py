"""A bound on the messages from streams that wait for the application.

Above the bound the stream of a message isn't parsed any further. Its unparsed bytes are bounded by the credit of the
stream, so a peer whose messages nobody takes runs out of credit, as it should. A parsed message costs more memory than
its bytes, so messages have a bound of their own: `Limits.short_window` for one receiver and `Limits.connection_bytes`
for all of them, at 256 bytes for each message. A receiver without unread messages may always have one more. So
receivers that nobody reads never block those that somebody does.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from muxkit._limits import Limits
from muxkit.core import StreamId

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct.reader import IncomingStream
    from muxkit.protocols.aqueduct.receive import EngineReceiver

MESSAGE_COST: Final = 256  # bytes that a message takes in addition to its own, about


class UnreadLimit:
    """Counts unread messages, and holds back the streams of receivers that have too many."""

    def __init__(self, limits: Limits) -> None:
        self.unread: int = 0
        self.most: int = max(1, limits.connection_bytes // MESSAGE_COST)
        self.most_of_one: int = max(1, limits.short_window // MESSAGE_COST)
        # The streams that are held back. An ordered dictionary, as removing the first entry of a plain one costs a
        # step for each entry that was removed before.
        self._held: dict[EngineReceiver, OrderedDict[StreamId, IncomingStream]] = {}
        # Receivers whose streams wait because of messages of other receivers.
        self._waiting: OrderedDict[EngineReceiver, None] = OrderedDict()

    def add(self, receiver: EngineReceiver) -> None:
        """Count one more unread message."""
        receiver.unread_messages += 1
        self.unread += 1

    def remove(self, receiver: EngineReceiver) -> bool:
        """Count one message less. Return True if a stream may wait for it; then the caller has to call `resume`."""
        receiver.unread_messages -= 1
        self.unread -= 1
        return bool(self._waiting) or receiver in self._held

    def is_full(self, receiver: EngineReceiver) -> bool:
        """Return True if the receiver may have no more messages now; then the caller has to call `hold_back`."""
        unread = receiver.unread_messages
        return unread > 0 and (unread >= self.most_of_one or self.unread >= self.most)

    def hold_back(self, receiver: EngineReceiver, stream: IncomingStream) -> None:
        """Resume the stream when the receiver may have one more message."""
        self._held.setdefault(receiver, OrderedDict())[stream.id] = stream
        if receiver.unread_messages < self.most_of_one:
            self._waiting.setdefault(receiver)

    def resume(self, receiver: EngineReceiver) -> None:
        """Resume the streams that may go on: those of this receiver, then those of others that waited for it."""
        if 2 * receiver.unread_messages <= self.most_of_one:
            self._resume(receiver)
        while self._waiting and self.unread < self.most:
            first, _ = self._waiting.popitem(last=False)
            self._resume(first)

    def drop(self, receiver: EngineReceiver) -> None:
        """Resume all streams of a receiver that has ended, whose messages are ignored from now on."""
        self._waiting.pop(receiver, None)
        for stream in self._held.pop(receiver, {}).values():
            stream.resume()

    def _resume(self, receiver: EngineReceiver) -> None:
        while (held := self._held.get(receiver)) and not self.is_full(receiver):
            _, stream = held.popitem(last=False)
            if not held:
                del self._held[receiver]
            stream.resume()
