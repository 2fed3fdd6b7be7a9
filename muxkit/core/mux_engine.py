"""The interface of a protocol's engine for the runtime's session.

An engine has two users. The pump passes bytes through it, with one of the interfaces in `muxkit.core._engine`. The
session opens channels and ends the connection, with the interface in this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from muxkit.core._channels import Reason
from muxkit.core._windows import StartPace
from muxkit.core.events import Halves


class MuxEngine(ABC):
    """One side of a connection with many channels, without I/O."""

    starts: StartPace
    """Limits how fast handlers start for a peer that keeps cancelling the channels it opens."""
    bytes_received: int
    """How many bytes the peer has sent."""

    @property
    @abstractmethod
    def messages_sent(self) -> int:
        """How many messages this side has sent."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """How many channels are open. It doesn't matter which side has opened them."""

    @property
    @abstractmethod
    def places(self) -> int:
        """How many more channels this side may open now."""

    @property
    @abstractmethod
    def outbox(self) -> int:
        """How many queued bytes wait for the link."""

    @property
    @abstractmethod
    def peer_takes_no_channels(self) -> bool:
        """True once the peer has announced that it accepts no more channels."""

    @abstractmethod
    def open_channel(self, opening: bytes) -> Halves:
        """Open a two-way channel. `with_name` has encoded the opening, which contains name, headers and payload."""

    def refuse(self, channel: Halves, reason: Reason) -> None:
        """End a channel that the peer has opened and this side doesn't accept. Some protocols send the reason.

        This implementation is for protocols in which cancelling the sending half ends the whole channel.
        """
        if channel.sender is not None:
            channel.sender.cancel(reason)

    @abstractmethod
    def ping(self, key: object) -> None:
        """Queue a ping. A `Pong` with the same key reports the answer.

        In some protocols, a ping can be about a half of a channel, which is the key then.
        """

    @abstractmethod
    def go_away(self, reason: Reason) -> None:
        """Announce that this side accepts no more channels, if the protocol supports that."""

    @abstractmethod
    def farewell(self, reason: Reason) -> bytes:
        """Return the last bytes to write, which contain the reason for the end, or b"" if the protocol has none."""
