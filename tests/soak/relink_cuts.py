"""A Relink link loses, repeats and disorders nothing when cut, with transactions and both directions busy.

A connector and a listener talk through a relay that cuts each connection at a random byte. Each side sends on several
channels, commits and rolls back at random, and answers at random `committed` or `uncommitted`. Afterwards: every
message that was committed was seen once, in order; none that was rolled back was seen; each answer is the one given.

    python -m tests.soak.relink_cuts [--cuts 1000] [--seed 1]

Ends with 1 if anything is missing, repeated, out of order, invented or answered otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Outcome
from muxkit.runtime import Backoff
from muxkit.testing import ChaosPlan, chaos_relay

if TYPE_CHECKING:
    from muxkit.protocols.relink import Link, Receipt, Receiver

CHANNELS = (1, 2, 300)
COUNT = 150  # messages that one side sends on one channel
MOST_UNDECIDED = 4  # messages; a window that is full of them would never empty
PLAN = ChaosPlan(cut_after=(0, 2_500), reset=0.4)
CONFIG = Config(connector_transactions=True, listener_transactions=True, keepalive=None)
LINGER = 30.0  # s; reached only when something hangs


@attrs.define
class Log:
    """What one side did and saw on one channel."""

    committed: list[bytes] = attrs.field(factory=list)
    rolled_back: list[bytes] = attrs.field(factory=list)
    outcomes: dict[bytes, Outcome | None] = attrs.field(factory=dict)
    seen: list[bytes] = attrs.field(factory=list)
    answers: dict[bytes, Outcome] = attrs.field(factory=dict)


@attrs.define
class Figures:
    """What came out."""

    rounds: int = 0
    messages: int = 0
    rolled_back: int = 0
    uncommitted: int = 0
    connections: int = 0
    cuts: int = 0
    resets: int = 0
    lost: int = 0
    repeated: int = 0
    disordered: int = 0
    invented: int = 0
    misanswered: int = 0
    seconds: float = 0.0

    @property
    def are_right(self) -> bool:
        wrong = (self.lost, self.repeated, self.disordered, self.invented, self.misanswered)
        return not any(wrong) and self.messages > 0

    def compare(self, sender: Log, receiver: Log) -> None:
        """What one side sent on a channel, against what the other side saw there."""
        seen = Counter(receiver.seen)
        self.messages += len(sender.committed)
        self.rolled_back += len(sender.rolled_back)
        self.uncommitted += sum(answer is Outcome.UNCOMMITTED for answer in receiver.answers.values())
        self.lost += sum(message not in seen for message in sender.committed)
        self.repeated += sum(count - 1 for count in seen.values())
        self.invented += len(seen.keys() - set(sender.committed))
        self.disordered += receiver.seen != sender.committed
        self.misanswered += sum(receiver.answers.get(one) is not sender.outcomes[one] for one in sender.committed)

    def compare_both(self, ours: Logs, theirs: Logs) -> None:
        for channel in CHANNELS:
            self.compare(ours[channel], theirs[channel])
            self.compare(theirs[channel], ours[channel])


Logs = dict[int, Log]


class Theirs:
    """What the listener's side did and saw on each link."""

    def __init__(self) -> None:
        self._logs: dict[int, Logs] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def keep(self, link_id: int, logs: Logs) -> None:
        self._logs[link_id] = logs
        self._changed.unpark_all()

    async def of(self, link_id: int) -> Logs:
        """Wait for the logs of a link, whose listener has heard everything and is about to say so."""
        while link_id not in self._logs:
            await self._changed.park()
        return self._logs[link_id]


async def talk(link: Link, dice: random.Random, *, count: int = COUNT, pause: float = 0.0) -> Logs:
    """What one side does: everything at once."""
    logs: Logs = {channel: Log() for channel in CHANNELS}
    async with trio.open_nursery() as nursery:
        for channel in CHANNELS:
            nursery.start_soon(send, link, channel, logs[channel], random.Random(dice.random()), count, pause)
            nursery.start_soon(receive, link.receiver(channel), logs[channel], random.Random(dice.random()), pause)
    return logs


