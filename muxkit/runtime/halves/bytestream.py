"""A two-way channel as a `trio.abc.HalfCloseableStream` of bytes."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from muxkit.runtime.halves.receive import ReceiveHalf
    from muxkit.runtime.halves.send import SendHalf

PIECE = 64 * 1024  # bytes in one message


class ByteStream(trio.abc.HalfCloseableStream):
    """Bytes over a pair of halves; message boundaries carry no meaning, and empty messages are skipped.

    Unlike the halves it yields in every call. `send_all` may be partial when it is cancelled, as Trio has it.
    """

    def __init__(self, sending: SendHalf, receiving: ReceiveHalf[bytes]) -> None:
        self._sending = sending
        self._receiving = receiving
        self._rest = b""
        self._closed = False
        self._eof_sent = False
        self._ended = False
        self._busy_sending = False
        self._busy_receiving = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._busy_sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._busy_sending = True
        try:
            await trio.lowlevel.checkpoint()
            self._check_sending()
            view = memoryview(data)
            for start in range(0, len(view), PIECE):
                await self._sending.send(bytes(view[start : start + PIECE]))
        finally:
            self._busy_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        if self._busy_sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._busy_sending = True
        try:
            await trio.lowlevel.checkpoint()
            self._check_sending()
            await self._sending.wait_for_room()
        finally:
            self._busy_sending = False

    async def send_eof(self) -> None:
        if self._busy_sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        self._eof_sent = True
        await self._sending.aclose()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes={max_bytes}: must be at least 1")
        if self._busy_receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._busy_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._rest and not self._ended:
                await self._fill()
        finally:
            self._busy_receiving = False
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        size = len(self._rest) if max_bytes is None else max_bytes
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._rest = b""
            self._sending.close()  # first: a peer counts the other order as breaking off
            self._receiving.close()
        await trio.lowlevel.checkpoint()

    async def _fill(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        try:
            self._rest = await self._receiving.receive()
        except trio.EndOfChannel:
            self._ended = True

    def _check_sending(self) -> None:
        if self._closed or self._eof_sent:
            raise trio.ClosedResourceError("this stream was closed, or its end was sent")
