"""What is owed to the peer beside messages: pongs, pings, acknowledgements and the resume, merged until written."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from muxkit.protocols.relink._packets import Ack, General, encode_ack, encode_general

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from muxkit.core import Buffer
    from muxkit.protocols.relink._incoming import Incoming
    from muxkit.protocols.relink._outgoing import Outgoing
    from muxkit.protocols.relink._state import Link

PING: Final = encode_general(General.PING)
PONG: Final = encode_general(General.PONG)
RESUME: Final = encode_general(General.RESUME)
SHUTDOWN: Final = encode_general(General.SHUTDOWN)

MOST_OUTCOMES: Final = 1024  # answers to keep before the peer is asked whether it has read them


class Purpose(Enum):
    """Why do we ping?"""

    ASKED = "asked"
    """The application wants to know."""
    ALIVE = "alive"
    """Nothing came for a while."""
    PROOF = "proof"
    """The pong shows that the peer has read what was written before."""


class Control:
    """The lane that goes first."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._dirty: deque[Incoming] = deque()
        self._owing: list[Incoming] = []
        self._resuming: deque[Incoming] = deque()
        self._resume_left = False
        self._pings: deque[Purpose] = deque()
        self._pings_out: deque[Purpose] = deque()
        self._unopened: dict[int, None] = {}  # channels that the peer closed without having opened them
        # Of what was written: what is kept until the peer is known to have read it.
        self._unproven: dict[Incoming | Outgoing, None] = {}
        self._ending: dict[Incoming, None] = {}  # of them, those whose end waits for it
        self._proof: list[tuple[Incoming | Outgoing, int]] | None = None  # what the ping that is out will show
        self.wants_proof = False  # a ping is to be written as soon as none is out
        self.pongs = 0

    def __bool__(self) -> bool:
        if self.pongs or self._pings or self._dirty or self._resume_left or self._unopened:
            return True
        return bool(self._unproven) and self._may_ask()

    @property
    def is_clear(self) -> bool:
        """Is nothing left to be told of what came?"""
        return not (self._dirty or self._owing or self._resume_left or self._unopened or self._ending)

    # --- owing

    def owe(self, incoming: Incoming) -> None:
        """Acks that may wait for more."""
        incoming.owing = True
        self._owing.append(incoming)
        self._link.owe_acks()

    def make_due(self, incoming: Incoming) -> None:
        incoming.due = True
        self.touch(incoming)

    def touch(self, incoming: Incoming) -> None:
        if not incoming.dirty and self._link.connected:
            incoming.dirty = True
            self._dirty.append(incoming)

    def make_all_due(self) -> None:
        """The acks have waited long enough."""
        owing, self._owing = self._owing, []
        for incoming in owing:
            incoming.owing = False
            self.make_due(incoming)

    def ping(self, purpose: Purpose) -> None:
        self._pings.append(purpose)

    def pong_came(self) -> Purpose:
        """Why we had asked; nobody had if the peer sends one by itself."""
        purpose = self._pings_out.popleft() if self._pings_out else Purpose.ASKED
        if purpose is Purpose.PROOF and self._proof is not None:
            proof, self._proof = self._proof, None
            for one, through in proof:
                self._unproven.pop(one, None)
                one.proven(through)
        return purpose

    def prove(self, one: Incoming | Outgoing) -> None:
        """Something was written that is kept until the peer is known to have read it."""
        self._unproven[one] = None

    def ask_proof(self, one: Outgoing) -> None:
        """The same, and something waits for the proof."""
        self._unproven[one] = None
        self.wants_proof = True

    def end_when_proven(self, incoming: Incoming) -> None:
        """The end of the peer's channel waits until the peer is known to have read all answers."""
        self._unproven[incoming] = self._ending[incoming] = None
        self.wants_proof = True

    def proven_to_end(self, incoming: Incoming) -> None:
        """What `end_when_proven` waited for has come."""
        self._ending.pop(incoming, None)

    def forget(self, one: Incoming | Outgoing) -> None:
        self._unproven.pop(one, None)

    def _may_ask(self) -> bool:
        """Is a ping due that shows what the peer has read?"""
        if self._proof is not None or not self._unproven:
            return False
        return self.wants_proof or self._link.outcomes > MOST_OUTCOMES

    def close_unopened(self, channels: Iterable[int]) -> None:
        """The peer closed channels that are not open: their ends are confirmed all the same."""
        for channel in channels:
            self._unopened[channel] = None

    @property
    def unopened(self) -> AbstractSet[int]:
        """The channels whose ends are to be confirmed though they were never open."""
        return self._unopened.keys()

    # --- connections

    def connect(self) -> None:
        """A new connection; what the old one owed is told by the resumption."""
        link = self._link
        self.pongs = 0
        for queue in (self._dirty, self._owing, self._pings, self._pings_out):
            queue.clear()
        for kept in (self._unproven, self._ending, self._unopened):
            kept.clear()
        self._proof = None
        self.wants_proof = False
        self._resuming.clear()
        if link.resumed:
            self._resuming.extend(link.incoming.values())
        self._resume_left = link.resumed

    # --- writing

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Append what is owed, about `limit` bytes at most."""
        written = self._write_pings(limit, out)
        if self._resume_left and written < limit:
            written += self._write_resumption(limit - written, out)
        while self._dirty and not self._resume_left and written < limit:
            incoming = self._dirty.popleft()
            incoming.dirty = False
            written += incoming.write_acks(out)
        if self._unopened and not self._resume_left and written < limit:
            written += self._write_unopened(out)
        if self._unproven:
            written += self.write_proof(out)
        return written

    def write_proof(self, out: list[Buffer]) -> int:
        """A ping, if one is due and nothing has to be written before it."""
        if self._resume_left or self._dirty or not self._may_ask():
            return 0
        self.wants_proof = False
        self._proof = [(one, one.proof) for one in self._unproven]
        self._pings_out.append(Purpose.PROOF)
        out.append(PING)
        return len(PING)

    def _write_unopened(self, out: list[Buffer]) -> int:
        written = 0
        for channel in self._unopened:
            packet = encode_ack(Ack.CLOSED, (channel,), self._link.in_id_size, None)
            out.append(packet)
            written += len(packet)
        self._unopened.clear()
        return written

    def _write_pings(self, limit: int, out: list[Buffer]) -> int:
        if not self.pongs and not self._pings:
            return 0
        pongs = min(self.pongs, limit // len(PONG) + 1)
        pings = min(len(self._pings), limit // len(PING) + 1)
        self.pongs -= pongs
        for _ in range(pings):
            self._pings_out.append(self._pings.popleft())
        out.append(PONG * pongs + PING * pings)
        return len(PONG) * pongs + len(PING) * pings

    def _write_resumption(self, limit: int, out: list[Buffer]) -> int:
        written = 0
        while self._resuming and written < limit:
            written += self._resuming.popleft().write_resumption(out)
        if not self._resuming:
            self._resume_left = False
            self._link.told_resume = True
            out.append(RESUME)
            written += len(RESUME)
        return written
