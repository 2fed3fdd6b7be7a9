"""Codecs: values survive the journey, and messages that don't fit are errors with a path and without a cost."""

from __future__ import annotations

import dataclasses
import tracemalloc
from contextlib import suppress
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pydantic
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import given
from hypothesis import strategies as st

import muxkit
from muxkit.codecs import UnknownCodec, available, codec_for, decoded

if TYPE_CHECKING:
    from collections.abc import Callable


class Price(msgspec.Struct):
    name: str
    cents: int


class Order(pydantic.BaseModel):
    id: int
    kind: Literal["buy", "sell"] = "buy"


@dataclasses.dataclass
class Basket:
    prices: list[Price]
    order: Order
    at: Timestamp


PRICE = Price("tea", 3)
CODECS = [muxkit.Json(Price), muxkit.MessagePack(Price), muxkit.Zstd(muxkit.Json(Price)), muxkit.Pydantic(dict)]
BY_NAME = pytest.mark.parametrize("codec", CODECS[:3], ids=lambda codec: codec.name)


@BY_NAME
def test_a_value_comes_back_as_it_was(codec: muxkit.Codec[Price]) -> None:
    assert decoded(codec, codec.encode(PRICE)) == PRICE


def test_models_of_pydantic_and_messages_of_protobuf_may_be_inside_of_other_types() -> None:
    basket = Basket([PRICE], Order(id=7, kind="sell"), Timestamp(seconds=5))
    for codec in (muxkit.Json(Basket), muxkit.MessagePack(Basket)):
        assert decoded(codec, codec.encode(basket)) == basket


def test_pydantic_and_json_speak_with_each_other() -> None:
    assert muxkit.Pydantic(Order).name == muxkit.Json(Order).name
    assert decoded(muxkit.Json(Order), muxkit.Pydantic(Order).encode(Order(id=7))) == Order(id=7)
    assert decoded(muxkit.Pydantic(Order), muxkit.Json(Order).encode(Order(id=7))) == Order(id=7)


def test_protobuf_messages_travel_in_their_own_format() -> None:
    codec = muxkit.Protobuf(StringValue)
    assert codec.encode(StringValue(value="tea")) == b"\n\x03tea"
    assert decoded(codec, b"\n\x03tea") == StringValue(value="tea")


@pytest.mark.parametrize(
    ("codec", "message", "text"),
    [
        (muxkit.Json(Price), b'{"name":"tea","cents":"3"}', "at $.cents: Expected `int`, got `str`"),
        (muxkit.Json(Price), b"{", "invalid message: Input data was truncated"),
        (muxkit.Json(list[Price]), b'[{"name":"tea"}]', "at $[0]: Object missing required field `cents`"),
        (muxkit.Json(Basket), b'{"prices":[],"order":{"id":"x"},"at":""}', "at $.order.id: Input should be"),
        (muxkit.Json(Basket), b'{"prices":[],"order":{"id":1},"at":"/////w=="}', "at $.at: invalid protobuf message"),
        (muxkit.MessagePack(Price), b"\x93\x01\x02\x03", "invalid message: Expected `object`, got `array`"),
        (muxkit.Pydantic(Order), b'{"id":1,"kind":"tea"}', "at $.kind: Input should be 'buy' or 'sell'"),
        (muxkit.Protobuf(Timestamp), b"\xff\xff\xff", "invalid protobuf message"),
        (muxkit.Zstd(muxkit.Json(Price)), b"tea", "isn't compressed by zstd"),
        (muxkit.Json(Any), b"[" * 100_000, "invalid message: "),
        (muxkit.MessagePack(Any), b"\x91" * 100_000, "invalid message: "),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else None,
)
def test_a_message_that_does_not_fit_is_an_error_with_its_path(
    codec: muxkit.Codec[object], message: bytes, text: str
) -> None:
    with pytest.raises(muxkit.InvalidMessage) as caught:
        decoded(codec, message)
    assert text in str(caught.value)


def test_a_message_is_not_decoded_if_it_is_larger_than_the_codec_takes() -> None:
    codec = muxkit.Json(list[int], max_size=10)
    assert decoded(codec, b"[1,2,3]") == [1, 2, 3]
    with pytest.raises(muxkit.InvalidMessage, match=r"the message has 11 bytes, the codec 'json' takes 10"):
        decoded(codec, b"[1,2,3,4,5]")


def test_a_compression_bomb_ends_at_the_bound() -> None:
    codec = muxkit.Zstd(muxkit.Json(str, max_size=100_000))
    bomb = codec.encode("x" * 100_000_000)
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(muxkit.InvalidMessage, match="expands to more than the 100,000 bytes"):
            decoded(codec, bomb)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("change", [lambda message: message[:-3], lambda message: message + b"x"], ids=["cut", "more"])
def test_a_compressed_message_that_is_cut_or_longer_is_invalid(change: Callable[[bytes], bytes]) -> None:
    codec = muxkit.Zstd(muxkit.Json(str))
    with pytest.raises(muxkit.InvalidMessage):
        decoded(codec, change(codec.encode("tea" * 100)))


@given(st.binary(max_size=200))
def test_no_message_does_anything_but_decode_or_be_invalid(message: bytes) -> None:
    codecs: list[muxkit.Codec[Any]] = [
        muxkit.Json(Basket),
        muxkit.MessagePack(Basket),
        muxkit.Pydantic(Order),
        muxkit.Protobuf(Timestamp),
        muxkit.Zstd(muxkit.MessagePack(dict)),
    ]
    for codec in codecs:
        with suppress(muxkit.InvalidMessage):
            decoded(codec, message)


@given(st.binary(max_size=40), st.integers(0, 40))
def test_a_damaged_message_does_nothing_but_decode_or_be_invalid(noise: bytes, at: int) -> None:
    basket = Basket([PRICE], Order(id=7), Timestamp(seconds=5))
    for codec in (muxkit.Json(Basket), muxkit.MessagePack(Basket), muxkit.Zstd(muxkit.Json(Basket))):
        message = codec.encode(basket)
        with suppress(muxkit.InvalidMessage):
            decoded(codec, message[:at] + noise + message[at + len(noise) :])


@pytest.mark.parametrize("name", ["json", "msgpack", "json+zstd", "msgpack+zstd", ""])
def test_a_codec_is_found_by_its_name(name: str) -> None:
    assert codec_for(name, Price).name == (name or "json")


@pytest.mark.parametrize("name", ["yaml", "json+zstd+zstd", "+zstd+zstd", "x" * 5000])
def test_an_unknown_name_is_an_error_that_lists_the_names(name: str) -> None:
    with pytest.raises(UnknownCodec, match=f"expected one of {', '.join(available())}"):
        codec_for(name, Price)


def test_a_codec_that_cannot_handle_the_type_is_an_error() -> None:
    with pytest.raises(UnknownCodec, match="'protobuf' can't be used here: invalid type"):
        codec_for("protobuf", Price)


def test_a_codec_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from muxkit.codecs import _names

    class Loud(muxkit.Json[Price]):
        def __init__(self, type: type[Price]) -> None:
            super().__init__(type)
            self.name = "loud"

    point = EntryPoint("loud", "package:Loud", "muxkit.codecs")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Loud)
    monkeypatch.setattr(_names, "entry_points", lambda group: [point] if group == "muxkit.codecs" else [])
    _names._added.cache_clear()
    try:
        assert codec_for("loud", Price).name == "loud"
        assert codec_for("loud+zstd", Price).name == "loud+zstd"
        assert "loud" in available()
    finally:
        _names._added.cache_clear()
