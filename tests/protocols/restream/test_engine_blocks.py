"""The client's engine that reports many messages together: what it reports is what `ClientEngine` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit import BaseObserver
from muxkit.protocols.restream import ClientConfig, ClientEngine, ErrorCode, Failed, Received, Refused
from muxkit.protocols.restream.applications import Unverified
from muxkit.protocols.restream.engine import BlockEngine, ReceivedBlock
from tests.protocols.restream._helpers import UUID

if TYPE_CHECKING:
    from collections.abc import Sequence

LINES = (
    b'{"id":1,"data":{"a":[1,null]}}',
    b'{"id":2,"data":"\\n","time":1700000000.25}',
    b'{"id":3,"data":1e5,"time":3}',
    '{"id":4,"data":"é"}'.encode(),
)


def reading(kind: type[ClientEngine], after: int = 0, **config: Any) -> ClientEngine:
    engine = kind.restore(
        kind.stateful(UUID, None, verifier=Unverified()).snapshot() | {"id": after},
        verifier=Unverified(),
        config=ClientConfig(ack_every=None, **config),
    )
    engine.connection_made(0.0)
    engine.buffers_to_send()
    return engine


def outcome(engine: ClientEngine, pieces: Sequence[bytes]) -> tuple[list[object], object]:
    """Feed bytes; return the id, data and time of each message, and the last event if it is none."""
    found: list[object] = []
    end: object = None
    for piece in pieces:
        engine.receive_bytes(piece, 0.0)
        for event in engine.events():
            match event:
                case Received(id, data, time):
                    found.append((id, data, time))
                case ReceivedBlock(block):
                    found += [(each.id, msgspec.json.decode(each.data), each.time) for each in block.messages()]
                case Failed(error):
                    end = (error.message, error.rule, error.offset)
                case Refused(text, code):
                    end = (text, code)
                case _:
                    end = event
    return found, end


def assert_alike(pieces: Sequence[bytes], after: int = 0, **config: Any) -> tuple[list[object], object]:
    block, plain = reading(BlockEngine, after, **config), reading(ClientEngine, after, **config)
    told = outcome(block, pieces)
    assert told == outcome(plain, pieces)
    assert (block.last_id, block.state, block.messages_received) == (
        plain.last_id,
        plain.state,
        plain.messages_received,
    )
    return told


def test_a_block_that_the_application_has_taken_is_acknowledged() -> None:
    engine = BlockEngine.stateful(UUID, None, verifier=Unverified(), config=ClientConfig(ack_every=2))
    engine.connection_made(0.0)
    engine.buffers_to_send()
    engine.receive_bytes(LINES[0] + b"\n" + LINES[1] + b"\n", 0.0)
    [block] = engine.events()
    assert isinstance(block, ReceivedBlock)
    assert not engine.has_output()
    engine.taken(block)
    assert b"".join(map(bytes, engine.buffers_to_send())) == b'{"uuid":"%b","ack":2}\n' % UUID.encode()


def test_the_data_is_the_json_that_the_server_sent() -> None:
    engine = reading(BlockEngine)
    engine.receive_bytes(b"\n".join([*LINES, b'{"id": 5, "data": [1, 2.50]}', b'{"id":6,']), 0.0)
    [event] = engine.events()
    assert isinstance(event, ReceivedBlock)
    assert [message.data for message in event.block.messages()] == [
        b'{"a":[1,null]}',
        b'"\\n"',
        b"1e5",
        '"é"'.encode(),
        b"[1, 2.50]",
    ]


@given(st.lists(st.integers(1, 120), max_size=8))
def test_messages_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    data, pieces, begin = b"\n".join(LINES) + b"\n", [], 0
    for end in [*sorted(cuts), len(data)]:
        pieces.append(data[begin:end])
        begin = max(begin, end)
    found, _ = assert_alike([piece for piece in pieces if piece])
    assert len(found) == 4


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b'{"id":5}',
        b'{"id":5.0,"data":1}',
        b'{"id":true,"data":1}',
        b'{"id":7,"data":1}',
        b'{"id":4,"data":1}',
        b'{"id":4294967296,"data":1}',
        b'{"id":5,"data":tru}',
        b'{"id":5,"data":"\xff"}',
        b'{"id":5,"data":"\\ud800"}',
        b'{"id":5,"data":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"id":5,"data":1} {"id":6,"data":1}',
        b'{"id":5,"data":1,"time":"now"}',
        b'{"id":5,"data":1,"time":null,"more":[]}',
        b'{"id":5,"data":"error"}',
        b'{"id":5,"data":1,"error":"the end"}',
        b'{"error":"gone","code":"gone","acknowledged":9}',
        b'{"error":"later","code":"unavailable"}',
        b'{"error":5}',
        b'{"id":5,"data":"' + b"x" * 70_000 + b'"}',
    ],
)
def test_an_unusual_line_is_judged_as_by_the_engine_that_parses_each_line(line: bytes) -> None:
    assert_alike([b"\n".join([*LINES, line]) + b"\n"])
    assert_alike([b"\n".join([*LINES, line, b'{"id":6,"data":1}']) + b"\n"])


def test_a_refusal_after_messages_comes_after_them() -> None:
    found, end = assert_alike([b"\n".join([*LINES, b'{"error":"busy","code":"busy"}']) + b"\n"])
    assert (len(found), end) == (4, ("busy", ErrorCode.BUSY))


def test_ids_end_with_32_bits() -> None:
    last = 2**32 - 1
    found, end = assert_alike([b'{"id":%d,"data":1}\n{"id":%d,"data":1}\n' % (last, last + 1)], after=last - 1)
    assert (len(found), end is None) == (1, False)


def test_an_unfinished_line_above_the_limit_is_refused() -> None:
    _, end = assert_alike([LINES[0] + b"\n" + b"x" * 200], line=100)
    assert end is not None


def test_after_a_lost_connection_reading_continues_after_the_last_message() -> None:
    engine = reading(BlockEngine)
    outcome(engine, [b"\n".join(LINES) + b'\n{"id":5,"da'])
    engine.connection_lost(0.0)
    engine.connection_made(0.0)
    assert b'"state":4' in bytes(engine.buffers_to_send()[0])
    assert outcome(engine, [b'{"id":5,"data":5}\n'])[0] == [(5, 5, None)]


def test_an_observer_gets_each_line() -> None:
    sizes: list[int] = []

    class Sizes(BaseObserver):
        def frame(self, direction: str, channel: str, name: str, size: int) -> None:
            sizes.append(size)

    engine = BlockEngine.stateful(UUID, None, verifier=Unverified(), observer=Sizes())
    engine.connection_made(0.0)
    engine.buffers_to_send()
    sizes.clear()
    engine.receive_bytes(b"\n".join(LINES[:2]) + b'\n{"id": 4, "data": 1}\n', 0.0)
    engine.receive_bytes(LINES[2] + b"\n", 0.0)
    assert sizes == [len(line) for line in LINES[:2]]
