"""One channel at either end: messages of 64 bytes, and what an order asks for."""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import trio

from .orders import MESSAGE, Order, Receipt, Way, Wrong

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

READ = 262_144  # bytes, the most that one read of a byte stream asks for
_LENGTH = struct.Struct("!I")


class Conversation(ABC):
    """One channel, at either end."""

    __slots__ = ("receive", "send")

    send: Callable[[bytes], Awaitable[object]]
    """Send the result of `prepare`, or an order, a receipt or an echo unchanged."""

    receive: Callable[[], Awaitable[bytes]]
    """Receive the next message of 64 bytes; raises `trio.EndOfChannel` at the end."""

    @abstractmethod
    def prepare(self, message: bytes, way: Way) -> bytes:
        """Frame a message for `send`, so that the other end can take it."""

    @abstractmethod
    async def send_batch(self, batch: list[bytes]) -> None:
        """Send several prepared messages in the cheapest way."""

    @abstractmethod
    async def take(self, order: Order) -> Receipt:
        """Receive what was ordered."""


class StreamConversation(Conversation):
    """A channel that is a byte stream: small messages carry their length in front, the rest needs no frames."""

    __slots__ = ("_receive_some", "_rest")

    def __init__(
        self, send: Callable[[bytes], Awaitable[object]], receive_some: Callable[[int], Awaitable[bytes | bytearray]]
    ) -> None:
        self.send = send
        self.receive = self._receive
        self._receive_some = receive_some
        self._rest: bytes | bytearray = b""

    async def _receive(self) -> bytes:
        data = self._rest or await self._some()
        while len(data) < MESSAGE:
            data += await self._some()
        if len(data) == MESSAGE:
            self._rest = b""
            return bytes(data)
        self._rest = data[MESSAGE:]
        return bytes(data[:MESSAGE])

    def prepare(self, message: bytes, way: Way) -> bytes:
        return message if way is Way.BULK else _LENGTH.pack(len(message)) + message

    async def send_batch(self, batch: list[bytes]) -> None:
        await self.send(b"".join(batch))

    async def take(self, order: Order) -> Receipt:
        return await (self._take_bytes(order) if order.way is Way.BULK else self._take_frames(order))

    async def _take_bytes(self, order: Order) -> Receipt:
        wanted, crc, verify = order.messages * order.size, 0, order.verify
        came = 0
        while came < wanted:
            data = self._rest or await self._some()
            self._rest = b""
            if came + len(data) > wanted:
                self._rest, data = data[wanted - came :], data[: wanted - came]
            came += len(data)
            if verify:
                crc = zlib.crc32(data, crc)
        return Receipt(came // order.size, came, crc)

    async def _take_frames(self, order: Order) -> Receipt:
        wanted, size, verify, length_at = order.messages, order.size, order.verify, _LENGTH.unpack_from
        came = crc = 0
        data, self._rest = self._rest, b""
        while True:
            at, end = 0, len(data)
            while end - at >= 4 and came < wanted:
                start = at + 4
                stop = start + length_at(data, at)[0]
                if stop > end:
                    break
                message = data[start:stop]  # an application would copy it as well
                if len(message) != size:
                    raise Wrong(f"message {came} has {len(message)} bytes, not {size}")
                if verify:
                    crc = zlib.crc32(message, crc)
                came += 1
                at = stop
            if came == wanted:
                self._rest = data[at:]
                return Receipt(came, came * size, crc)
            data = data[at:] + await self._some()

    async def _some(self) -> bytes | bytearray:
        data = await self._receive_some(READ)
        if not data:
            raise trio.EndOfChannel
        return data
