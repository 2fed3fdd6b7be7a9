"""The events that only a bpmux engine reports. `muxkit.core.events` has the events that all protocols share."""

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
    """The peer has sent a request. The session answers it with one message on `request`, or declines by ending it."""

    request: Sender
    payload: bytes


@attrs.define(eq=False)
class Responded:
    """The response to our request has arrived, and the request has ended."""

    request: Receiver
    payload: bytes


@attrs.define(eq=False)
class Pinged:
    """The peer has sent a ping about an entity. The engine has answered it unless `Config.pongs` is False."""

    entity: Entity


@attrs.define(eq=False)
class HalfClosed:
    """The peer has ended its direction of the stream, but may still read answers (`Engine.expects_answer`).

    `HungUp` follows when there is nothing more to send.
    """


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
