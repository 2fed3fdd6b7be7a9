"""What do I owe the peer beside messages? Pongs, pings, acknowledgements and the resume, merged until written."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from muxkit.protocols.relink._packets import General, encode_general

if TYPE_CHECKING:
    from muxkit.core import Buffer
    from muxkit.protocols.relink._incoming import Incoming
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
        self._unproven: dict[Incoming, None] = {}
        self._proof: list[tuple[Incoming, int, bool]] | None = None  # what the ping that is out will show
        self.pongs = 0

    def __bool__(self) -> bool:
        if self.pongs or self._pings or self._dirty or self._resume_left:
            return True
        return bool(self._unproven) and self._wants_proof()

    @property
    def is_clear(self) -> bool:
        """Is nothing left to be told of what came?"""
        return not (self._dirty or self._owing or self._resume_left)

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
            for incoming, through, is_closed in proof:
                self._unproven.pop(incoming, None)
                incoming.proven(through)
                if is_closed:
                    self._link.forget_tomb(incoming)
                elif incoming.outcomes or incoming.close_told:  # its end was told behind the ping
                    self._unproven[incoming] = None
        return purpose

    def prove(self, incoming: Incoming) -> None:
        """Something was written that is kept until the peer is known to have read it."""
        self._unproven[incoming] = None

    def forget(self, incoming: Incoming) -> None:
        self._unproven.pop(incoming, None)

    def _wants_proof(self) -> bool:
        if self._proof is not None or not self._unproven:
            return False
        return bool(self._link.tombs) or self._link.outcomes > MOST_OUTCOMES

    # --- connections

    def connect(self) -> None:
        """A new connection; what the old one owed is told by the resumption."""
        link = self._link
        self.pongs = 0
        for queue in (self._dirty, self._owing, self._pings, self._pings_out, self._unproven):
            queue.clear()
        self._proof = None
        self._resuming.clear()
        if link.resumed:
            self._resuming.extend(link.tombs.values())
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
        if self._wants_proof() and not self._resume_left and not self._dirty:
            self._proof = [(incoming, incoming.told_answer, incoming.close_told) for incoming in self._unproven]
            self._pings_out.append(Purpose.PROOF)
            out.append(PING)
            written += len(PING)
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
