"""Streams whose data has a type of the program, and uuids as Python's own class."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, assert_type
from uuid import UUID, uuid4

import msgspec
import pytest
import trio

from muxkit.protocols import restream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

URL = "restream+mem://typed"


class Line(msgspec.Struct):
    line: str
    level: int = 0


@asynccontextmanager
async def fed(*data: restream.Json) -> AsyncGenerator[UUID, None]:
    """A server with a session of these messages, whose uuid it gives."""
    uuid = uuid4()
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        await store.register(uuid, None, attached=False)
        await store.append_many(uuid, data)
        await store.finish(uuid)
        assert (await store.status(uuid)).uuid == str(uuid)
        await nursery.start(partial(restream.serve, URL, store, application=restream.Fed()))
        yield uuid
        nursery.cancel_scope.cancel()


async def test_the_data_of_a_typed_stream_is_of_that_type() -> None:
    async with fed({"line": "tea"}, {"line": "milk", "level": 3}) as uuid:
        async with restream.stream(URL, uuid=uuid, type=Line) as reader:
            assert_type(reader, restream.Reader[restream.Message[Line]])
            first, second = await reader.receive(), await reader.receive()
    assert_type(first.data, Line)
    assert [(each.id, each.data) for each in (first, second)] == [(1, Line("tea")), (2, Line("milk", 3))]


async def test_data_of_another_shape_is_an_error_that_says_where_and_the_next_message_follows() -> None:
    async with fed({"line": 7}, {"line": "milk"}) as uuid, restream.stream(URL, uuid=uuid, type=Line) as reader:
        with pytest.raises(msgspec.ValidationError, match=r"message 1 is not a Line: Expected `str`, got `int`.*line"):
            await reader.receive()
        assert (await reader.receive()).data == Line("milk")


async def test_a_stream_without_a_type_gives_json() -> None:
    async with fed({"line": "tea"}) as uuid, restream.stream(URL, uuid=uuid) as reader:
        assert_type(reader, restream.Reader[restream.Message[restream.Json]])
        assert (await reader.receive()).data == {"line": "tea"}


async def test_a_uuid_may_be_of_pythons_own_class() -> None:
    """Was: "TypeError: expected string or bytes-like object, got 'UUID'"."""
    uuid = uuid4()
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        await nursery.start(restream.serve, URL, store)
        async with restream.numbers(URL, count=2, uuid=uuid) as reader:
            assert reader.uuid == str(uuid)
            assert len([number async for number in reader]) == 2
        assert (await store.status(uuid)).head == 2
        nursery.cancel_scope.cancel()
