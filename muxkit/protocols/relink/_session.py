"""The `Link` class: the session object that applications use for a Relink link."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

from muxkit.protocols.relink._channels import Channel, Receipt, Receiver, Sender
from muxkit.protocols.relink._connection import Connection
from muxkit.runtime.mux_session import LINGER, MuxSession

LEAVE_TIMEOUT: Final = LINGER


class Link(MuxSession[Connection, Channel]):
    """A running link, whether or not it has a connection at the moment. `link`, `listen` and `session` create links.

    An application uses a link in one of two ways. `sender`, `receiver` and `receivers` give Relink's own channels:
    each has one direction, and Relink adds receipts, transactions and multicast. `open` and `incoming` give the common
    channels that all protocols of muxkit have.

    `open` doesn't wait for the peer. A channel that was opened with a name or a payload is announced to the peer
    immediately, and every other channel with its first message.
    """

    # --- messages

    def sender(self, channel: int = 0) -> Sender:
        """Return a `Sender` for one of our channels. Its first message opens the channel.

        A channel can have one open sender at a time. After that sender was closed, you can create the next one. The
        `send` method of the new sender waits until the peer has confirmed the close.

        Raises:
            LocalProtocolError: The channel has an open sender, the number is too large for this link, or the channel
                is in use as a common channel.
        """
        return self._connection.sender(channel)

    def receiver(self, channel: int = 0) -> Receiver:
        """Return a `Receiver` for the messages that the peer sends on this channel.

        The peer may open the channel later. A channel can have one receiver at a time.

        Raises:
            LocalProtocolError: The channel has a receiver, the number is too large for this link, or the channel is in
                use as a common channel.
        """
        return self._connection.receiver(channel)

    def receivers(self) -> AsyncIterator[Receiver]:
        """Iterate over a new `Receiver` for each channel that the peer opens. Ends with the peer's shutdown."""
        return self._connection.use_receivers()

    async def multicast(self, senders: Sequence[Sender], *parts: bytes) -> list[Receipt]:
        """Send one message on several channels in one packet. Waits until all of the channels have room.

        If `senders` names a sender twice, the message is sent twice on that sender's channel. If the call is cancelled,
        the message was sent on none of the channels.

        Returns a receipt for each entry of `senders`, in the same order.

        Raises:
            LocalProtocolError: The message wouldn't fit even if no other message were in the windows.
            trio.ClosedResourceError: One of the senders was closed.
            LinkChanged: The listener has replaced the link that the channels belonged to.
            LinkLost: The link has ended.
        """
        return await self._connection.multicast(senders, *parts)

    # --- the common channels

    def incoming(self) -> AsyncIterator[Channel]:
        return self._connection.use_common()

    # --- the link

    @property
    def id(self) -> int:
        """The id of the link; 0 until the first handshake.

        Keep the id secret, because anyone who knows it may be able to take over the link.
        """
        return self._connection.link.link_id

    @property
    def is_connected(self) -> bool:
        """True while the link has a connection."""
        return self._connection.carrier is not None

    @property
    def connections(self) -> int:
        """How many connections the link has had."""
        return self._connection.connections

    @property
    def unanswered(self) -> int:
        """How many of our messages the peer hasn't consumed, or with transactions hasn't answered."""
        return self._connection.link.state.ours.unanswered

    @property
    def outage(self) -> Exception | None:
        """The error of the last attempt to connect, or None if a connection has worked since."""
        return self._connection.supply.outage

    async def connected(self) -> None:
        """Wait until the link has a connection and, if it resumes, the peer's resume has arrived.

        If the link has ended, this raises the error that ended it. Use `trio.fail_after` to limit the wait.
        """
        await self._connection.connected()

    async def ping(self) -> float:
        """Send a ping, wait for the answer, and return the round trip in seconds.

        Waits for a connection if there is none. If the connection is lost before the answer arrives, the ping is
        repeated on the next connection.
        """
        return await self._connection.ping()

    async def shutdown(self, *, grace: float) -> None:
        """Open no more channels, and wait up to `grace` seconds for the open channels to end.

        The peer is notified immediately. After `grace` seconds the remaining common channels are aborted, and the
        remaining senders are closed. Closing a sender rolls back its undecided messages. Messages that were sent before
        are still delivered as long as the link lives.
        """
        await self._connection.shutdown(grace=grace)
