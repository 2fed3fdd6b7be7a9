"""Is the peer still there, and did it say goodbye? Two channel types that sessions keep for themselves.

The document has neither a ping nor an end of a session, and a packet link has no end of its own. So a channel of type
`PING` that ends with its opening is answered as every channel is, with an ack; one of type `BYE` says that its sender
has left. If everything of it was processed, the body is 0 and then id and ack of each channel, since the last acks may
have been lost and nobody will be there to repeat them; else it is something else. A peer that knows neither type
answers with an err, and that is an answer too. Both are ours.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from muxkit._errors import LocalProtocolError
from muxkit.runtime import LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.protocols.e3x._session.connection import Connection
    from muxkit.protocols.e3x.config import Config
    from muxkit.protocols.e3x.engine._channel_old import EngineChannel

PING: Final = "muxkit.ping"
BYE: Final = "muxkit.bye"
RESERVED: Final = frozenset({PING, BYE})
IN_ORDER: Final = b"\0"
FINAL_MOST: Final = 8000  # channels
FINAL_FEW: Final = 20  # the same where a goodbye must fit into one packet
LATER: Final = 1.25
_FINAL: Final = struct.Struct("!II")
HOLD: Final = 2.0  # s, at most, that a peer which has left is kept waiting for what is still unconfirmed


class _Question:
    """A ping, or a goodbye, on its way."""

    __slots__ = ("answer", "asked_at", "error", "took")

    def __init__(self) -> None:
        self.asked_at = trio.current_time()
        self.answer = trio.Event()
        self.took: float | None = None
        self.error: Callable[[], Exception] | None = None


class Liveness:
    """Asks, answers, and keeps the time of silence."""

    def __init__(self, connection: Connection, config: Config, *, odd: bool) -> None:
        self._connection = connection
        # One side asks a little later, so that the other's question is answer enough.
        self._keepalive = None if config.keepalive is None else config.keepalive * (1.0 if odd else LATER)
        self._timeout = config.timeout
        self._questions: dict[int, _Question] = {}
        self._bye: EngineChannel | None = None
        self._said_bye = trio.Event()
        self.peer_left = False
        """The peer has said that it leaves, with everything of it processed."""
        self.round_trip: float | None = None

    # --- asking

    async def ping(self) -> float:
        """One round trip through the peer's session; raises `LinkLost` if no answer comes."""
        connection = self._connection
        await trio.lowlevel.checkpoint()
        connection.raise_if_lost()
        while connection.engine.places < 1:
            await connection.gone.park()
            connection.raise_if_lost()
        took = await self._ask(PING)
        self.round_trip = took if self.round_trip is None else 0.875 * self.round_trip + 0.125 * took
        return took

    async def say_goodbye(self) -> None:
        """Tell the peer that we leave, and wait until it has heard it; it may hang up instead of answering."""
        if self._connection.pump.is_lost or self._connection.engine.places < 1:
            return
        engine = self._connection.engine
        acks = engine.final_acks()[: FINAL_MOST if engine.config.frag else FINAL_FEW]
        with suppress(LinkLost):
            await self._ask(BYE, IN_ORDER + b"".join(_FINAL.pack(id, ack) for id, ack in acks))

    async def _ask(self, type: str, body: bytes = b"") -> float:
        connection = self._connection
        connection.touch()
        channel = connection.engine.open(type, body, end=True)
        question = self._questions[channel.id] = _Question()
        connection.ring()
        try:
            await question.answer.wait()
        finally:
            self._questions.pop(channel.id, None)
        if question.took is None:
            raise (question.error or connection.pump.loss)()
        return question.took

    def answered(self, id: int) -> None:
        """The peer has processed, or refused, what we opened."""
        question = self._questions.get(id)
        if question is not None and question.took is None:
            question.took = trio.current_time() - question.asked_at
            question.answer.set()

    def broken(self, id: int, *, is_answer: bool) -> None:
        if is_answer:
            self.answered(id)
            return
        question = self._questions.get(id)
        if question is not None and question.took is None:
            question.error = self._silence
            question.answer.set()

    def lost(self, error: Callable[[], Exception]) -> None:
        for question in self._questions.values():
            question.error = question.error or error
            question.answer.set()

    # --- answering

    def asked(self, channel: EngineChannel, body: bytes) -> None:
        """The peer opened a channel of ours and not of the application's."""
        engine = self._connection.engine
        if not channel.is_reliable:  # neither ever is; without this anybody's guess would be taken
            engine.err(channel, "reliable only")
        elif channel.type == PING:
            engine.done(channel)
            if not channel.gone:
                engine.end(channel)
        elif not body.startswith(IN_ORDER):
            self._connection.pump.lose("the peer gave the session up", by="peer")
        elif self._bye is not None:
            engine.err(channel, "bye")
        else:
            engine.accept(channel)
            for id, ack in _FINAL.iter_unpack(body[1 : 1 + (len(body) - 1) // _FINAL.size * _FINAL.size]):
                engine.take_final_ack(id, ack)
            self._bye = channel
            self.peer_left = True
            self._said_bye.set()

    def answer_goodbye(self) -> None:
        """The peer waits for that before it hangs up."""
        if self._bye is not None:
            self._connection.touch()
            self._connection.engine.err(self._bye, "bye")
            self._connection.did()

    # --- in the background

    async def run(self) -> None:
        """Ask when nothing was heard for long, until the peer has left; raises nothing."""
        connection = self._connection
        while not self._said_bye.is_set():
            due = float("inf") if self._keepalive is None else connection.heard_at + self._keepalive
            with trio.move_on_at(due):
                await self._said_bye.wait()
            if not self._said_bye.is_set() and trio.current_time() >= connection.heard_at + (self._keepalive or 0):
                await self._check()
        await self._part()

    async def _check(self) -> None:
        """Nobody was heard for a while: is there anybody?"""
        try:
            with trio.move_on_after(self._timeout):
                await self.ping()
                return
        except LocalProtocolError:  # every id is used; then nothing can be asked
            await trio.sleep_forever()
        except LinkLost:
            pass
        self.suspect()

    def suspect(self) -> None:
        """Something got no answer in time; is it the channel, or the peer?"""
        if trio.current_time() - self._connection.heard_at >= self._timeout:
            error = self._silence()
            self._connection.pump.lose(error.reason, by=error.by)

    def _silence(self) -> LinkLost:
        silence = trio.current_time() - self._connection.heard_at
        return LinkLost(f"nothing was heard for {silence:.0f} s", by="network", peer=self._connection.pump.peer)

    async def _part(self) -> None:
        """The peer has left: hear its last acks, answer, and hang up too."""
        connection = self._connection
        connection.on_goodbye(None)
        with trio.move_on_after(HOLD):
            while any(_is_waiting(channel.engine_channel) for channel in connection.live.values()):
                await connection.moved.park()
        self.answer_goodbye()
        await connection.pump.flushed()
        count = len(connection.live)
        what = f" while {count} channels were open" if count else ""
        if not connection.is_on_packets:  # its stream says so itself in a moment
            with trio.move_on_after(HOLD):
                await connection.pump.hung_up.wait()
        connection.pump.lose(f"the peer hung up{what}", by="peer")


def _is_waiting(channel: EngineChannel) -> bool:
    """Is something of ours unconfirmed?"""
    outgoing = channel.outgoing
    return outgoing is not None and not channel.gone and outgoing.acked < outgoing.next_seq - 1
