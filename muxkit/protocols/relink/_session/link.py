"""The session of Relink: a link with senders and receivers, or with the common channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from muxkit._errors import LocalProtocolError
from muxkit.protocols.relink._session.common import CommonChannels, Opening
from muxkit.protocols.relink._session.receiver import Receiver
from muxkit.protocols.relink._session.sender import Receipt, Sender, as_parts
from muxkit.runtime import Session as CommonSession
from muxkit.runtime import SessionInfo, SessionStats, background, protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from muxkit._limits import Limits
    from muxkit.protocols.relink._session.channel import Channel
    from muxkit.protocols.relink._session.core import Core, ErrorMaker
    from muxkit.protocols.relink.engine.events import LinkReplaced
    from muxkit.runtime import Outage

    OnChanged = Callable[[LinkReplaced], None]


LEAVE_TIMEOUT = 5.0  # s, for taking leave


@protected_manager
async def living(link: Link, linger: float, *work: Callable[[], Awaitable[None]]) -> AsyncGenerator[Link, None]:
    """Run a link and its background `work` for a block: a normal end leaves the link in order, an error drops it."""
    async with background() as nursery:
        for task in work:
            nursery.start_soon(task)
        try:
            yield link
        except BaseException:
            link.core.lose_because("the link was left by an error", by="local")
            raise
        await link.leave(linger)


class Link(CommonSession):
    """One link at work, with or without a connection; made by `link`, `listen` and `session`.

    Use `sender`, `receiver` and `receivers` for what Relink is, or `open` and `incoming` for the common channels.
    """

    def __init__(self, core: Core, *, on_changed: OnChanged | None = None, outage: Outage | None = None) -> None:
        self.core = core
        self._engine = core.engine
        self._common = CommonChannels(core, self._shut_down_if_idle)
        self._on_changed = on_changed
        self._outage = outage
        self._is_leaving = False
        self._was_unheard = False  # when the link was over
        core.owner = self

    # --- messages

    def sender(self, channel: int = 0) -> Sender:
        """To send on a channel of ours. Its first message opens it; one sender at a time, and one more that waits until
        the channel's end is confirmed."""
        core = self.core
        core.raise_if_over()
        if not 0 <= channel < 1 << 8 * core.out_id_size:
            raise LocalProtocolError(f"channel {channel} does not fit an id of {core.out_id_size} bytes")
        self._common.check_free(channel)
        before = core.outs.get(channel)
        if before is None:
            sender = Sender(core, channel)
            core.outs[channel] = sender
        elif isinstance(before, Sender) and before.is_closed and channel not in core.successors:
            sender = Sender(core, channel)
            core.successors[channel] = sender
        else:
            raise LocalProtocolError(f"channel {channel} has a sender")
        return sender

    def receiver(self, channel: int = 0) -> Receiver:
        """To receive what the peer sends on this channel, now or once the peer opens it; one receiver at a time."""
        core = self.core
        core.raise_if_over()
        if not 0 <= channel < 1 << 8 * core.in_id_size:
            raise LocalProtocolError(f"channel {channel} does not fit an id of {core.in_id_size} bytes")
        self._common.check_free(channel)
        if channel in core.ins:
            raise LocalProtocolError(f"channel {channel} has a receiver")
        self._common.claim(channel)
        receiver = core.ins[channel] = Receiver(core, channel)
        return receiver

    def receivers(self) -> AsyncIterator[Receiver]:
        """A receiver for each channel that the peer opens, until the peer's shutdown."""
        return self._common.receivers()

    async def multicast(self, senders: Sequence[Sender], *parts: bytes) -> list[Receipt]:
        """Send one message to several channels in one packet; waits until all of them have room.

        A sender that stands there twice sends it twice. Gives a receipt for each, in the order of `senders`. Cancelled
        means that it was sent to none of them. Raises as `Sender.send` does, and `LocalProtocolError` if it could not
        even be sent when nothing else is under way.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        message = as_parts(parts)
        engine, channels = self._engine, [sender.channel for sender in senders]
        engine.check_targets(len(senders))
        while True:
            full = next((one for one in senders if not one.may_go(one.size_of(message))), None)
            if full is not None:
                await full.wait_for_room(full.size_of(message))
            elif not engine.fits(channels, message) and engine.unanswered:
                await self.core.moved.park()  # each has room, but not all together
            else:
                break
        numbers = engine.multicast(channels, message)
        receipts = [sender.sent(number) for sender, number in zip(senders, numbers, strict=True)]
        self.core.request_write()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return receipts

    # --- the common channels

    def open(self) -> AbstractAsyncContextManager[Channel]:
        """A channel in both directions; the peer hears of it with its first message."""
        return Opening(self._common)

    def incoming(self) -> AsyncIterator[Channel]:
        return self._common.incoming()

    async def ping(self) -> float:
        """One round trip, in seconds; it waits for a connection if there is none."""
        return await self.core.pings.ping()

    # --- the link

    @property
    def id(self) -> int:
        """0 before there is a link. It is a secret of both sides: a peer that knows it can take the link over."""
        return self._engine.link_id

    @property
    def is_connected(self) -> bool:
        return self.core.pump is not None

    @property
    def connections(self) -> int:
        """How many connections it has had."""
        return self.core.connections

    @property
    def unanswered(self) -> int:
        """Messages of ours that the peer has not consumed, or answered, yet."""
        return self._engine.unanswered

    @property
    def outage(self) -> Exception | None:
        """What went wrong with the last attempt to connect, if nothing has worked since."""
        return None if self._outage is None else self._outage.last

    async def connected(self) -> None:
        """Wait for a connection on which messages flow.

        Raises what ended the link if it is over; put `trio.fail_after` around it for a limit.
        """
        await self.core.connected()

    async def shutdown(self, *, grace: float) -> None:
        """Open no more channels, let the live ones end for up to `grace` seconds, then cut them.

        The peer is told at once. Senders that are not closed by then are closed, what they had not decided is rolled
        back; what was sent before is still delivered while the link lives.
        """
        await trio.lowlevel.checkpoint()
        core = self.core
        if core.error is not None:
            return
        self._common.ended(None)
        self._common.announce_all()
        self._common.refuse_unclaimed()
        if not self._engine.is_shutting_down and not self._engine.over:
            self._engine.shutdown()
            core.after_command()
        with trio.move_on_after(grace):
            while not self._is_over and (self._common.live or any(one.is_live for one in self._senders())):
                await core.moved.park()
        if not self._is_over:
            self._common.abort_all()
            for sender in self._senders():
                sender.close()

    @property
    def _is_over(self) -> bool:
        return self.core.error is not None

    def _senders(self) -> list[Sender]:
        outs = (*self.core.outs.values(), *self.core.successors.values())
        return [sender for sender in outs if isinstance(sender, Sender)]

    @property
    def limits(self) -> Limits:
        return self.core.limits

    @property
    def info(self) -> SessionInfo:
        return SessionInfo(protocol="relink", peer=self.core.peer)

    def stats(self) -> SessionStats:
        core = self.core
        return SessionStats(
            bytes_received=core.bytes_received,
            bytes_sent=core.bytes_sent,
            messages_received=core.messages_received,
            messages_sent=core.messages_sent,
            channels=len(self._common.live) + len(self._senders()) + len(core.peer_channels.keys() - self._common.live),
            queued=self._engine.outbox + (core.pump.unsent if core.pump is not None else 0),
            round_trip=core.pings.round_trip,
        )

    def __repr__(self) -> str:
        state = "over" if self.core.error is not None else "connected" if self.is_connected else "absent"
        return f"<relink.Link {self.core.peer or 'without a peer yet'}: {state}>"

    # --- for the core

    def channel_opened(self, channel: int) -> None:
        self._common.opened(channel)
        if self._is_leaving or self._engine.is_shutting_down:
            self._common.refuse_unclaimed()

    def peer_shut_down(self) -> None:
        self._common.peer_shut_down()

    def changed(self, change: LinkReplaced, error: ErrorMaker) -> None:
        self._common.forget_unclaimed()
        if self._on_changed is not None:
            self._on_changed(change)
        elif self._is_unheard:
            self.core.unreported = error
        if self._is_leaving:
            self.core.lose(error)

    def ending(self) -> None:
        self._was_unheard = self._is_unheard

    def over(self, error: ErrorMaker) -> None:
        orderly = self.core.is_finished or self._engine.has_peer_shut_down
        self._common.ended(None if orderly else error)

    def _shut_down_if_idle(self) -> None:
        """Answer the peer's shutdown once no channel is left, if all were common ones."""
        engine, faces = self._engine, self._common
        if not (faces.is_common and engine.has_peer_shut_down) or engine.is_shutting_down or engine.over:
            return
        if not faces.live and not self._senders() and self.core.error is None:
            engine.shutdown()
            self.core.after_command()

    # --- leaving

    @property
    def _is_unheard(self) -> bool:
        """True if something was sent that the peer may not have received."""
        if any(sender.is_unheard for sender in self._senders()):
            return True
        return any(one.sink.has_sent and one.sink.is_unheard for one in self._common.live.values())

    async def leave(self, linger: float) -> None:
        """Close all channels, wait until the peer has received everything, shut down; at most `linger` seconds."""
        core = self.core
        self._is_leaving = True
        with trio.move_on_after(linger):
            self._goodbye()
            while core.error is None and self._is_unheard:
                await core.moved.park()
            if core.error is None and not self._engine.is_shutting_down:
                self._engine.shutdown()
                core.after_command()
            while core.error is None and (self._common.is_common or not core.owes_the_application):
                await core.moved.park()
            # Messages for receivers that are no longer read are never consumed, so the link cannot finish in order.
            if core.pump is not None and core.error is None:
                await core.pump.flushed()
                await core.pump.hang_up()
            while core.pump is not None:
                await core.moved.park()
        core.lose_because(f"the peer did not take leave within {linger} s", by="local")
        error = core.unreported or (core.error if self._was_unheard or core.is_violated else None)
        if error is not None:
            raise error()

    def _goodbye(self) -> None:
        self._common.ended(None)
        self._common.refuse_unclaimed()
        self._common.close_all()
        for sender in self._senders():
            sender.close()
