"""Packets of e3x: the JSON head and the binary body, the delta list `miss`, and the pieces of large messages.

Parsing is strict, and checks sizes before it does any work that depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NoReturn, cast

import attrs

from muxkit._errors import RemoteProtocolError

ID_MOST = 2**32 - 1
SEQ_MOST = 2**32 - 1  # no wrap: a channel that reaches it ends
TYPE_MOST = 1024  # characters; not in the document: a channel keeps its type for as long as it lives
PING = "muxkit.ping"  # the types of channels that are the session's own: see `liveness`; not in the document
BYE = "muxkit.bye"
RESERVED = frozenset({PING, BYE})
HEAD_MOST = 2**16 - 1  # bytes, the most that two bytes of length can express
JSON_LEAST = 7  # bytes; shorter heads are binary, as in the original implementations
DEPTH_MOST = 32  # nested brackets
LISTED_MOST = 256  # deltas of a `miss` that is sent; a longer list may be cut, and does not tell what arrived
ACK_SIZE = len(b',"ack":4294967295')
MISS_SIZE = len(b',"miss":[]')
DELTA_SIZE = len(b"4294967295,")
LISTED_SIZE = 4  # bytes of one delta of a long list, on average
ASK_SIZE = ACK_SIZE + MISS_SIZE + len(b"99999")  # kept free in each packet for an ack


@attrs.define
class Packet:
    """One packet of a channel; absent fields are None, False, 0 or empty."""

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
    """Why a received `miss` was ignored; the other fields of such a packet count."""


# --- length, head, body


def join_packet(head: bytes, body: bytes = b"") -> bytes:
    """Encode the length, the head and the body."""
    if len(head) > HEAD_MOST:
        raise ValueError(f"a head of {len(head)} bytes; two bytes of length say at most {HEAD_MOST}")
    return b"%c%c%b%b" % (len(head) >> 8, len(head) & 0xFF, head, body)


def split_packet(packet: bytes) -> tuple[bytes, bytes]:
    """Split a received packet into head and body."""
    if len(packet) < 2:
        raise RemoteProtocolError(f"a packet of {len(packet)} bytes has no length")
    size = packet[0] << 8 | packet[1]
    if size > len(packet) - 2:
        raise RemoteProtocolError(f"a head of {size} bytes in a packet that goes on for {len(packet) - 2}")
    return packet[2 : 2 + size], packet[2 + size :]


def encode_head(fields: dict[str, object]) -> bytes:
    """Encode a JSON head without spaces; one without keys is empty."""
    if not fields:
        return b""
    head = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if len(head) < JSON_LEAST:
        raise ValueError(f"a head of {len(head)} bytes would be read as binary, {JSON_LEAST} or more are JSON")
    return head


def parse_head(head: bytes) -> dict[str, object]:
    """Parse a JSON head strictly: UTF-8 without BOM, NaN, lone surrogates, repeated keys or deep nesting.

    A head shorter than any JSON object with a key is binary and has no keys, even if its bytes are JSON. A float may
    be infinite (1e999 is valid JSON); no key of the protocol takes one.
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
    except ValueError as error:  # UTF-8 decoding and long numbers raise it, too
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


# --- packets of channels


def encode_packet(packet: Packet) -> bytes:
    """Encode a packet; the keys have a fixed order."""
    head = head_of(packet.channel, packet.type, packet.seq, packet.end, packet.frag)
    if packet.err is not None:
        head += b',"err":%b' % quoted(packet.err)
    return join_packet(b"{%b%b}" % (head, ack_part(packet.ack, packet.miss)), packet.body)


def head_of(channel: int, type: str | None, seq: int | None, end: bool, frag: int) -> bytes:
    """Encode a head without braces and without `ack` and `miss`, which differ each time the packet is sent."""
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
    """Encode `ack` and `miss` to append to a head."""
    part = b"" if ack is None else b',"ack":%d' % ack
    return part if miss is None else part + b',"miss":[%b]' % b",".join([b"%d" % delta for delta in miss])


def quoted(text: str) -> bytes:
    """Encode a JSON string; raises `UnicodeEncodeError` for a lone surrogate."""
    return json.dumps(text, ensure_ascii=False).encode()


def parse_packet(data: bytes) -> Packet:
    """Parse a packet; raises `RemoteProtocolError` for any fault in it. Unknown keys are ignored."""
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
        packet.ack = None  # it confirms nothing: 0 is only the base of a `miss`
    return packet


def name_of(packet: Packet) -> str:
    """Return the name of a packet for an observer."""
    if packet.err is not None:
        return "err"
    if packet.end:
        return "end"
    if packet.type is not None:
        return "open"
    return "ack" if packet.seq is None and packet.ack is not None else "data"


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
    """Return a value for an error text, shortened."""
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


# --- miss


@attrs.define
class Miss:
    """A decoded `miss` array."""

    missing: list[int]
    """The seqs to send again, ascending."""
    limit: int
    """The highest seq that is accepted now; the document calls it that, and also the first that is not accepted."""
    window: int
    """Its distance from the ack, which stays as the ack moves."""


def encode_miss(ack: int, missing: Iterable[int], capacity: int | None = None, *, most: int | None = None) -> list[int]:
    """Encode the missing seqs above `ack` as deltas, then one for the limit: `ack + capacity`, itself still accepted.

    Encodes at most `most` deltas; the peer learns nothing about missing seqs that are left out.
    """
    listed = sorted(missing) if capacity is None else sorted(seq for seq in missing if seq < ack + capacity)
    if most is not None:
        del listed[max(0, most - 1) :]
    if capacity is not None:
        listed.append(ack + capacity)
    return [seq - previous for previous, seq in pairwise([ack, *listed])]


def decode_miss(ack: int, deltas: Sequence[int]) -> Miss:
    """Decode a `miss`; raises `RemoteProtocolError` if it is empty or has a delta below 1."""
    if not deltas:
        raise RemoteProtocolError("miss is empty", rule="e3x-M03")
    for delta in deltas:
        if delta < 1:
            raise RemoteProtocolError(f"{delta} among the deltas of miss, 1 or more are allowed", rule="e3x-M03")
    _, *missing, limit = accumulate(deltas, initial=ack)
    return Miss(missing, limit, limit - ack)


# --- pieces of messages


def cut(body: bytes, first: int, other: int) -> Iterator[tuple[int, bytes]]:
    """Cut a message into pieces, each with the number of those after it.

    The first has at most `first` bytes, the others `other`.
    """
    yield pieces_after(len(body), first, other), body[:first]
    for start in range(first, len(body), other):
        yield (len(body) - start - 1) // other, body[start : start + other]


def pieces_after(size: int, first: int, other: int) -> int:
    """Return the number of pieces after the first."""
    return max(0, -(-(size - first) // other))
