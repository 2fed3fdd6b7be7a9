"""Halves over a window in memory instead of a protocol, so that the runtime can be tried by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.testing

from muxkit import ChannelStopped, LinkLost, LocalProtocolError
from muxkit.core import Reason
from muxkit.runtime import Mailbox, OutboxBudget, ReceiveHalf, SendHalf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit.runtime.halves.budget import ErrorMaker

LARGEST = 1_000_000


class Outbox:
    """What waits for the transport; `drain` is the transport taking it."""

    def __init__(self, limit: int = 1000) -> None:
        self.used = 0
        self.limit = limit
        self.room = OutboxBudget(limit, self)
        self.rung = 0

    def drain(self, size: int | None = None) -> None:
        self.used -= self.used if size is None else min(size, self.used)
        self.room.wake_waiting()

    def ring(self) -> None:
        self.rung += 1


class Window:
    """Credit in bytes, of one half or of several that share it."""

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.watching: list[WindowedSend] = []

    def grant(self, amount: int) -> None:
        self.credit += amount
        watching, self.watching = self.watching, []
        for half in watching:
            half._window_changed()


class WindowedSend(SendHalf):
    """Sends into a list, as far as a window of bytes allows."""

    def __init__(
        self, outbox: Outbox, credit: int | Window = 1000, deliver: Callable[[bytes], None] | None = None
    ) -> None:
        super().__init__(outbox.room, outbox.ring)
        self.outbox = outbox
        self.window = credit if isinstance(credit, Window) else Window(credit)
        self.grant = self.window.grant
        self.sent: list[bytes] = []
        self.log: list[str] = []
        self._deliver = deliver

    # What a session does to a half, and no application can.

    def confirm(self) -> None:
        self._confirmed()

    def lose(self, error: ErrorMaker) -> None:
        self._lost(error)

    def stop(self, error: ErrorMaker) -> None:
        self._stopped(error)

    def has_room(self, size: int) -> bool:
        return size <= self.window.credit

    def _watch(self, size: int) -> None:
        if self not in self.window.watching:
            self.window.watching.append(self)

    def _push(self, message: bytes) -> None:
        if not self.has_room(len(message)):
            raise LocalProtocolError(f"{len(message)} bytes against {self.window.credit}")
        self.window.credit -= len(message)
        self.outbox.used += len(message)
        self.sent.append(message)
        if self._deliver is not None:
            self._deliver(message)

    def _check_size(self, size: int) -> None:
        if size > LARGEST:
            raise LocalProtocolError(f"{size} bytes against {LARGEST}")

    def _finish(self, payload: bytes) -> None:
        self.log.append(f"finish {payload!r}")

    def _abort(self, reason: Reason) -> None:
        self.log.append("abort")
        self.outbox.used = 0


class PlainReceive(ReceiveHalf[bytes]):
    """Receives what the test delivers."""

    _new_storage = Mailbox

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.consumed = 0
        self.was_stopped = False
        self.on_consumed: Callable[[int], None] = lambda size: None

    # What a session does to a half, and no application can.

    def deliver(self, message: bytes) -> None:
        self._deliver(message)

    def deliver_all(self, messages: list[bytes]) -> None:
        self._deliver_all(messages)

    def end(self, error: ErrorMaker) -> None:
        """End it: whoever receives gets this error behind what came before."""
        self._ended(error)

    def take(self) -> bytes | None:
        """Take a message without waiting for one."""
        return self._try_receive()

    def _taken(self, messages: Sequence[bytes], size: int) -> bool:
        self.consumed += size
        self.on_consumed(size)
        return True

    def _stop(self) -> None:
        self.was_stopped = True


def lost() -> Exception:
    return LinkLost("cut", by="network")


def stopped() -> Exception:
    return ChannelStopped("no more")


async def at_rest() -> None:
    await trio.testing.wait_all_tasks_blocked()
