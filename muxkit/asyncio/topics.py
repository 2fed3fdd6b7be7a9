"""Topics for asyncio programs. Subscribers may use asyncio or Trio."""

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
    """Sends each update to all its subscribers. It is a handler of channels, for `muxkit.asyncio.by_name`.

    The arguments are those of `muxkit.Topic`: `keep=`, `keep_bytes=`, `allow_wait=`, `journal=` and `name=`. The
    journal must be given as a URL, such as "sqlite:prices.db". Trio serves the subscribers, so they need no asyncio
    tasks.
    """

    def __init__(self, values: type[ValueT] | Codec[ValueT], **options: Any) -> None:
        self._set(muxkit.topics.Topic(values, **options))

    def _set(self, native: muxkit.topics.Topic[ValueT]) -> None:
        self.native: muxkit.topics.Topic[ValueT] = native
        """The wrapped `muxkit.Topic`."""
        self._block: Block[muxkit.topics.Topic[ValueT]] = Block(lambda _: native)

    async def __aenter__(self) -> Self:
        """Open the topic. This is necessary only with a journal, to find the number of its last update."""
        await self._block.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all subscriptions."""
        await self._block.leave(error)

    async def publish(self, value: ValueT) -> int:
        """Send a value to all subscribers, and return its number. See `muxkit.Topic.publish`.

        Raises:
            RuntimeError: If no session and no server of `muxkit.asyncio` is open in this loop.
        """
        return await guest_of_loop().call(partial(self.native.publish, value))

    def publish_nowait(self, value: ValueT) -> int:
        """Send a value to all subscribers without waiting, and return its number.

        Raises:
            trio.WouldBlock: If the topic has a journal, or must wait for a subscriber with the policy "wait".
        """
        return self.native.publish_nowait(value)

    async def __call__(self, channel: Channel) -> None:
        """Serve a subscriber."""
        await guest_of_loop().call(partial(self.native, channel.native))

    def close(self) -> None:
        """End all subscriptions after the last update. Later subscriptions end immediately."""
        self.native.close()

    @property
    def head(self) -> int:
        """The number of the newest update, or 0 before the first one."""
        return self.native.head

    @property
    def subscribers(self) -> int:
        """The number of subscribers."""
        return self.native.subscribers

    @property
    def members(self) -> Sequence[Member]:
        """The subscribers that gave a name as `member=`, or that the server has authenticated."""
        return self.native.members

    @property
    def presence(self) -> Topic[Presence]:
        """A topic with an update for each member that joins or leaves. See `muxkit.Topic.presence`."""
        presence: Topic[Presence] = Topic.__new__(Topic)
        presence._set(self.native.presence)
        return presence
