"""Two engines on a connection that breaks at any byte, compared with a plain model of a link.

The model knows lists only: what was sent on a channel in each of its lives, what was decided about it, what the other
side was given and answered. Every event and every message is compared with it as it happens.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError
from muxkit.core.events import Failed
from muxkit.protocols.relink import Config
from muxkit.protocols.relink.events import (
    Arrived,
    ChannelClosed,
    ChannelOpened,
    Committed,
    Consumed,
    Ended,
    Event,
    LinkFinished,
    Received,
    RolledBack,
    Uncommitted,
)
from muxkit.protocols.relink.frames import OVERHEAD
from tests.protocols.relink._model import Life, Sent
from tests.protocols.relink._numbered import NumberedEngine, channel_of

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from muxkit._limits import Limits
    from muxkit.protocols.relink.frames import Parts
    from muxkit.protocols.relink.send import Item

EPOCH, LINK = 7, 5


class World:
    """Sides 0 (connector) and 1 (listener); what side s sends on channel c is `lives[s, c]`."""

    def __init__(self, config: Config, limits: Limits | None = None) -> None:
        self.config = config
        self.engines = (
            NumberedEngine(config, is_connector=True, limits=limits),
            NumberedEngine(config, is_connector=False, limits=limits),
        )
        self.transactions = (config.connector_transactions, config.listener_transactions)
        self.first = config.first_sequence
        self.lives: dict[tuple[int, int], list[Life]] = defaultdict(list)
        # What arrived and the application of this side has not taken.
        self.waiting: dict[tuple[int, int], list[tuple[int, Parts]]] = defaultdict(list)
        self.pipes = (bytearray(), bytearray())  # on the way to each side
        self.now = 0.0
        self.cuts = 0
        self.finished: set[int] = set()
        self._serial = 0
        self.connect()

    # --- the connection

    def connect(self) -> None:
        for engine in self.engines:
            if not engine.over:
                engine.connection_made(self.now, epoch=EPOCH, link_id=LINK)
        self.collect()

    def cut(self) -> None:
        """Break the connection, lose the bytes under way, and connect again."""
        for pipe in self.pipes:
            pipe.clear()
        for engine in self.engines:
            engine.connection_lost(self.now)
        self.cuts += 1
        self.connect()

    def pull(self, side: int, limit: int) -> int:
        engine = self.engines[side]
        data = b"".join(engine.buffers_to_send(limit)) if engine.has_output() else b""
        self.pipes[1 - side].extend(data)
        self.collect()
        return len(data)

    def deliver(self, side: int, size: int) -> int:
        pipe = self.pipes[side]
        data = bytes(pipe[:size])
        del pipe[:size]
        if data:
            self.engines[side].receive_bytes(data, self.now)
        self.collect()
        return len(data)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for engine in self.engines:
            due = engine.next_deadline()
            if due is not None and due <= self.now:
                engine.handle_deadline(self.now)
        self.collect()

    # --- the senders' commands

    def life(self, side: int, channel: int) -> Life | None:
        """Return the life of an open channel, or None."""
        lives = self.lives[side, channel]
        return lives[-1] if lives and not lives[-1].closed else None

    def content(self, dice: random.Random) -> tuple[bytes, ...]:
        self._serial += 1
        sizes = [dice.choice((0, 3, 8, 60, 300, 300, 3000)) for _ in range(dice.choice((0, 1, 1, 1, 2, 3)))]
        return tuple(self._serial.to_bytes(4, "big") + bytes(size) if size else b"" for size in sizes)

    def send(self, side: int, channel: int, parts: tuple[bytes, ...]) -> None:
        engine, life = self.engines[side], self.life(side, channel)
        size = sum(map(len, parts))
        refused = engine.over or (life is not None and life.closing) or (life is None and engine.is_shutting_down)
        if refused or not engine.admits(channel, size, len(parts)):
            if refused or engine.room(channel) == 0:
                self._must_refuse(lambda: engine.send(channel, parts))
            return
        number = engine.try_send(channel, parts[0]) if len(parts) == 1 else None
        if number is None:
            number = engine.send(channel, parts)
        self._sent(side, channel, parts, number)

    def multicast(self, side: int, channels: Sequence[int], parts: tuple[bytes, ...]) -> None:
        engine = self.engines[side]
        try:
            numbers = engine.multicast(channels, parts)
        except LocalProtocolError:
            return
        for channel, number in zip(channels, numbers, strict=True):
            self._sent(side, channel, parts, number)

    def _sent(self, side: int, channel: int, parts: tuple[bytes, ...], number: int) -> None:
        life = self.life(side, channel)
        if life is None:
            life = Life()
            self.lives[side, channel].append(life)
        assert number == self.first + len(life.messages)
        life.messages.append(Sent(parts))

    def decide(self, side: int, channel: int, decision: str, count: int) -> None:
        """Commit or roll back the next `count` messages that are undecided."""
        life, engine = self.life(side, channel), self.engines[side]
        if life is None or life.closing or not life.undecided or engine.over:
            self._must_refuse(lambda: engine.commit(channel))
            return
        done = len(life.messages) - life.undecided
        through = min(done + count, len(life.messages)) - 1
        (engine.commit if decision == "commit" else engine.rollback)(channel, through=self.first + through)
        for message in life.messages[done : through + 1]:
            message.decision = decision

    def close(self, side: int, channel: int) -> None:
        life, engine = self.life(side, channel), self.engines[side]
        if life is None or life.closing or engine.over or (self.transactions[side] and life.undecided):
            self._must_refuse(lambda: engine.close(channel))
            return
        engine.close(channel)
        life.closing = True

    def _must_refuse(self, command: object) -> None:
        assert callable(command)
        try:
            command()
        except LocalProtocolError:
            return
        raise AssertionError("a command that is illegal was taken")

    # --- the receivers' commands; `side` is the one that receives

    def peer_life(self, side: int, channel: int) -> Life | None:
        """Return the last life of a channel that the receiver was told of, or None."""
        opened = [life for life in self.lives[1 - side, channel] if life.opened]
        return opened[-1] if opened else None

    def receive(self, side: int, channel: int, most: int | None) -> int:
        """Have the application take at most so many of the messages that arrived."""
        waiting, life = self.waiting[side, channel], self.peer_life(side, channel)
        batch = waiting[:most]
        del waiting[:most]
        for number, parts in batch:
            assert life is not None
            message = life.messages[number - self.first]
            assert message.parts == parts
            assert message.decision == "commit" or not self.transactions[1 - side]
            assert not message.consumed, "given again though it was consumed"
            for before in life.messages[: number - self.first]:
                assert before.given or before.decision == "rollback", "a gap"
            message.given = True
        return len(batch)

    def rewind(self, side: int, channel: int) -> None:
        life = self.peer_life(side, channel)
        for message in life.messages if life is not None else ():
            message.given = message.consumed and message.decision != "rollback"
        self.waiting[side, channel].clear()
        self.engines[side].rewind(channel)
        self.collect()

    def consume(self, side: int, channel: int, count: int) -> None:
        life = self.peer_life(side, channel)
        waiting = [i for i, one in enumerate(life.messages) if one.given and not one.consumed] if life else []
        if not waiting or life is None:
            return
        index = waiting[: max(1, count)][-1]
        self.engines[side].consume(channel, through=self.first + index, now=self.now)
        for message in life.messages[: index + 1]:
            message.consumed = True
        self.collect()

    def reply(self, side: int, channel: int, reply: str, count: int) -> None:
        """Answer the next `count` messages that were given."""
        life = self.peer_life(side, channel)
        waiting = [i for i, one in enumerate(life.messages) if one.given and not one.reply] if life else []
        if not waiting or life is None:
            return
        index = waiting[: max(1, count)][-1]
        engine = self.engines[side]
        answer = engine.committed if reply == "committed" else engine.uncommitted
        answer(channel, through=self.first + index, now=self.now)
        for message in life.messages[: index + 1]:
            message.consumed = True
            if message.decision == "commit" and not message.reply:
                assert message.given
                message.reply = reply
        self.collect()

    # --- what the engines tell

    def collect(self) -> None:
        for side in (0, 1):
            while events := self.engines[side].events():
                for event in events:
                    self._check(side, event)

    def _check(self, side: int, event: Event) -> None:
        match event:
            case Failed():
                raise AssertionError(f"side {side}: {event.error}")
            case ChannelOpened():
                lives = self.lives[1 - side, channel_of(event)]
                life = next(one for one in lives if not one.opened)
                assert all(one.ended for one in lives[: lives.index(life)])
                life.opened = True
            case Arrived():
                self.waiting[side, channel_of(event)].extend(enumerate(event.messages, event.first))
            case Ended():
                life = self._peer(side, channel_of(event))
                assert life.closing
                assert not life.ended
                life.ended = True
            case RolledBack():
                last = self._peer(side, channel_of(event)).messages[event.through - self.first]
                assert last.decision == "rollback"
            case Received() | Consumed():
                life = self._ours(side, channel_of(event))
                for message in life.messages[: event.through - self.first + 1]:
                    done = message.consumed or message.decision == "rollback"
                    assert done or isinstance(event, Received)
            case Committed() | Uncommitted():
                answer = type(event).__name__.lower()
                life = self._ours(side, channel_of(event))
                for message in life.messages[event.first - self.first : event.through - self.first + 1]:
                    if message.decision == "commit":
                        assert message.answer == ""
                        assert message.reply == answer
                        message.answer = answer
            case ChannelClosed():
                life = self._ours(side, channel_of(event))
                assert life.ended or self.engines[side].over  # both shutdowns stand for a `closed` that has not come
                self._check_over(life, side)
                life.closed = True
            case LinkFinished():
                self.finished.add(side)
            case _:
                pass

    def _ours(self, side: int, channel: int) -> Life:
        life = self.life(side, channel)
        assert life is not None
        return life

    def _peer(self, side: int, channel: int) -> Life:
        life = self.peer_life(side, channel)
        assert life is not None
        return life

    def _check_over(self, life: Life, sender: int) -> None:
        for message in life.messages:
            if message.decision == "rollback":
                assert not message.given
                assert not message.answer
                continue
            assert message.given
            assert message.consumed
            if self.transactions[sender]:
                assert message.decision == "commit"
                assert message.answer == message.reply != ""

    # --- to the end

    def check_windows(self) -> None:
        """Check each engine's counters against the model."""
        for side in (0, 1):
            engine = self.engines[side]
            for channel in {key[1] for key in self.lives if key[0] == side}:
                life = self.life(side, channel)
                outgoing = engine.state.ours.live.get(channel)
                assert (life is None) == (outgoing is None)
                if life is not None and outgoing is not None:
                    assert outgoing.next - self.first == len(life.messages)
                    assert 0 <= outgoing.outstanding <= self.config.window
                    assert outgoing.bytes == sum(map(_cost, (*outgoing.kept, *outgoing.unsent)))
                    assert len(outgoing.kept) + len(outgoing.unsent) == outgoing.outstanding
                    grown = [item for item in (*outgoing.kept, *outgoing.unsent) if not isinstance(item, bytes)]
                    assert outgoing.grown == len(grown)
            ours, theirs = engine.state.ours, engine.state.theirs
            for total, over, channels in (
                (ours.retained, ours.retained_over, ours.live),
                (theirs.bytes, theirs.held_over, theirs.live),
            ):
                assert total == sum(one.bytes for one in channels.values())
                assert over == sum(max(0, one.bytes - theirs.floor) for one in channels.values())
            queued = sum(len(item) for one in engine.state.ours.live.values() for item in one.unsent)
            assert engine.outbox == queued

    def run_until_settled(self) -> None:
        """Deliver, decide, take and answer everything."""
        for _ in range(10_000):
            moved = 0
            for side in (0, 1):
                moved += self.pull(side, 1 << 20)
            for side in (0, 1):
                moved += self.deliver(side, 1 << 20)
            for sender, channel in [*self.lives]:
                life = self.life(sender, channel)
                if life and self.transactions[sender] and life.undecided and not life.closing:
                    self.decide(sender, channel, "commit", 1 << 20)
                    moved += 1
                while self.receive(1 - sender, channel, None):
                    moved += 1
                if self.transactions[sender]:
                    self.reply(1 - sender, channel, "committed", 1 << 20)
                else:
                    self.consume(1 - sender, channel, 1 << 20)
            dues = [due for engine in self.engines if (due := engine.next_deadline()) is not None]
            if not moved and not any(engine.has_output() for engine in self.engines):
                if not dues:
                    return
                self.wait(max(0.0, min(dues) - self.now))
        raise AssertionError("the link does not come to rest")

    def check_the_end(self) -> None:
        """Check that no message was lost and nothing is kept, then shut both sides down."""
        self.run_until_settled()
        for (sender, channel), lives in self.lives.items():
            for life in lives:
                assert life.opened
                self._check_over(life, sender)
                assert life.closed == life.closing
            assert not lives or self.engines[sender].room(channel) == self.config.window
        self.check_windows()
        for side, engine in enumerate(self.engines):
            assert (engine.outbox, engine.held_bytes, engine.unanswered) == (0, 0, 0)
            assert not engine.is_shutting_down or not engine.over or engine.has_peer_shut_down
            if not engine.out_id_size and engine.channels:
                self.close(side, 0)  # with ids of 0 bytes the shutdown follows the close of the only channel
            if not engine.is_shutting_down:
                engine.shutdown()
        self.run_until_settled()
        for engine in self.engines:
            if self.finished:
                engine.receive_eof(self.now)  # a side that has finished hangs up; it answers no pings any more
        self.collect()
        assert self.finished == {0, 1}


def _cost(item: Item) -> int:
    return len(item) + OVERHEAD if isinstance(item, bytes) else item.cost
