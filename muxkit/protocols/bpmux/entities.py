"""The entities of a bpmux connection: the sinks, streams and requests of the specification.

An entity is a request, or one direction of a channel. Its messages go in one direction. `Sender` is the class of
entities that we send messages on, and `Receiver` the class of those that the peer sends messages on. Their common base
`Entity`, in this module, has everything that goes in both directions:

- credit, because the side that receives messages may also send a payload, in the chunk that ends the entity
- pings and pongs
- the end

The module `state` explains the terms and the states of an entity. "The specification" always means bpmux/rel.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError
from muxkit.core import Credit, Pieces, Reason, ReceiveWindow
from muxkit.protocols.bpmux.frames import Type, label

if TYPE_CHECKING:
    from muxkit.protocols.bpmux.send import Outgoing
    from muxkit.protocols.bpmux.state import State

NO_REASON = Reason()
# The payload of an abort without a reason. By muxkit's convention, any end payload that isn't empty means that messages
# are missing.
ABORTED = b"\x01"


class Kind(IntEnum):
    """The kinds of entities, one for each of the six maps in the specification.

    The number of a kind is also the type of the chunks that we send about its entities. `OUT` means that this side has
    opened the entity, `IN` that the peer has. We send messages on a sink and receive them from a stream. Since the peer
    does the opposite, an entity that the peer opens as a sink is a `STREAM_IN` here.

        kind          opened by    messages go     the application holds
        REQUEST_OUT   this side    to this side    a `Request`, for whose response it waits
        REQUEST_IN    the peer     to the peer     an `IncomingRequest`, which it answers
        SINK_OUT      this side    to the peer     a `Sink`, or the sending half of a `Duplex`
        SINK_IN       the peer     to the peer     a `Sink`, or the sending half of a `Duplex` that the peer opened
        STREAM_OUT    this side    to this side    a `Source`, or the receiving half of a `Duplex`
        STREAM_IN     the peer     to this side    a `Source`, or the receiving half of a `Duplex` that the peer opened
    """

    REQUEST_OUT = 0
    REQUEST_IN = 1
    SINK_OUT = 2
    SINK_IN = 3
    STREAM_OUT = 4
    STREAM_IN = 5


class Life(IntEnum):
    """The state of an entity. The module `state` explains the states, and `NEXT` has the steps between them."""

    HALF_OPENED = 0
    """The peer is opening the entity with a message in parts, and some parts are missing."""
    UNANNOUNCED = 1
    """This side is opening the entity, and the opening isn't written completely."""
    OPEN = 2
    """The entity is open, and our end isn't written."""
    END_DUE = 3
    """This side has ended the entity with a control chunk, which isn't written yet."""
    ENDED = 4
    """Our end was written, and the peer hasn't acknowledged it."""
    GONE = 5
    """The entity was removed."""


# Module constants are faster than attributes of the class, and some of these are used for every message.
HALF_OPENED, UNANNOUNCED, OPEN, END_DUE, ENDED, GONE = Life

NEXT = (
    (OPEN, GONE),  # from HALF_OPENED
    (OPEN, GONE),  # from UNANNOUNCED
    (END_DUE, ENDED, GONE),  # from OPEN
    (ENDED, GONE),  # from END_DUE
    (GONE,),  # from ENDED
    (),  # from GONE
)


# The table in the specification's section "Receiving Chunks": the kind of entity that a received chunk is about, by the
# type of the chunk. The peer names the type from its point of view, so "Out" and "Sink" become "IN" and "STREAM".
ADDRESSED = (
    Kind.REQUEST_IN,  # Out-Request
    Kind.REQUEST_OUT,  # In-Request
    Kind.STREAM_IN,  # Out-Sink
    Kind.STREAM_OUT,  # In-Sink
    Kind.SINK_IN,  # Out-Stream
    Kind.SINK_OUT,  # In-Stream
    Kind.SINK_IN,  # Duplex: this map and STREAM_IN
)

RECEIVERS = frozenset({Kind.REQUEST_OUT, Kind.STREAM_OUT, Kind.STREAM_IN})  # the peer sends messages on these
OURS = frozenset({Kind.REQUEST_OUT, Kind.SINK_OUT, Kind.STREAM_OUT})  # this side opened these
TOP = frozenset({Kind.SINK_OUT, Kind.STREAM_OUT})  # id 0 of these kinds is the top level
# The types of the chunks that we send, by kind: about the top level, and about all other entities.
OF_OTHERS = tuple(Type(kind) for kind in Kind)
OF_TOP = tuple(Type(kind + 1) if kind in TOP else Type(kind) for kind in Kind)

