"""Every row of the collected vectors, with its `expect`."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from muxkit.protocols.restream import (
    Doubling,
    Failed,
    Numbers,
    Registered,
    Resumed,
    ServerEngine,
    StatelessRequested,
    parse_integer,
)
from muxkit.protocols.restream.applications import next_value, roll
from muxkit.testing._pair import drain
from tests.protocols import _vectors as vectors
from tests.protocols.restream._helpers import said

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.protocols._vectors import Row

Line = dict[str, Any]


def check_chain(row: Row) -> None:
    value, crc, numbers = row["seed"], 0, Numbers()
    data: Mapping[str, int] = {}
    state = numbers.initial({"count": len(row["values"])}, row["seed"])
    for expected, rolled in zip(row["values"], row["rolling_crc"], strict=True):
        value = next_value(value)
        crc = roll(crc, value)
        data, state = numbers.step(state)
        assert (value, crc) == (expected, rolled)
        assert (data["value"], state["crc"]) == (expected, rolled)
    assert data["crc"] == row["rolling_crc"][-1]


def check_checksum(row: Row) -> None:
    crc = 0
    for value in row["values"]:
        crc = roll(crc, value)
    assert crc == row["crc"] == zlib.crc32(bytes.fromhex(row["hex"]))


def check_doubling(row: Row) -> None:
    request = b"{}\n" if row["state"] is None else b'{"state":"%b"}\n' % row["state"].encode()
    assert doubled(request, seed=0x9A, count=len(row["data"])) == row["data"]


def check_transcript(row: Row) -> None:
    """Return the same replies, with the numbers of the reference.

    `hex` (or `sent`) holds the lines of the client: its request, then acknowledgements or anything else. `received` is
    the reply, as lines: messages, perhaps one error at the end, and `<EOF>` or `<OPEN>`, which say whether the server
    closes then. Words of an error are not compared, since each server has its own.
    """
    sent = vectors.data_of(row)
    if "sent" in row:
        assert "".join(row["sent"]).encode() == sent, "`sent` and `hex` differ"
    request, *rest = sent.splitlines(keepends=True)
    lines = "".join(row["received"]).splitlines()
    end = lines.pop() if lines and lines[-1] in ("<EOF>", "<OPEN>") else ""
    replies = [json.loads(line) for line in lines]
    is_refused = bool(replies) and "error" in replies[-1]
    assert not any("error" in reply for reply in replies[:-1])
    messages = replies[:-1] if is_refused else replies
    if not messages:
        assert is_refused, "a transcript in which nothing comes back"
        ours, is_closing = answered(sent) if rest else answered(request)
        assert next(iter(ours[-1])) == "error"
        assert len(ours) == 1
        assert is_closing is (end != "<OPEN>")
        return
    server = ServerEngine()
    server.receive_bytes(request, 0.0)
    (event,) = server.events()
    if isinstance(event, StatelessRequested):
        # The reference doubles, so its first number is enough to know what has to follow.
        values = [int(message["data"]) for message in messages]
        value = values[0] if event.state is None else Doubling().next(parse_integer(event.state))
        for _ in values:
            server.send_value(value)
            value = Doubling().next(value)
    else:
        assert isinstance(event, Registered | Resumed)
        assert server.accept(head=event.state if isinstance(event, Resumed) else 0)
        known = event.state if isinstance(event, Resumed) else 0
        assert [message["id"] for message in messages] == [*range(known + 1, known + 1 + len(messages))]
        for message in messages:
            server.send_message(message["id"], message["data"], final=Numbers().is_final(message["data"]))
    written = drain(server)
    server.receive_bytes(b"".join(rest), 0.0)
    assert any(isinstance(event, Failed) for event in server.events()) is is_refused
    assert server.closing is (end == "<EOF>")
    written += drain(server)
    ours_text = written.decode().splitlines()
    assert ours_text[: len(messages)] == lines[: len(messages)]
    assert len(ours_text) == len(lines)
    assert not is_refused or next(iter(json.loads(ours_text[-1]))) == "error"


def check_overruled(row: Row) -> None:
    """The rows in which the reference differs: an error line and the end, or a replay that it refused."""
    request = vectors.data_of(row)
    assert "".join(row["sent"]).encode() == request, "`sent` and `hex` differ"
    theirs = "".join(row["received"]).splitlines()
    ours, is_closing = answered(request)
    if "error" in ours[-1]:
        assert len(ours) == 1
        assert is_closing
        # The reference is silent, continues, or uses other words.
        assert json.dumps(ours[0], separators=(",", ":")) not in theirs
    else:
        assert [line["id"] for line in ours] == [*range(1, len(ours) + 1)]
        assert not theirs or [json.dumps(line, separators=(",", ":")) for line in ours] != theirs[: len(ours)]


def doubled(request: bytes, *, seed: int, count: int) -> list[str]:
    server = ServerEngine()
    server.receive_bytes(request, 0.0)
    (event,) = server.events()
    assert isinstance(event, StatelessRequested)
    value = seed if event.state is None else Doubling().next(parse_integer(event.state))
    for _ in range(count):
        server.send_value(value)
        value = Doubling().next(value)
    values = []
    for message in said(server):
        assert isinstance(message, dict)
        assert list(message) == ["data"]
        values.append(str(message["data"]))
    return values


def answered(request: bytes) -> tuple[list[Line], bool]:
    """Return the replies of this library's server, which has the sessions of the transcripts, none acknowledged."""
    server = ServerEngine()
    server.receive_bytes(request, 0.0)
    event = server.events()[-1]
    if isinstance(event, Registered):
        stored = SESSIONS.get(event.uuid)
        if stored is None or stored == event.params:
            try:
                state = Numbers().initial(event.params, 0)
            except Exception as error:  # any error of the application about its params
                server.fail(str(error))
            else:
                replay(server, state, known=0)
        else:
            server.fail("this session has other params")
    elif isinstance(event, Resumed):
        stored = SESSIONS.get(event.uuid)
        if stored is None:
            server.fail("this session is not known here")
        else:
            replay(server, Numbers().initial(stored, 0), known=event.state)
    else:
        assert isinstance(event, Failed)
    lines = [line for line in said(server) if isinstance(line, dict)]
    return lines, server.closing


