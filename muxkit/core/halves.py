"""The two halves of a channel, as an engine keeps them.

Every protocol has a sending and a receiving half for each channel, and every protocol answers the same questions about
them: is there room for so many bytes, tell me when there is, take this message, this was the last one, give up, the
application has consumed so much. These are the questions, as two protocols. An engine implements them with the rules of
its document, and the runtime's `SendHalf` and `ReceiveHalf` hold one each and call it directly.

    application          channel.send(message)          channel.receive()
    muxkit.runtime       SendHalf                       ReceiveHalf          which task waits, what was cancelled
    muxkit.core          Sender                         Receiver             may it go, what does the peer learn
    muxkit.protocols     frames                         frames

A half reports to its engine, which returns events (`muxkit.core.events`). `owner` leads back from the half in an event
to the object of the session: the runtime puts it there, and engines never look at it.

The classes of engines inherit from them by name. They are no abstract base classes with slots, because a class can have
only one base that has any, and bpmux's two kinds of entity share another one. So each implementation has `owner` among
its own slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar

from muxkit.core._channels import Reason

ItemT = TypeVar("ItemT", contravariant=True)


class Sender(Protocol):
    """The sending half of a channel: what may be sent now, and what waits to be written."""

    __slots__ = ()

    owner: object | None
    """What the session has for this half, if it has anything. Each implementation has it as a slot of its own."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The half as errors and logs call it, in the words of the protocol, such as "sink 7"."""

    @property
    @abstractmethod
    def queued(self) -> int:
        """Bytes of messages that were sent here and that haven't been written yet."""

    @property
    def credit_out(self) -> int | None:
        """Return how much the peer lets this side send, or None if the protocol has no such number."""
        return None

    @property
    def has_sent(self) -> bool:
        """True once the peer may have heard of this half, so that leaving the session waits for its confirmation."""
        return True

    @abstractmethod
    def check_size(self, size: int) -> None:
        """Raise `LocalProtocolError` if a message of so many bytes can never be sent."""

    @abstractmethod
    def has_room(self, size: int) -> bool:
        """Return True if a message of so many bytes may be sent now."""

    @abstractmethod
    def notify_when_room(self, size: int) -> None:
        """Report `Writable` as soon as `has_room(size)` may have become True."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Queue a message; `has_room` must be True for its size."""

    def try_send(self, message: bytes) -> bool | None:
        """Queue a message if there is room for it; return None, having done nothing, if there isn't.

        True means that the session has to request a write. False means that it has done so for an earlier message,
        which is still queued, so this one leaves with it. A protocol whose quickest way is another one overrides this:
        it runs once for each message.
        """
        if not self.has_room(len(message)):
            return None
        self.send(message)
        return True

    def try_send_all(self, messages: list[bytes]) -> bool:
        """Queue all of several messages, or return False having queued none; a shortcut that a protocol may have."""
        return False

    @abstractmethod
    def finish(self, payload: bytes = b"") -> None:
        """Queue the end behind all messages; `payload` is for protocols whose end can carry one."""

    @abstractmethod
    def cancel(self, reason: Reason) -> None:
        """Drop what hasn't begun to leave, and let the peer learn that messages are missing, and why."""


class Receiver(Protocol[ItemT]):
    """The receiving half of a channel: what the peer may still send, and what the application hasn't consumed."""

    __slots__ = ()

    owner: object | None
    """What the session has for this half, if it has anything. Each implementation has it as a slot of its own."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The half as errors and logs call it."""

    @property
    def credit_in(self) -> int | None:
        """Return how much this side lets the peer send, or None if the protocol has no such number."""
        return None

    @property
    @abstractmethod
    def held(self) -> int:
        """Bytes of messages that came and that the application hasn't consumed."""

    @property
    def lag(self) -> int:
        """How many bytes the application may take before the engine hears of them, while more of them wait.

        The engine then hears of them with `consumed_portion`. 0, if it wants to hear of each item.
        """
        return 0

    @abstractmethod
    def consumed(self, items: Sequence[ItemT], size: int) -> bool:
        """Count items as taken by the application, or `size` bytes as dropped if there are no items.

        Returns True if there may be something to write because of it, such as a grant.
        """

    def consumed_portion(self, count: int, size: int) -> bool:
        """Count `count` items of `size` bytes together as taken by the application, which took them one by one.

        Returns what `consumed` returns. Only an engine that counts items, and not bytes, overrides this.
        """
        return self.consumed((), size)

    @abstractmethod
    def stop(self, reason: Reason) -> None:
        """Let the peer learn that this side wants no more, and why if the protocol can say so."""
