"""Records: messages whose data is bytes, with an optional key and headers, as in Kafka.

restream's data is JSON, and JSON has no bytes. This module is the convention with which bytes are sent nevertheless. A
record has three forms:

- In JSON, it is an object with the single member `@record`. Bytes are in base64. Peers that don't know the convention
  see plain JSON, and any client can read and write it.
- In a store, and in the blocks that a reader can request (see `wire/blocks.py`), it is bytes: a tag, the sizes of key
  and headers, the key, the headers, and the value as it is. A JSON text never begins with the bytes of a tag, so stored
  records and stored JSON are told apart by their first byte.
- In Python, it is a `Record`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.wire.json import Json, JsonObject

MEMBER: Final = "@record"
JSON_PREFIX: Final = b'{"@record":'
"""The first bytes of each record in compact JSON."""

PREFIX: Final = struct.Struct("<BII")  # the tag, the size of the key plus 1 or 0 without a key, the size of the headers
VALUE_TAG: Final = 0
NULL_TAG: Final = 1  # of a record whose value is null
MAX_TAG: Final = NULL_TAG

Headers = Sequence[tuple[str, bytes | None]]


class _RecordJson(msgspec.Struct, omit_defaults=True, gc=False):
    """The value of the member. msgspec writes and reads bytes as base64."""

    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = []


class _DataJson(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    record: _RecordJson = msgspec.field(name=MEMBER)


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_DataJson).decode
_headers: Final = msgspec.json.Decoder(list[tuple[str, bytes | None]])


@attrs.frozen
class Record:
    """The data of a message that consists of bytes. Stores and servers accept it wherever they accept JSON data.

    Attributes:
        value: the bytes, or None, which Kafka uses to mark a key as deleted.
        key: the bytes by which messages are grouped, or None.
        headers: names and values in order. A name may occur several times, and a value may be None.
    """

    value: bytes | None
    key: bytes | None = None
    headers: Headers = attrs.field(default=(), converter=tuple[tuple[str, bytes | None], ...])

    def to_json(self) -> JsonObject:
        """Return the record as JSON, for peers that don't know records."""
        return msgspec.to_builtins(_DataJson(_RecordJson(self.value, self.key, list(self.headers))))  # type: ignore[no-any-return]  # an object, since it was one

    def encode(self) -> bytes:
        """Return the record in the form that stores and blocks contain."""
        key, value = self.key, self.value
        headers = encode_headers(self.headers) if self.headers else b""
        prefix = PREFIX.pack(NULL_TAG if value is None else VALUE_TAG, 0 if key is None else len(key) + 1, len(headers))
        return b"".join((prefix, key or b"", headers, value or b""))

    @classmethod
    def decode(cls, encoded: bytes) -> Record:
        """Parse the form that stores and blocks contain. Raises `RemoteProtocolError` if it is damaged."""
        if len(encoded) < PREFIX.size or encoded[0] > MAX_TAG:
            raise RemoteProtocolError("invalid record: expected a tag, the size of the key and that of the headers")
        tag, key_size, headers_size = PREFIX.unpack_from(encoded)
        key_end = PREFIX.size + max(0, key_size - 1)
        end = key_end + headers_size
        if end > len(encoded) or (tag == NULL_TAG and end < len(encoded)):
            raise RemoteProtocolError(f"invalid record: key and headers end at {end}, the record at {len(encoded)}")
        return cls(
            None if tag == NULL_TAG else encoded[end:],
            encoded[PREFIX.size : key_end] if key_size else None,
            parse_headers(encoded[key_end:end]) if headers_size else (),
        )

    @classmethod
    def of(cls, data: Json) -> Record | None:
        """Return the record that the data of a message is, or None for any other data."""
        if not isinstance(data, dict) or data.keys() != {MEMBER}:
            return None
        try:
            found = msgspec.convert(data, _DataJson).record
        except msgspec.ValidationError:
            return None
        return cls(found.value, found.key, tuple(found.headers))


def encode_headers(headers: Headers) -> bytes:
    """Return headers as they are in the stored form: JSON, with the values in base64."""
    return _encode(headers)


def parse_headers(encoded: bytes) -> Headers:
    """Parse stored headers. Raises `RemoteProtocolError` if they are damaged."""
    try:
        return tuple(_headers.decode(encoded))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"invalid headers of a record: {error}") from None


def is_encoded(data: bytes) -> bool:
    """Return True if stored data is a record, and False if it is JSON."""
    return data[:1] <= b"\x01"


def json_of(encoded: bytes) -> bytes:
    """Return the JSON of a stored record, for a peer that reads lines."""
    record = Record.decode(encoded)
    return _encode(_DataJson(_RecordJson(record.value, record.key, list(record.headers))))


def encoded_of(json: bytes) -> bytes:
    """Return the stored form of data that begins with `JSON_PREFIX`, or the data itself if it isn't a record."""
    try:
        found = _decode(json).record
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json
    return Record(found.value, found.key, found.headers).encode()
