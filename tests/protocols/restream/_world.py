"""A client, a server and a link that breaks at any byte; the server's sessions are a dict, the clock is a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from muxkit.protocols.restream import (
    Acknowledged,
    ClientConfig,
    ClientEngine,
    Failed,
    Finished,
    HungUp,
    Numbers,
    Permutation,
    Phase,
    Received,
    ReceivedValue,
    Refused,
    Registered,
    Resumed,
    ServerEngine,
    StatelessRequested,
    StatusReceived,
    StatusRequested,
    parse_integer,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

MOST_CONNECTIONS = 5000


@attrs.define
class Session:
    """The sessions of a server."""

    state: Mapping[str, int]
    params: Mapping[str, object]
    messages: dict[int, Mapping[str, int]] = attrs.field(factory=dict)
    made: list[int] = attrs.field(factory=list)
    head: int = 0
    acknowledged: int = 0


class Server:
    """The application of all connections, with all that is durable."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.sessions: dict[str, Session] = {}
        self.numbers = Numbers()
        self.violations: list[Failed] = []

    def look(self, engine: ServerEngine) -> None:
        """Handle the events of a server engine."""
        for event in engine.events():
            match event:
                case StatelessRequested(state):
                    self.value = self.dice.getrandbits(64) if state is None else parse_integer(state)
                case Registered(uuid, params):
                    session = self.sessions.get(uuid)
                    if session is None:
                        initial = self.numbers.initial(params, self.dice.getrandbits(32))
                        session = self.sessions[uuid] = Session(initial, params)
                    assert session.params == params
                    self._accept(engine, session, 0)
                case Resumed(uuid, after):
                    self._accept(engine, self.sessions[uuid], after)
                case Acknowledged(uuid, id):
                    session = self.sessions[uuid]
                    session.acknowledged = id
                    for old in [old for old in session.messages if old <= id]:
                        del session.messages[old]
                case Failed():
                    self.violations.append(event)
                case HungUp() | StatusRequested():
                    pass

    def _accept(self, engine: ServerEngine, session: Session, state: int) -> None:
        assert engine.accept(head=session.head, acknowledged=session.acknowledged)
        self.at = state

    def stream(self, engine: ServerEngine) -> None:
        """Queue a few more lines: stored ones first, then new ones."""
        if engine.phase is Phase.VALUES:
            for _ in range(self.dice.randrange(4)):
                self.value = Permutation().next(self.value)
                engine.send_value(self.value)
        if engine.phase is not Phase.MESSAGES:
            return
        session = self.sessions[engine.uuid]
        for _ in range(self.dice.randrange(4)):
            if self.at == session.head:
                if self.numbers.is_over(session.state):
                    engine.finish()
                    return
                data, session.state = self.numbers.step(session.state)
                session.head += 1
                session.messages[session.head] = data
                session.made.append(data["value"])
            self.at += 1
            data = session.messages[self.at]
            engine.send_message(self.at, data, final=self.numbers.is_final(data))
            if engine.closing:
                return


class World:
    """A client that reads a whole stream over any number of connections."""

    def __init__(self, dice: random.Random, client: ClientEngine) -> None:
        self.dice = dice
        self.client = client
        self.server = Server(dice)
        self.waiting: list[Received | ReceivedValue] = []  # received, and not taken by the application
        self.ids: list[int] = []
        self.values: list[int] = []
        self.finished = False
        self.connections = 0
        self.now = 0.0

    def run(self, enough: int) -> None:
        """Run until the stream is over, or this many values of a stateless one came."""
        while not self.finished and len(self.values) < enough:
            self.connections += 1
            assert self.connections < MOST_CONNECTIONS
            self._connect()
            self._between()

    def _connect(self) -> None:
        """Run one connection until both sides hung up, or it breaks at some byte."""
        dice, client, server = self.dice, self.client, ServerEngine()
        client.connection_made(self.now)
        left = dice.choice((0, 5, 50, 200, 1000, 5000)) + dice.randrange(200)  # bytes until the link breaks
        to_server = to_client = b""
        while left > 0 and len(self.values) < 10**9:
            self.now += 0.001
            to_server += b"".join(map(bytes, client.buffers_to_send(dice.choice((1, 100, 9999)))))
            to_client += b"".join(map(bytes, server.buffers_to_send(dice.choice((1, 100, 9999)))))
            size = dice.randrange(left + 1)
            data, to_server = to_server[:size], to_server[size:]
            server.receive_bytes(data, self.now)
            self.server.look(server)
            self.server.stream(server)
            left -= len(data)
            size = dice.randrange(left + 1)
            data, to_client = to_client[:size], to_client[size:]
            client.receive_bytes(data, self.now)
            left -= len(data) + 1
            self._hear()
            if dice.random() < 0.5:
                self._take()
            if self.finished:
                self._take()
                server.receive_bytes(to_server + b"".join(map(bytes, client.buffers_to_send(9999))), self.now)
                self.server.look(server)
                break
            if server.closing and not server.has_output() and not to_client:
                client.receive_eof(self.now)
                break
        server.receive_eof(self.now)
        self.server.look(server)
        client.connection_lost(self.now)
        self._hear()

    def _hear(self) -> None:
        for event in self.client.events():
            match event:
                case Received() | ReceivedValue():
                    self.waiting.append(event)
                case Finished():
                    self.finished = True
                case HungUp():
                    pass
                case Failed() | Refused() | StatusReceived():
                    raise AssertionError(event)

    def _take(self) -> None:
        """Let the application take some of the waiting messages, or all if the stream is over."""
        count = len(self.waiting) if self.finished else self.dice.randrange(len(self.waiting) + 1)
        for event in self.waiting[:count]:
            self.client.taken(event)
            if isinstance(event, Received):
                assert isinstance(event.data, dict)
                value = event.data["value"]
                assert isinstance(value, int)
                self.ids.append(event.id)
                self.values.append(value)
            else:
                self.values.append(parse_integer(event.value))
        del self.waiting[:count]

    def _between(self) -> None:
        """Between connections, perhaps restore the client from a snapshot, or rewind it."""
        if self.finished:
            return
        chance = self.dice.random()
        if chance < 0.2:
            self.client = ClientEngine.restore(self.client.snapshot(), config=self.client.config)
            self.waiting.clear()
        elif chance < 0.3:
            self.client.rewind()
            self.waiting.clear()


def config_for(dice: random.Random) -> ClientConfig:
    return ClientConfig(ack_every=dice.choice((None, 1, 2, 16)))
