"""The replay of vectors: rows of new combinations are understood, and a broken row of any kind fails.

The rows here were written by hand from the documents, so they are independent of the encoders. Each is replayed as it
is, and then broken in every way that `mutations` knows.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from muxkit._errors import RemoteProtocolError
from muxkit.core import NeedMore
from tests.protocols import _vectors as vectors
from tests.protocols.aqueduct import test_vectors as aqueduct
from tests.protocols.bpmux import test_vectors as bpmux
from tests.protocols.e3x import test_vectors as e3x
from tests.protocols.relink import test_vectors as relink
from tests.protocols.restream import test_vectors as restream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.protocols._vectors import Row

KINDS: dict[str, Sequence[vectors.Kind]] = {
    "aqueduct": aqueduct.KINDS,
    "bpmux": bpmux.KINDS,
    "e3x": e3x.KINDS,
    "relink": relink.KINDS,
    "restream": restream.KINDS,
}
FAILURES: tuple[type[BaseException], ...] = (
    AssertionError,
    AttributeError,
    LookupError,
    NeedMore,
    RemoteProtocolError,
    TypeError,
    ValueError,
    OverflowError,
    pytest.fail.Exception,
)


def row(name: str, hex: str | list[str], expect: str = "wire", **fields: Any) -> Row:
    joined = hex.replace(" ", "") if isinstance(hex, str) else [part.replace(" ", "") for part in hex]
    return {"name": name, "hex": joined, "expect": expect, "meaning": "", "source": "by hand", **fields}


def talk(name: str, sent: list[str], received: str, expect: str = "transcript") -> Row:
    return row(name, ["".join(sent).encode().hex()], expect, sent=sent, received=[received])


UUID = "11111111-2222-4333-8444-555555555555"
EPOCH = 1_700_000_000_000_000  # 0x00060a24181e4000
EPOCH_HEX = "00 40 1e 18 24 0a 06 00"

NEW: dict[str, list[Row]] = {
    "bpmux": [
        row("varu64 1", "01"),
        row("varu64 255", "f8 ff"),
        row("of one byte", "2a", value=42),
        row("of three bytes", "f9 01 2c", value=300),
        row("varu64 65536", "fa 01 00 00", value=65536),
        row("varu64 18446744073709551615", "ff ff ff ff ff ff ff ff ff"),
        row("varu64 invalid: cut in the middle", "fa 01 00", "reject"),
        row("varu64 invalid: 255 in three bytes", "f9 00 ff", "reject"),
        row("varu64 invalid: 2^32 - 1 in nine bytes", "ff 00 00 00 00 ff ff ff ff", "reject"),
        row("out-request", "1c 05 01 78 64", type="out-request", id=5, payload="78", credit=100, ping=True),
        row("in-request, a response, id=248", "30 f8 f8 00", type="in-request", payload=""),
        row("out-stream with credit=70000", "88 02 fa 01 11 70", type="out-stream", id=2),
        row("in-stream end", "a2 07 02 6e 6f", type="in-stream", id=7, end="6e6f"),
        row("payload and end in one chunk", "52 03 01 61 01 62", type="out-sink", id=3, payload="61", end="62"),
        row("ack-end", "21 09", type="in-request", id=9, ack_end=True),
        row("partial total=65536", "e2 01 00 00", type="partial"),
        row(
            "two chunks",
            ["d8 03 01 64 0a", "44 03"],
            chunks=[
                {"type": "duplex", "id": 3, "payload": "64", "credit": 10},
                {"type": "out-sink", "id": 3, "ping": True},
            ],
        ),
        row("a total of zero", "e0 00", "reject", rule="bpmux-P04"),
        row("a payload without credit", "50 01 01 78", "reject", before="50 01 00"),
        row("a second end", "42 01 00", "reject", before="50 01 00 42 01 00"),
        row("ack-end without an end", "81 01", "reject", before="50 01 00"),
    ],
    "aqueduct": [
        row("varint 0", "00"),
        row("varint 127", "7f"),
        row("of two bytes", "80 01", value=128),
        row("varint 2097151", "ff ff 7f", value=2097151),
        row("ROUTE_TO creator=1 sender=1 oneshot=0 index=3", "03 1b"),
        row("ROUTE_TO", "03 96 01", creator=0, sender=1, oneshot=1, index=18),
        row("SENT_UNRELIABLE", "05 ac 02", count=300),
        row("FINISH_SENDER sent_reliable=0", "06 00"),
        row("ACK_RELIABLE deltas=[0,3]", "08 02 00 03"),
        row("ACK_NACK_UNRELIABLE", "09 08 02 05 01", channel=8, deltas=[5, 1]),
        row("MESSAGE num=130", "04 82 01 00 00 01 78", payload_hex="78", ids=[]),
        row("MESSAGE", "04 00 00 04 08 00 02 00 00", num=0, ids=[8, 2], payload_hex=""),
        row("CLOSE_RECEIVER", "0a", frame="CLOSE_RECEIVER"),
        row(
            "three frames",
            ["03 00", "07", "0b"],
            frames=[
                {"frame": "ROUTE_TO", "creator": 0, "sender": 0, "oneshot": 0, "index": 0},
                {"frame": "CANCEL_SENDER"},
                {"frame": "FORGET_CHANNEL"},
            ],
        ),
        row("ACK_NACK_UNRELIABLE deltas=[2,1]", "09 02 02 01", "option: channel_field=False"),
        row("invalid: two zeros", "09 02 00 00", "option: channel_field=False"),
        row("a tag that does not exist", "0c", "reject"),
        row("ack-version behind ROUTE_TO", "03 02 01", "reject"),
    ],
    "e3x": [
        row("an empty head is written as two zeros", "00 00", head={}, body=None),
        row("a head and a body", "000f 7b2261636b223a312c2263223a327d 6869", head={"ack": 1, "c": 2}, body="hi"),
        row("a binary head", "0002 abcd 78", head="hex:abcd", body="x"),
        row("read: a body only", "0000 6869", result={"json": {}, "head": "", "body": "hi"}),
        row("read: a head that is no object", "0007 5b312c322c335d", result="undefined"),
        row("one hole: ack=3 buffered=[5] capacity=10", "", json={"ack": 3, "miss": [1, 9]}),
        row("two holes in fields", "", json={"ack": 0, "miss": [1, 1, 18]}, ack=0, buffered=[3], capacity=20),
        row("one chunk and its end", "02 6162 00", packet="6162", size=10),
        row("two chunks and their end", "02 6162 02 6364 00", packet="61626364", size=3),
        row("two packets read", ["01 61 00", "01 62 00"], packets=["61", "62"]),
    ],
    "relink": [
        row("message in fields", "11 01 0a 00 02 00 00 00 68 69 00 00 00 00 00 00", idsize=1, id=10, parts=["hi"]),
        row("message parts=[hi] idsize=1 id=0x0a", "11 01 0a 00 02 00 00 00 68 69 00 00 00 00 00 00", total_len=16),
        row("channel_op_close idsize=2", "41 00 34 12 00 00 00 00", id=0x1234, total_len=8),
        row("sequence_op_commit idsize=0", "09 00 00 00 07 00 00 00", seq=7),
        row("hs_listener epoch=5 link=9", "05 00 00 00 00 00 00 00 09 00 00 00 00 00 00 00", total_len=16),
        row("hs_listener", "05 00 00 00 00 00 00 00 09 00 00 00 00 00 00 00", epoch=5, link=9),
        row(
            'hs_version + hs_connector name="ab" idsizes=1,2 flags=0 epoch=0 link=0 + general_ping',
            "00 00 00 00 00 00 00 00  02 61 62 01 02 00 00 00" + "00" * 16 + "20 00 00 00 00 00 00 00",
        ),
        row(
            "hs_version + hs_listener epoch=3 link=4 + channel_op_close idsize=2 id=0x0001",
            "00 00 00 00 00 00 00 00  03 00 00 00 00 00 00 00 04 00 00 00 00 00 00 00  41 00 01 00 00 00 00 00",
        ),
        row("a listener's answer, then a ping", EPOCH_HEX + "07 00 00 00 00 00 00 00" + "00 00 00 00 00 00 00 00"),
    ],
    "restream": [
        talk("stateless from 5", ['{"state":"5"}\n'], '{"data":"10"}\n{"data":"20"}\n'),
        talk(
            "stateless, then no line of JSON", ['{"state":"5"}\n', "x\n"], '{"data":"10"}\n{"error":"no JSON"}\n<EOF>'
        ),
        talk("no JSON at all", ["{\n"], '{"error":"bad"}\n<EOF>'),
        talk("an array", ["[1]\n"], '{"error":"no object"}\n<EOF>'),
        talk("unknown uuid", [f'{{"uuid":"{UUID[:-1]}0","state":1}}\n'], '{"error":"unknown client"}\n<EOF>'),
        talk(
            "a session, then an ack of nothing",
            [f'{{"uuid":"{UUID}","state":1}}\n', '{"ack":0}\n'],
            '{"id":2,"data":{"value":1}}\n{"error":"ack 0 names no message"}\n<EOF>',
        ),
        talk(
            "a session, then an ack beyond what was sent",
            [f'{{"uuid":"{UUID}","state":1}}\n', '{"ack":3}\n'],
            '{"id":2,"data":{"value":1}}\n{"error":"ack 3"}\n<EOF>',
        ),
        talk(
            "a session that ends in order",
            [f'{{"uuid":"{UUID}","state":3}}\n'],
            '{"id":4,"data":{"value":7,"crc":9}}\n<EOF>',
        ),
        row("doubling", "", state="7", data=["14", "28"]),
    ],
}


def mutations(protocol: str, kind: str, original: Row) -> Iterator[tuple[str, Row, str]]:
    """Give broken copies of a row, each with what was done, and why it may pass; "" if it may not."""
    yield "a field that nobody knows", original | {"colour": 1}, ""
    yield "expect", original | {"expect": "unheard of"}, ""
    data = vectors.data_of(original)
    is_reject = kind in ("violation", "bad number", "bad report without its field", "overruled")
    is_undefined = original.get("result") == "undefined"
    other = "a violation may come before the last byte, and another one is also a violation" if is_reject else ""
    other = other or ("a head that cannot be read may be broken in other ways" if is_undefined else "")
    if data:
        is_spare = kind == "chunks read" and data.endswith(bytes(2))
        shorter = other or ("an empty chunk more or less changes nothing" if is_spare else "")
        yield "cut by a byte", original | {"hex": data[:-1].hex()}, shorter
        longer = other or (
            "it belongs to the body" if kind == "packet read" and "hi" in str(original["result"]) else ""
        )
        yield "longer by a byte", original | {"hex": data.hex() + "ff"}, longer if kind == "packet read" else other
    if (protocol, kind) in STATES_ALL and not is_undefined:
        for bit in range(min(8 * len(data), 8 * 16)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            yield f"bit {bit} flipped", original | {"hex": flipped.hex()}, ""
    for field in original.keys() - vectors.NOTES:
        for value in others(field, original[field]):
            yield f"{field}={value!r}", original | {field: value}, NEUTRAL.get((kind, field), "")


STATES_ALL = {  # kinds whose rows say everything that their bytes say
    ("bpmux", "number"),
    ("aqueduct", "number"),
    ("e3x", "packet written"),
    ("e3x", "packet read"),
    ("e3x", "chunks written"),
    ("e3x", "chunks read"),
    ("relink", "packet"),
    ("relink", "handshake"),
    ("restream", "checksum"),
}
NEUTRAL = {
    ("violation", "before"): "it only sets the stage",
    ("chunks written", "size"): "a packet below the size is one chunk, whatever the size",
    ("packet", "idsize"): "a small id has the same bytes in some larger sizes, which the alignment hides",
    ("overruled", "received"): "what a reference program said, which no reply of ours may repeat",
}


def others(field: str, value: object) -> list[object]:
    """Return values that differ from one in a way that has a meaning."""
    if field == "received":
        assert isinstance(value, list)
        text = "".join(value)
        changed = text.replace("<EOF>", "<OPEN>") if "<EOF>" in text else text + "<EOF>"
        return [[changed], [text.replace('"data"', '"date"')] if '"data"' in text else []]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, str):
        return [f"{value}00"]
    if isinstance(value, list):
        if field == "data":
            return [[*value, *value]]  # a shorter list is what came first of the same endless stream
        return [value[:-1], *([] if field == "buffered" else [[*value, *value]])] if value else [[1]]
    if isinstance(value, dict):
        return [value | {"another": 1}, {}] if value else [{"another": 1}]
    return ["another"]


def cases() -> list[object]:
    found: list[object] = []
    for protocol, kinds in KINDS.items():
        rows = [*vectors.rows_of(protocol), *NEW[protocol]]
        found += [
            pytest.param(protocol, each, id=f"{protocol}: {each['name']}"[:80])
            for each in rows
            if vectors.kind_of(each, kinds).name not in ("evidence", "prose", "missing padding", "large ids")
        ]
    return found


@pytest.mark.parametrize(
    ("protocol", "new"),
    [pytest.param(protocol, each, id=f"{protocol}: {each['name']}"[:80]) for protocol in NEW for each in NEW[protocol]],
)
def test_a_row_of_a_new_combination_is_replayed(protocol: str, new: Row) -> None:
    vectors.check(new, KINDS[protocol])


@pytest.mark.parametrize(("protocol", "original"), cases())
def test_a_row_that_was_broken_in_any_way_fails(protocol: str, original: Row) -> None:
    kinds = KINDS[protocol]
    kind = vectors.kind_of(original, kinds).name
    passed = []
    for done, broken, may_pass in mutations(protocol, kind, json.loads(json.dumps(original))):
        try:
            vectors.check(broken, kinds)
        except FAILURES:
            continue
        if not may_pass:
            passed.append(done)
    assert not passed, f"still passes with: {', '.join(passed)}"


def test_each_kind_of_row_fails_for_some_broken_bytes() -> None:
    """Rows that do not say every value of their bytes still notice most flipped bits; this counts them all."""
    tried = failed = 0
    for protocol, kinds in KINDS.items():
        for original in [*vectors.rows_of(protocol), *NEW[protocol]]:
            kind = vectors.kind_of(original, kinds)
            data = vectors.data_of(original)
            if not data or vectors.evidence(original) or not vectors.expects(original, "wire"):
                continue
            of_row = 0
            for bit in range(min(8 * len(data), 64)):
                flipped = bytearray(data)
                flipped[bit // 8] ^= 1 << bit % 8
                try:
                    vectors.check(original | {"hex": flipped.hex()}, kinds)
                except FAILURES:
                    of_row += 1
                tried += 1
            assert of_row, f"{kind.name}: no flipped bit of {original['name']!r} is noticed"
            failed += of_row
    assert failed / tried > 0.9, f"{failed} of {tried}"


@pytest.mark.parametrize("protocol", sorted(KINDS))
def test_a_row_with_a_setting_that_contradicts_its_name_fails(protocol: str) -> None:
    contradicting = {
        "aqueduct": row("SENT_UNRELIABLE count=5", "05 05", count=6),
        "bpmux": row("partial total=42", "e0 2a", total=43),
        "e3x": row("miss ack=3 buffered=[5] capacity=10", "", json={"ack": 3, "miss": [1, 9]}, ack=4),
        "relink": row("sequence_op_commit seq=7 idsize=0", "09 00 00 00 07 00 00 00", seq=8),
        "restream": row("doubling state=8", "", state="7", data=["14"], colour="red"),
    }
    with pytest.raises(AssertionError):
        vectors.check(contradicting[protocol], KINDS[protocol])
