"""Pings and pongs of a connection, and pings that find out what the peer has read.

The peer reads our packets in order and answers each ping with a pong. So when a pong arrives, the peer has read all
packets that we wrote before the ping. We call a ping that is sent to find that out a *probe*, and the pong its proof.

Relink acknowledges most packets, but two kinds have no acknowledgement of their own, and for these we need probes:

- the answer to a commit of a transaction. We have to keep the answer, to repeat it after a reconnection, until the
  peer has read it.
- the first message of a channel that we want to close before the peer has acknowledged any of its messages.

`Probes.unproven` contains the *halves* (one direction of a channel each) that wait for a proof. One probe serves all of
them.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, Protocol

from muxkit.core import Buffer, RoundTrip
from muxkit.protocols.relink.frames import General, encode_general

PING: Final = encode_general(General.PING)
PONG: Final = encode_general(General.PONG)

# We keep runs of answers to commits until the peer has read them. If we keep more than this number of runs, we send a
# probe to find out whether the peer has read them.
MAX_OUTCOMES: Final = 1024


class Provable(Protocol):
    """A half of a channel that needs proof that the peer has read what the half wrote."""

    @property
    def proof(self) -> int:
        """The number of the last message or answer that the peer must have read when it answers a ping written now."""

    def proven(self, through: int) -> None:
        """Record that the peer has read all messages or answers up to number `through`."""


class Purpose(Enum):
    """The reason for a ping."""

    ASKED = "asked"
    """The application measures the round trip."""
    ALIVE = "alive"
    """The keepalive checks a connection on which nothing has arrived for a while."""
    ROUND_TRIP = "round trip"
    """The windows measure the round trip."""
    PROOF = "proof"
    """The pong proves that the peer has read all packets that were written before the ping."""


class Probes:
    """The pings and pongs of the current connection, and the halves that wait for a proof."""

    def __init__(self) -> None:
        self.outcomes: int = 0
        """How many runs of answers to commits are kept because the peer may not have read them."""
        self.reset()

    def reset(self) -> None:
        """Drop all pings, pongs and waiting halves of the last connection. The resume makes them unnecessary."""
        self.pongs: int = 0
        """Number of pongs that are still to be written."""
        self.pings: deque[Purpose] = deque()
        """Pings that are still to be written."""
        # Pings that were written and not answered.
        self._under_way: deque[Purpose] = deque()
        self.unproven: dict[Provable, None] = {}
        """The halves that wait for a proof."""
        self.ending: dict[Provable, None] = {}
        """The halves in `unproven` whose channels end when the proof arrives."""
        # The halves that the probe under way serves, each with the number that the pong proves. None without a probe.
        self._proof: list[tuple[Provable, int]] | None = None
        self.wants_proof: bool = False
        """True if a probe is to be written as soon as no other probe is under way."""

    def pong_came(self) -> Purpose:
        """Handle a pong and return the purpose of the ping that it answers. A pong without a ping counts as ASKED."""
        purpose = self._under_way.popleft() if self._under_way else Purpose.ASKED
        if purpose is Purpose.PROOF and self._proof is not None:
            proof, self._proof = self._proof, None
            for one, through in proof:
                self.unproven.pop(one, None)
                one.proven(through)
        return purpose

    def measure(self, round_trip: RoundTrip, now: float) -> None:
        """Queue a ping if it is time to measure the round trip again."""
        if round_trip.is_due(now):
            round_trip.asked(now)
            self.pings.append(Purpose.ROUND_TRIP)

    def prove(self, one: Provable, *, at_once: bool = False) -> None:
        """Let a half wait for proof that the peer has read what the half wrote.

        The next probe serves the half as well. With `at_once` a probe is sent as soon as possible.
        """
        self.unproven[one] = None
        self.wants_proof = self.wants_proof or at_once

    def end_when_proven(self, one: Provable) -> None:
        """Delay the end of the peer's channel until a pong proves that the peer has read all answers."""
        self.ending[one] = None
        self.prove(one, at_once=True)

    def forget(self, one: Provable) -> None:
        self.unproven.pop(one, None)

    @property
    def may_ask(self) -> bool:
        """True if a probe may be written now and is needed."""
        if self._proof is not None or not self.unproven:
            return False
        return self.wants_proof or self.outcomes > MAX_OUTCOMES

    def write_proof(self, out: list[Buffer]) -> int:
        """Write a probe if `may_ask`. The caller must have written all other packets that the probe should cover."""
        if not self.may_ask:
            return 0
        self.wants_proof = False
        self._proof = [(one, one.proof) for one in self.unproven]
        self._under_way.append(Purpose.PROOF)
        out.append(PING)
        return len(PING)

    def write(self, limit: int, out: list[Buffer]) -> int:
        """Write pongs and pings, up to about `limit` bytes of each."""
        pongs = min(self.pongs, limit // len(PONG) + 1)
        pings = min(len(self.pings), limit // len(PING) + 1)
        self.pongs -= pongs
        for _ in range(pings):
            self._under_way.append(self.pings.popleft())
        out.append(PONG * pongs + PING * pings)
        return len(PONG) * pongs + len(PING) * pings
