"""Properties of the engines for any cut, any bytes, and any number of broken connections."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.protocols.restream import (
    ClientEngine,
    Failed,
    Permutation,
    Registered,
    Resumed,
    ServerConfig,
    ServerEngine,
    ServerEvent,
    Unverified,
    new_uuid,
)
from muxkit.testing._pair import EngineCase, check_every_split, check_stream_engine, drain, feed
from tests.protocols.restream._helpers import OTHER, UUID, example, line, lines
from tests.protocols.restream._world import World, config_for

if TYPE_CHECKING:
    from collections.abc import Callable

ACK = {"uuid": UUID, "ack": 2}

SERVER_TRANSCRIPTS = [
    b"{}\n" + lines({"zzz": [1, {"y": 2}]}),
    b'{"state":"-12345678901234567890"}\r\n',
    lines({"uuid": UUID, "params": {"count": 5, "é": ["x", None]}}, {"uuid": UUID, "ack": 1}, {"zzz": "a:b"}),
    lines({"uuid": UUID.upper(), "state": 3}, ACK, ACK, {"uuid": UUID, "ack": 3}),
    lines({"uuid": UUID, "status": True}),
]
CLIENT_TRANSCRIPTS = [
    lines(*example()),
    lines(*example()[:3], {"id": 4, "data": {"value": 0, "é": "a:b"}, "time": 1.5}),
]
BROKEN: list[bytes] = [
    b"nope\n{}\n",
    b"\n",
    b'{"a":1,"a":2}\n',
    lines({"uuid": UUID, "params": {}}, {"uuid": OTHER, "ack": 1}, {}),
    lines({"uuid": UUID, "state": 3}, {"uuid": UUID, "ack": 9}),
    lines({}, {}, {}),
    b"{}\n" + b"x" * 70,
    b" " * 105 + b"\n",
]


class Accepting(ServerEngine):
    """A server engine whose application accepts every session at once, with three messages."""

    def events(self) -> list[ServerEvent]:
        events = list(super().events())
        for event in events:
            if isinstance(event, (Registered, Resumed)):
                self.accept(head=3, acknowledged=1)
                events += super().events()
        return events


def joined() -> ClientEngine:
    client = ClientEngine.stateful(UUID, {"count": 5})
    client.connection_made(0.0)
    drain(client)
    return client


def small() -> ServerEngine:
    return ServerEngine(ServerConfig(line=64, digits=1))


def waiting() -> ServerEngine:
    return ServerEngine(ServerConfig(status=True))


@pytest.mark.clause("restream-F01")
@pytest.mark.requirement("R-21")
@pytest.mark.parametrize("transcript", SERVER_TRANSCRIPTS + BROKEN[:-2], ids=lambda it: it[:30].decode())
def test_a_server_does_not_mind_where_the_bytes_are_cut(transcript: bytes) -> None:
    check_every_split(waiting, transcript)


@pytest.mark.clause("restream-F12")
@pytest.mark.parametrize("transcript", BROKEN[-2:])
def test_a_line_that_is_too_long_is_the_same_wherever_it_is_cut(transcript: bytes) -> None:
    engine = ServerEngine(ServerConfig(line=64, digits=1))
    assert engine.config.first_line == 4097
    check_every_split(small, transcript)


@pytest.mark.parametrize("transcript", [*CLIENT_TRANSCRIPTS, lines(*example()[:2], {"error": "x"}, 5), b"{}\n"])
def test_a_client_does_not_mind_where_the_bytes_are_cut(transcript: bytes) -> None:
    check_every_split(joined, transcript)


@pytest.mark.requirement("R-21", "R-24")
def test_the_engines_keep_what_every_engine_promises() -> None:
    check_stream_engine(
        EngineCase(make=joined, is_failure=lambda event: isinstance(event, Failed), transcripts=CLIENT_TRANSCRIPTS)
    )
    # The error line of a server comes after the last event; the tests below look at it.
    check_stream_engine(
        EngineCase(
            make=Accepting,
            is_failure=lambda event: False,
            transcripts=[*SERVER_TRANSCRIPTS[:3], lines({"uuid": UUID, "state": 3}, ACK, ACK)],
            preface=lines({"uuid": UUID, "state": 3}),
            question=line(ACK),
        )
    )


PIECES = st.sampled_from(
    [*SERVER_TRANSCRIPTS, *CLIENT_TRANSCRIPTS, *BROKEN, b"{}\n", b"[", b'"', b"\\", b"\n", b"\xff"]
)
GARBAGE = st.binary(max_size=80) | st.lists(PIECES | st.binary(max_size=5), max_size=5).map(b"".join)


@pytest.mark.clause("restream-F05", "restream-F07", "restream-F09")
@pytest.mark.requirement("R-21", "R-24")
@given(GARBAGE, st.integers(0, 200))
def test_whatever_comes_a_server_fails_at_most_once_and_says_so(data: bytes, cut: int) -> None:
    server = Accepting(ServerConfig(status=True))
    events = feed(server, [data[:cut], data[cut:]])
    failures = [index for index, event in enumerate(events) if isinstance(event, Failed)]
    assert failures in ([], [len(events) - 1])
    written = drain(server)
    assert len(written.splitlines()) == len(failures)
    assert server.closing == bool(failures)
    if failures:
        assert {"error"} <= {*json.loads(written)} <= {"error", "code", "acknowledged"}
        assert feed(server, [data, b"{}\n"]) == []
        server.receive_eof(1.0)
        assert server.events() == []


@pytest.mark.clause("restream-F05")
@pytest.mark.requirement("R-21", "R-24")
@given(GARBAGE, st.integers(0, 200), st.sampled_from(["stateless", "stateful", "any", "status"]))
def test_whatever_comes_a_client_fails_at_most_once(data: bytes, cut: int, mode: str) -> None:
    makers: dict[str, Callable[[], ClientEngine]] = {
        "stateless": ClientEngine.stateless,
        "stateful": lambda: ClientEngine.stateful(UUID, {"count": 3}),
        "any": lambda: ClientEngine.stateful(UUID, None, verifier=Unverified()),
        "status": lambda: ClientEngine.status(UUID),
    }
    client = makers[mode]()
    client.connection_made(0.0)
    drain(client)
    events = feed(client, [data[:cut], data[cut:]])
    failures = [index for index, event in enumerate(events) if isinstance(event, Failed)]
    assert failures in ([], [len(events) - 1])
    assert not failures or not client.may_resume
    assert drain(client) == b""


@pytest.mark.clause(
    "restream-T01", "restream-S06", "restream-S16", "restream-S19", "restream-S20", "restream-A01", "restream-G01"
)
@pytest.mark.requirement("R-21")
@pytest.mark.seeds(60, soak=5000)
def test_a_session_over_broken_links_has_no_gap_and_no_repeat(seed: int) -> None:
    """The client restarts and rewinds sometimes; the verifier has checked the CRC when it is finished."""
    dice = random.Random(seed)
    count = dice.choice((1, 2, 10, 100, 300))
    uuid = new_uuid()
    world = World(dice, ClientEngine.stateful(uuid, {"count": count}, config=config_for(dice)))
    world.run(10**9)
    session = world.server.sessions[uuid]
    assert not world.server.violations
    assert world.ids == list(range(1, count + 1))
    assert world.values == session.made
    assert len(session.made) == count
    if world.client.config.ack_every is not None:
        assert session.acknowledged == count
        assert not session.messages


@pytest.mark.clause("restream-L08", "restream-L09", "restream-L11", "restream-L12")
@pytest.mark.seeds(20, soak=2000)
def test_a_stateless_stream_over_broken_links_has_no_gap_and_no_repeat(seed: int) -> None:
    dice = random.Random(seed)
    world = World(dice, ClientEngine.stateless())
    world.run(200)
    assert not world.server.violations
    begun = world.values[0]
    for value in world.values:
        assert value == begun
        begun = Permutation().next(begun)


def test_the_engines_know_nothing_of_trio() -> None:
    code = "import sys, muxkit.protocols.restream; sys.exit('trio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
