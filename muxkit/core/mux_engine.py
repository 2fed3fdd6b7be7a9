"""The engine of a protocol with many channels, as the runtime's session sees it.

What moves bytes in and out is declared in `muxkit.core._engine`, one interface for each kind of link. This is the other
side of the same object: what a session asks about channels, and the commands that end or limit them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from muxkit.core._channels import Reason
from muxkit.core._windows import StartPace
from muxkit.core.events import Halves


class MuxEngine(ABC):
    """One end of a connection that carries many channels, without I/O."""

    starts: StartPace
    """It says when work on the next channel of the peer may begin, and is told what began and what need not."""
    bytes_received: int

    @property
    @abstractmethod
    def messages_sent(self) -> int:
        """How many messages this side has sent."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """How many channels of both sides live."""

    @property
    @abstractmethod
    def places(self) -> int:
        """How many more channels this side may open now."""

    @property
    @abstractmethod
    def outbox(self) -> int:
        """How many bytes are queued and wait for the transport."""

    @property
    @abstractmethod
    def peer_takes_no_channels(self) -> bool:
        """True once the peer has said that it takes no new channels."""

    @abstractmethod
    def open_channel(self, opening: bytes) -> Halves:
        """Open a two-way channel, whose opening carries these bytes (`with_name` puts the name into them)."""

    def refuse(self, channel: Halves, reason: Reason) -> None:
        """End a channel that the peer opened and that nobody here takes, and say why if the protocol can.

        Where cancelling the sending half gives up the whole channel, that is enough.
        """
        if channel.sender is not None:
            channel.sender.cancel(reason)

    @abstractmethod
    def ping(self, key: object) -> None:
        """Queue a ping, about a half of a channel if the protocol has such pings; the answer is a `Pong`."""

    @abstractmethod
    def go_away(self, reason: Reason) -> None:
        """Tell the peer that this side takes no new channels, if the protocol can say so."""

    @abstractmethod
    def farewell(self, reason: Reason) -> bytes:
        """Return the last bytes to write, which say why the connection ends; b"" if the protocol cannot say it."""
