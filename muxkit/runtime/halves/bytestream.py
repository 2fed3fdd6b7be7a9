"""`ByteStream`, which turns a two-way channel into a `trio.abc.HalfCloseableStream` of bytes."""

from __future__ import annotations

import operator
from collections.abc import Awaitable
from typing import Protocol

import trio

from muxkit._spans import ChannelSpan
from muxkit.runtime._links import OneAtATime

PIECE = 64 * 1024  # maximum size of a message in bytes


class Sending(Protocol):
    """The sending half of a `ByteStream`."""

    def send(self, message: bytes) -> Awaitable[None]: ...
    def wait_for_room(self, size: int = 1) -> Awaitable[None]: ...
    def aclose(self) -> Awaitable[None]: ...
    def close(self) -> object: ...


class Receiving(Protocol):
    """The receiving half of a `ByteStream`, or a channel if the items of its receiving half aren't bytes."""

    def receive(self) -> Awaitable[bytes]: ...
    def close(self) -> object: ...


class ByteStream(trio.abc.HalfCloseableStream):
    """A stream of bytes over a pair of halves. Message boundaries have no meaning, and empty messages are skipped.

    Unlike the methods of the halves, each method executes a checkpoint in every call. If `send_all` is cancelled, it
    may have sent part of the data, as with any Trio stream.
    """

    def __init__(self, sending: Sending, receiving: Receiving, span: ChannelSpan | None = None) -> None:
        self._sending = sending
        self._receiving = receiving
        self._span = span  # of the channel, which ends with the stream
        self._rest = b""
        self._closed = False
        self._eof_sent = False
        self._ended = False
        self._one_sends = OneAtATime("sending on this stream")
        self._one_receives = OneAtATime("receiving on this stream")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._one_sends:
            await trio.lowlevel.checkpoint()
            self._check_sending()
            view = memoryview(data)
            for start in range(0, len(view), PIECE):
                await self._sending.send(bytes(view[start : start + PIECE]))

    async def wait_send_all_might_not_block(self) -> None:
        with self._one_sends:
            await trio.lowlevel.checkpoint()
            self._check_sending()
            await self._sending.wait_for_room()

    async def send_eof(self) -> None:
        self._one_sends.check()
        await trio.lowlevel.checkpoint()
        self._check_open()
        self._eof_sent = True
        await self._sending.aclose()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes={max_bytes}: must be at least 1")
        with self._one_receives:
            await trio.lowlevel.checkpoint()
            while not self._rest and not self._ended:
                self._check_open()
                try:
                    self._rest = await self._receiving.receive()
                except trio.EndOfChannel:
                    self._ended = True
        self._check_open()
        size = len(self._rest) if max_bytes is None else max_bytes
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._rest = b""
            # Close the sending half first, because a peer treats the opposite order as a cancelled channel.
            self._sending.close()
            self._receiving.close()
            if self._span is not None:
                self._span.end()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")

    def _check_sending(self) -> None:
        self._check_open()
        if self._eof_sent:
            raise trio.ClosedResourceError("the end of this stream was sent")
