"""The entities of a connection: what the document calls sinks, streams and requests, and what may be done with any.

An entity is one half of a channel, or a request. Its payload goes in one direction: on some entities we send
(`Sender`), on the others the peer does (`Receiver`). Everything else goes in both directions, and is here: credit,
because an end may carry a payload against the direction of the messages; pings and pongs; and the end.
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
ABORTED = b"\x01"  # end payload of an abort: any payload but an empty one means that messages are missing


class Kind(IntEnum):
    """The six maps of the document; the number is the type of the chunks that this side sends about such an entity.

    `OUT` is what this side opened, `IN` what the peer opened. "Sink" and "stream" say what this side does: it sends on
    a sink and receives from a stream. The peer does the opposite, so what it opens as a sink is a `STREAM_IN` here (see
    `ADDRESSED`).

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
    """How far the life of an entity has come; `NEXT` has the steps, and the module `state` the picture."""

    HALF_OPENED = 0
    """The peer is opening it, with a payload in parts of which some are missing. The application doesn't know it."""
    UNANNOUNCED = 1
    """This side is opening it, and the opening isn't written completely."""
    OPEN = 2
    END_DUE = 3
    """This side has ended it by a chunk without payload, which waits for nothing but its turn to be written."""
    ENDED = 4
    """The end of this side was written, and the peer hasn't acknowledged it."""
    GONE = 5
    """It was removed: nothing is written or received about it any more."""


# The same without a look-up in the class, because some are asked for with every message.
HALF_OPENED, UNANNOUNCED, OPEN, END_DUE, ENDED, GONE = Life

NEXT = (
    (OPEN, GONE),  # from HALF_OPENED
    (OPEN, GONE),  # from UNANNOUNCED
    (END_DUE, ENDED, GONE),  # from OPEN
    (ENDED, GONE),  # from END_DUE
    (GONE,),  # from ENDED
    (),  # from GONE
)


# The table under "Receiving Chunks": the map that a received chunk type addresses.
ADDRESSED = (
    Kind.REQUEST_IN,  # Out-Request
    Kind.REQUEST_OUT,  # In-Request
    Kind.STREAM_IN,  # Out-Sink
    Kind.STREAM_OUT,  # In-Sink
    Kind.SINK_IN,  # Out-Stream
    Kind.SINK_OUT,  # In-Stream
    Kind.SINK_IN,  # Duplex: this map and STREAM_IN
)

RECEIVERS = frozenset({Kind.REQUEST_OUT, Kind.STREAM_OUT, Kind.STREAM_IN})  # the peer sends the payload
OURS = frozenset({Kind.REQUEST_OUT, Kind.SINK_OUT, Kind.STREAM_OUT})  # opened by this side
TOP = frozenset({Kind.SINK_OUT, Kind.STREAM_OUT})  # the maps whose id 0 is the top level
OF_OTHERS = tuple(Type(kind) for kind in Kind)
OF_TOP = tuple(Type(kind + 1) if kind in TOP else Type(kind) for kind in Kind)

# Shared by all entities that need no credit, or no window, against their direction; these two never change.
NO_CREDIT = Credit()
NO_WINDOW = ReceiveWindow()


class Parts:
    """A message that arrives in parts."""

    __slots__ = ("is_end", "left", "pieces", "pinged")

    def __init__(self, total: int, *, is_wanted: bool) -> None:
        self.left: int = total
        self.pieces: Pieces | None = Pieces() if is_wanted else None  # None: the parts are discarded
        self.is_end: bool | None = None  # whether these are parts of an end payload; None before the first part
        self.pinged: list[Entity] = []  # pings to report when the opening is complete


