"""Halves over an engine of a few lines in memory, so that the runtime can be tried by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.testing

from muxkit import ChannelStopped, LinkLost, LocalProtocolError
from muxkit.runtime import OutboxBudget
from muxkit.runtime.halves.owner import HalfOwner
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit.core import Reason
    from muxkit.runtime.halves.budget import ErrorMaker
    from muxkit.runtime.pumps.reading import Reading

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


class MemoryConnection(HalfOwner):
    """The connection of halves in memory."""

    def __init__(self, outbox: Outbox, reader: Reading | None = None) -> None:
        self.budget = outbox.room
        self._outbox = outbox
        self.reading = reader

    def request_write(self) -> None:
        self._outbox.ring()

    def dispatch_events(self) -> None:
        pass

    @property
    def loss(self) -> ErrorMaker | None:
        return None


class Window:
    """Credit in bytes, of one half or of several that share it."""

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.watching: list[WindowedSend] = []

    def grant(self, amount: int) -> None:
        self.credit += amount
        watching, self.watching = self.watching, []
        for half in watching:
            half.window_changed()


class MemorySender:
    """The engine's half: it sends into a list, as far as a window of bytes allows.

    It has all methods of a `Sender` without deriving from it, as interpreted classes can't derive from compiled ones.
    """

    owner: object | None = None
    label = "sink"
    credit_out: int | None = None
    has_sent = True

    def __init__(self, outbox: Outbox, window: Window, deliver: Callable[[bytes], None] | None) -> None:
        self.outbox = outbox
        self.window = window
        self.sent: list[bytes] = []
        self.log: list[str] = []
        self._deliver = deliver

    @property
    def queued(self) -> int:
        return self.outbox.used

    def check_size(self, size: int) -> None:
        if size > LARGEST:
            raise LocalProtocolError(f"{size} bytes against {LARGEST}")

    def has_room(self, size: int) -> bool:
        return size <= self.window.credit

    def notify_when_room(self, size: int) -> None:
        assert isinstance(self.owner, WindowedSend)
        if self.owner not in self.window.watching:
            self.window.watching.append(self.owner)

    def send(self, message: bytes) -> None:
        if not self.has_room(len(message)):
            raise LocalProtocolError(f"{len(message)} bytes against {self.window.credit}")
        self.window.credit -= len(message)
        self.outbox.used += len(message)
        self.sent.append(message)
        if self._deliver is not None:
            self._deliver(message)

    def try_send(self, message: bytes) -> bool | None:
        if not self.has_room(len(message)):
            return None
        self.send(message)
        return True

    def try_send_all(self, messages: list[bytes]) -> bool:
        return False

    def finish(self, payload: bytes = b"") -> None:
        self.log.append(f"finish {payload!r}")

    def cancel(self, reason: Reason) -> None:
        self.log.append("abort")
        self.outbox.used = 0


class WindowedSend(SendHalf):
    """A sending half with its engine's half, and what a connection does to it."""

    new_sender: type[MemorySender] = MemorySender

    def __init__(
        self, outbox: Outbox, credit: int | Window = 1000, deliver: Callable[[bytes], None] | None = None
    ) -> None:
        self.window = credit if isinstance(credit, Window) else Window(credit)
        self.engine = self.new_sender(outbox, self.window, deliver)
        self.outbox = outbox
        self.grant = self.window.grant
        super().__init__(MemoryConnection(outbox), self.engine)

    @property
    def sent(self) -> list[bytes]:
        return self.engine.sent

    @property
    def log(self) -> list[str]:
        return self.engine.log


class MemoryReceiver:
    """The engine's half: it counts what the application has consumed."""

    owner: object | None = None
    credit_in: int | None = None
    label = "source"
    held = 0

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self.total = 0
        self.was_stopped = False
        self.on_consumed: Callable[[int], None] = lambda size: None
        self.on_stop: Callable[[], None] = lambda: None

    @property
    def lag(self) -> int:
        return self._lag

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        self.total += size
        self.on_consumed(size)
        return True

    def consumed_portion(self, count: int, size: int) -> bool:
        return self.consumed((), size)

    def stop(self, reason: Reason) -> None:
        self.was_stopped = True
        self.on_stop()


class PlainReceive(ReceiveHalf[bytes]):
    """Receives what the test delivers."""

    def __init__(self, lag: int = 0, reader: Reading | None = None) -> None:
        self.engine = MemoryReceiver(lag)
        super().__init__(MemoryConnection(Outbox(), reader), self.engine)

    @property
    def consumed(self) -> int:
        return self.engine.total

    @property
    def was_stopped(self) -> bool:
        return self.engine.was_stopped


def lost() -> Exception:
    return LinkLost("cut", by="network")


def stopped() -> Exception:
    return ChannelStopped("no more")


async def at_rest() -> None:
    await trio.testing.wait_all_tasks_blocked()
