"""Pings and pongs of a connection, and what a pong proves.

A peer reads packets in order and answers each ping. So the pong proves that the peer has read everything that we wrote
before the ping. The document confirms some things in no other way: that the peer has read our answers to its commits,
and that it has read the first message of a channel which we want to close. Channels that keep something until then
stand in `Probes.unproven`, and one ping serves for all of them.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, Protocol

from muxkit.core import Buffer, RoundTrip
from muxkit.protocols.relink.frames import General, encode_general

PING: Final = encode_general(General.PING)
PONG: Final = encode_general(General.PONG)

MOST_OUTCOMES: Final = 1024  # answers that are kept before we ask the peer whether it has read them


class Provable(Protocol):
    """A half of a channel that keeps something until the peer has read what was written."""

    @property
    def proof(self) -> int:
        """The number through which the answer to a ping written now would prove everything read."""

    def proven(self, through: int) -> None:
        """The peer has read everything through this number."""


class Purpose(Enum):
    """The reason for a ping."""

    ASKED = "asked"
    """The application wants to know the round trip."""
    ALIVE = "alive"
    """Nothing came for a while."""
    ROUND_TRIP = "round trip"
    """The windows want to know the round trip."""
    PROOF = "proof"
    """The pong shows that the peer has read what was written before."""


class Probes:
    """The pings and pongs of the present connection, and the halves that wait for what a pong proves."""

    def __init__(self) -> None:
        self.outcomes: int = 0
        """Answers to commits that are kept because the peer may not know them."""
        self.reset()

    def reset(self) -> None:
        """Drop what the last connection owed. The resume covers it."""
        self.pongs: int = 0
        self.pings: deque[Purpose] = deque()  # to be written
        self._under_way: deque[Purpose] = deque()
        self.unproven: dict[Provable, None] = {}
        self.ending: dict[Provable, None] = {}  # those of them whose end waits for the proof
        self._proof: list[tuple[Provable, int]] | None = None  # what the ping under way will show
        self.wants_proof: bool = False  # a ping is to be written as soon as none is under way

    def pong_came(self) -> Purpose:
        """Return the purpose of the oldest ping. A pong without a ping counts as ASKED."""
        purpose = self._under_way.popleft() if self._under_way else Purpose.ASKED
        if purpose is Purpose.PROOF and self._proof is not None:
            proof, self._proof = self._proof, None
            for one, through in proof:
                self.unproven.pop(one, None)
                one.proven(through)
        return purpose

    def measure(self, round_trip: RoundTrip, now: float) -> None:
        """Ping if a window could use the round trip."""
        if round_trip.is_due(now):
            round_trip.asked(now)
            self.pings.append(Purpose.ROUND_TRIP)

    def prove(self, one: Provable, *, at_once: bool = False) -> None:
        """Keep what was written until a later ping, or one that is sent at once, proves that the peer has read it."""
        self.unproven[one] = None
        self.wants_proof = self.wants_proof or at_once

    def end_when_proven(self, one: Provable) -> None:
        """Delay the end of the peer's channel until a ping proves that the peer has read all answers."""
        self.ending[one] = None
        self.prove(one, at_once=True)

    def forget(self, one: Provable) -> None:
        self.unproven.pop(one, None)

    @property
    def may_ask(self) -> bool:
        """True if a ping for a proof is due."""
        if self._proof is not None or not self.unproven:
            return False
        return self.wants_proof or self.outcomes > MOST_OUTCOMES

    def write_proof(self, out: list[Buffer]) -> int:
        """Write the ping for a proof if it is due. Nothing may have to be written before it."""
        if not self.may_ask:
            return 0
        self.wants_proof = False
        self._proof = [(one, one.proof) for one in self.unproven]
        self._under_way.append(Purpose.PROOF)
        out.append(PING)
        return len(PING)

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Write pongs and pings, about `limit` bytes at most of each."""
        pongs = min(self.pongs, limit // len(PONG) + 1)
        pings = min(len(self.pings), limit // len(PING) + 1)
        self.pongs -= pongs
        for _ in range(pings):
            self._under_way.append(self.pings.popleft())
        out.append(PONG * pongs + PING * pings)
        return len(PONG) * pongs + len(PING) * pings
