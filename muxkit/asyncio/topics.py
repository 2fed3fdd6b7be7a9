"""Topics for programs that run on asyncio: publish in asyncio tasks, to subscribers on any event loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import muxkit.topics
from muxkit.asyncio.faces import Channel
from muxkit.asyncio.guest import Block, guest_of_loop
from muxkit.codecs import Codec
from muxkit.topics import Member, Presence

if TYPE_CHECKING:
    from types import TracebackType

ValueT = TypeVar("ValueT")


class Topic(Generic[ValueT]):
    """Something to subscribe to, as `muxkit.Topic`. It is a handler of channels, for `muxkit.asyncio.by_name`.

    The arguments are those of `muxkit.Topic`: `keep=`, `keep_bytes=`, `allow_wait=`, `journal=` and `name=`. Pass the
    place of a journal, such as "sqlite:prices.db". Trio serves the subscribers, so they don't cost an asyncio task
    each.
    """

    def __init__(self, values: type[ValueT] | Codec[ValueT], **options: Any) -> None:
        self._set(muxkit.topics.Topic(values, **options))

    def _set(self, native: muxkit.topics.Topic[ValueT]) -> None:
        self.native: muxkit.topics.Topic[ValueT] = native
        """The object of Trio."""
        self._block: Block[muxkit.topics.Topic[ValueT]] = Block(lambda _: native)

    async def __aenter__(self) -> Self:
        """Open the topic. Only one with a journal has to be opened, to read where it ended."""
        await self._block.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all subscriptions."""
        await self._block.leave(error)

    async def publish(self, value: ValueT) -> int:
        """Send a value to all subscribers, and return its number, as `muxkit.Topic.publish` does.

        Raises RuntimeError if no session or server of `muxkit.asyncio` is open on this loop.
        """
        return await guest_of_loop().call(partial(self.native.publish, value))

    def publish_nowait(self, value: ValueT) -> int:
        """Send a value to all subscribers without waiting, and return its number.

        Raises `trio.WouldBlock` if a subscriber with the policy "wait" is in the way, or the topic has a journal.
        """
        return self.native.publish_nowait(value)

    async def __call__(self, channel: Channel) -> None:
        """Serve a subscriber; the topic is a handler of channels."""
        await guest_of_loop().call(partial(self.native, channel.native))

    def close(self) -> None:
        """End all subscriptions, after what was published. Later subscriptions end immediately."""
        self.native.close()

    @property
    def head(self) -> int:
        """The number of the newest update; 0 before the first."""
        return self.native.head

    @property
    def subscribers(self) -> int:
        """How many subscribers there are."""
        return self.native.subscribers

    @property
    def members(self) -> Sequence[Member]:
        """The subscribers that gave a name as `member=`, or that `authorize=` knows."""
        return self.native.members

    @property
    def presence(self) -> Topic[Presence]:
        """A topic with those who join and leave, as `muxkit.Topic.presence`."""
        presence: Topic[Presence] = Topic.__new__(Topic)
        presence._set(self.native.presence)
        return presence
