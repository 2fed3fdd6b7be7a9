"""Interfaces by which the runtime uses the engine's side of a channel.

A session has two layers. The *engine* implements the rules of one protocol. It does no I/O and never waits. The
*runtime* belongs to all protocols. It lets tasks wait for the engine, and handles their cancellation.

In both layers, a channel consists of a part that sends and a part that receives, which we call its *halves*. `Sender`
and `Receiver` describe the engine's halves. Each protocol implements them, and the runtime's halves call them:

    application          channel.send(message)          channel.receive()
    muxkit.runtime       SendHalf                       ReceiveHalf
    muxkit.core          Sender                         Receiver             (these interfaces)
    muxkit.protocols     the protocol's sender          the protocol's receiver

The engine reports to the runtime by events (`muxkit.core.events`), for example that a message has arrived. An event
names the engine's half. Its attribute `owner` contains the runtime's half, which the runtime has stored there. Engines
don't use `owner`.

The interfaces derive from `typing.Protocol` and have no slots. In Python, only one base class of a class may have
slots, and some engines need another such base class. So each implementation has to list `owner` in its own slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar

from muxkit.core._channels import Reason

ItemT = TypeVar("ItemT", contravariant=True)


class Sender(Protocol):
    """The engine's sending half of a channel."""

    __slots__ = ()

    owner: object | None
    """The runtime's object for this half, or None if it has none."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the half in errors and logs, in the words of the protocol, such as "sink 7"."""

    @property
    @abstractmethod
    def queued(self) -> int:
        """The number of bytes of messages that are queued and haven't been written."""

    @property
    def credit_out(self) -> int | None:
        """How many bytes the peer lets this side send, or None if the protocol doesn't count bytes."""
        return None

    @property
    def has_sent(self) -> bool:
        """True if the peer may know this half.

        A session that ends waits until the peer has confirmed the ends of all such halves.
        """
        return True

    @abstractmethod
    def check_size(self, size: int) -> None:
        """Raise `LocalProtocolError` if a message of `size` bytes can never be sent."""

    @abstractmethod
    def has_room(self, size: int) -> bool:
        """Return True if a message of `size` bytes may be sent now."""

    @abstractmethod
    def notify_when_room(self, size: int) -> None:
        """Report the event `Writable` once `has_room(size)` may return True. The caller has to check that again."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Queue a message. The caller has made sure with `has_room` that there is room for it."""

    def try_send(self, message: bytes) -> bool | None:
        """Queue a message if there is room for it.

        This runs once for each message, so protocols override it with a faster implementation.

        Returns:
            None if there was no room, so the message wasn't queued. True if the caller now has to request a write.
            False if an earlier message is still queued, because a write was requested for that one already.
        """
        if not self.has_room(len(message)):
            return None
        self.send(message)
        return True

    def try_send_all(self, messages: list[bytes]) -> bool:
        """Queue several messages, or queue none of them and return False. Protocols with a fast path override this."""
        return False

    @abstractmethod
    def finish(self, payload: bytes = b"") -> None:
        """Queue the end of this direction, after all messages. Some protocols send a payload with it."""

    @abstractmethod
    def cancel(self, reason: Reason) -> None:
        """Drop the messages of which nothing was written, and notify the peer that messages are missing."""


class Receiver(Protocol[ItemT]):
    """The engine's receiving half of a channel. Its items are messages, or objects of the protocol with a message."""

    __slots__ = ()

    owner: object | None
    """The session's object for this half, or None if it has none."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the half in errors and logs."""

    @property
    def credit_in(self) -> int | None:
        """How many bytes this side lets the peer send, or None if the protocol doesn't count bytes."""
        return None

    @property
    @abstractmethod
    def held(self) -> int:
        """The number of bytes that have arrived and that the application hasn't consumed."""

    @property
    def lag(self) -> int:
        """How many bytes the application may take before the runtime must notify the engine.

        If this is more than 0, the runtime may take several items and then call `consumed_portion` once. Otherwise it
        calls `consumed` for each item.
        """
        return 0

    @abstractmethod
    def consumed(self, items: Sequence[ItemT], size: int) -> bool:
        """Count items as consumed by the application. Without items, count `size` bytes as dropped.

        Returns:
            True if there may be something to write now, such as a grant of credit.
        """

    def consumed_portion(self, count: int, size: int) -> bool:
        """Count several items, of `size` bytes in total, as consumed by the application.

        Engines that count items instead of bytes override this.

        Returns:
            The same as `consumed`.
        """
        return self.consumed((), size)

    @abstractmethod
    def stop(self, reason: Reason) -> None:
        """Notify the peer that this side doesn't want more messages. Some protocols send the reason."""
