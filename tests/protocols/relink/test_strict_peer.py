"""Links to a peer that forgets closed channels at once and refuses unknown ones live through cuts at any byte."""

from __future__ import annotations

import random
from collections import defaultdict

import attrs
import pytest

from muxkit.core.events import Failed
from muxkit.protocols.relink.events import Arrived, ChannelClosed, ChannelOpened
from muxkit.protocols.relink.frames import Parts
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import EPOCH, LINK, quiet
from tests.protocols.relink._numbered import NumberedEngine, channel_of
from tests.protocols.relink._plain_peer import PlainPeer

CHANNELS = (1, 2, 3)


@attrs.define
class Talk:
    """An engine of ours, the plain peer, and a connection between them that breaks."""

    dice: random.Random
    engine: NumberedEngine
    peer: PlainPeer
    to_peer: bytearray = attrs.field(factory=bytearray)
    to_us: bytearray = attrs.field(factory=bytearray)
    sent: dict[int, list[list[bytes]]] = attrs.field(factory=lambda: defaultdict(list))
    """By us: of each channel its lives, of each life its messages."""
    sent_to_us: dict[int, list[list[bytes]]] = attrs.field(factory=lambda: defaultdict(list))
    came: dict[int, list[list[bytes]]] = attrs.field(factory=lambda: defaultdict(list))
    arrived: dict[int, list[tuple[int, Parts]]] = attrs.field(factory=lambda: defaultdict(list))
    """What the application has not taken yet."""
    open: set[int] = attrs.field(factory=set)
    closing: set[int] = attrs.field(factory=set)
    serial: int = 0
    now: float = 0.0

    def connect(self, *, resumed: bool) -> None:
        self.to_peer.clear()
        self.to_us.clear()
        if resumed:
            self.engine.connection_lost(self.now)
        self.engine.connection_made(self.now, epoch=EPOCH, link_id=LINK)
        self.peer.connect(resumed=resumed)
        self.hear()

    def hear(self) -> None:
        for event in self.engine.events():
            assert not isinstance(event, Failed), event
            if isinstance(event, ChannelOpened):
                self.came[channel_of(event)].append([])
            elif isinstance(event, Arrived):
                self.arrived[channel_of(event)] += enumerate(event.messages, event.first)
            elif isinstance(event, ChannelClosed):
                self.open.remove(channel_of(event))
                self.closing.remove(channel_of(event))

    def move(self, most: int) -> bool:
        """Move up to `most` bytes in each direction; return True if there were any."""
        self.to_peer += drain(self.engine)
        self.to_us += self.peer.write()
        did = bool(self.to_peer or self.to_us)
        data = bytes(self.to_peer[:most])
        del self.to_peer[:most]
        self.peer.read(data)
        data = bytes(self.to_us[:most])
        del self.to_us[:most]
        self.engine.receive_bytes(data, self.now)
        self.hear()
        return did

    def payload(self) -> bytes:
        self.serial += 1
        return b"%d" % self.serial

    def act(self) -> None:
        channel, dice = self.dice.choice(CHANNELS), self.dice
        match dice.randrange(7):
            case 0 | 1 if channel not in self.closing:
                if channel not in self.open:
                    self.open.add(channel)
                    self.sent[channel].append([])
                self.sent[channel][-1].append(self.payload())
                self.engine.send(channel, (self.sent[channel][-1][-1],))
            case 2 if channel in self.open - self.closing:
                self.closing.add(channel)
                self.engine.close(channel)
            case 3:
                out = self.peer.outs.get(channel)
                if out is None or not out.is_closed:
                    if out is None or not out.messages:
                        self.sent_to_us[channel].append([])
                    self.sent_to_us[channel][-1].append(self.payload())
                    self.peer.send(channel, self.sent_to_us[channel][-1][-1])
            case 4:
                self.peer.close(channel)
            case 5:
                self.take(channel, dice.choice((1, None)))
            case 6:
                self.peer.consume(channel, dice.choice((1, 9)))
            case _:
                pass

    def take(self, channel: int, most: int | None) -> None:
        batch = self.arrived[channel][:most]
        del self.arrived[channel][:most]
        if batch:
            self.came[channel][-1] += [parts[0] for _, parts in batch]
            self.engine.consume(channel, through=batch[-1][0], now=self.now)

    def rest(self) -> None:
        """Consume everything and confirm every end, without further cuts."""
        for channel in CHANNELS:
            self.peer.close(channel)
            if channel in self.open - self.closing:
                self.closing.add(channel)
                self.engine.close(channel)
        for _ in range(100):
            for channel in CHANNELS:
                self.take(channel, None)
                self.peer.consume(channel, 1 << 20)
            if not self.move(1 << 20):
                due = self.engine.next_deadline()
                if due is None:
                    return
                self.now = due
                self.engine.handle_deadline(due)
        raise AssertionError("the link does not come to rest")


