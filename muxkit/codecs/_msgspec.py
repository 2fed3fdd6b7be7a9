"""The codecs that need nothing but msgspec: JSON and MessagePack.

msgspec parses and checks in one pass in C. Types that it doesn't know are handled by two hooks: pydantic models travel
as the mappings that they dump, and protobuf messages as their own bytes.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from muxkit.codecs._codec import MAX_MESSAGE

ValueT = TypeVar("ValueT")


def encode_unknown(value: Any) -> Any:  # noqa: ANN401 - values of other libraries
    """Turn a value that msgspec doesn't know into one that it knows."""
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    if hasattr(value, "SerializeToString"):  # protobuf
        return value.SerializeToString()
    raise NotImplementedError(f"invalid value: expected a type that msgspec can encode, got {type(value).__name__!r}")


def decode_unknown(type: type, value: Any) -> Any:  # noqa: ANN401 - as above
    """Turn a value that was decoded into one of a type that msgspec doesn't know."""
    if hasattr(type, "model_validate"):
        try:
            return type.model_validate(value)
        except ValueError as error:
            raise ValueError(first_problem(error)) from None
    if hasattr(type, "FromString"):
        import base64

        raw = base64.b64decode(value, validate=True) if isinstance(value, str) else value
        try:
            return type.FromString(raw)
        except Exception as error:  # DecodeError, which is no ValueError
            raise ValueError(f"invalid protobuf message: {error}") from None
    raise NotImplementedError(f"invalid type: expected one that msgspec can decode, got {type.__name__!r}")


def first_problem(error: ValueError) -> str:
    """Return the text of the first problem that pydantic found; its own text quotes the input and has links."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first: dict[str, Any] = errors(include_url=False, include_input=False)[0]
    path = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
    return f"{first['msg']} - at `${path}`" if path else str(first["msg"])


def to_builtins(value: object) -> Any:  # noqa: ANN401 - what JSON can hold
    """Turn a value into mappings, lists, texts and numbers."""
    return msgspec.to_builtins(value, enc_hook=encode_unknown)


def from_builtins(value: object, type: Any) -> Any:  # noqa: ANN401 - a type is one of many things
    """Turn mappings, lists, texts and numbers into a value of a type. Raises ValueError if they don't fit."""
    return msgspec.convert(value, type, dec_hook=decode_unknown)


class Json(Generic[ValueT]):
    """JSON, checked against a type: `Json(Price)`.

    Args:
        type: The type of the values.
        max_size: The largest message that is decoded, in bytes.

    Raises:
        TypeError: msgspec can't handle the type, for example because a field has no type.
    """

    def __init__(self, type: type[ValueT], *, max_size: int = MAX_MESSAGE) -> None:
        self.name: str = "json"
        self.type = type
        self.max_size: int = max_size
        self._decoder = msgspec.json.Decoder(type, dec_hook=decode_unknown)
        self._encoder = msgspec.json.Encoder(enc_hook=encode_unknown)

    def encode(self, value: ValueT, /) -> bytes:
        return self._encoder.encode(value)

    def decode(self, message: bytes, /) -> ValueT:
        return self._decoder.decode(message)


class MessagePack(Generic[ValueT]):
    """MessagePack, checked against a type: `MessagePack(Price)`. It is smaller than JSON, and carries bytes as bytes.

    The arguments and errors are those of `Json`.
    """

    def __init__(self, type: type[ValueT], *, max_size: int = MAX_MESSAGE) -> None:
        self.name: str = "msgpack"
        self.type = type
        self.max_size: int = max_size
        self._decoder = msgspec.msgpack.Decoder(type, dec_hook=decode_unknown)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_unknown)

    def encode(self, value: ValueT, /) -> bytes:
        return self._encoder.encode(value)

    def decode(self, message: bytes, /) -> ValueT:
        return self._decoder.decode(message)
