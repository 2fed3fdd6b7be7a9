"""Check every row of the collected test vectors against its `expect`."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import pytest

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore
from muxkit.protocols.relink import Config
from muxkit.protocols.relink.events import Refused, Requested
from muxkit.protocols.relink.frames import (
    Ack,
    AckPacket,
    Bounds,
    General,
    MessagePacket,
    Operation,
    OperationPacket,
    Packet,
    encode_packet,
    parse_packet,
)
from muxkit.protocols.relink.handshake import (
    ConnectorHandshake,
    ListenerHandshake,
    encode_answer,
    encode_request,
    encode_version,
)
from muxkit.testing._pair import drain, feed
from tests.protocols import _vectors as vectors
from tests.protocols.relink._helpers import connector, fed, listener, parsed, quiet, reconnect, violation, written

if TYPE_CHECKING:
    from tests.protocols._vectors import Row

PACKET = re.compile(r"(general|channel_op|channel_ack|sequence_op|sequence_ack|message)[_ ]")
EPOCHS = range(2**40, 2**53)  # microseconds since 1970; what an undescribed stream may have for an epoch
RESUME = "0d000000000000002d000000ffffffff6000000000000000"  # of a listener that received one message and consumed none
ANSWER = "0d000000000000002d000000000000006000000000000000"  # the same when it has consumed it
UNKNOWN_LINK = "e13f9d15c86006000000000000000000"
CLOSE = "4100341200000000"


def parts_of(name: str) -> tuple[bytes, ...]:
    """The parts of a message, as the name of its row writes them."""
    if found := re.search(r"\((\d+) empty parts\)", name):
        return (b"",) * int(found[1])
    if found := re.search(r"(\d+)-byte-part", name):
        return (b"x" * int(found[1]),)
    if found := re.search(r"parts=\d+: \[(.*?)\]", name):
        return tuple(map(described_part, found[1].split(", ")))
    found = re.search(r"parts=\[(.*?)\]", name)
    assert found is not None, f"no parts in {name!r}"
    return tuple(b"" if part == "empty" else part.encode() for part in found[1].split(",") if part)


def described_part(text: str) -> bytes:
    """`'y'`, or `65536x78` for so many bytes 0x78."""
    if text.startswith("'"):
        return text.strip("'").encode()
    count, byte = text.split("x")
    return bytes.fromhex(byte) * int(count)


def packet_of(name: str) -> tuple[Packet, int]:
    """Return the packet that a row's name describes, and the id size."""
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
        return MessagePacket(channels, parts_of(name), multicast), id_size
    word = name.split()[0].split("_")[2].upper()
    if "_op_" in name:
        return OperationPacket(Operation[word], channels, sequence, multicast), id_size
    return AckPacket(Ack[word], channels, sequence, multicast), id_size


def described(row: Row) -> str:
    """Return the name of a row with its settings, those that are fields after those of the name."""
    vectors.settings_of(row)  # they agree
    fields = sorted(row.keys() - vectors.NOTES - {"total_len", "parts_of_stream"})
    new = [key for key in fields if not re.search(rf"(?<!\S){key}=", row["name"])]
    return " ".join([row["name"], *(f"{key}={as_setting(key, row[key])}" for key in new)])


def as_setting(key: str, value: object) -> str:
    """Write a field as the names of rows do."""
    if key == "name_of_endpoint":
        return f'"{value}"'
    if key == "parts":
        assert isinstance(value, list)
        return f"[{','.join(part or 'empty' for part in value)}]"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def check_length(row: Row, data: bytes) -> None:
    assert row.get("total_len", len(data)) == len(data)


def check_packet(row: Row) -> None:
    packet, id_size = packet_of(described(row))
    data = vectors.data_of(row)
    encoded = encode_packet(packet, id_size)
    check_length(row, encoded)
    shown = re.search(r"TRUNCATED: hex is only the first (\d+) bytes", str(row.get("meaning")))
    assert (encoded[: int(shown[1])] if shown else encoded) == data
    assert "total_len" in row or not shown
    assert parsed(encoded, Bounds(id_size, id_size, 1024, 1024, 2**20)) == [packet]


def check_large_ids(row: Row) -> None:
    """Check that ids of more than eight bytes are refused."""
    found = re.search(r"idsize=(\d+)", row["name"])
    assert found is not None
    with pytest.raises(ValueError, match="expected a number from 0 to 8"):
        Config(connector_id_size=int(found[1]))


def check_missing_padding(row: Row) -> None:
    """Check that a message without its padding is refused."""
    packet, id_size = packet_of(row["name"])
    data = bytes.fromhex(row["hex"])
    assert encode_packet(packet, id_size) != data
    with contextlib.suppress(NeedMore):
        assert parse_packet(Cursor(data), Bounds(id_size, id_size, 1024, 1024, 2**20)) != packet