class Entity:
    """One half of a channel, or a request: payload in one direction, credit and ends in both."""

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
        # The state that the document names: credit_out, credit_in and the end flags.
        self.credit: Credit = NO_CREDIT if kind in RECEIVERS else Credit()
        self.window: ReceiveWindow = window or NO_WINDOW
        self.end_in: bool = False
        # Receiving.
        self.is_wanted: bool = True  # the application receives what arrives; otherwise it is discarded
        self.direct: bool = True  # payloads need no check beside credit: wanted, and nothing in parts on its window
        self.parts: Parts | None = None
        # Sending.
        self.outgoing: Outgoing | None = None
        # Control chunks to write, merged: a grant in bytes, and numbers of pings and pongs.
        self.grant: int = 0
        self.pings: int = 0
        self.pongs: int = 0
        # Life.
        self.owner: object | None = None  # the session's object for it; the engine does not use it
        self.life: Life = OPEN
        self.orderly: bool = False  # the peer ended the other half of this duplex without an error
        self.is_rest_of_reset: bool = False  # the peer cancelled the other half of this duplex
        self.late: bool = False  # the peer opened it after it had closed its top level
        self.twin: Entity | None = None  # the other half of a duplex, while both are alive

    def step(self, life: Life) -> None:
        """Go on to another part of its life."""
        if life not in NEXT[self.life]:
            raise AssertionError(f"{self.label}: there is no step from {self.life.name} to {life.name}")
        self.life = life

    # --- commands for entities of both directions: each does all of its work, or raises and changes nothing

    def end(self, payload: bytes = b"") -> None:
        """End it: close one that this side sends on, or cancel one that the peer sends on.

        A payload uses the entity's credit. Messages queued before are sent first, and before the end of the top level
        all openings.
        """
        state = self.state
        self.check_open("end")
        if payload:
            state.check_size(len(payload), self.label)
            if not self.admits(len(payload)):
                raise LocalProtocolError(
                    f"{self.label}: an end payload of {len(payload)} bytes against {self.credit_out} of credit"
                )
        if payload or not state.end_at_once(self):
            state.outgoing(self).close(payload)
            state.end_queued(self)

    def abort(self, reason: Reason = NO_REASON) -> None:
        """Drop the messages of which nothing was written, then end it; harmless once the end was written.

        On a sink, and for a request without a response, the end has a payload, which by convention means an error: as
        much of the reason as credit covers. It may wait for a byte of credit, because without it the peer would take
        the messages for complete.
        """
        state = self.state
        state.check_alive()
        if self.gone:
            raise LocalProtocolError(f"{self.label}: cannot abort an entity that is gone")
        if self.life is ENDED:
            return
        if self is state.top_sink:
            state.decline_openings(begun=False)
        outgoing = state.outgoing(self)
        outgoing.drop_unbegun()
        if not self.ending:
            # The end of a request cannot be taken for a response, so it need not wait for credit.
            can_explain = self.kind is not Kind.REQUEST_IN or self.credit_out > 0
            told = reason.encode(max(1, self.credit_out - outgoing.queued)) or ABORTED
            outgoing.close(b"" if self.receives or not can_explain else told)
        outgoing.count(outgoing.waits_for_transport())
        state.end_queued(self)

    def give_credit(self, amount: int) -> None:
        """Grant credit beside the automatic grants."""
        self.check_open("give credit for")
        self.own_window().grant(amount)
        self.state.grant(self, amount)
        self.state.lend_shortfall(self)

    def ping(self) -> None:
        """Send a ping about it; the answer is a `Pong`."""
        self.check_open("ping")
        self.state.control.owe(self, pings=1)

    def pong(self) -> None:
        """Send a pong, for `Config(pongs=False)`."""
        self.check_open("pong")
        self.state.control.owe(self, pongs=1)

    def blame(self) -> None:
        """Count a failure of local work on it, as if the peer had cancelled it, if the peer opened it."""
        if self.kind not in OURS:
            self.state.starts.broken_off(self.state.now)

    def check_open(self, what: str) -> None:
        """Raise `LocalProtocolError` if this side can't `what` it, because it has ended."""
        self.state.check_alive()
        if self.gone:
            raise LocalProtocolError(f"{self.label}: cannot {what} an entity that is gone")
        if self.ending:
            raise LocalProtocolError(f"{self.label}: cannot {what} it, it was ended")

    # --- what it is

    def admits(self, size: int) -> bool:
        """Return True if `size` bytes of payload may be queued now.

        They may if credit covers them beside what is queued, or if nothing is queued and there is some credit: then
        the engine keeps the rest and writes it in parts as credit arrives.
        """
        if self.outgoing is None:
            return self.credit.available > 0 or size == 0
        return self.outgoing.admits(size)

    def own_credit(self) -> Credit:
        """Return credit that may be changed; a receiving entity uses some only for an end payload."""
        if self.credit is NO_CREDIT:
            self.credit = Credit()
        return self.credit

    def own_window(self) -> ReceiveWindow:
        """Return a window that may be changed; a sending entity uses one only for the peer's end payload."""
        if self.window is NO_WINDOW:
            self.window = ReceiveWindow()
        return self.window

    @property
    def receiving(self) -> Entity | None:
        """The half of its channel that the peer sends payload on."""
        return self if self.receives else self.twin

    @property
    def type(self) -> Type:
        """The type of chunks about it. Both sides have the top level as an out-entity and address it as the peer's."""
        return OF_TOP[self.kind] if self.id == 0 else OF_OTHERS[self.kind]

    @property
    def receives(self) -> bool:
        """Whether the peer sends its payload."""
        return self.kind in RECEIVERS

    @property
    def credit_out(self) -> int:
        return self.credit.available

    @property
    def credit_in(self) -> int:
        return self.window.credit

    @property
    def partial(self) -> int:
        """Bytes missing of a message in parts."""
        return 0 if self.parts is None else self.parts.left

    @property
    def ending(self) -> bool:
        """Whether this side has ended it, so that the end was written or is queued, or it is gone."""
        return self.life >= END_DUE or (self.outgoing is not None and self.outgoing.closing)

    @property
    def gone(self) -> bool:
        return self.life is GONE

    @property
    def end_out(self) -> bool:
        """The flag of the document: our end was written, and the peer hasn't acknowledged it."""
        return self.life is ENDED

    @property
    def is_ours(self) -> bool:
        """Whether this side opened it."""
        return self.kind in OURS

    @property
    def is_top(self) -> bool:
        return self.id == 0 and self.kind in TOP

    @property
    def label(self) -> str:
        """Its name in logs and errors, as this side addresses it: `out-sink 7`."""
        return label(self.type, self.id)

    def __repr__(self) -> str:
        return f"<{self.label} credit_out={self.credit_out} credit_in={self.credit_in}>"
