"""What do the processes of the demo tell each other? Lines of JSON to whoever started them, and the first and last
message of each channel.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Literal

import msgspec

from muxkit.cli.outcome import Exit  # noqa: TC001  # msgspec reads the annotations


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the client is to do; times in seconds."""

    seconds: float
    """Under load."""
    idle_seconds: float
    """Before that, with all channels open and silent."""
    channels: int = 100
    seed: int = 1
    patience: float = 30.0
    """How much longer the whole run may take than it should."""


# --- lines


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The server listens."""

    url: str


class Progress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How far the client is."""

    phase: Literal["idle", "load"]
    elapsed: float
    messages: int
    bytes: int
    ping: float | None
    """The last round trip, in seconds."""


class Totals(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What one end found out: the last line of a process that did its work."""

    messages_sent: int
    bytes_sent: int
    messages_verified: int
    """Of those that the other end sent."""
    bytes_verified: int
    problems: list[str]
    memory: int | None
    """Bytes, resident, at their highest."""
    seconds: float | None = None
    """How long the load lasted, until the last byte was confirmed."""
    idle_pings: list[float] = []
    """Round trips, like the two below; samples of them if they are many."""
    load_pings: list[float] = []
    echoes: list[float] = []


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last line of a process that could not do its work."""

    sentence: str
    exit: Exit


Event = Ready | Progress | Totals | Failed

_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def tell(event: Event) -> None:
    """Write a line; nothing happens if nobody reads any more."""
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()


def understand(line: bytes) -> Event:
    return _events.decode(line)


# --- messages


class Order(msgspec.Struct, frozen=True):
    """The first message of a channel: what follows, and from which seed."""

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
