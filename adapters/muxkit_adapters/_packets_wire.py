"""What does Trio's DTLS take for a socket? Ours, so that what the network says never reaches Trio's own task."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import trio

from muxkit.runtime import turns

from ._packets import TURN

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from ._packets import Address
    from ._packets_socket import PacketSocket

TOO_LARGE = 18_500  # bytes: above any DTLS record; such packets are not kept


class Party(Protocol):
    """Who wants to know about the packets of one address."""

    def heard(self, packets: Sequence[bytes], /) -> None:
        """Something came from there."""

    def told(self) -> None:
        """Trio has sent a packet of its own there."""


class Wire(trio.socket.SocketType):
    """The calls that Trio's endpoint makes; in the task that it receives in, an unforeseen error would end the program.

    `peer` is who a connected socket is connected to; `link_of`
    finds out whose packets are whose.
    """

    def __init__(self, packets: PacketSocket, peer: Address | None, link_of: Callable[[Address], Party | None]) -> None:
        super().__init__()
        self._packets = packets
        self._peer = peer
        self._link_of = link_of
        self._queue: deque[tuple[bytes, Address]] = deque()
        self._clock = turns().now
        self._until = 0.0  # when the others get their turn

    @property
    def is_connected(self) -> bool:
        return self._peer is not None

    @property
    def family(self) -> socket.AddressFamily:
        return self._packets.socket.family

    @property
    def type(self) -> socket.SocketKind:
        return self._packets.socket.type

    def getsockname(self) -> Any:  # noqa: ANN401 - as in Trio
        return self._packets.socket.getsockname()

    def close(self) -> None:
        self._packets.close()

    async def recvfrom(self, *_: object) -> tuple[bytes, Any]:
        packets = self._packets
        while not self._queue:
            if packets.has_more:
                await trio.lowlevel.checkpoint()
            else:
                await packets.wait_readable()
            for address, burst in packets.receive():
                came_from = address or self._peer
                if came_from is None:
                    continue
                link = self._link_of(came_from)
                if link is not None:
                    link.heard(burst)
                # An empty packet would be an error in Trio, and end the link: anybody can send one.
                self._queue.extend((packet, came_from) for packet in burst if 0 < len(packet) <= TOO_LARGE)
            self._until = self._clock() + TURN
        # Trio works on each packet as soon as it has it, and would go on as long as there are more.
        if self._clock() >= self._until:
            await trio.lowlevel.checkpoint()
            self._until = self._clock() + TURN
        return self._queue.popleft()

    async def sendto(self, *arguments: Any) -> int:
        packet, address = bytes(arguments[0]), arguments[-1]
        try:
            while not self.send_nowait([packet], address):
                await self._packets.wait_writable()
        except OSError:  # too large for the path: the handshake comes again with smaller ones
            self._packets.lost += 1
        await trio.lowlevel.checkpoint()
        link = self._link_of(address)
        if link is not None:
            link.told()
        return len(packet)

    def send_nowait(self, packets: Sequence[bytes], address: Address) -> int:
        """As `PacketSocket.send`."""
        return self._packets.send(packets, None if self._peer is not None else address)
