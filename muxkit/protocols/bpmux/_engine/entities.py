"""Who is this id? The entities of a connection: six maps, what each kind may carry, how chunks address it."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from muxkit.core import Credit, Pieces, ReceiveWindow
from muxkit.protocols.bpmux._frames import Type, label

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._engine.outgoing import Outgoing


class Kind(IntEnum):
    """The six maps of the document; the number is the type of the chunks that we send for such an entity."""

    REQUEST_OUT = 0
    REQUEST_IN = 1
    SINK_OUT = 2
    SINK_IN = 3
    STREAM_OUT = 4
    STREAM_IN = 5


# The table under "Receiving Chunks": the map that a received type speaks of.
ADDRESSED = (
    Kind.REQUEST_IN,  # Out-Request
    Kind.REQUEST_OUT,  # In-Request
    Kind.STREAM_IN,  # Out-Sink
    Kind.STREAM_OUT,  # In-Sink
    Kind.SINK_IN,  # Out-Stream
    Kind.SINK_OUT,  # In-Stream
    Kind.SINK_IN,  # Duplex: this map and STREAM_IN
)

RECEIVERS = frozenset({Kind.REQUEST_OUT, Kind.STREAM_OUT, Kind.STREAM_IN})  # payload comes from the peer
OURS = frozenset({Kind.REQUEST_OUT, Kind.SINK_OUT, Kind.STREAM_OUT})
TOP = frozenset({Kind.SINK_OUT, Kind.STREAM_OUT})  # the maps whose id 0 is the top level
OF_OTHERS = tuple(Type(kind) for kind in Kind)
OF_TOP = tuple(Type(kind + 1) if kind in TOP else Type(kind) for kind in Kind)

# Most halves never grant, or are never granted, anything against their direction; nobody changes these two.
NO_CREDIT = Credit()
NO_WINDOW = ReceiveWindow()


class Parts:
    """A message that comes in parts."""

    __slots__ = ("ends", "left", "pieces", "pinged")

    def __init__(self, total: int, *, is_wanted: bool) -> None:
        self.left = total
        self.pieces = Pieces() if is_wanted else None  # None: what comes goes to the waste bin
        self.ends: bool | None = None  # parts of an end payload? None before the first part
        self.pinged: list[Entity] = []  # meanwhile: to be told once the opening is whole


class Entity:
    """One half of a channel, or a request: one direction of payload, credit and ends in both."""

    __slots__ = (
        "announced",
        "credit",
        "direct",
        "end_in",
        "end_out",
        "gone",
        "grant",
        "half",
        "id",
        "kind",
        "late",
        "live",
        "opening",
        "orderly",
        "outgoing",
        "parts",
        "pings",
        "pongs",
        "twin",
        "window",
    )

    def __init__(self, kind: Kind, id: int, window: ReceiveWindow | None) -> None:
        self.kind = kind
        self.id = id
        # What the document keeps: credit_out, credit_in, the end flags, and what is still to come in parts.
        self.credit = NO_CREDIT if kind in RECEIVERS else Credit()
        self.window = window or NO_WINDOW
        self.end_out = False
        self.end_in = False
        # Receiving.
        self.live = True  # the application wants what comes
        self.direct = True  # a payload can be handed over as it is: live, nothing in parts on its window
        self.opening = False  # its opening payload is still coming, in parts
        self.parts: Parts | None = None
        # Sending.
        self.announced = True  # our opening chunk is out
        self.outgoing: Outgoing | None = None
        # Control that we owe: merged, never a queue.
        self.grant = 0
        self.pings = 0
        self.pongs = 0
        # Life.
        self.half: object = None  # what the application holds of it: kept for the session, never looked at here
        self.gone = False
        self.orderly = False  # a duplex whose other half the peer ended without an error
        self.late = False  # made by the peer after it had closed its top level
        self.twin: Entity | None = None  # the other half of a duplex, while both live

    def own_credit(self) -> Credit:
        """Its credit, for a change; what comes on it needs some only to say why it was stopped."""
        if self.credit is NO_CREDIT:
            self.credit = Credit()
        return self.credit

    def own_window(self) -> ReceiveWindow:
        """Its window, for a change; what is sent on it needs one only for what the peer may say to stop it."""
        if self.window is NO_WINDOW:
            self.window = ReceiveWindow()
        return self.window

    @property
    def type(self) -> Type:
        """Of the chunks about it. The top level is an out-entity on both sides: each speaks of it as the peer's."""
        return OF_TOP[self.kind] if self.id == 0 else OF_OTHERS[self.kind]

    @property
    def receives(self) -> bool:
        """Does its payload come from the peer?"""
        return self.kind in RECEIVERS

    @property
    def credit_out(self) -> int:
        return self.credit.available

    @property
    def credit_in(self) -> int:
        return self.window.credit

    @property
    def partial(self) -> int:
        """What is still to come of a message in parts."""
        return 0 if self.parts is None else self.parts.left

    @property
    def ending(self) -> bool:
        """Did we say that we are done with it, or are we about to?"""
        return self.end_out or (self.outgoing is not None and self.outgoing.closing)

    @property
    def is_top(self) -> bool:
        return self.id == 0 and self.kind in TOP

    @property
    def label(self) -> str:
        """For people, as we address it: `out-sink 7`."""
        return label(self.type, self.id)

    def __repr__(self) -> str:
        return f"<{self.label} credit_out={self.credit_out} credit_in={self.credit_in}>"