def check_handshake(row: Row) -> None:
    name, data = described(row), vectors.data_of(row)
    check_length(row, data)
    numbers = {key: int(value) for key, value in re.findall(r"(flags|epoch|link)=(\d+)", name)}
    request = re.search(r'name="(.*)" idsizes=(\d),(\d)', name)
    if not numbers:
        assert encode_version(0) == data
    elif request is None:
        assert encode_answer(numbers["epoch"], numbers["link"]) == data
    else:
        check_request(data, request[1], (int(request[2]), int(request[3])), numbers)


def check_request(data: bytes, endpoint: str, id_sizes: tuple[int, int], numbers: dict[str, int]) -> None:
    flags, (first, second) = numbers["flags"], id_sizes
    config = Config(
        endpoint=endpoint,
        connector_id_size=first,
        listener_id_size=second,
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


def check_sequence(row: Row) -> None:
    """Check a stream: a part of a handshake, packets, or both, in this order.

    Parts that the name describes, joined by ` + `, are compared one by one. Otherwise the bytes have to be a stream
    that is encoded as it came, of any id size.
    """
    data = vectors.data_of(row)
    check_length(row, data)
    assert data
    parts = str(row["name"]).split(" + ")
    if len(parts) > 1 and all(is_packet({"name": part}) or is_handshake({"name": part}) for part in parts):
        assert b"".join(map(encoded_part, parts)) == data
        return
    assert any(is_stream(data, after) for after in handshakes(data)), "no handshake and packets of any id size"


def encoded_part(name: str) -> bytes:
    """Encode the packet or the part of a handshake that one part of a name describes."""
    if is_packet({"name": name}):
        packet, id_size = packet_of(name)
        return encode_packet(packet, id_size)
    numbers = {key: int(value) for key, value in re.findall(r"(flags|epoch|link)=(\d+)", name)}
    request = re.search(r'name="(.*)" idsizes=(\d),(\d)', name)
    if not numbers:
        return encode_version(0)
    if request is None:
        return encode_answer(numbers["epoch"], numbers["link"])
    flags = numbers["flags"]
    config = Config(
        endpoint=request[1],
        connector_id_size=int(request[2]),
        listener_id_size=int(request[3]),
        connector_transactions=bool(flags & 1),
        listener_transactions=bool(flags & 2),
    )
    return encode_request(config, epoch=numbers["epoch"], link_id=numbers["link"], require_link=bool(flags & 4))


def handshakes(data: bytes) -> list[int]:
    """Return the offsets at which packets may begin: after nothing, or after what either side sends before them."""
    after = [0]
    begin = 8 if data[:8] == bytes(8) else 0  # the version
    if begin:
        after.append(8)
    if int.from_bytes(data[begin : begin + 8], "little") in EPOCHS and len(data) >= begin + 16:
        after.append(begin + 16)  # the listener's answer
    length = data[begin] if len(data) > begin else 0
    head = 1 + length + 3
    size = head + -head % 8 + 16
    padding, epoch = data[begin + head : begin + size - 16], data[begin + size - 16 : begin + size - 8]
    is_epoch = not any(epoch) or int.from_bytes(epoch, "little") in EPOCHS
    if len(data) >= begin + size and not any(padding) and data[begin + head - 1] < 8 and is_epoch:
        after.append(begin + size)  # the connector's request
    return after


def is_stream(data: bytes, after: int) -> bool:
    """Return True if the bytes from an offset on are packets of some id size, encoded as they came."""
    rest = data[after:]
    for id_size in range(9):
        bounds = Bounds(id_size, id_size, 1024, 1024, 2**20)
        with contextlib.suppress(NeedMore, RemoteProtocolError):
            if b"".join(encode_packet(packet, id_size) for packet in parsed(rest, bounds)) == rest:
                return True
    return False


def check_prose(row: Row) -> None:
    """Check that a row without bytes, which states a rule in words, has a test of its own."""
    assert row["name"] in PROSE, f"no test was written for {row['name']!r}: {row['meaning']}"


def is_packet(row: Row) -> bool:
    return PACKET.match(str(row["name"])) is not None and " + " not in row["name"]


def is_handshake(row: Row) -> bool:
    return str(row["name"]).startswith("hs_") and " + " not in row["name"]


def wire(row: Row) -> bool:
    return vectors.expects(row, "wire")


def missing_padding(row: Row) -> bool:
    return vectors.evidence(row) and is_packet(row) and "reference_bug" in row


def large_ids(row: Row) -> bool:
    found = re.search(r"idsize=(\d+)", str(row["name"]))
    return vectors.evidence(row) and found is not None and int(found[1]) > 8


OF_PACKETS = frozenset({"total_len", "idsize", "id", "ids", "seq", "multicast", "parts"})
OF_HANDSHAKES = frozenset({"total_len", "flags", "epoch", "link", "idsizes"})
KINDS = (
    vectors.Kind("missing padding", missing_padding, check_missing_padding),
    vectors.Kind("large ids", large_ids, check_large_ids),
    vectors.Kind(
        "evidence",
        lambda row: vectors.evidence(row) and not missing_padding(row) and not large_ids(row),
        vectors.nothing_owed,
    ),
    vectors.Kind("packet", lambda row: wire(row) and is_packet(row), check_packet, OF_PACKETS),
    vectors.Kind("handshake", lambda row: wire(row) and is_handshake(row), check_handshake, OF_HANDSHAKES),
    vectors.Kind(
        "sequence",
        lambda row: wire(row) and bool(row["hex"]) and not is_packet(row) and not is_handshake(row),
        check_sequence,
        frozenset({"total_len"}),
    ),
    vectors.Kind("prose", lambda row: wire(row) and not row["hex"], check_prose),
)
ROWS = vectors.rows_of("relink")


@pytest.mark.clause("relink-G01", "relink-C02", "relink-C04", "relink-C07", "relink-M08", "relink-M11", "relink-Q13")
@pytest.mark.clause("relink-P16", "relink-M04", "relink-M06", "relink-M10", "relink-M13", "relink-M14", "relink-M16")
@pytest.mark.clause("relink-H08", "relink-H11", "relink-H12", "relink-H13", "relink-H14", "relink-H15", "relink-H17")
@pytest.mark.clause("relink-H02", "relink-H21")
@pytest.mark.parametrize("row", vectors.params(ROWS))
def test_a_row_holds(row: Row) -> None:
    vectors.check(row, KINDS)


NEW_ROWS: list[Row] = [
    {"name": "message parts=[x,empty] idsize=2 id=0x0102", "hex": "11020201010000007800000000000000", "total_len": 16},
    {"name": "sequence_ack_received seq=9 idsize=0", "hex": "0d00000009000000", "total_len": 8},
    {"name": "hs_listener epoch=1 link=2", "hex": "01000000000000000200000000000000", "total_len": 16},
    {"name": "two packets, one after the other", "hex": "00000000000000004000000000000000", "total_len": 16},
]


@pytest.mark.parametrize("row", vectors.params([row | {"expect": "wire"} for row in NEW_ROWS]))
def test_a_new_row_of_a_known_kind_is_tested(row: Row) -> None:
    vectors.check(row, KINDS)
    with pytest.raises(AssertionError):
        vectors.check(row | {"hex": "ff" + row["hex"][2:]}, KINDS)


@pytest.mark.parametrize("expect", ["reject", "option: unheard of", ""])
def test_a_row_of_an_unknown_kind_fails(expect: str) -> None:
    with pytest.raises(AssertionError, match="has to be of one kind"):
        vectors.check({"name": "new", "hex": "00", "total_len": 1, "expect": expect}, KINDS)


def test_a_row_in_words_for_which_there_is_no_test_fails() -> None:
    with pytest.raises(AssertionError, match="no test was written"):
        vectors.check({"name": "new arithmetic", "hex": "", "meaning": "…", "expect": "wire"}, KINDS)


@pytest.mark.clause("relink-R02", "relink-R01")
def test_a_resume_is_told_as_the_vector_says() -> None:
    engine = listener(quiet(connector_id_size=0, listener_id_size=0))
    fed(engine, "11 01 05 00 00 00 00 00 68 65 6c 6c 6f 00 00 00")
    reconnect(engine)
    assert written(engine).replace(" ", "") == RESUME
    engine.consume(0, through=0, now=0.0)
    reconnect(engine)
    assert written(engine).replace(" ", "") == ANSWER


@pytest.mark.clause("relink-R03")
def test_the_resume_of_the_vector_is_understood() -> None:
    engine = connector(quiet(connector_id_size=0, listener_id_size=0))
    engine.send(0, (b"hello",))
    engine.send(0, (b"again",))
    drain(engine)
    reconnect(engine)
    drain(engine)
    assert fed(engine, RESUME) == [("Received", 0, 0), ("Resumed",)]
    assert parsed(drain(engine), Bounds(0, 0, 1024, 1024, 1000)) == [MessagePacket((0,), (b"again",))]


@pytest.mark.clause("relink-H31", "relink-H33")
def test_the_answer_to_an_unknown_link_that_was_required() -> None:
    answer = bytes.fromhex(UNKNOWN_LINK)
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
    assert written(one) == CLOSE
    fed(other, CLOSE)
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


PROSE = {"consumed/received sequence arithmetic": test_what_a_cumulative_ack_may_say}
"""The tests of rows that have no bytes."""
