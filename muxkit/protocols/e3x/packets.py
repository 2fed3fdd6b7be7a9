"""Encoding and parsing of e3x packets: the JSON head, the binary body, the `miss` array, and pieces of large messages.

The engine uses these functions for every packet. A packet comes from an untrusted peer, so parsing is strict, and
checks a size before it does any work that is proportional to the size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NoReturn, cast

import attrs

from muxkit._errors import RemoteProtocolError

ID_MOST = 2**32 - 1
SEQ_MOST = 2**32 - 1  # sequence numbers don't wrap around: a channel that reaches this number ends
# Maximum length of a channel's type in characters. The specification has no limit, but a channel keeps its type in
# memory for its whole life.
TYPE_MOST = 1024
# The types of channels that the session itself uses. `liveness` explains them. They are not in the specification.
PING = "muxkit.ping"
BYE = "muxkit.bye"
RESERVED = frozenset({PING, BYE})
HEAD_MOST = 2**16 - 1  # maximum size of a head in bytes, because its length is encoded in two bytes
JSON_LEAST = 7  # shorter heads are binary and not JSON, as in the original implementations
DEPTH_MOST = 32  # maximum number of nested brackets in a head
# Maximum number of deltas in a `miss` that we send. We treat a received list of this length as incomplete, so we don't
# conclude from it which packets have arrived.
LISTED_MOST = 256
ACK_SIZE = len(b',"ack":4294967295')
MISS_SIZE = len(b',"miss":[]')
DELTA_SIZE = len(b"4294967295,")
LISTED_SIZE = 4  # average size of a delta in a long list, in bytes
ASK_SIZE = ACK_SIZE + MISS_SIZE + len(b"99999")  # bytes that each packet with a seq reserves for an ack


# The heads that muxkit sends on an open channel, if no packet is missing and all numbers have at most nine digits.
# `parse_packet` reads such a head with one match, which takes a fifth of the time of the JSON parser. It reads all
# other heads with the JSON parser. Both give the same result.
_USUAL_HEAD: Final = re.compile(
    rb"""\{"c":([1-9]\d{0,8})(?:,"seq":([1-9]\d{0,8}))?(,"end":true)?(?:,"frag":([1-9]\d{0,8}))?"""
    rb"""(?:,"ack":([1-9]\d{0,8})(?:,"miss":\[([1-9]\d{0,8})\])?)?\}"""
)


@attrs.define
class Packet:
    """One packet of a channel. Absent fields are None, False, 0 or empty."""

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
    """The reason for ignoring an illegal `miss`, or an empty string. The other fields of the packet are still valid."""


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
    """Encode a JSON head without spaces. A head without keys is empty."""
    if not fields:
        return b""
    head = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if len(head) < JSON_LEAST:
        raise ValueError(f"a head of {len(head)} bytes would be read as binary, {JSON_LEAST} or more are JSON")
    return head


def parse_head(head: bytes) -> dict[str, object]:
    """Parse a JSON head.

    The head must be UTF-8, and must not contain a BOM, NaN, lone surrogates, repeated keys or deep nesting. A head that
    is shorter than `JSON_LEAST` is binary and has no keys, even if its bytes are valid JSON. A float may be infinite
    (1e999 is valid JSON), which is harmless because no key of the protocol accepts a float.
    """
    if len(head) < JSON_LEAST:
        return {}
    try:
        text = head.decode()
        if text.count("[") + text.count("{") > DEPTH_MOST:
            _check_depth(text)
        fields: object = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()  # raises for a lone surrogate
    except ValueError as error:  # invalid UTF-8 and numbers with too many digits raise this as well
        raise RemoteProtocolError(f"a head that is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"a head that is a JSON {type(fields).__name__}, not an object")
    return cast("dict[str, object]", fields)  # the keys of a JSON object are always strings


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
    """Encode a packet. The keys have a fixed order."""
    head = head_of(packet.channel, packet.type, packet.seq, packet.end, packet.frag)
    if packet.err is not None:
        head += b',"err":%b' % quoted(packet.err)
    return join_packet(b"{%b%b}" % (head, ack_part(packet.ack, packet.miss)), packet.body)


def head_of(channel: int, type: str | None, seq: int | None, end: bool, frag: int) -> bytes:
    """Encode the part of a head that is the same each time that the packet is sent: no `ack`, `miss` or braces."""
    if seq is not None and type is None and not (end or frag):  # as in nearly all packets
        return b'"c":%d,"seq":%d' % (channel, seq)
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
    """Encode `ack` and `miss` as the part that is appended to `head_of`."""
    if ack is not None and miss is not None and len(miss) == 1:  # as in nearly all acks
        return b',"ack":%d,"miss":[%d]' % (ack, miss[0])
    part = b"" if ack is None else b',"ack":%d' % ack
    return part if miss is None else part + b',"miss":[%b]' % b",".join([b"%d" % delta for delta in miss])


def quoted(text: str) -> bytes:
    """Encode a JSON string. Raises `UnicodeEncodeError` if the string contains a lone surrogate."""
    return json.dumps(text, ensure_ascii=False).encode()


def parse_packet(data: bytes) -> Packet:
    """Parse a packet. Unknown keys are ignored.

    Raises:
        RemoteProtocolError: The packet is malformed. An illegal `miss` doesn't raise but sets `Packet.miss_fault`.
    """
    head, body = split_packet(data)
    usual = _USUAL_HEAD.fullmatch(head)
    if usual is not None:
        c, number, ending, pieces, acked, window = usual.groups()
        return Packet(
            int(c),
            None,
            None if number is None else int(number),
            None if acked is None else int(acked),
            None if window is None else [int(window)],
            ending is not None,
            None,
            0 if pieces is None else int(pieces),
            body,
        )
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
        packet.ack = None  # an ack of 0 acks no packet, and is only useful as the base of a `miss`
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
    if type(number) is int and least <= number <= most:  # compare the exact type, because True is an int as well
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
    """Return a shortened value for an error message."""
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


# --- miss


@attrs.define
class Miss:
    """A decoded `miss` array."""

    missing: list[int]
    """The seqs of the missing packets, ascending."""
    limit: int
    """The highest seq that the sender of the miss accepts now.

    The specification contradicts itself: in another place it calls this number the first seq that is not accepted.
    """
    window: int
    """The size of the window: `limit` minus the ack of the same packet. It stays valid when later acks advance."""


def encode_miss(ack: int, missing: Iterable[int], capacity: int | None = None, *, most: int | None = None) -> list[int]:
    """Encode a `miss`: the seqs of the missing packets above `ack` and then the limit, each as a delta to the last one.

    The limit is `ack + capacity`, which is the highest seq that is accepted. At most `most` deltas are encoded. Missing
    seqs that don't fit are left out, and the peer can't see that.
    """
    listed = sorted(missing) if capacity is None else sorted(seq for seq in missing if seq < ack + capacity)
    if most is not None:
        del listed[max(0, most - 1) :]
    if capacity is not None:
        listed.append(ack + capacity)
    return [seq - previous for previous, seq in pairwise([ack, *listed])]


def decode_miss(ack: int, deltas: Sequence[int]) -> Miss:
    """Decode a `miss`. Raises `RemoteProtocolError` if it is empty or contains a delta below 1."""
    if not deltas:
        raise RemoteProtocolError("miss is empty", rule="e3x-M03")
    for delta in deltas:
        if delta < 1:
            raise RemoteProtocolError(f"{delta} among the deltas of miss, 1 or more are allowed", rule="e3x-M03")
    _, *missing, limit = accumulate(deltas, initial=ack)
    return Miss(missing, limit, limit - ack)


# --- pieces of messages


def cut(body: bytes, first: int, other: int) -> Iterator[tuple[int, bytes]]:
    """Cut a message into pieces, and yield each piece with the number of pieces after it.

    The first piece has at most `first` bytes, each other piece has at most `other` bytes.
    """
    yield pieces_after(len(body), first, other), body[:first]
    for start in range(first, len(body), other):
        yield (len(body) - start - 1) // other, body[start : start + other]


def pieces_after(size: int, first: int, other: int) -> int:
    """Return the number of pieces after the first piece of a message of `size` bytes."""
    return max(0, -(-(size - first) // other))
