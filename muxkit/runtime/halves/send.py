"""The sending half of a channel of byte messages."""

from __future__ import annotations

from abc import abstractmethod
from itertools import islice
from typing import TYPE_CHECKING

import trio

from muxkit.core import Sending
from muxkit.runtime.halves.turn import OPEN, YIELD_BYTES, YIELD_CALLS, YIELD_LEAST, SendTurn

if TYPE_CHECKING:
    from collections.abc import Iterable

ONLY_BYTES = {bytes}
MANY = 16  # one `send_many` may send so many times what a half sends between two yields


class SendHalf(SendTurn, trio.abc.SendChannel[bytes]):
    """Sends whole messages; a protocol fills in `_push` and what `SendTurn` leaves open.

    Several tasks may send at once: they are served in the order in which they came.
    """

    __slots__ = ()

    # --- for the application

    async def send(self, message: bytes) -> None:
        """Send one message; returns when the connection has it, in order behind the half's earlier ones.

        Cancelled means not sent. Checks for cancellation in every call, yields at the latest on every 64th call
        or 16 KiB of this half, and always when it had to wait.

        Raises `trio.ClosedResourceError` after `finish`, `abort` or `aclose`, `ChannelStopped` when the peer
        wants no more, `LinkLost` when the connection is gone, `LocalProtocolError` for what cannot be sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if type(message) is not bytes:
            message = as_bytes(message)
        size = len(message)
        if self.state is OPEN and not self._gate and self._budget.admits(size) and self._try_push(message):
            self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call
        else:
            await self._hand_over(message)
        self._request_write()
        if self._since_yield >= YIELD_BYTES:
            await self._yield()

    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages with one checkpoint, if they need not wait; cancelled, a prefix was sent."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            rest = iter(messages)
            while batch := list(islice(rest, YIELD_CALLS * MANY)):
                if not self._push_all(batch):
                    for message in batch:
                        await self._hand_over(message if type(message) is bytes else as_bytes(message))
                        if self._since_yield >= YIELD_BYTES * MANY:
                            self._request_write()
                            await self._yield()
                if self._since_yield >= YIELD_BYTES * MANY:
                    self._request_write()
                    await self._yield()
        finally:
            self._request_write()
        await self._yield()

    async def finish(self, payload: bytes = b"") -> None:
        """Say that no more follows, after everything that was sent, and wait until the peer has heard it.

        Raises `ChannelStopped` if the peer stopped listening before, `LinkLost` if that is never known.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.state is Sending.OPEN:
            if payload:
                await self.wait_turn(len(payload))
            try:
                self._close(payload)
            finally:
                self.end_turn()
            self._request_write()
        elif self._error is not None:
            await self._refuse()
        await self.wait_over()

    # --- what a protocol fills in

    @abstractmethod
    def _push(self, message: bytes) -> None:
        """Give a message to the engine."""

    def _try_push(self, message: bytes) -> bool:
        """Give a message to the engine if the window has room; False means that nothing was done.

        A protocol may have a quicker way than to ask first.
        """
        if not self.admits(len(message)):
            return False
        self._push(message)
        return True

    def _try_push_all(self, messages: list[bytes]) -> bool:
        """The same for several messages at once: all or none."""
        return False

    # --- inside

    async def _hand_over(self, message: bytes) -> None:
        """Wait for a turn, then give the message to the engine with no checkpoint in between."""
        size = len(message)
        if self.state is not Sending.OPEN:
            await self._refuse()
        if self.may_send(size):
            self._push(message)
            self._since_yield += max(size, YIELD_LEAST)
            return
        await self._wait(size)
        try:
            if not self._try_push(message):
                self._push(message)
        finally:
            self.end_turn()

    def _push_all(self, messages: list[bytes]) -> bool:
        """Give all of them to the engine, if they fit as they are; otherwise none."""
        if self.state is not OPEN or self._gate or set(map(type, messages)) != ONLY_BYTES:
            return False
        size = sum(map(len, messages))
        if size > YIELD_BYTES * MANY or not self._budget.admits(size) or not self._try_push_all(messages):
            return False
        self._since_yield += max(size, YIELD_LEAST * len(messages))
        return True


def as_bytes(message: object) -> bytes:
    """Return a bytes-like message as bytes; raises TypeError for anything else."""
    if isinstance(message, (bytes, bytearray, memoryview)):
        return bytes(message)
    raise TypeError(f"a message is bytes, not {type(message).__name__}")
