"""Links, as applications hold them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

from muxkit.protocols.relink._channels import Channel, Receipt, Receiver, Sender
from muxkit.protocols.relink._connection import Connection
from muxkit.runtime.mux_session import LINGER, MuxSession

LEAVE_TIMEOUT: Final = LINGER


class Link(MuxSession[Connection, Channel]):
    """One link at work, with or without a connection; made by `link`, `listen` and `session`.

    Use `sender`, `receiver` and `receivers` for what Relink is, or `open` and `incoming` for the common channels.
    `open` returns at once: the peer hears of a channel with its first message, or at once if it has a name or a
    payload.
    """

    # --- messages

    def sender(self, channel: int = 0) -> Sender:
        """Return an object to send on a channel of ours. Its first message opens the channel.

        A channel has one sender at a time, and one more that waits until the channel's end is confirmed.
        """
        return self._connection.sender(channel)

    def receiver(self, channel: int = 0) -> Receiver:
        """Return an object to receive what the peer sends on this channel, now or once the peer opens it.

        A channel has one receiver at a time.
        """
        return self._connection.receiver(channel)

    def receivers(self) -> AsyncIterator[Receiver]:
        """Iterate over receivers, one for each channel that the peer opens, until the peer's shutdown."""
        return self._connection.use_receivers()

    async def multicast(self, senders: Sequence[Sender], *parts: bytes) -> list[Receipt]:
        """Send one message to several channels in one packet; waits until all of them have room.

        A sender that stands there twice sends it twice. Returns a receipt for each, in the order of `senders`.
        Cancelled means that it was sent to none of them. Raises as `Sender.send` does, and `LocalProtocolError` if it
        could not even be sent when nothing else is under way.
        """
        return await self._connection.multicast(senders, *parts)

    # --- the common channels

    def incoming(self) -> AsyncIterator[Channel]:
        return self._connection.use_common()

    # --- the link

    @property
    def id(self) -> int:
        """The id of the link; 0 before there is one.

        It is a secret of both sides: a peer that knows it can take the link over.
        """
        return self._connection.link.link_id

    @property
    def is_connected(self) -> bool:
        """True while there is a connection."""
        return self._connection.carrier is not None

    @property
    def connections(self) -> int:
        """How many connections it has had."""
        return self._connection.connections

    @property
    def unanswered(self) -> int:
        """Messages of ours that the peer has not consumed, or answered, yet."""
        return self._connection.link.state.ours.unanswered

    @property
    def outage(self) -> Exception | None:
        """What went wrong with the last attempt to connect, if nothing has worked since."""
        return self._connection.supply.outage

    async def connected(self) -> None:
        """Wait for a connection on which messages flow.

        Raises what ended the link if it is over; put `trio.fail_after` around it for a limit.
        """
        await self._connection.connected()

    async def ping(self) -> float:
        """Return the seconds of one round trip.

        It waits for a connection, and is repeated on the next one if this one is lost.
        """
        return await self._connection.ping()

    async def shutdown(self, *, grace: float) -> None:
        """Open no more channels, let the live ones end for up to `grace` seconds, then cut them.

        The peer is told at once. Senders that are not closed by then are closed, and what they had not decided is
        rolled back. What was sent before is still delivered while the link lives.
        """
        await self._connection.shutdown(grace=grace)
