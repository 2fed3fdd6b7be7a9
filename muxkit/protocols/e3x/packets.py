"""What does a packet look like? Two bytes of length, a JSON head, a binary body; judged strictly, bounded first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn, cast

import attrs

from muxkit._errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

ID_MOST = 2**32 - 1
SEQ_MOST = 2**32 - 1  # no wrap: a channel that comes here is over
TYPE_MOST = 1024  # characters; ours, since a channel keeps its type for as long as it lives
HEAD_MOST = 2**16 - 1  # bytes, what two bytes of length can say
JSON_LEAST = 7  # bytes; shorter heads are binary, as the original implementations read them
DEPTH_MOST = 32  # brackets inside each other


@attrs.define
class Packet:
    """One packet of a channel; what it does not carry is None, False, 0 or empty."""

    channel: int
    type: str | None = None
    seq: int | None = None
    ack: int | None = None
    miss: list[int] | None = None
    end: bool = False
    err: str | None = None
    frag: int = 0
    body: bytes = b""
    miss_fault: str = ""
    """Why a `miss` that came was not taken; the rest of such a packet counts."""


# ---------------------------------------------------------------------------- length, head, body


def join_packet(head: bytes, body: bytes = b"") -> bytes:
    """Length, head and body as they travel."""
    if len(head) > HEAD_MOST:
        raise ValueError(f"a head of {len(head)} bytes; two bytes of length say at most {HEAD_MOST}")
    return b"%c%c%b%b" % (len(head) >> 8, len(head) & 0xFF, head, body)


def split_packet(packet: bytes) -> tuple[bytes, bytes]:
    """Head and body of what came."""
    if len(packet) < 2:
        raise RemoteProtocolError(f"a packet of {len(packet)} bytes has no length")
    size = packet[0] << 8 | packet[1]
    if size > len(packet) - 2:
        raise RemoteProtocolError(f"a head of {size} bytes in a packet that goes on for {len(packet) - 2}")
    return packet[2 : 2 + size], packet[2 + size :]


def encode_head(fields: dict[str, object]) -> bytes:
    """A JSON head, as short as JSON can be; without any key it is no byte at all."""
    if not fields:
        return b""
    head = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if len(head) < JSON_LEAST:
        raise ValueError(f"a head of {len(head)} bytes would be read as binary, {JSON_LEAST} or more are JSON")
    return head


def parse_head(head: bytes) -> dict[str, object]:
    """A JSON head, strictly: UTF-8, no BOM, NaN, lone surrogate or repeated key, not too deep.

    A head that is empty or shorter than any JSON object with a key is binary, even if its bytes are JSON: no keys.
    A float may be infinite here (1e999 is good JSON): no key of ours takes one.
    """
    if len(head) < JSON_LEAST:
        return {}
    try:
        text = head.decode()
        if text.count("[") + text.count("{") > DEPTH_MOST:
            _check_depth(text)
        fields: object = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()  # fails for one half of a surrogate pair
    except ValueError as error:  # also what decoding UTF-8 and long numbers raise
        raise RemoteProtocolError(f"a head that is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"a head that is a JSON {type(fields).__name__}, not an object")
    return cast("dict[str, object]", fields)  # keys of JSON are strings


def _check_depth(text: str) -> None:
    depth = 0
    in_string = escaped = False
    for sign in text:
        if in_string:
            in_string = escaped or sign != '"'
            escaped = sign == "\\" and not escaped
        elif sign == '"':
            in_string = True
        elif sign in "[{":
            depth += 1
            if depth > DEPTH_MOST:
                raise ValueError(f"more than {DEPTH_MOST} brackets inside each other")
        elif sign in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is repeated")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


# ---------------------------------------------------------------------------- packets of channels


def encode_packet(packet: Packet) -> bytes:
    """A packet as it travels; the keys stand in a fixed order."""
    head = head_of(packet.channel, packet.type, packet.seq, packet.end, packet.frag)
    if packet.err is not None:
        head += b',"err":%b' % quoted(packet.err)
    return join_packet(b"{%b%b}" % (head, ack_part(packet.ack, packet.miss)), packet.body)


def head_of(channel: int, type: str | None, seq: int | None, end: bool, frag: int) -> bytes:
    """A head without its braces and without `ack` and `miss`, which change from one sending to the next."""
    head = b'"c":%d' % channel
    if type is not None:
        head += b',"type":%b' % quoted(type)
    if seq is not None:
        head += b',"seq":%d' % seq
    if end:
        head += b',"end":true'
    if frag:
        head += b',"frag":%d' % frag
    return head


def ack_part(ack: int | None, miss: Sequence[int] | None) -> bytes:
    part = b"" if ack is None else b',"ack":%d' % ack
    return part if miss is None else part + b',"miss":[%b]' % b",".join([b"%d" % delta for delta in miss])


def quoted(text: str) -> bytes:
    """A JSON string; a lone surrogate is a `UnicodeEncodeError`."""
    return json.dumps(text, ensure_ascii=False).encode()


def parse_packet(data: bytes) -> Packet:
    """The packet in a datagram; whatever is wrong with it is a `RemoteProtocolError`. Unknown keys are ignored."""
    head, body = split_packet(data)
    fields = parse_head(head)
    get = fields.get
    channel = _whole(fields, "c", 1, ID_MOST)
    if channel is None:
        raise RemoteProtocolError("a packet without c, the id of its channel")
    end = get("end", False)
    if end is not True and end is not False:
        raise RemoteProtocolError(f"end is {_shown(end)}, not true")
    type = _text(fields, "type")
    if type == "":
        raise RemoteProtocolError("type is empty")
    packet = Packet(
        channel,
        type,
        _whole(fields, "seq", 1, SEQ_MOST, "e3x-S02"),
        _whole(fields, "ack", 0, SEQ_MOST, "e3x-A01"),
        None,
        end,
        _text(fields, "err"),
        _whole(fields, "frag", 0, SEQ_MOST) or 0,
        body,
    )
    if "miss" in fields:
        _take_miss(packet, get("miss"))
    if packet.ack == 0 and packet.miss is None:
        packet.ack = None  # nothing is confirmed: 0 is only the base of a `miss`
    return packet


def _take_miss(packet: Packet, miss: object) -> None:
    if packet.ack is None:
        packet.miss_fault = "a miss without an ack to count from"
    elif not isinstance(miss, list) or not miss:
        packet.miss_fault = f"miss is {_shown(miss)}, not an array of deltas"
    else:
        for delta in miss:
            if type(delta) is not int or not 0 < delta <= SEQ_MOST:
                packet.miss_fault = f"{_shown(delta)} among the deltas of miss, 1 to {SEQ_MOST} are allowed"
                return
        packet.miss = miss


def _whole(fields: dict[str, object], key: str, least: int, most: int, rule: str | None = None) -> int | None:
    number = fields.get(key)
    if type(number) is int and least <= number <= most:  # an exact type: true is an int too
        return number
    if key not in fields:
        return None
    raise RemoteProtocolError(f"{key} is {_shown(number)}, whole numbers from {least} to {most} are allowed", rule=rule)


def _text(fields: dict[str, object], key: str) -> str | None:
    text = fields.get(key)
    if isinstance(text, str) or key not in fields:
        return text if isinstance(text, str) else None
    raise RemoteProtocolError(f"{key} is {_shown(text)}, not a string")


def _shown(value: object) -> str:
    """Short enough for an error, whatever a peer sent."""
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
