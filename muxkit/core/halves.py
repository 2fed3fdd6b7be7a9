"""The interfaces between the runtime and the engines for the two directions of a channel.

A channel has two *halves* on each side: one for sending and one for receiving. Each half exists twice. The runtime's
half lets tasks wait and handles their cancellation. The engine's half implements the rules of the protocol and never
waits. `Sender` and `Receiver` are the interfaces of the engine's halves, so that the runtime can use all protocols in
the same way:

    application          channel.send(message)          channel.receive()
    muxkit.runtime       SendHalf                       ReceiveHalf
    muxkit.core          Sender                         Receiver             (these interfaces)
    muxkit.protocols     the protocol's sender          the protocol's receiver

In the other direction, the engine reports events (`muxkit.core.events`), which contain the engine's half. The runtime
stores its own object for the half in `owner`, and finds it there when it handles an event. Engines don't use `owner`.

The interfaces are protocols (`typing.Protocol`) without slots of their own, from which the engines' classes derive. A
class can have only one base class with slots, and the classes of bpmux have another one. So each implementation must
have `owner` in its own slots.
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
    """The session's object for this half, or None if it has none."""

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
        """True if the peer may know this half. The end of a session waits until the peer has confirmed its end."""
        return True

    @abstractmethod
    def check_size(self, size: int) -> None:
        """Raise `LocalProtocolError` if a message of `size` bytes can never be sent."""

    @abstractmethod
    def has_room(self, size: int) -> bool:
        """Return True if a message of `size` bytes may be sent now."""

    @abstractmethod
    def notify_when_room(self, size: int) -> None:
        """Report `Writable` as soon as `has_room(size)` may have become True."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Queue a message. The caller has made sure with `has_room` that there is room for it."""

    def try_send(self, message: bytes) -> bool | None:
        """Queue a message if there is room for it.

        This runs once for each message, so protocols override it with a faster implementation.

        Returns:
            None if there was no room. Otherwise, True if the session has to request a write, and False if it doesn't
            have to, because an earlier message is still queued.
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
