"""Every pair of what a peer said on one connection and what it leaves out on the next, against a plain reference.

The reference knows no engine. From the packets that were written it keeps the set of states in which an honest peer can
be: how many messages it may have read, whether it may have read the close. A resume is legal if it fits one of these
states; one that fits none has to end the link with the clause that names the fault, and nothing is ever raised.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import attrs
import pytest

from muxkit.core.events import Failed
from muxkit.protocols.relink.events import ChannelClosed
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import EPOCH, LINK, quiet, split
from tests.protocols.relink._numbered import NumberedEngine, channel_of

if TYPE_CHECKING:
    from collections.abc import Callable

RULES = {"relink-R02", "relink-R03", "relink-Q11"}
CHANNELS = (1, 2)
MESSAGE, COMMIT, COMMIT_THROUGH, CLOSE, PING = 0x11, 0x01, 0x09, 0x41, 0x20
RECEIVED, COMMITTED = 0x0D, 0x4D
PONG, RESUME = bytes.fromhex("40" + "00" * 7), bytes.fromhex("60" + "00" * 7)


@attrs.frozen
class State:
    """What an honest peer has read of one channel."""

    messages: int = 0
    decisions: int = 0
    has_close: bool = False

    def after(self, packet: bytes) -> State:
        match packet[0]:
            case 0x11:
                return attrs.evolve(self, messages=self.messages + 1)
            case 0x01:
                return attrs.evolve(self, decisions=self.decisions + 1)
            case 0x09:
                through = int.from_bytes(packet[4:8], "little") + 1
                return attrs.evolve(self, decisions=max(self.decisions, through))
        assert packet[0] == CLOSE
        return attrs.evolve(self, has_close=True)


@attrs.define(eq=False)
class Life:
    """A channel from its first message to its end, as far as an honest peer can have followed it."""

    heads: list[tuple[int, set[State]]] = attrs.field(factory=lambda: [(0, {State()})])
    """After each packet since something was known for certain; an honest peer is in one of them."""
    proven: int = 0
    """Packets that an honest peer has read, since it answered a ping behind them."""
    packets: int = 0
    sent: int = 0
    known: int = 0
    """Messages that the peer has acknowledged."""
    answered: int = 0

    @property
    def possible(self) -> set[State]:
        return set().union(*(states for _, states in self.heads))

    def written(self, packet: bytes) -> None:
        self.packets += 1
        self.heads.append((self.packets, {state.after(packet) for state in self.heads[-1][1]}))

    def restrict(self, fits: Callable[[State], bool]) -> None:
        heads = [(at, {state for state in states if fits(state)}) for at, states in self.heads]
        self.heads = [(at, states) for at, states in heads if states]
        assert self.heads

    @property
    def honest(self) -> set[State]:
        """Return the states that agree with the pongs as well.

        A pong binds no peer: one that has less is sent it again.
        """
        return set().union(*(states for at, states in self.heads if at >= self.proven))

    def begin_again(self, states: set[State]) -> None:
        self.heads = [(self.packets, states)]
        self.proven = min(self.proven, self.packets)


def ack(kind: int, channel: int, count: int) -> bytes:
    """Encode an ack of the first `count` messages, with a sequence number."""
    return bytes((kind, 0)) + channel.to_bytes(2, "little") + ((count - 1) % 2**32).to_bytes(4, "little")


class Play:
    """An engine that sends, and a peer that makes legal or illegal statements about its channels."""

    def __init__(self, seed: int, *, is_connector: bool, transactions: bool, is_honest: bool) -> None:
        config = quiet(connector_transactions=transactions, listener_transactions=transactions)
        self.dice = random.Random(seed)
        self.transactions = transactions
        self.is_honest = is_honest
        self.engine = NumberedEngine(config, is_connector=is_connector)
        self.lives: dict[int, Life] = {}
        self.closing: set[int] = set()
        self.ping: list[tuple[Life, int]] | None = None
        self.failure: Failed | None = None
        self.written: dict[int, int] = {}
        self.refused = self.ended = 0

    def run(self, connections: int) -> None:
        for number in range(connections):
            self.engine.connection_made(0.0, epoch=EPOCH, link_id=LINK)
            self.ping = None
            self.take_output()
            if number and not self.resume():
                assert self.failure is not None, "an illegal resume was taken"
                assert self.failure.error.rule in RULES, self.failure
                self.refused += 1
                return
            assert self.failure is None, self.failure
            for _ in range(self.dice.randrange(6)):
                self.dice.choice((self.command, self.command, self.acknowledge, self.answer_ping))()
                self.take_output()
                assert self.failure is None, self.failure
            self.engine.connection_lost(0.0)
            for _ in range(self.dice.randrange(3)):
                self.command()

    # --- the engine

    def feed(self, data: bytes) -> None:
        self.engine.receive_bytes(data, 0.0)
        for event in self.engine.events():
            if isinstance(event, Failed):
                self.failure = event
            elif isinstance(event, ChannelClosed):
                life = self.lives.pop(channel_of(event))
                self.closing.remove(channel_of(event))
                assert self.may_be_over(life), "a channel was given up that the peer may not have had"
                self.ended += 1

    def take_output(self) -> None:
        self.written = {}
        for packet in split(drain(self.engine)):
            if packet[0] == PING:
                self.ping = [(life, life.packets) for life in self.lives.values()]
            elif packet[0] & 1:
                channel = int.from_bytes(packet[2:4], "little")
                self.lives[channel].written(packet)
                self.written[channel] = self.written.get(channel, 0) + (packet[0] == MESSAGE)

    def command(self) -> None:
        channel = self.dice.choice(CHANNELS)
        if channel in self.closing:
            return
        if channel in self.lives and self.dice.random() < 0.4:
            self.engine.close(channel)
            self.closing.add(channel)
            return
        self.engine.send(channel, (b"x",))
        self.lives.setdefault(channel, Life()).sent += 1
        if self.transactions:
            self.engine.commit(channel)

    # --- an honest peer

    def may_be_over(self, life: Life) -> bool:
        """Return True if the peer may have forgotten the channel.

        It has read the close, and under transactions we know all answers.
        """
        if self.transactions and life.answered < life.sent:
            return False
        return any(state.has_close for state in life.possible)

    def acknowledge(self) -> None:
        for channel, life in [*self.lives.items()]:
            counts = sorted({state.messages for state in life.honest if state.messages >= max(1, life.known)})
            if self.may_be_over(life) and self.dice.random() < 0.3:
                self.feed(bytes((0x85, 0)) + channel.to_bytes(2, "little") + bytes(4))
                assert channel not in self.lives
            elif counts:
                count = self.dice.choice(counts)
                life.known = count
                life.restrict(lambda state, least=count: state.messages >= least)  # type: ignore[misc]
                self.feed(ack(RECEIVED, channel, count))
                self.answer(channel, life)

    def answer(self, channel: int, life: Life) -> None:
        decided = [state.decisions for state in life.possible if state.decisions > life.answered]
        if self.transactions and decided and self.dice.random() < 0.7:
            life.answered = self.dice.choice(sorted(decided))
            life.known = max(life.known, life.answered)
            life.restrict(lambda state: state.decisions >= life.answered)
            self.feed(ack(COMMITTED, channel, life.answered))

    def answer_ping(self) -> None:
        if self.ping is not None:
            for life, packets in self.ping:
                life.proven = packets
            self.ping = None
            self.feed(PONG)

    # --- what it says when it comes back

    def resume(self) -> bool:
        """Return True if the peer's statements in a resume are legal."""
        left_out: dict[int, Life] = {}
        lacking: dict[int, int] = {}
        for channel, life in [*self.lives.items()]:
            counts = {state.messages for state in life.possible if state.messages >= life.known}
            honest = {state.messages for state in life.honest if state.messages >= life.known}
            is_over = self.may_be_over(life)
            assert not (is_over and 0 in honest), "silence would mean two things"
            says: list[int | None] = [*sorted(honest - {0})]
            if is_over or 0 in honest:
                says.append(None)
            if not self.is_honest:
                says = [None, *range(life.sent + 2)]
            count = self.dice.choice(says)
            if count is None:
                left_out[channel] = life
                continue
            self.feed(ack(RECEIVED, channel, count))
            if count not in counts:
                return False
            life.known = count
            life.begin_again({state for state in life.possible if state.messages == count})
            lacking[channel] = life.sent - count
            self.answer(channel, life)
        over = {channel for channel, life in left_out.items() if self.may_be_over(life)}
        told = {channel for channel, life in left_out.items() if any(state.has_close for state in life.possible)}
        is_legal = all(channel in over or not (life.known or channel in told) for channel, life in left_out.items())
        self.feed(RESUME)
        if not is_legal:
            return False
        assert over.isdisjoint(self.lives)
        for channel, life in left_out.items():
            if channel not in over:
                life.begin_again({State()})
                lacking[channel] = life.sent
        self.take_output()
        # What is lacking is written again, all of it and nothing else.
        assert {channel: count for channel, count in lacking.items() if count} == {
            channel: count for channel, count in self.written.items() if count
        }
        return True


@pytest.mark.clause("relink-R02", "relink-R03", "relink-H35", "relink-K02", "relink-K03")
@pytest.mark.requirement("R-17", "R-44")
@pytest.mark.seeds(13, soak=4000)
@pytest.mark.parametrize("is_honest", [True, False], ids=["honest", "any"])
@pytest.mark.parametrize("transactions", [False, True], ids=["plain", "transactions"])
@pytest.mark.parametrize("is_connector", [True, False], ids=["connector", "listener"])
def test_what_a_peer_says_and_leaves_out_over_many_connections(
    seed: int, is_connector: bool, transactions: bool, is_honest: bool
) -> None:
    for more in range(5):
        play = Play(5 * seed + more, is_connector=is_connector, transactions=transactions, is_honest=is_honest)
        play.run(8)
        assert not (is_honest and play.refused)
