"""What both processes of the demo share: their messages, how they report a result and end, and their memory."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from muxkit.cli.outcome import Exit, failure_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The orders of the client; times in seconds."""

    seconds: float
    """Time under load."""
    idle_seconds: float
    """Time before that, with all channels open and idle."""
    channels: int = 100
    seed: int = 1
    patience: float = 30.0
    """Extra time that the whole run may take."""


# --- lines


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The server listens."""

    url: str


class Progress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The progress of the client."""

    phase: Literal["idle", "load"]
    elapsed: float
    messages: int
    bytes: int
    ping: float | None
    """The last round trip, in seconds."""


class Totals(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The result of one end: the last line of a process that did its work."""

    messages_sent: int
    bytes_sent: int
    messages_verified: int
    """How many messages from the other end were verified."""
    bytes_verified: int
    problems: list[str]
    memory: int | None
    """The highest resident memory, in bytes."""
    seconds: float | None = None
    """How long the load lasted, until the last byte was confirmed."""
    idle_pings: list[float] = []
    """Round trips, as in the two lists below; a sample if there are more than `samples.MOST`."""
    load_pings: list[float] = []
    echoes: list[float] = []


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last line of a process that could not do its work."""

    sentence: str
    exit: Exit


Event = Ready | Progress | Totals | Failed

_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def tell(event: Event) -> None:
    """Write a line; a closed pipe is ignored."""
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()


def understand(line: bytes) -> Event:
    return _events.decode(line)


# --- messages


class Order(msgspec.Struct, frozen=True):
    """The first message of a channel: its job, and the seed of its contents."""

    job: Literal["echo", "bulk"]
    channel: int
    seed: int


class Receipt(msgspec.Struct, frozen=True):
    """The last message of the server on a channel: what it had received when the client had finished."""

    messages: int
    bytes: int


_orders = msgspec.json.Decoder(Order)
_receipts = msgspec.json.Decoder(Receipt)


def read_order(message: bytes) -> Order:
    return _orders.decode(message)


def read_receipt(message: bytes) -> Receipt:
    return _receipts.decode(message)


def run_part(part: Callable[[], Awaitable[Totals | None]]) -> Exit:
    """Run `part` and report its result; None means that the parent ended it before."""
    try:
        totals = trio.run(part)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        tell(Failed(failure.sentence, failure.exit))
        return failure.exit
    if totals is None:
        return Exit.INTERRUPTED
    tell(totals)
    return Exit.OK


async def until_released() -> None:
    """Wait for the end of standard input: the parent has closed it, or has ended."""
    # Not `sys.stdin.read`: its thread, once abandoned, would hold a lock when the interpreter ends.
    while await trio.to_thread.run_sync(os.read, 0, 1024, abandon_on_cancel=True):
        pass


STATUS = Path("/proc/self/status")


def peak_memory() -> int | None:
    """Return the highest resident memory in bytes; None where the system does not report it."""
    if STATUS.exists():
        # Not `ru_maxrss`: on Linux a new process inherits that from the one that started it.
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
