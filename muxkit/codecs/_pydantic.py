"""The codec of pydantic: JSON that pydantic reads and writes, with its validators and serializers."""

from __future__ import annotations

from typing import Generic, TypeVar

from muxkit._errors import ExtraNeeded
from muxkit.codecs._codec import MAX_MESSAGE
from muxkit.codecs._msgspec import first_problem

ValueT = TypeVar("ValueT")


class Pydantic(Generic[ValueT]):
    """JSON by pydantic: `Pydantic(Order)`, for a model or any other type that pydantic knows.

    The name of the codec is "json", because its messages are JSON: the other end may use `Json`.

    Args:
        type: The type of the values.
        max_size: The largest message that is decoded, in bytes.

    Raises:
        ExtraNeeded: pydantic isn't installed.
    """

    def __init__(self, type: type[ValueT], *, max_size: int = MAX_MESSAGE) -> None:
        try:
            from pydantic import TypeAdapter
        except ImportError as error:
            raise ExtraNeeded("pydantic", "pydantic") from error
        self.name: str = "json"
        self.type = type
        self.max_size: int = max_size
        self._adapter = TypeAdapter(type)

    def encode(self, value: ValueT, /) -> bytes:
        return self._adapter.dump_json(value)

    def decode(self, message: bytes, /) -> ValueT:
        try:
            return self._adapter.validate_json(message)
        except ValueError as error:
            raise ValueError(first_problem(error)) from error
