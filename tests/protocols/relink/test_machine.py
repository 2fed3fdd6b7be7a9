"""Hypothesis looks for a sequence of commands, deliveries and cuts that the plain model does not agree with."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocols.relink._helpers import quiet
from tests.protocols.relink._world import World

SIDES = st.integers(0, 1)
CHANNELS = st.integers(0, 2)
COUNTS = st.integers(1, 4)


class LinkMachine(RuleBasedStateMachine):
    """Random steps of applications, network and clock; each rule is one kind of step."""

    world: World

    @initialize(
        sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
        transactions=st.tuples(st.booleans(), st.booleans()),
        window=st.sampled_from((1, 3, 16)),
        first=st.sampled_from((0, 2**32 - 2)),
    )
    def start(self, sizes: tuple[int, int], transactions: tuple[bool, bool], window: int, first: int) -> None:
        self.world = World(
            quiet(
                connector_id_size=sizes[0],
                listener_id_size=sizes[1],
                connector_transactions=transactions[0],
                listener_transactions=transactions[1],
                window=window,
                first_sequence=first,
            )
        )

    @rule(side=SIDES, channel=CHANNELS, seed=st.integers(0, 1000))
    def send(self, side: int, channel: int, seed: int) -> None:
        self.world.send(side, channel, self.world.content(random.Random(seed)))

    @rule(side=SIDES, channels=st.lists(CHANNELS, min_size=1, max_size=3), seed=st.integers(0, 1000))
    def multicast(self, side: int, channels: list[int], seed: int) -> None:
        self.world.multicast(side, channels, self.world.content(random.Random(seed)))

    @rule(side=SIDES, channel=CHANNELS, count=COUNTS, decision=st.sampled_from(("commit", "rollback")))
    def decide(self, side: int, channel: int, count: int, decision: str) -> None:
        if self.world.transactions[side]:
            self.world.decide(side, channel, decision, count)

    @rule(side=SIDES, channel=CHANNELS)
    def close(self, side: int, channel: int) -> None:
        self.world.close(side, channel)

    @rule(side=SIDES, channel=CHANNELS, most=st.none() | COUNTS)
    def receive(self, side: int, channel: int, most: int | None) -> None:
        self.world.receive(side, channel, most)

    @rule(side=SIDES, channel=CHANNELS)
    def rewind(self, side: int, channel: int) -> None:
        self.world.rewind(side, channel)

    @rule(side=SIDES, channel=CHANNELS, count=COUNTS)
    def consume(self, side: int, channel: int, count: int) -> None:
        self.world.consume(side, channel, count)

    @rule(side=SIDES, channel=CHANNELS, count=COUNTS, reply=st.sampled_from(("committed", "uncommitted")))
    def reply(self, side: int, channel: int, count: int, reply: str) -> None:
        if self.world.transactions[1 - side]:
            self.world.reply(side, channel, reply, count)

    @rule(side=SIDES, limit=st.sampled_from((1, 40, 1 << 20)))
    def pull(self, side: int, limit: int) -> None:
        self.world.pull(side, limit)

    @rule(side=SIDES, size=st.sampled_from((1, 7, 24, 1 << 20)))
    def deliver(self, side: int, size: int) -> None:
        self.world.deliver(side, size)

    @rule(seconds=st.sampled_from((0.01, 0.1, 1.0)))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def cut(self) -> None:
        self.world.cut()

    @invariant()
    def windows_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check_windows()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.check_the_end()


TestLinkMachine = LinkMachine.TestCase
pytestmark = [pytest.mark.requirement("R-44"), pytest.mark.clause("relink-R03", "relink-F04", "relink-T01")]
