"""Where does one frame stop and the next begin, and may it stand there? The sequences that come in streams."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, Lent, NeedMore, Pieces, Stop
from muxkit.protocols.aqueduct._frames import (
    CONNECTION_TAGS,
    TAG_VERSION,
    ForgetChannel,
    MessageFrame,
    RouteTo,
    Unfinished,
    parse_frame,
)
from muxkit.protocols.aqueduct._receiving import ReceiverMachine

if TYPE_CHECKING:
    from muxkit.core import StreamId
    from muxkit.protocols.aqueduct._channels import Channels, Half
    from muxkit.protocols.aqueduct._dispatch import Dispatch


class Phase(Enum):
    """Where a sequence is in the pattern of section 2.1."""

    START = "start"
    CONNECTION = "connection"
    """VERSION, ACK_VERSION and CONNECTION_HEADERS."""
    ROUTED = "routed"
    """After ROUTE_TO."""
    IGNORED = "ignored"


NOTHING: Final = Pieces()  # nothing is ever put into it


class Incoming:
    """One stream that the peer writes: what came of an unfinished frame, and what is owed for the rest.

    `unconsumed` counts the bytes that the link may not renew yet. A frame that does not fit a window borrows the
    rest of it as a whole, so that no two half-lent ones wait for each other.
    """

    __slots__ = (
        "_back",
        "_channels",
        "_dispatch",
        "_held",
        "_is_patient",
        "_later",
        "_lent",
        "_lent_at",
        "_missing",
        "_reserved",
        "_wanted",
        "_whole",
        "channel",
        "fin",
        "frames",
        "half",
        "id",
        "last_word",
        "offset",
        "phase",
        "unconsumed",
    )

    def __init__(self, id: StreamId, channels: Channels, dispatch: Dispatch) -> None:
        self.id = id
        self.phase = Phase.START
        self.channel = 0
        self.half: Half | None = None  # whom the frames are for, once there was one
        self.last_word: type[object] | None = None  # FINISH_SENDER or CANCEL_SENDER came in this sequence
        self.frames = 0  # of channels
        self.fin = False
        self.unconsumed = 0
        self.offset = 0  # bytes parsed
        self._held = Pieces()
        self._wanted = 0  # size of the held bytes with which parsing may get on
        # Held back: the bytes in which parsing stopped, with the place, and what came after them.
        self._back: tuple[bytes, int] | None = None
        self._later = NOTHING
        self._missing = 0
        self._whole = True
        self._is_patient = False  # it would borrow, if less were waiting to be read before it
        self._reserved = 0  # borrowed from the budget for the frame that is held
        self._lent = 0  # and told the peer of
        self._lent_at = 0
        self._channels = channels
        self._dispatch = dispatch

    @property
    def is_over(self) -> bool:
        """May it be forgotten?"""
        return self.fin and self.unconsumed == 0

    @property
    def is_held_back(self) -> bool:
        """Does it wait for others than the peer: for the connection headers, or for messages to be read?"""
        return self._back is not None

    @property
    def missing(self) -> int:
        """Bytes with which parsing may get on, if a frame has begun; 0 otherwise."""
        return max(0, self._wanted - self._held.size) if self._held.size else 0

    @property
    def waits_for_peer(self) -> bool:
        """Is a frame unfinished, and nothing of ours in the way of its rest?"""
        if not self._held.size or self._back is not None or self.fin:
            return False
        is_small = self._wanted <= self._dispatch.lend_from and self.unconsumed == self._held.size
        return is_small or self._reserved > 0

    def feed(self, data: bytes) -> None:
        """Take in more; `unconsumed` was raised by its size."""
        if self.phase is Phase.IGNORED:
            self.consume(len(data))
            return
        if self._back is not None:
            if self._later is NOTHING:
                self._later = Pieces()
            self._later.append(data)
            return
        if self._held.size:
            self._held.append(data)
            if self._held.size < self._wanted:
                return
            data = self._held.join()
        self._parse(data, 0)

    def go_on(self) -> None:
        """What was held back may be parsed now; it may stop again, and costs what it parses, however much there is."""
        if self._back is None:
            return
        (data, position), self._back = self._back, None
        self._parse(data, position)
        if not self.is_held_back and self._later.size:
            later, self._later = self._later, NOTHING
            self.feed(later.join())
        if self.fin:
            self.check_end()

    def check_end(self) -> None:
        """The stream has ended: so must the frame."""
        if self.is_held_back or self.phase is Phase.IGNORED:
            return
        if self._held.size:
            error = RemoteProtocolError(
                f"the stream ends {self._held.size} bytes into a frame that needs {self._missing} more at least",
                rule="aqueduct-F09",
            )
            error.offset = self.offset
            raise error
        if self.frames == 0 and self.phase in (Phase.START, Phase.ROUTED):
            self._channels.check_stream_churn("a stream was opened for nothing")

    def reset(self) -> None:
        """What came of an unfinished frame is ignored."""
        if self.frames == 0:
            self._channels.check_stream_churn("a stream was reset before it brought a frame")
        self.ignore()
        self.fin = True

    def ignore(self) -> None:
        """Nothing more of this sequence is of interest."""
        self.phase = Phase.IGNORED
        self._wanted = 0
        held = self._held.size + self._later.size
        if self._back is not None:
            data, position = self._back
            held += len(data) - position
        self._held, self._later, self._back = Pieces(), NOTHING, None
        self._drop_loan()
        self.consume(held)

    def consume(self, amount: int) -> None:
        """These bytes are done with."""
        if amount:
            self.unconsumed -= amount
            if self._is_patient:
                self._borrow()
            self._channels.consumed[self.id] = self._channels.consumed.get(self.id, 0) + amount

    # --- frames

    def _parse(self, data: bytes, position: int) -> None:
        size = len(data)
        while position < size:
            if self.phase is Phase.IGNORED or self._is_gone():
                self.ignore()
                self.consume(size - position)
                return
            if self.phase is not Phase.ROUTED and self._is_to_wait(data[position]):
                self._back = data, position
                return
            cursor = Cursor(data, position)
            try:
                frame = parse_frame(cursor, self._dispatch.bounds)
            except NeedMore as need:
                self._held.append(data[position:])
                self._want(need)
                return
            except RemoteProtocolError as error:
                error.offset = self.offset
                raise
            if isinstance(frame, MessageFrame) and self.last_word is None and self._is_crowded():
                self._back = data, position
                return
            length = cursor.position - position
            loan = self._keep_loan()
            try:
                self._apply(frame, length, loan)
            except RemoteProtocolError as error:
                if error.offset is None:
                    error.offset = self.offset
                raise
            self.offset += length
            position = cursor.position

    def _is_to_wait(self, tag: int) -> bool:
        """Until the peer's connection headers have come, everything after the first part waits (H04)."""
        if self.phase is Phase.START and tag != TAG_VERSION and not self._dispatch.sent_ack_version:
            raise RemoteProtocolError(
                f"a sequence begins with {tag:#04x} before any VERSION came", rule="aqueduct-V06", offset=0
            )
        return tag not in CONNECTION_TAGS and not self._dispatch.is_open

    def _is_crowded(self) -> bool:
        """Do too many messages wait to be read for one more?"""
        return isinstance(self.half, ReceiverMachine) and self._channels.crowd.holds_back(self, self.half)

    def _is_gone(self) -> bool:
        """Has the channel ended since? After its last word only a violation or FORGET_CHANNEL can come."""
        return self.half is not None and self.half.gone and self.last_word is None

    def _apply(self, frame: object, length: int, loan: int) -> None:
        dispatch = self._dispatch
        dispatch.frames += 1
        if self.phase is not Phase.ROUTED:
            dispatch.check_place(frame)
            if isinstance(frame, RouteTo):
                self._route(frame.channel)
            else:
                self.phase = Phase.CONNECTION
                dispatch.connection_frame(frame, on_stream=True)
        else:
            self.frames += 1
            if isinstance(frame, MessageFrame):
                if not dispatch.stream_message(frame, self, length, loan):
                    self.consume(length)
                    self._repay(loan)
                return
            dispatch.channel_frame(frame, self)
            if isinstance(frame, ForgetChannel):
                self.ignore()
        self.consume(length)
        self._repay(loan)

    def _route(self, channel: int) -> None:
        self.channel = channel
        known, self.half = self._dispatch.route(channel)
        if known:
            self.phase = Phase.ROUTED
            return
        self.ignore()
        if not self.fin:
            self._channels.stops[self.id] = Stop(self.id)

    # --- loans

    def _want(self, need: NeedMore) -> None:
        self._missing = need.missing
        self._wanted = self._held.size + need.missing
        self._whole = not isinstance(need, Unfinished) or need.whole
        if self._wanted <= self._dispatch.lend_from:
            return
        if self._reserved:
            if self._whole:
                self._trim(self._lent + self.shortfall())
            self._lend()
        elif self._channels.reassembly.waits(self):
            self._dispatch.serve()
        else:
            self._borrow()

    def _borrow(self) -> None:
        """A stream that nobody reads must not go on growing by loan after loan."""
        self._is_patient = self.unconsumed - self._held.size >= self._dispatch.lend_below
        if not self._is_patient and self._channels.reassembly.borrow(self, self.to_borrow()):
            self.borrowed(self.to_borrow())

    def to_borrow(self) -> int:
        """What the frame may still need; of a message whose head is not complete, as much as any may."""
        rest = self._missing if self._whole else self._dispatch.largest_frame - self._held.size
        return min(max(rest, self._missing), self._channels.reassembly.total)

    def borrowed(self, amount: int) -> None:
        self._reserved, self._lent, self._lent_at = amount, 0, self._held.size
        self._lend()

    def shortfall(self) -> int:
        """What the frame needs beyond what was lent already, as far as is known."""
        return max(0, self._held.size + self._missing - self._lent_at - self._lent)

    def _lend(self) -> None:
        amount = min(self.shortfall(), self._reserved - self._lent)
        if amount > 0:
            self._lent += amount
            self._channels.lent.append(Lent(self.id, amount))

    def _trim(self, needed: int) -> None:
        if needed < self._reserved:
            surplus, self._reserved = self._reserved - needed, needed
            self._dispatch.repay(surplus)

    def _keep_loan(self) -> int:
        """The frame is complete; gives what is to be repaid when it is consumed."""
        if self._channels.reassembly.waits(self):
            self._channels.reassembly.leave(self)
            self._dispatch.serve()
        self._is_patient = False
        self._trim(self._lent)
        loan, self._reserved, self._lent = self._reserved, 0, 0
        return loan

    def _drop_loan(self) -> None:
        self._repay(self._keep_loan())

    def _repay(self, loan: int) -> None:
        if loan:
            self._dispatch.repay(loan)