async def send(link: Link, channel: int, log: Log, dice: random.Random, count: int, pause: float) -> None:
    sender = link.sender(channel)
    undecided: list[tuple[bytes, Receipt]] = []
    committed: list[tuple[bytes, Receipt]] = []

    def decide(number: int) -> None:
        batch = undecided[:number]
        del undecided[:number]
        if dice.random() < 0.4:
            sender.rollback(through=batch[-1][1])
            log.rolled_back += [message for message, _ in batch]
        else:
            sender.commit(through=batch[-1][1])
            committed.extend(batch)

    for serial in range(count):
        message = b"%d/%d " % (channel, serial) + dice.randbytes(dice.choice((0, 3, 40, 400)))
        cut = dice.randint(0, len(message))
        parts = (message[:cut], message[cut:]) if dice.random() < 0.3 else (message,)
        undecided.append((message, await sender.send(*parts)))
        if dice.random() < 0.3 or len(undecided) == MOST_UNDECIDED:
            decide(dice.randint(1, len(undecided)))
        if dice.random() < 0.1:
            await trio.sleep(pause * dice.random())
    if undecided:
        decide(len(undecided))
    log.committed += [message for message, _ in committed]
    for message, receipt in committed:
        with suppress(relink.NotCommitted):
            await receipt.committed()
        log.outcomes[message] = receipt.outcome
    await sender.finish()


async def receive(receiver: Receiver, log: Log, dice: random.Random, pause: float) -> None:
    async with receiver:
        while True:
            try:
                message = await receiver.receive()
            except trio.EndOfChannel:
                return
            log.seen.append(message.data)
            if dice.random() < 0.1:
                await trio.sleep(pause * dice.random())
            if dice.random() < 0.2:
                message.uncommitted()
                log.answers[message.data] = Outcome.UNCOMMITTED
            else:
                message.committed()
                log.answers[message.data] = Outcome.COMMITTED


async def converse(figures: Figures, cuts: int, seed: int) -> None:
    """One link after another through the relay, until there were so many cuts."""
    dice = random.Random(seed)
    theirs = Theirs()

    async def handle(link: Link) -> None:
        theirs.keep(link.id, await talk(link, random.Random(dice.random())))

    async with trio.open_nursery() as nursery:

        async def listen(task_status: trio.TaskStatus[relink.Listening]) -> None:
            url = "relink+tcp://127.0.0.1:0/busy"
            await relink.listen(handle, url, config=CONFIG, linger=LINGER, task_status=task_status)

        listening: relink.Listening = await nursery.start(listen)
        address = listening.url.partition("://")[2].partition("/")[0]
        began = trio.current_time()
        async with chaos_relay(address, PLAN, seed) as relay:
            while relay.cuts < cuts:
                await one_round(f"relink+tcp://{relay.address}/busy", dice, theirs, figures)
            figures.cuts += relay.cuts
            figures.resets += relay.stats().resets
        figures.seconds += trio.current_time() - began
        nursery.cancel_scope.cancel()


async def one_round(url: str, dice: random.Random, theirs: Theirs, figures: Figures) -> None:
    # Cuts come far more often than any back-off is made for.
    backoff = Backoff(first=0.001, most=0.01)
    async with relink.link(url, config=CONFIG, backoff=backoff, linger=LINGER) as link:
        ours = await talk(link, random.Random(dice.random()))
        link_id = link.id
    figures.rounds += 1
    figures.connections += link.connections
    figures.compare_both(ours, await theirs.of(link_id))


async def survive(cuts: int, seed: int) -> Figures:
    figures = Figures()
    await converse(figures, cuts, seed)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    figures = trio.run(survive, arguments.cuts, arguments.seed)
    print(
        f"{figures.cuts:,} cuts ({figures.resets:,} resets), {figures.connections:,} connections, "
        f"{figures.rounds} links, {figures.messages:,} messages committed and {figures.rolled_back:,} rolled back, "
        f"{figures.uncommitted:,} answered with uncommitted, in {figures.seconds:.1f} s: {figures.lost} lost, "
        f"{figures.repeated} repeated, {figures.disordered} channels out of order, {figures.invented} invented, "
        f"{figures.misanswered} answered otherwise"
    )
    sys.exit(0 if figures.are_right else 1)


if __name__ == "__main__":
    main()
