"""How do a state and data become JSON, and come back in their own types?

Python's NaN and infinities become null, as JSON has none; tuples become arrays.
"""

from __future__ import annotations

from typing import Generic

import msgspec

from muxkit.protocols.restream.store.errors import NotJson, StoreFull
from muxkit.protocols.restream.store.protocol import Data, State


class Codec(Generic[State, Data]):
    """JSON of one application; `state` and `data` are anything that msgspec can decode into."""

    __slots__ = ("_data", "_encoder", "_params", "_state")

    def __init__(self, state: type[State], data: type[Data]) -> None:
        self._state = msgspec.json.Decoder(state)
        self._data = msgspec.json.Decoder(data)
        self._params = msgspec.json.Decoder(object)
        self._encoder = msgspec.json.Encoder()

    def encode(self, value: object, most: int) -> bytes:
        """One line of JSON, at most so many bytes."""
        try:
            encoded = self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise NotJson(f"a {type(value).__name__} cannot be written as JSON: {error}") from error
        if len(encoded) > most:
            raise StoreFull(
                f"{len(encoded):,} bytes of JSON are more than the {most:,} allowed; "
                "send less at once, or raise StoreLimits(message_bytes=…)"
            )
        return encoded

    def state(self, encoded: bytes) -> State:
        """A fresh copy, so that whoever changes it changes nothing here."""
        return _decoded(self._state, encoded, "state")

    def data(self, encoded: bytes) -> Data:
        """What was put."""
        return _decoded(self._data, encoded, "data of a message")

    def params(self, encoded: bytes) -> object:
        """What the session was registered with."""
        return _decoded(self._params, encoded, "params")


def _decoded(decoder: msgspec.json.Decoder[State], encoded: bytes, what: str) -> State:
    try:
        return decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(
            f"the stored {what} is not what this application stores: {error}; was the session made by another one?"
        ) from error
