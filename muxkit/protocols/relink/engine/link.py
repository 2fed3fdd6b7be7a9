"""What both directions of a link share: its settings and phases, its events and timers, and its pings."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, Deadlines, serial_add, serial_distance
from muxkit.protocols.relink.config import Config
from muxkit.protocols.relink.engine.events import Event
from muxkit.protocols.relink.frames import PART_OVERHEAD, Ack, General, Operation, encode_general

PING: Final = encode_general(General.PING)
PONG: Final = encode_general(General.PONG)

MOST_OUTCOMES: Final = 1024  # answers to keep before the peer is asked whether it has read them
OUTCOMES_MOST: Final = 2**20  # answers that a peer may leave without a sign that it has read them


class Timer(Enum):
    """The deadlines of a connection."""

    ACKS = "acks"
    """When to tell what was received and consumed."""
    KEEPALIVE = "keepalive"
    """When to ping because nothing came for a while."""
    ANSWER = "answer"
    """When to give up on a connection that is silent after that ping."""
    STALL = "stall"
    """When to look whether an unfinished packet made progress."""


# That of an enum is a call, and these are looked up with each read.
Timer.__hash__ = object.__hash__  # type: ignore[method-assign]


class LinkState:
    """The state that our channels, the peer's channels and the connection share; the engine itself is one."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None, *, is_connector: bool) -> None:
        self.config = config
        self.limits = limits
        self.observer = observer
        self.is_connector = is_connector
        sizes = (config.connector_id_size, config.listener_id_size)
        transactions = (config.connector_transactions, config.listener_transactions)
        out, into = (0, 1) if is_connector else (1, 0)
        self.out_id_size: int = sizes[out]
        self.in_id_size: int = sizes[into]
        self.out_transactions: bool = transactions[out]
        self.in_transactions: bool = transactions[into]
        # A channel's first bytes up to the floor are free; what is over that counts for the link's budget. The sum
        # over all channels does not depend on the order in which messages come, so both sides agree about it.
        self.floor: int = min(limits.channel_floor, limits.channel_bytes)
        # A peer with the same limits stops when it is over them, so by one message more at most, and by those that
        # its outbox had admitted.
        extra = limits.message + limits.outbox + (16 + PART_OVERHEAD) * config.parts + 128
        self.held_most: int = limits.connection_bytes + extra
        self.outcomes_most = OUTCOMES_MOST
        self.happened: list[Event] = []
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.now: float = 0.0
        self.over: bool = False
        """True once the link has finished or failed: each command raises."""
        self.epoch = 0
        """The listener's epoch, to be sent with the next request; 0 before there is a link."""
        self.link_id = 0
        """The id of the link; 0 before there is one."""
        self.is_shutting_down = False
        self.probes: Probes = Probes(self)
        self.repeats: dict[int, int] = {}
        """Messages by channel that are to be written again, for the observer; empty without one."""
        self._reset()

    def _reset(self) -> None:
        """Forget what belongs to one link."""
        self.is_connected = False
        self.resumes = False  # the connection goes on with a link that had one
        self.peer_resumed = False  # the peer has told what it has, or need not
        self.told_resume = False  # and so have we
        self.shutdown_written = False
        self.has_peer_shut_down = False
        self.outcomes = 0  # answers that are kept because the peer may not know them
        self.repeats.clear()
        self.probes.reset()

    def check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the link is over")

    @property
    def is_resumed(self) -> bool:
        """True if connected and, on a resumed link, the peer's resume has come."""
        return self.is_connected and self.peer_resumed

    @property
    def is_resuming(self) -> bool:
        """True if connected and the peer's resume has not come."""
        return self.is_connected and not self.peer_resumed

    def observe_state(self, channel: str, state: str) -> None:
        if self.observer is not None:
            self.observer.state(channel, state)


class Provable(Protocol):
    """A channel that keeps something until the peer is known to have read what was written."""

    @property
    def proof(self) -> int:
        """The number through which the answer to a ping written now would prove everything read."""

    def proven(self, through: int) -> None:
        """The peer has read everything through this number."""


class Purpose(Enum):
    """The reason for a ping."""

    ASKED = "asked"
    """The application wants to know."""
    ALIVE = "alive"
    """Nothing came for a while."""
    PROOF = "proof"
    """The pong shows that the peer has read what was written before."""


class Probes:
    """Pings and pongs of the present connection, and the channels that wait for what a pong proves."""

    def __init__(self, link: LinkState) -> None:
        self._link = link
        self.reset()

    def reset(self) -> None:
        """Drop what the old connection owed; the resume covers it."""
        self.pongs: int = 0
        self.pings: deque[Purpose] = deque()  # to be written
        self._under_way: deque[Purpose] = deque()
        # Of what was written: what is kept until the peer is known to have read it.
        self.unproven: dict[Provable, None] = {}
        self.ending: dict[Provable, None] = {}  # of them, those whose end waits for it
        self._proof: list[tuple[Provable, int]] | None = None  # what the ping under way will show
        self.wants_proof: bool = False  # a ping is to be written as soon as none is under way

    def pong_came(self) -> Purpose:
        """Return the purpose of the oldest ping; ASKED for a pong without a ping."""
        purpose = self._under_way.popleft() if self._under_way else Purpose.ASKED
        if purpose is Purpose.PROOF and self._proof is not None:
            proof, self._proof = self._proof, None
            for one, through in proof:
                self.unproven.pop(one, None)
                one.proven(through)
        return purpose

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
        """True if a ping for proof is due."""
        if self._proof is not None or not self.unproven:
            return False
        return self.wants_proof or self._link.outcomes > MOST_OUTCOMES

    def write_proof(self, out: list[Buffer]) -> int:
        """Write the ping for proof, if it is due; call it when nothing has to be written before it."""
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


@attrs.define
class Run:
    """A run of equal decisions or answers through a number; it begins behind the run before it."""

    kind: Operation | Ack
    through: int


def extend(runs: deque[Run], kind: Operation | Ack, through: int) -> bool:
    """Extend the last run, or begin another one; True if this is another one."""
    if runs and runs[-1].kind is kind:
        runs[-1].through = through
        return False
    runs.append(Run(kind, through))
    return True


def counts_of(channels: Sequence[int]) -> dict[int, int]:
    """Count how often each channel is named."""
    return {channels[0]: 1} if len(channels) == 1 else Counter(channels)


# --- sequence numbers, which never wrap inside the engine


def resolve(what: str, wire: int, *, done: int, last: int, behind: int = 0) -> int | None:
    """Return the number from `done` to `last` that the 32-bit `wire` stands for.

    `done` is the last that was meant before, `last` the last that can be meant now. None if it is one of the
    `behind` numbers before `done`; whatever is left is a violation.
    """
    ahead = serial_distance(done % 2**32, wire)
    if ahead <= last - done:
        return done + ahead
    back = serial_distance(wire, done % 2**32)
    if back <= behind:
        return None
    if back < ahead:
        raise RemoteProtocolError(f"{what}: {wire} came after {serial_add(done, 0)}", rule="relink-Q11")
    last_wire = serial_add(last, 0)
    raise RemoteProtocolError(f"{what}: {wire} is beyond {last_wire}, the last that can be meant", rule="relink-Q11")


def advance(what: str, steps: int, *, done: int, last: int) -> int:
    """Return the number that `steps` acks without a sequence number lead to."""
    if done + steps > last:
        was, most = serial_add(done, 0), serial_add(last, 0)
        raise RemoteProtocolError(
            f"{what}: {steps} more after {was}, and {most} is the last that can be meant", rule="relink-O12"
        )
    return done + steps
