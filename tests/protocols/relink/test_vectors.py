"""Every row of the collected vectors, as its `expect` says."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from muxkit.core import Cursor, NeedMore
from muxkit.protocols.relink import (
    Ack,
    AckPacket,
    Bounds,
    Config,
    ConnectorHandshake,
    General,
    ListenerHandshake,
    MessagePacket,
    Operation,
    OperationPacket,
    Packet,
    Refused,
    Requested,
    encode_answer,
    encode_packet,
    encode_request,
    encode_version,
    parse_packet,
)
from muxkit.testing._pair import drain, feed
from tests.protocols.relink._helpers import (
    connector,
    fed,
    listener,
    parsed,
    quiet,
    reconnect,
    violation,
    written,
)

ROWS = json.loads((Path(__file__).parents[2] / "data/vectors/relink.json").read_text(encoding="utf-8"))
PACKET = re.compile(r"(general|channel_op|channel_ack|sequence_op|sequence_ack|message)[_ ]")
PARTS = {
    "parts=[]": (),
    "parts=[empty]": (b"",),
    "parts=[12345678]": (b"12345678",),
    "parts=[a,bb]": (b"a", b"bb"),
    "parts=[abc,empty,hello]": (b"abc", b"", b"hello"),
    "LONG(256 empty parts)": (b"",) * 256,
    "65535-byte-part (not large)": (b"x" * 65_535,),
    "LARGE(65536 x 'x' parts=2: [65536x78, 'y'])": (b"x" * 65_536, b"y"),
}


def rows(expect: str, prefix: str = "") -> list[object]:
    chosen = [row for row in ROWS if row["expect"].startswith(expect) and row["name"].startswith(prefix)]
    return [pytest.param(row, id=row["name"]) for row in chosen]


def row_named(name: str) -> str:
    return next(str(row["hex"]) for row in ROWS if row["name"] == name)


def packets(expect: str) -> list[object]:
    chosen = [row for row in ROWS if row["expect"].startswith(expect) and PACKET.match(row["name"])]
    return [pytest.param(row, id=row["name"]) for row in chosen]


def packet_of(name: str) -> tuple[Packet, int]:
    """What a row's name says, and the id size."""
    kind, _, rest = name.partition("_")
    if kind == "general":
        return General[rest.upper()], 2
    id_size = int(re.search(r"idsize=(\d+)", name)[1])  # type: ignore[index]
    multicast = "multicast" in name
    if multicast and id_size == 0:
        channels: tuple[int, ...] = (0,) * int(re.search(r"multicast=(\d+)", name)[1])  # type: ignore[index]
    elif multicast:
        channels = tuple(int(id, 0) for id in name.partition("ids=")[2].split()[0].split(","))
    else:
        found = re.search(r"id=(\w+)", name)
        channels = (int(found[1], 0) if found else 0,)
    found = re.search(r"seq=(\w+)", name)
    sequence = int(found[1], 0) if found else None
    if name.startswith("message"):
        parts = next(parts for text, parts in PARTS.items() if name.startswith(f"message {text} "))
        return MessagePacket(channels, parts, multicast), id_size
    word = name.split()[0].split("_")[2].upper()
    if "_op_" in name:
        return OperationPacket(Operation[word], channels, sequence, multicast), id_size
    return AckPacket(Ack[word], channels, sequence, multicast), id_size


def test_every_row_is_of_a_kind_that_is_tested_here() -> None:
    kinds = [packets("wire"), packets("reference-only"), rows("wire", "hs_")]
    single = ["resume burst (server side)", "client resume burst", "require-unknown-link reply"]
    single += ["channel close exchange", "consumed/received sequence arithmetic"]
    assert len(ROWS) == sum(map(len, kinds)) + len(single)
    assert {row["name"] for row in ROWS} >= set(single)


@pytest.mark.clause("relink-G01", "relink-C02", "relink-C04", "relink-C07", "relink-M08", "relink-M11", "relink-Q13")
@pytest.mark.clause("relink-P16", "relink-M04", "relink-M06", "relink-M10", "relink-M13", "relink-M14", "relink-M16")
@pytest.mark.parametrize("row", packets("wire"))
def test_a_packet_is_written_and_read_as_the_vector_says(row: dict[str, object]) -> None:
    packet, id_size = packet_of(str(row["name"]))
    data = bytes.fromhex(str(row["hex"]))
    encoded = encode_packet(packet, id_size)
    assert len(encoded) == row["total_len"]
    assert encoded.startswith(data)
    cursor = Cursor(encoded)
    assert parse_packet(cursor, Bounds(id_size, id_size, 1024, 1024, 2**20)) == packet
    assert cursor.remaining == 0


@pytest.mark.parametrize("row", packets("reference-only: id sizes"))
def test_ids_of_more_than_eight_bytes_are_not_spoken(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="0 to 8 bytes"):
        Config(connector_id_size=16)


@pytest.mark.clause("relink-M04")
@pytest.mark.parametrize("row", packets("reference-only: the writer"))
def test_a_message_without_its_padding_is_not_what_the_document_says(row: dict[str, object]) -> None:
    packet, id_size = packet_of(str(row["name"]))
    data = bytes.fromhex(str(row["hex"]))
    assert encode_packet(packet, id_size) != data
    with contextlib.suppress(NeedMore):
        assert parse_packet(Cursor(data), Bounds(id_size, id_size, 1024, 1024, 2**20)) != packet


