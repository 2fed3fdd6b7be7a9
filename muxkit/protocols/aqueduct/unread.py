"""Limits how many messages from streams wait for the application.

The credit of a stream limits how many bytes the peer may send on it. But a parsed message takes more memory than its
bytes, because of the objects around it. So we also limit the number of unread messages. When a receiver has reached the
limit, its streams are *held back*: we stop parsing them, until the application has read some messages. The peer then
runs out of credit, as it should.

We count 256 bytes for each message. One receiver may have as many messages as fit into `Limits.short_window`, and all
receivers together as many as fit into `Limits.connection_bytes`. But a receiver without unread messages may always have
one. So a receiver that the application doesn't read can't block the others.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from muxkit._limits import Limits
from muxkit.core import StreamId

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct.reader import IncomingStream
    from muxkit.protocols.aqueduct.receive import EngineReceiver

MESSAGE_COST: Final = 256  # about how many bytes a message takes in addition to its payload


class UnreadLimit:
    """Counts unread messages, and holds back the streams of receivers that have too many."""

    def __init__(self, limits: Limits) -> None:
        self.unread: int = 0
        self.most: int = max(1, limits.connection_bytes // MESSAGE_COST)
        self.most_of_one: int = max(1, limits.short_window // MESSAGE_COST)
        # The streams that are held back. An `OrderedDict` finds its first entry quickly. A plain dict would need a step
        # for each entry that was removed before it.
        self._held: dict[EngineReceiver, OrderedDict[StreamId, IncomingStream]] = {}
        # The receivers whose streams are held back because of the messages of other receivers.
        self._waiting: OrderedDict[EngineReceiver, None] = OrderedDict()

    def add(self, receiver: EngineReceiver, count: int) -> None:
        """Count unread messages."""
        receiver.unread_messages += count
        self.unread += count

    def remove(self, receiver: EngineReceiver) -> bool:
        """Count a message as read. Return True if a stream may wait for that. The caller must then call `resume`."""
        receiver.unread_messages -= 1
        self.unread -= 1
        return bool(self._waiting) or receiver in self._held

    def room(self, receiver: EngineReceiver) -> int:
        """Return how many more messages the receiver may have now. If it is 0, the caller must call `hold_back`."""
        unread = receiver.unread_messages
        room = min(self.most_of_one - unread, self.most - self.unread)
        return room if room > 0 else 0 if unread else 1

    def hold_back(self, receiver: EngineReceiver, stream: IncomingStream) -> None:
        """Record a stream that must wait. Its method `resume` is called when the receiver may have more messages."""
        self._held.setdefault(receiver, OrderedDict())[stream.id] = stream
        if receiver.unread_messages < self.most_of_one:
            self._waiting.setdefault(receiver)

    def resume(self, receiver: EngineReceiver) -> None:
        """Resume the streams that don't have to wait any more: those of this receiver, and then those of others."""
        if 2 * receiver.unread_messages <= self.most_of_one:
            self._resume(receiver)
        while self._waiting and self.unread < self.most:
            first, _ = self._waiting.popitem(last=False)
            self._resume(first)

    def drop(self, receiver: EngineReceiver) -> None:
        """Resume all streams of a receiver that has ended. Their messages are dropped from now on."""
        self._waiting.pop(receiver, None)
        for stream in self._held.pop(receiver, {}).values():
            stream.resume()

    def _resume(self, receiver: EngineReceiver) -> None:
        while (held := self._held.get(receiver)) and self.room(receiver):
            _, stream = held.popitem(last=False)
            if not held:
                del self._held[receiver]
            stream.resume()
