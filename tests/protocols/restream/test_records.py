"""Records and blocks: the bytes that their page documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit import RemoteProtocolError
from muxkit.protocols import restream
from muxkit.protocols.restream.applications import Unverified
from muxkit.protocols.restream.engine import BlockEngine, ReceivedBlock
from muxkit.protocols.restream.store import StoreFull, StoreLimits, open_store
from muxkit.protocols.restream.wire import Block, StoredMessage
from muxkit.protocols.restream.wire.blocks import MAX_BODY, encode_block
from muxkit.protocols.restream.wire.messages import encode_stored, parse_request
from muxkit.protocols.restream.wire.records import encoded_of, json_of
from tests.protocols.restream._server_clients import U1, place
from tests.protocols.restream.test_engine_blocks import reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

    from tests.protocols.restream.stores import Place as StorePlace

pytest_plugins = ["tests.protocols.restream._postgres", "tests.protocols.restream.stores_fixtures"]

EXAMPLES = {
    "value": (restream.Record(b"hi!"), b"\x00" + b"\0\0\0\0" + b"\0\0\0\0" + b"hi!", b'{"@record":{"value":"aGkh"}}'),
    "key": (
        restream.Record(b"\n\xff", b"k1"),
        b"\x00" + b"\3\0\0\0" + b"\0\0\0\0" + b"k1\n\xff",
        b'{"@record":{"value":"Cv8=","key":"azE="}}',
    ),
    "empty key": (restream.Record(b"", b""), b"\x00" + b"\1\0\0\0" + b"\0\0\0\0", b'{"@record":{"value":"","key":""}}'),
    "no value": (
        restream.Record(None, b"k1"),
        b"\x01" + b"\3\0\0\0" + b"\0\0\0\0" + b"k1",
        b'{"@record":{"value":null,"key":"azE="}}',
    ),
    "headers": (
        restream.Record(b"v", None, (("a", b"\0"), ("a", None))),
        b"\x00" + b"\0\0\0\0" + b"\x19\0\0\0" + b'[["a","AA=="],["a",null]]' + b"v",
        b'{"@record":{"value":"dg==","headers":[["a","AA=="],["a",null]]}}',
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_record_has_these_bytes_in_a_block_and_in_json(name: str) -> None:
    record, encoded, json = EXAMPLES[name]
    assert record.encode() == encoded
    assert restream.Record.decode(encoded) == record
    assert json_of(encoded) == json
    assert encoded_of(json) == encoded


records = st.builds(
    restream.Record,
    st.none() | st.binary(max_size=30),
    st.none() | st.binary(max_size=10),
    st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3).map(tuple),
)


@given(records)
def test_each_form_of_a_record_gives_the_same_record(record: restream.Record) -> None:
    assert restream.Record.decode(record.encode()) == record
    assert encoded_of(json_of(record.encode())) == record.encode()
    assert restream.Record.of(record.to_json()) == record


@pytest.mark.parametrize("data", [None, 5, {}, {"@record": 5}, {"@record": {"value": "?"}}, {"@record": {}, "more": 1}])
def test_other_data_is_not_a_record(data: restream.Json) -> None:
    assert restream.Record.of(data) is None


@pytest.mark.parametrize(
    "json", [b'{"@record":5}', b'{"@record":{"value":"?"}}', b'{"@record":{"value":null},"more":1}']
)
def test_json_that_is_not_a_record_stays_as_it_is(json: bytes) -> None:
    assert encoded_of(json) == json


@pytest.mark.parametrize(
    "encoded", [b"", b"\x00\0\0\0\0", b"\x02" + b"\0" * 8, b"\x00\5\0\0\0\0\0\0\0k", b"\x01" + b"\0" * 8 + b"v"]
)
def test_a_damaged_record_is_refused(encoded: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="invalid record"):
        restream.Record.decode(encoded)


def test_damaged_headers_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="invalid headers"):
        restream.Record.decode(b"\x00\0\0\0\0\1\0\0\0{")


# ---------------------------------------------------------------------------- blocks

MESSAGES = [StoredMessage(101, 1.5, b'{"n":1}'), StoredMessage(102, 1.5, restream.Record(b"hi!").encode())]
BLOCK = b'{"block":{"id":101,"sizes":[7,12],"time":1.5}}\n{"n":1}\x00\0\0\0\0\0\0\0\0hi!'
LINES = b'{"id":101,"data":{"n":1},"time":1.5}\n{"id":102,"data":{"@record":{"value":"aGkh"}},"time":1.5}\n'
LATER = [StoredMessage(103, None, b"1"), StoredMessage(104, 2.0, b"2")]
LATER_BLOCK = b'{"block":{"id":103,"sizes":[1,1],"times":[null,2.0]}}\n12'


def test_messages_are_this_block_and_these_lines() -> None:
    assert encode_block(MESSAGES) == BLOCK
    assert encode_block(LATER) == LATER_BLOCK
    assert encode_stored(MESSAGES) == LINES


def test_a_request_for_blocks_is_this_line() -> None:
    engine = reading(BlockEngine, 100, reader="")
    engine.connection_lost(0.0)
    engine.connection_made(0.0)
    line = b"".join(bytes(each) for each in engine.buffers_to_send())
    assert line == b'{"uuid":"%b","state":100,"reader":"","blocks":true}\n' % engine.uuid.encode()
    assert parse_request(line, digits=9, status=True) == restream.Resumed(engine.uuid, 100, "", blocks=True)


def received(pieces: Sequence[bytes], **config: int) -> list[StoredMessage]:
    engine = reading(BlockEngine, 100, **config)
    found: list[StoredMessage] = []
    for piece in pieces:
        engine.receive_bytes(piece, 0.0)
        for event in engine.events():
            assert isinstance(event, ReceivedBlock), event
            found += event.block.messages()
    assert engine.last_id == 100 + len(found)
    return found


@given(st.lists(st.integers(1, 400), max_size=8))
def test_blocks_and_lines_may_be_mixed_and_cut_anywhere(cuts: list[int]) -> None:
    data = BLOCK + b'{"id":103,"data":"a"}\n{"id":104,"data":{"@record":{"value":null}}}\n'
    data += LATER_BLOCK.replace(b"103", b"105") + b'{"id":107,"data":1}\n'
    pieces, begin = [], 0
    for end in [*sorted(cuts), len(data)]:
        pieces.append(data[begin:end])
        begin = max(begin, end)
    expected = [
        *MESSAGES,
        StoredMessage(103, None, b'"a"'),
        StoredMessage(104, None, restream.Record(None).encode()),
        StoredMessage(105, None, b"1"),
        StoredMessage(106, 2.0, b"2"),
        StoredMessage(107, None, b"1"),
    ]
    assert received([piece for piece in pieces if piece]) == expected


def test_a_line_in_a_record_is_not_taken_for_a_line_of_the_server() -> None:
    message = StoredMessage(101, None, restream.Record(b'\n{"error":"no"}\n{"block":{}}\n').encode())
    assert received([encode_block([message])]) == [message]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"block":5}\n', "invalid header of a block"),
        (b'{"block":{"id":101,"sizes":[]}}\n', "invalid block of 0 messages"),
        (b'{"block":{"id":4294967295,"sizes":[1,1]}}\n12', "invalid block of 2 messages"),
        (b'{"block":{"id":101,"sizes":[0]}}\n', "message without data"),
        (b'{"block":{"id":101,"sizes":[1],"times":[1,2]}}\n1', "expected 1 times, got 2"),
        (b'{"block":{"id":103,"sizes":[1]}}\n1', "message 103 after message 100: 2 are missing"),
        (b'{"block":{"id":100,"sizes":[1]}}\n1', "message 100 after message 100: ids have to ascend"),
        (b'{"block":{"id":101,"sizes":[99999999]}}\n', "allows no more"),
        (b'{"block":{"id":101,"sizes":[%s]}}\n' % b",".join([b"65536"] * 17), f"expected at most {MAX_BODY}"),
    ],
)
def test_an_invalid_block_is_a_violation(line: bytes, problem: str) -> None:
    engine = reading(BlockEngine, 100)
    engine.receive_bytes(line, 0.0)
    [event] = engine.events()
    assert isinstance(event, restream.Failed)
    assert problem in event.error.message


def test_an_unfinished_block_counts_for_the_stall_of_a_connection() -> None:
    engine = reading(BlockEngine, 100)
    engine.receive_bytes(BLOCK[:-1], 0.0)
    deadline = engine.next_deadline()
    assert deadline is not None
    engine.handle_deadline(deadline)
    assert engine.events() == [restream.Silent(engine.limits.stall)]


def test_a_block_is_split_between_two_messages() -> None:
    whole = Block(101, [7, 12], [1.5, None], BLOCK.partition(b"\n")[2])
    first, rest = whole.split(1)
    assert rest is not None
    assert [*first.messages(), *rest.messages()] == [*whole.messages()]
    assert (first.last, rest.first) == (101, 102)
    assert whole.split(2) == (whole, None)


# ---------------------------------------------------------------------------- stores and servers


async def test_a_store_keeps_records_beside_json(place_of_store: StorePlace) -> None:
    appended = [EXAMPLES[name][0] for name in EXAMPLES]
    async with open_store(place_of_store.where, now=place_of_store.clock) as store:
        await store.register(U1, None)
        await store.append_many(U1, [*appended, {"a": 1}])
        assert [message.data for message in await store.replay(U1, 0)] == [*appended, {"a": 1}]
        assert [row.data for row in await store.replay_stored(U1, 0)] == [
            *(EXAMPLES[name][1] for name in EXAMPLES),
            b'{"a":1}',
        ]


async def test_a_record_has_the_size_limit_of_all_messages() -> None:
    async with open_store("memory:", limits=StoreLimits(message_bytes=20)) as store:
        await store.register(U1, None)
        await store.append(U1, restream.Record(b"x" * 11))
        with pytest.raises(StoreFull, match="21 bytes are more than the 20 allowed"):
            await store.append(U1, restream.Record(b"x" * 12))


async def test_a_client_that_knows_nothing_of_records_reads_json(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed()) as there:
        await there.store.register(U1, None, attached=False)
        await there.store.append_many(U1, [restream.Record(b"hi!", b"k1"), 5], time=1.5)
        client = await there.ask({"uuid": U1, "state": 0})
        assert await client.line() == b'{"id":1,"data":{"@record":{"value":"aGkh","key":"azE="}},"time":1.5}'
        assert await client.line() == b'{"id":2,"data":5,"time":1.5}'


async def test_a_client_that_asks_for_blocks_gets_the_stored_bytes(autojump_clock: MockClock) -> None:
    config = restream.ServerConfig(status=True)
    async with place(application=restream.Fed(), config=config) as there:
        await there.store.register(U1, None, attached=False)
        await there.store.append_many(U1, [restream.Record(b"hi!", b"k1"), 5], time=1.5)
        client = await there.ask({"uuid": U1, "state": 0, "reader": "", "blocks": True, "until": 2})
        assert await client.line() == b'{"block":{"id":1,"sizes":[14,1],"time":1.5}}'
        assert await client.rest_of_bytes() == EXAMPLES["key"][1][:9] + b"k1hi!5"


async def test_an_application_that_is_asked_for_each_message_may_have_records(autojump_clock: MockClock) -> None:
    async with place(application=restream.Fed(final_key="last")) as there:
        await there.store.register(U1, None, attached=False)
        await there.store.append_many(U1, [restream.Record(b"hi!"), {"last": 1}], time=1.5)
        client = await there.ask({"uuid": U1, "state": 0})
        assert (await client.hear())["data"] == {"@record": {"value": "aGkh"}}
        assert (await client.hear())["data"] == {"last": 1}


async def test_a_reader_of_a_program_turns_data_into_records(autojump_clock: MockClock) -> None:
    import trio

    from muxkit.runtime import background

    async with open_store("memory:") as store, background() as nursery:
        await store.register(U1, None, attached=False)
        await store.append(U1, EXAMPLES["headers"][0])
        served = await nursery.start(_serve, store)
        async with restream.stream(served.url, uuid=U1, verifier=Unverified()) as reader:
            assert restream.Record.of((await reader.receive()).data) == EXAMPLES["headers"][0]
        nursery.cancel_scope.cancel()
    await trio.lowlevel.checkpoint()


async def _serve(store: object, *, task_status: object) -> None:
    await restream.serve("restream+mem://records", store, application=restream.Fed(), task_status=task_status)  # type: ignore[arg-type]