def start(seed: int, *, is_connector: bool, is_hasty: bool) -> Talk:
    talk = Talk(random.Random(seed), NumberedEngine(quiet(), is_connector=is_connector), PlainPeer(is_hasty))
    talk.connect(resumed=False)
    return talk


def check(talk: Talk, *, is_hasty: bool) -> None:
    """Check that both agree that everything is over, and that each message came once, in order."""
    talk.rest()
    assert (talk.engine.channel_count, talk.engine.unanswered) == (0, 0)
    assert not talk.peer.outs
    assert not talk.peer.ins
    assert talk.peer.lives == talk.sent
    if not is_hasty:
        assert talk.came == {channel: lives for channel, lives in talk.sent_to_us.items() if lives}
        return
    # What it closed at once and lost is lost; the rest is there once and in order.
    for channel, lives in talk.came.items():
        known = [message for life in talk.sent_to_us[channel] for message in life]
        got = [message for life in lives for message in life]
        assert got == [message for message in known if message in set(got)]


@pytest.mark.clause("relink-R02", "relink-R03", "relink-K02", "relink-K03", "relink-O13")
@pytest.mark.requirement("R-44", "R-51")
@pytest.mark.seeds(16, soak=20_000)
@pytest.mark.parametrize("is_hasty", [False, True], ids=["patient", "hasty"])
@pytest.mark.parametrize("is_connector", [True, False], ids=["connector", "listener"])
def test_a_link_to_a_peer_that_forgets_closed_channels_lives_through_cuts(
    seed: int, is_connector: bool, is_hasty: bool
) -> None:
    talk = start(seed, is_connector=is_connector, is_hasty=is_hasty)
    for _ in range(talk.dice.randrange(20, 200)):
        match talk.dice.randrange(8):
            case 0:
                talk.connect(resumed=True)
            case 1 | 2 | 3:
                talk.move(talk.dice.choice((3, 8, 24, 100, 1000)))
            case 4:
                talk.now += 0.1
                talk.engine.handle_deadline(talk.now)
            case _:
                talk.act()
    check(talk, is_hasty=is_hasty)


@pytest.mark.clause("relink-R02", "relink-K02", "relink-K03")
@pytest.mark.requirement("R-44", "R-51")
@pytest.mark.parametrize("again", [False, True], ids=["one cut", "two cuts"])
@pytest.mark.parametrize("is_connector", [True, False], ids=["connector", "listener"])
def test_a_cut_may_fall_at_every_byte_of_an_opening_a_close_and_the_next_life(is_connector: bool, again: bool) -> None:
    """Both sides open channel 1, close it, and open and close it again under the same number."""
    at, cuts = 0, 0
    while not cuts:
        talk = start(0, is_connector=is_connector, is_hasty=False)
        left, cuts = at, 2 if again else 1
        while drive(talk):
            talk.move(left if 0 < left < 8 else 8)
            left -= 8
            if left < 0 and cuts:
                talk.connect(resumed=True)
                cuts -= 1
                left = at % 40
        check(talk, is_hasty=False)
        assert talk.sent[1] == [[b"our first"], [b"our second"]]
        assert talk.sent_to_us[1] == [[b"its first"], [b"its second"]]
        at += 1
    assert at > 100


def drive(talk: Talk) -> bool:
    """Make one step of both applications; return False when nothing is left to do."""
    talk.take(1, None)
    talk.peer.consume(1, 9)
    talk.now += 0.05
    talk.engine.handle_deadline(talk.now)
    is_ours_over, is_its_over = 1 not in talk.open, 1 not in talk.peer.outs
    if is_ours_over and len(talk.sent[1]) < 2:
        talk.open.add(1)
        talk.closing.add(1)
        talk.sent[1].append([(b"our first", b"our second")[len(talk.sent[1])]])
        talk.engine.send(1, talk.sent[1][-1])
        talk.engine.close(1)
    elif is_its_over and len(talk.sent_to_us[1]) < 2:
        talk.sent_to_us[1].append([(b"its first", b"its second")[len(talk.sent_to_us[1])]])
        talk.peer.send(1, talk.sent_to_us[1][-1][0])
        talk.peer.close(1)
    elif is_ours_over and is_its_over:
        return False
    return True
