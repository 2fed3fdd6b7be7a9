"""The channels that the peer opens: common channels, or receivers on a link without common channels."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import trio

from muxkit._errors import LocalProtocolError
from muxkit.protocols.relink._session.channel import Channel
from muxkit.protocols.relink._session.receiver import Receiver
from muxkit.runtime import Backlog, ChannelStopped, Unsupported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from muxkit.protocols.relink._session.core import Core, ErrorMaker


class CommonChannels:
    """Opens common channels, and hands the peer's unclaimed channels to `incoming` or `receivers`."""

    def __init__(self, core: Core, on_idle: Callable[[], None]) -> None:
        self._core = core
        self._on_idle = on_idle
        self._unclaimed: dict[int, None] = {}
        self._channels: Backlog[Channel] | None = None
        self._receivers: Backlog[Receiver] | None = None
        self._end: ErrorMaker | None = None
        self._has_ended = False
        self._parity = 0 if core.is_connector else 1
        self._space = 1 << 8 * min(core.out_id_size, core.in_id_size)
        self._next = self._parity
        self._ours = 0
        self.is_common = False
        self.live: dict[int, Channel] = {}

    # --- iterating

    def incoming(self) -> AsyncIterator[Channel]:
        self.use_common()
        if self._channels is None:
            self._channels = Backlog(lambda channel: None)
            self._start(self._channels)
            self._claim()
        return self._channels

    def receivers(self) -> AsyncIterator[Receiver]:
        if self.is_common:
            raise LocalProtocolError("this link carries common channels: they come from incoming()")
        if self._receivers is None:
            self._receivers = Backlog(lambda receiver: None)
            self._start(self._receivers)
            self._claim()
        return self._receivers

    def use_common(self) -> None:
        """Treat the peer's channels as common ones from now on."""
        if self.is_common:
            return
        if self._receivers is not None:
            raise LocalProtocolError("the channels of this link are taken by receivers()")
        if self._space == 1:
            raise Unsupported("channel ids of 0 bytes name one channel: use sender(0) and receiver(0)")
        self.is_common = True

    def _start(self, backlog: Backlog[Channel] | Backlog[Receiver]) -> None:
        if self._has_ended:
            self._claim()
            backlog.ended(self._end)

    def ended(self, error: ErrorMaker | None) -> None:
        """End `incoming` and `receivers`."""
        if not self._has_ended:
            self._has_ended, self._end = True, error
        for backlog in (self._channels, self._receivers):
            if backlog is not None:
                backlog.ended(error)

    # --- what the peer opens

    def opened(self, channel: int) -> None:
        self._unclaimed[channel] = None
        self._claim()

    def check_free(self, channel: int) -> None:
        if channel in self.live:
            raise LocalProtocolError(f"channel {channel} is a common one")

    def claim(self, channel: int) -> None:
        """Remove a channel that a caller asked for by number."""
        self._unclaimed.pop(channel, None)

    def forget_unclaimed(self) -> None:
        self._unclaimed.clear()

    def _claim(self) -> None:
        if self._channels is not None:
            for id in [*self._unclaimed]:
                if id % 2 != self._parity and id < self._space:
                    del self._unclaimed[id]
                    self._channels.put(self._accept(id))
        elif self._receivers is not None:
            for id in [*self._unclaimed]:
                del self._unclaimed[id]
                receiver = self._core.ins[id] = Receiver(self._core, id)
                self._receivers.put(receiver)

    def _accept(self, id: int) -> Channel:
        channel = self.live[id] = Channel(self._core, id, self._forgotten, is_ours=False)
        channel.arrived()
        if self._core.peer_channels.get(id, False):
            channel.ended()
        return channel

    # --- what we open

    async def open(self) -> Channel:
        """A common channel; the peer hears of it with the first message."""
        self.use_common()
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            error = self._closed()
            if error is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                raise error
            # Each needs a channel of ours, and those of the peer do as well.
            if self._ours < min(self._core.limits.channels, self._space) // 2:
                break
            await self._core.moved.park()
        while self._next in self.live:
            self._advance()
        id = self._next
        self._advance()
        self._ours += 1
        channel = self.live[id] = Channel(self._core, id, self._forgotten, is_ours=True)
        return channel

    def _advance(self) -> None:
        self._next += 2
        if self._next >= self._space:
            self._next = self._parity

    def _closed(self) -> Exception | None:
        """Return why no channel can be opened any more, or None."""
        core = self._core
        if core.error is not None:
            return core.error()
        if core.engine.has_peer_shut_down:
            return ChannelStopped("no channel can be opened any more: the peer is closing the link")
        if core.engine.is_shutting_down:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the link")
        return None

    def _forgotten(self, channel: Channel) -> None:
        core, id = self._core, channel.id
        if self.live.get(id) is not channel:
            return
        del self.live[id]
        if id % 2 == self._parity:
            self._ours -= 1
        for table in (core.outs, core.ins):
            if table.get(id) is channel:
                del table[id]
        core.peer_channels.pop(id, None)
        if core.moved:
            core.moved.unpark_all()
        self._on_idle()

    # --- the end

    def refuse_unclaimed(self) -> None:
        """Abort common channels that no task has taken, so that the link can end."""
        if self.is_common:
            for id in [*self._unclaimed]:
                del self._unclaimed[id]
                if id % 2 != self._parity and id < self._space:
                    self._accept(id).abort()

    def announce_all(self) -> None:
        for channel in [*self.live.values()]:
            channel.announce()

    def close_all(self) -> None:
        for channel in [*self.live.values()]:
            channel.close()

    def abort_all(self) -> None:
        for channel in [*self.live.values()]:
            channel.abort()

    def peer_shut_down(self) -> None:
        self.ended(None)
        for channel in [*self.live.values()]:
            channel.refuse_unanswered()
            channel.absorb()
        self._on_idle()


class Opening(AbstractAsyncContextManager[Channel]):
    """Opens when the block is entered; closes when it is left normally, aborts when by an error."""

    __slots__ = ("_channel", "_common")

    def __init__(self, faces: CommonChannels) -> None:
        self._common = faces
        self._channel: Channel | None = None

    async def __aenter__(self) -> Channel:
        if self._channel is not None:
            raise RuntimeError("this block was entered before; open another channel")
        self._channel = await self._common.open()
        return self._channel

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._channel is None:
            return
        if kind is None:
            await self._channel.aclose()
        else:
            self._channel.abort()
