"""What a bpmux engine reports: the events that all protocols have (`muxkit.core.events`), and these."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from muxkit.core.events import (
    Cancelled,
    Confirmed,
    Failed,
    Finished,
    HungUp,
    Opened,
    Pong,
    Probed,
    Received,
    Refused,
    Silent,
    Stopped,
    Writable,
)
from muxkit.protocols.bpmux.entities import Entity
from muxkit.protocols.bpmux.receive import Receiver
from muxkit.protocols.bpmux.send import Sender


@attrs.define(eq=False)
class Requested:
    """The peer sent a request, which is answered by one message on `request`, or by its end."""

    request: Sender
    payload: bytes


@attrs.define(eq=False)
class Responded:
    """The response to a request of ours came; the request is over."""

    request: Receiver
    payload: bytes


@attrs.define(eq=False)
class Pinged:
    """The peer sent a ping, which is answered unless `Config.pongs` is off."""

    entity: Entity


@attrs.define(eq=False)
class HalfClosed:
    """The peer closed its direction of the stream, and `Engine.owes` entities something. `HungUp` follows."""


Event: TypeAlias = """(
    Opened
    | Received[bytes]
    | Finished
    | Cancelled
    | Stopped
    | Confirmed
    | Refused
    | Writable
    | Pong
    | Probed
    | HungUp
    | Silent
    | Failed
    | Requested
    | Responded
    | Pinged
    | HalfClosed
)"""