def replay(server: ServerEngine, state: Mapping[str, int], *, known: int) -> None:
    data: Mapping[str, int] = {}
    for id in range(1, 3):
        data, state = Numbers().step(state)
        if id == 1:
            assert server.accept(head=max(known, 1))
        if id > known:
            server.send_message(id, data, final=Numbers().is_final(data))
        if Numbers().is_final(data):
            break


def wire(row: Row, *fields: str) -> bool:
    return vectors.expects(row, "wire") and row.keys() >= set(fields)


KINDS = (
    vectors.Kind("evidence", vectors.evidence, vectors.nothing_owed),
    vectors.Kind(
        "chain",
        lambda row: wire(row, "seed", "values", "rolling_crc"),
        check_chain,
        frozenset({"seed", "values", "rolling_crc"}),
    ),
    vectors.Kind("checksum", lambda row: wire(row, "values", "crc"), check_checksum, frozenset({"values", "crc"})),
    vectors.Kind("doubling", lambda row: wire(row, "state", "data"), check_doubling, frozenset({"state", "data"})),
    vectors.Kind(
        "transcript",
        lambda row: vectors.expects(row, "transcript") and "received" in row,
        check_transcript,
        frozenset({"sent", "received"}),
    ),
    vectors.Kind(
        "overruled",
        lambda row: vectors.expects(row, "overruled") and "received" in row,
        check_overruled,
        frozenset({"sent", "received"}),
    ),
)
ROWS = vectors.rows_of("restream")
REQUESTS = [json.loads(bytes.fromhex("".join(row["hex"]))) for row in ROWS if vectors.expects(row, "transcript")]
SESSIONS: dict[str, Any] = {line["uuid"]: line["params"] for line in REQUESTS if "params" in line}


@pytest.mark.clause("restream-N06", "restream-N08", "restream-A02", "restream-A03", "restream-S12", "restream-S13")
@pytest.mark.clause("restream-L01", "restream-L11", "restream-L12", "restream-L13", "restream-M02", "restream-S06")
@pytest.mark.clause("restream-S10", "restream-S21", "restream-S22")
@pytest.mark.clause("restream-F05", "restream-M03", "restream-S03", "restream-S04")
@pytest.mark.parametrize("row", vectors.params(ROWS))
def test_a_row_holds(row: Row) -> None:
    vectors.check(row, KINDS)


UUID = "11111111-2222-4333-8444-555555555555"


def talk(name: str, expect: str, request: str, received: str) -> Row:
    return {"name": name, "expect": expect, "hex": [request.encode().hex()], "sent": [request], "received": [received]}


NEW_ROWS: list[tuple[Row, Row]] = [
    (
        {"name": "a new checksum", "hex": "00000001", "values": [1], "crc": zlib.crc32(b"\0\0\0\1"), "expect": "wire"},
        {"crc": 1},
    ),
    ({"name": "a new doubling", "hex": "", "state": "5", "data": ["10"], "expect": "wire: doubling"}, {"data": ["11"]}),
    (
        talk("a new talk", "transcript: …", '{"state":"7"}\n', '{"data":"14"}\n{"data":"28"}\n'),
        {"received": ['{"data":"14"}\n{"data":"29"}\n']},
    ),
    (
        talk(
            "a new session",
            "transcript: …",
            f'{{"uuid":"{UUID}","state":1}}\n',
            '{"id":2,"data":{"value":1,"crc":2}}\n<EOF>',
        ),
        {"received": ['{"id":2,"data":{"value":1}}\n<EOF>']},
    ),
    (
        talk(
            "a new refusal",
            "overruled: …",
            f'{{"uuid":"{UUID}","params":{{"count":70000}}}}\n',
            '{"id":1,"data":{"value":9}}\n',
        ),
        {"received": [""], "hex": [b'{"state":"1"}\n'.hex()]},
    ),
]


@pytest.mark.parametrize(("row", "wrong"), NEW_ROWS, ids=lambda row: row.get("name", ""))
def test_a_new_row_of_a_known_kind_is_tested(row: Row, wrong: Row) -> None:
    vectors.check(row, KINDS)
    with pytest.raises(AssertionError):
        vectors.check(row | wrong, KINDS)


@pytest.mark.parametrize("row", [{"expect": "wire"}, {"expect": "transcript"}, {"expect": "reject", "received": []}])
def test_a_row_of_an_unknown_kind_fails(row: Row) -> None:
    with pytest.raises(AssertionError, match="has to be of one kind"):
        vectors.check({"name": "new", "hex": ""} | row, KINDS)
