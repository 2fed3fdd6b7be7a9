"""The codec of protobuf: messages of classes that `protoc` generated."""

from __future__ import annotations

from typing import Generic, Protocol, Self, TypeVar

from muxkit.codecs._codec import MAX_MESSAGE


class ProtobufMessage(Protocol):
    """What the codec uses of a generated class."""

    def SerializeToString(self) -> bytes: ...
    @classmethod
    def FromString(cls, s: bytes, /) -> Self: ...


MessageT = TypeVar("MessageT", bound=ProtobufMessage)


class Protobuf(Generic[MessageT]):
    """Protobuf's binary format: `Protobuf(Order)`, where `Order` is a generated class.

    Args:
        type: The generated class.
        max_size: The largest message that is decoded, in bytes.

    Raises:
        TypeError: The type isn't a generated class.
    """

    def __init__(self, type: type[MessageT], *, max_size: int = MAX_MESSAGE) -> None:
        if not hasattr(type, "FromString"):
            raise TypeError(f"invalid type: expected a class that protoc generated, got {type!r}")
        self.name: str = "protobuf"
        self.type = type
        self.max_size: int = max_size

    def encode(self, value: MessageT, /) -> bytes:
        return value.SerializeToString()

    def decode(self, message: bytes, /) -> MessageT:
        try:
            return self.type.FromString(message)
        except Exception as error:  # protobuf's DecodeError is no ValueError
            raise ValueError(f"invalid protobuf message: {error}") from error
