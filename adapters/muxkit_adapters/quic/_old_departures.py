"""How do the packets of one QUIC connection leave? On its socket as far as the kernel takes them, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from .sockets import Packet, UdpSocket

GOODBYES = 8  # doublings of the packets that a peer sends on before he is told goodbye again


class Departures:
    """What waits for the kernel, and the goodbye, which may be needed again."""

    def __init__(self, wire: UdpSocket) -> None:
        self.wire = wire
        self.waiting: list[Packet] = []
        self._goodbye: list[Packet] = []
        self._unheard = 0

    @property
    def has_said_goodbye(self) -> bool:
        return bool(self._goodbye)

    def send(self, packets: list[Packet], *, is_goodbye: bool = False) -> None:
        """All, or what the kernel takes now; the rest waits."""
        if is_goodbye:
            self._goodbye = packets
        try:
            taken = self.wire.send_nowait(packets)
        except trio.ClosedResourceError:
            return
        if taken < len(packets):
            self.waiting = packets[taken:]

    async def wait(self) -> None:
        """Until the kernel takes more; then send that."""
        wire = self.wire
        try:
            await wire.wait_writable()
        except trio.ClosedResourceError:
            if wire is self.wire:  # it was not replaced: there is nothing left to tell anybody with
                self.waiting = []
            return
        waiting, self.waiting = self.waiting, []
        self.send(waiting)

    def repeat_goodbye(self) -> None:
        """The peer has not heard it: again at his first packet, the second, the fourth, …"""
        self._unheard += 1
        if self._unheard < 1 << GOODBYES and self._unheard & (self._unheard - 1) == 0 and not self.waiting:
            self.send(self._goodbye)

    def replace(self, wire: UdpSocket) -> UdpSocket:
        """Go on from another socket; gives the one before. What waited for that counts as lost on the way."""
        before, self.wire = self.wire, wire
        self.waiting = []
        return before