@pytest.mark.clause("relink-H08", "relink-H11", "relink-H12", "relink-H13", "relink-H14", "relink-H15", "relink-H17")
@pytest.mark.clause("relink-H02", "relink-H21")
@pytest.mark.parametrize("row", rows("wire", "hs_"))
def test_the_handshake_is_written_and_read_as_the_vector_says(row: dict[str, object]) -> None:
    name, data = str(row["name"]), bytes.fromhex(str(row["hex"]))
    numbers = {key: int(value) for key, value in re.findall(r"(flags|epoch|link)=(\d+)", name)}
    if name == "hs_version":
        assert encode_version(0) == data
    elif name.startswith("hs_listener"):
        assert encode_answer(numbers["epoch"], numbers["link"]) == data
    else:
        endpoint, first, second = re.search(r'name="(.*)" idsizes=(\d),(\d)', name).groups()  # type: ignore[union-attr]
        flags = numbers["flags"]
        config = Config(
            endpoint=endpoint,
            connector_id_size=int(first),
            listener_id_size=int(second),
            connector_transactions=bool(flags & 1),
            listener_transactions=bool(flags & 2),
        )
        asked = {"epoch": numbers["epoch"], "link_id": numbers["link"]}
        assert encode_request(config, **asked, require_link=bool(flags & 4)) == data
        handshake = ListenerHandshake(now=0.0)
        (request,) = feed(handshake, [bytes(8), data])
        assert isinstance(request, Requested)
        assert (request.endpoint, request.epoch, request.link_id) == (endpoint, numbers["epoch"], numbers["link"])
        assert (request.connector_transactions, request.require_link) == (bool(flags & 1), bool(flags & 4))


@pytest.mark.clause("relink-R02", "relink-R01")
def test_a_resume_is_told_as_the_vector_says() -> None:
    engine = listener(quiet(connector_id_size=0, listener_id_size=0))
    fed(engine, "11 01 05 00 00 00 00 00 68 65 6c 6c 6f 00 00 00")
    reconnect(engine)
    assert written(engine).replace(" ", "") == row_named("resume burst (server side)")
    engine.receive(0)
    engine.consume(0, through=0, now=0.0)
    reconnect(engine)
    assert written(engine).replace(" ", "") == row_named("client resume burst")


@pytest.mark.clause("relink-R03")
def test_the_resume_of_the_vector_is_understood() -> None:
    engine = connector(quiet(connector_id_size=0, listener_id_size=0))
    engine.send(0, (b"hello",))
    engine.send(0, (b"again",))
    drain(engine)
    reconnect(engine)
    drain(engine)
    assert fed(engine, row_named("resume burst (server side)")) == [("Received", 0, 0), ("Resumed",)]
    assert parsed(drain(engine), Bounds(0, 0, 1024, 1024, 1000)) == [MessagePacket((0,), (b"again",))]


@pytest.mark.clause("relink-H31", "relink-H33")
def test_the_answer_to_an_unknown_link_that_was_required() -> None:
    answer = bytes.fromhex(row_named("require-unknown-link reply"))
    epoch = int.from_bytes(answer[:8], "little")
    handshake = ListenerHandshake(now=0.0)
    config = Config(require_link=True)
    feed(handshake, [bytes(8), encode_request(config, epoch=epoch - 1, link_id=99, require_link=True)])
    drain(handshake)
    handshake.refuse(epoch)
    assert drain(handshake) == answer
    asking = ConnectorHandshake(config, now=0.0, epoch=epoch - 1, link_id=99)
    assert feed(asking, [bytes(8), answer]) == [Refused(epoch)]


@pytest.mark.clause("relink-K01", "relink-K02")
def test_a_channel_is_closed_as_in_the_vector() -> None:
    one, other = connector(), listener()
    one.send(0x1234, (b"x",))
    other.receive_bytes(drain(one), 0.0)
    other.handle_deadline(1.0)
    one.receive_bytes(drain(other), 1.0)
    one.close(0x1234)
    assert written(one) == row_named("channel close exchange")
    fed(other, row_named("channel close exchange"))
    other.receive(0x1234)
    other.consume(0x1234, through=0, now=0.0)
    assert "8500341200000000" in written(other)


@pytest.mark.clause("relink-Q11", "relink-O12")
@pytest.mark.requirement("R-19")
@pytest.mark.parametrize("ack", ["0d", "2d"], ids=["received", "consumed"])
@pytest.mark.parametrize(
    ("sent", "numbers", "is_legal"),
    [
        (1, [0xFFFFFFFF], True),
        (1, [0], True),
        (1, [0, 0], True),
        (1, [0, 0xFFFFFFFF], False),
        (1, [0, 1], False),
        (1, [0, 2], False),
        (10, [1, 4], True),
        (10, [1, 4, 3], False),
        (10, [1, 4, 15], False),
        (10, [1, 4, 0xFFFFFFFF], False),
    ],
)
def test_what_a_cumulative_ack_may_say(sent: int, numbers: list[int], is_legal: bool, ack: str) -> None:
    engine = connector(quiet(connector_id_size=0, listener_id_size=0))
    for _ in range(sent):
        engine.send(0, (b"",))
    drain(engine)
    data = [f"{ack} 00 00 00 {number.to_bytes(4, 'little').hex()}" for number in numbers]
    if is_legal:
        assert not any(event[0] == "Failed" for event in fed(engine, *data))
    else:
        assert violation(engine, *data).rule == "relink-Q11"
