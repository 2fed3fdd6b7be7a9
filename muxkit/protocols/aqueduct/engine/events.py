"""The events of an Aqueduct engine: what the peer did, and what became of our messages and channels."""

from __future__ import annotations

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.core import Reason, StreamId
from muxkit.protocols.aqueduct.engine.halves import Half, Outcome, Promise, ReceiverMachine, SenderMachine
from muxkit.protocols.aqueduct.frames import Headers


@attrs.define(eq=False)
class Attachment:
    """A half that came with a message."""

    half: Half
    headers: Headers


@attrs.define(eq=False)
class Arrived:
    """A message came; call `Engine.consumed` with it when the application has it.

    A channel that has ended in the meantime is not among the attachments. The receiver may be one that the application
    does not know yet: then it comes as an attachment later.
    """

    receiver: ReceiverMachine
    number: int
    payload: bytes
    headers: Headers
    attachments: tuple[Attachment, ...]
    cost: int  # bytes that `consumed` gives back
    loan: int  # bytes that `consumed` repays
    stream: StreamId | None  # None if it came in a datagram

    @property
    def unreliable(self) -> bool:
        return self.stream is None


@attrs.define(eq=False)
class Ended:
    """A half has ended for the application; the peer may not have heard of it yet."""

    half: Half
    outcome: Outcome


@attrs.define(eq=False)
class Unclaimed:
    """The message that carries this receiver is not waited for any more; what came for it may be consumed."""

    half: ReceiverMachine


@attrs.define(eq=False)
class Acked:
    """A message that was sent with a receipt has arrived."""

    receipt: Promise


@attrs.define(eq=False)
class Nacked:
    """A message that was sent with a receipt did not arrive, or its fate will never be known."""

    receipt: Promise


@attrs.define(eq=False)
class Writable:
    """A watched sender has room for more."""

    sender: SenderMachine


@attrs.define(eq=False)
class Connected:
    """The connection headers of the peer have come."""

    headers: Headers


@attrs.define(eq=False)
class Parted:
    """The peer has said why it ends the connection, which follows."""

    reason: Reason


@attrs.define(eq=False)
class HungUp:
    """The link is gone. Clean if no channel beside the entrypoint was alive."""

    clean: bool


@attrs.define
class Silent:
    """Nothing came for too long while a frame was unfinished. The connection is over."""

    seconds: float


@attrs.define(eq=False)
class Failed:
    """The peer broke the rules. The connection is over."""

    error: RemoteProtocolError


Event = Arrived | Ended | Unclaimed | Acked | Nacked | Writable | Connected | Parted | HungUp | Silent | Failed