# Placeholders that save memory. Most entities never send a payload against the direction of their messages, so they
# need either no credit or no window. These two objects must never change.
NO_CREDIT = Credit()
NO_WINDOW = ReceiveWindow()


class Parts:
    """A message of which some parts have arrived."""

    __slots__ = ("is_end", "left", "pieces", "pinged")

    def __init__(self, total: int, *, is_wanted: bool) -> None:
        self.left: int = total  # number of missing bytes
        self.pieces: Pieces | None = Pieces() if is_wanted else None  # None if the parts are discarded
        self.is_end: bool | None = None  # True if these are parts of an end payload; None before the first part
        self.pinged: list[Entity] = []  # entities for which to report a `Pinged` event when the opening is complete


class Entity:
    """A request, or one direction of a channel. The base class of `Sender` and `Receiver`."""

    __slots__ = (
        "credit",
        "direct",
        "end_in",
        "grant",
        "id",
        "is_rest_of_reset",
        "is_wanted",
        "kind",
        "late",
        "life",
        "orderly",
        "outgoing",
        "owner",
        "parts",
        "pings",
        "pongs",
        "state",
        "twin",
        "window",
    )

    def __init__(self, state: State, kind: Kind, id: int, window: ReceiveWindow | None) -> None:
        self.state: State = state
        self.kind: Kind = kind
        self.id: int = id
        # The specification calls these credit_out, credit_in and end_in.
        self.credit: Credit = NO_CREDIT if kind in RECEIVERS else Credit()  # bytes that we may send
        self.window: ReceiveWindow = window or NO_WINDOW  # bytes that the peer may send
        self.end_in: bool = False  # True if the peer has ended the entity
        # Receiving.
        self.is_wanted: bool = True  # False if payloads are discarded, because this side has ended the entity
        self.direct: bool = True  # True if the reader may deliver payloads without other checks than that for credit
        self.parts: Parts | None = None  # the message that is arriving in parts
        # Sending.
        self.outgoing: Outgoing | None = None  # the queue of messages to send; see `State.outgoing`
        # Control chunks to write: a grant in bytes, and numbers of pings and pongs.
        self.grant: int = 0
        self.pings: int = 0
        self.pongs: int = 0
        # State.
        self.owner: object | None = None  # the session's object for this entity, which the engine doesn't use
        self.life: Life = OPEN
        self.orderly: bool = False  # the peer ended the other half of this duplex without an error
        self.is_rest_of_reset: bool = False  # the peer cancelled the other half of this duplex
        self.late: bool = False  # the peer opened this entity after it had ended its top level
        self.twin: Entity | None = None  # the other half of a duplex, while both halves exist

    def step(self, life: Life) -> None:
        """Change the state. A step that isn't in `NEXT` is a bug in muxkit and raises `AssertionError`."""
        if life not in NEXT[self.life]:
            raise AssertionError(f"{self.label}: there is no step from {self.life.name} to {life.name}")
        self.life = life

    # --- commands for entities of both directions: a command that raises changes nothing

    def end(self, payload: bytes = b"") -> None:
        """End the entity: finish it if this side sends messages on it, and cancel it if the peer does.

        Queued messages are sent before the end. The end of the top-level sink also waits for all queued openings.

        Args:
            payload: Sent with the end. It uses the entity's credit.

        Raises:
            LocalProtocolError: If the entity has ended, or the payload is too large or not covered by credit.
        """
        state = self.state
        self.check_open("end")
        if payload:
            state.check_size(len(payload), self.label)
            if not self.admits(len(payload)):
                raise LocalProtocolError(
                    f"{self.label}: end payload too large: {len(payload)} bytes with {self.credit_out} bytes of credit"
                )
        if payload or not state.end_at_once(self):
            state.outgoing(self).close(payload)
            state.end_queued(self)

    def abort(self, reason: Reason = NO_REASON) -> None:
        """End the entity, and drop queued messages unless a part of them was written already.

        If we send messages on the entity, the end has a payload. By muxkit's convention, that means that messages are
        missing. The payload contains the reason, or as much of it as credit covers. Without any credit, the end waits
        until the peer grants some, because the peer would take an end without payload for a normal one.

        Does nothing if the end was written already.

        Raises:
            LocalProtocolError: If the entity was removed, or the connection has ended.
        """
        state = self.state
        state.check_alive()
        if self.gone:
            raise LocalProtocolError(f"{self.label}: can't abort it, because it has ended")
        if self.life is ENDED:
            return
        if self is state.top_sink:
            state.decline_openings(begun=False)
        outgoing = state.outgoing(self)
        outgoing.drop_unbegun()
        if not self.ending:
            # The end of a request can't be taken for a response, so it doesn't have to wait for credit.
            can_explain = self.kind is not Kind.REQUEST_IN or self.credit_out > 0
            told = reason.encode(max(1, self.credit_out - outgoing.queued)) or ABORTED
            outgoing.close(b"" if self.receives or not can_explain else told)
        outgoing.count(outgoing.waits_for_transport())
        state.end_queued(self)

    def give_credit(self, amount: int) -> None:
        """Grant the peer credit in addition to the automatic grants.

        Raises:
            LocalProtocolError: If the entity has ended.
        """
        self.check_open("give credit for")
        self.own_window().grant(amount)
        self.state.grant(self, amount)
        self.state.lend_shortfall(self)

    def ping(self) -> None:
        """Send a ping about the entity. A `Pong` event reports the peer's answer."""
        self.check_open("ping")
        self.state.control.queue(self, pings=1)

    def pong(self) -> None:
        """Answer a ping. Only needed with `Config(pongs=False)`, because the engine answers pings otherwise."""
        self.check_open("pong")
        self.state.control.queue(self, pongs=1)

    def blame(self) -> None:
        """Count a failure of this side's handler as if the peer had cancelled the entity, if the peer opened it.

        A peer that keeps causing failures is slowed down like a peer that keeps cancelling (`StartPace`).
        """
        if self.kind not in OURS:
            self.state.starts.broken_off(self.state.now)

    def check_open(self, what: str) -> None:
        """Raise `LocalProtocolError` if the entity has ended. `what` names the command in the error message."""
        self.state.check_alive()
        if self.gone:
            raise LocalProtocolError(f"{self.label}: can't {what} it, because it has ended")
        if self.ending:
            raise LocalProtocolError(f"{self.label}: can't {what} it, because this side has ended it")

    # --- properties

    def admits(self, size: int) -> bool:
        """Return True if a payload of `size` bytes may be queued now.

        That is the case if credit covers it in addition to the queued payloads. It is also the case if nothing is
        queued and there is any credit at all: the engine then writes the payload in parts, as credit arrives.
        """
        if self.outgoing is None:
            return self.credit.available > 0 or size == 0
        return self.outgoing.admits(size)

    def own_credit(self) -> Credit:
        """Return the credit to change it. This replaces the placeholder `NO_CREDIT` first."""
        if self.credit is NO_CREDIT:
            self.credit = Credit()
        return self.credit

    def own_window(self) -> ReceiveWindow:
        """Return the window to change it. This replaces the placeholder `NO_WINDOW` first."""
        if self.window is NO_WINDOW:
            self.window = ReceiveWindow()
        return self.window

    @property
    def receiving(self) -> Entity | None:
        """The half of this channel on which the peer sends messages, or None if there is none."""
        return self if self.receives else self.twin

    @property
    def type(self) -> Type:
        """The type of the chunks that we send about the entity.

        The top level is special: on both sides it belongs to the `OUT` maps, so its chunks have an `IN` type.
        """
        return OF_TOP[self.kind] if self.id == 0 else OF_OTHERS[self.kind]

    @property
    def receives(self) -> bool:
        """True if the peer sends messages on the entity."""
        return self.kind in RECEIVERS

    @property
    def credit_out(self) -> int:
        return self.credit.available

    @property
    def credit_in(self) -> int:
        return self.window.credit

    @property
    def partial(self) -> int:
        """The number of missing bytes of the message that is arriving in parts, or 0."""
        return 0 if self.parts is None else self.parts.left

    @property
    def ending(self) -> bool:
        """True if this side's end is queued or written, or the entity was removed."""
        return self.life >= END_DUE or (self.outgoing is not None and self.outgoing.closing)

    @property
    def gone(self) -> bool:
        return self.life is GONE

    @property
    def end_out(self) -> bool:
        """The specification's flag end_out: our end was written, and the peer hasn't acknowledged it."""
        return self.life is ENDED

    @property
    def is_ours(self) -> bool:
        """True if this side opened the entity."""
        return self.kind in OURS

    @property
    def is_top(self) -> bool:
        return self.id == 0 and self.kind in TOP

    @property
    def label(self) -> str:
        """The name for logs and errors, from this side's point of view, such as `out-sink 7`."""
        return label(self.type, self.id)

    def __repr__(self) -> str:
        return f"<{self.label} credit_out={self.credit_out} credit_in={self.credit_in}>"
