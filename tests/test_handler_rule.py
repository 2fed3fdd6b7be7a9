"""The rule for handlers: async, one parameter, a channel unless the annotation is a session; checked at the start."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest
import trio

import muxkit
import muxkit.asyncio
from muxkit.protocols import aqueduct, bpmux, relink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from muxkit import Session
    from muxkit.protocols.relink import Link

URL = "bpmux+mem://rule"


async def annotated(channel: muxkit.Channel) -> None:
    await channel.send(b"channel")


async def untyped(c):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - it has no annotations
    await c.send(b"channel")


async def native(duplex: bpmux.Duplex) -> None:
    await duplex.send(b"channel")


async def one_of_trio(channel: trio.abc.Channel[bytes]) -> None:
    await channel.send(b"channel")


async def with_options(channel: muxkit.Channel, *, answer: bytes = b"channel") -> None:
    await channel.send(answer)


async def of_two(answer: bytes, channel: muxkit.Channel) -> None:
    await channel.send(answer)


def logged(function: Callable[[muxkit.Channel], Awaitable[None]]) -> Callable[[muxkit.Channel], Awaitable[None]]:
    @wraps(function)
    def wrapper(channel: muxkit.Channel) -> Awaitable[None]:
        return function(channel)

    return wrapper


class Service:
    async def __call__(self, channel: muxkit.Channel) -> None:
        await channel.send(b"channel")

    async def method(self, c):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - it has no annotations
        await c.send(b"channel")

    @staticmethod
    async def static(channel: muxkit.Channel) -> None:
        await channel.send(b"channel")


OF_CHANNELS: dict[str, Any] = {
    "an annotated function": annotated,
    "a function without annotations": untyped,
    "a function of the protocol's own channels": native,
    "a function of Trio's channels": one_of_trio,
    "a function with options": with_options,
    "a partial function": partial(of_two, b"channel"),
    "a decorated function": logged(annotated),
    "a callable object": Service(),
    "a method": Service().method,
    "a static method": Service.static,
}


@pytest.mark.parametrize("handler", OF_CHANNELS.values(), ids=OF_CHANNELS.keys())
async def test_a_handler_of_channels_is_called_with_channels(handler: Any) -> None:  # noqa: ANN401 - of any shape
    """F04: `async def h(c)`, methods and partial functions silently became handlers of sessions."""
    async with muxkit.open_server(handler, URL) as server, muxkit.connect(server.url) as session:
        with trio.fail_after(60):
            assert await (await session.open()).receive() == b"channel"


async def of_sessions(session: muxkit.Session) -> None:
    await (await session.open()).send(b"session")


async def of_native_sessions(session: bpmux.Session) -> None:
    await (await session.open()).send(b"session")


async def of_sessions_for_type_checkers(s: Session) -> None:
    await (await s.open()).send(b"session")


async def of_two_and_sessions(message: bytes, session: muxkit.Session) -> None:
    await (await session.open()).send(message)


class SessionService:
    async def __call__(self, session: muxkit.Session) -> None:
        await (await session.open()).send(b"session")


OF_SESSIONS: dict[str, Any] = {
    "a function": of_sessions,
    "a function of the protocol's own sessions": of_native_sessions,
    "a function whose annotation only type checkers import": of_sessions_for_type_checkers,
    "a partial function": partial(of_two_and_sessions, b"session"),
    "a callable object": SessionService(),
}


@pytest.mark.parametrize("handler", OF_SESSIONS.values(), ids=OF_SESSIONS.keys())
async def test_a_handler_that_is_annotated_as_one_of_sessions_is_called_with_sessions(
    handler: Any,  # noqa: ANN401 - of any shape
) -> None:
    async with muxkit.open_server(handler, URL) as server, muxkit.connect(server.url) as session:
        with trio.fail_after(60):
            assert await (await anext(session.incoming())).receive() == b"session"


async def test_a_mock_of_an_async_function_is_a_handler() -> None:
    mock = AsyncMock()
    async with muxkit.open_server(mock, URL) as server, muxkit.connect(server.url) as session:
        with pytest.raises(trio.EndOfChannel):
            await (await session.open()).receive()
    assert mock.await_count == 1


def sync(channel: muxkit.Channel) -> None:
    pass


async def generator(channel: muxkit.Channel) -> Any:  # noqa: ANN401 - it is wrong in any case
    yield channel


async def nothing() -> None:
    pass


async def of_any(channel: Any) -> None:  # noqa: ANN401 - that is the mistake
    pass


async def of_bytes(message: bytes) -> None:
    pass


async def of_a_link(link: Link) -> None:
    pass


async def of_asyncio(channel: muxkit.asyncio.Channel) -> None:
    pass


class SyncService:
    def __call__(self, channel: muxkit.Channel) -> None:
        pass


WRONG: dict[str, tuple[Any, str]] = {
    "a function that is not async": (sync, "sync: expected an async function, got one that isn't async. Write it with"),
    "a lambda": (
        lambda channel: annotated(channel),
        "got a lambda. Write `async def`, or bind arguments with functools",
    ),
    "a partial of a function that is not async": (partial(sync), "got one that isn't async"),
    "an object whose call is not async": (
        SyncService(),
        "SyncService.__call__: expected an async function, got one that isn't",
    ),
    "a class": (Service, "Service: expected an async function, got a class. Pass an instance"),
    "a generator": (generator, "generator: expected an async function, got an async generator. Remove `yield`"),
    "no parameter": (nothing, r"nothing\(\): expected a function that can be called with one argument, the channel"),
    "two parameters": (of_two, r"of_two\(answer, channel\): expected a function that can be called with one argument"),
    "the URL": ("bpmux+mem://swapped", "expected an async function, got 'str'. The handler is the first argument"),
    "any type": (of_any, "of_any: expected muxkit.Channel .* got the annotation typing.Any of its parameter 'channel'"),
    "another type": (of_bytes, "got the annotation builtins.bytes of its parameter 'message'"),
    "a type that does not exist": (of_a_link, "the annotation 'Link' of its parameter 'link' can't be resolved"),
    "a channel of asyncio": (of_asyncio, "expected muxkit.Channel .* got the annotation muxkit.asyncio.faces.Channel"),
}
wrong = pytest.mark.parametrize(("handler", "said"), WRONG.values(), ids=WRONG.keys())


@wrong
async def test_what_cannot_be_a_handler_is_refused_before_the_server_listens(
    handler: Any,  # noqa: ANN401 - that is the mistake
    said: str,
) -> None:
    """F04: it failed with the first client, who read "code 500", and the log withheld the text of the TypeError."""
    with pytest.raises(TypeError, match=said):
        async with muxkit.open_server(handler, URL):
            pass
    with pytest.raises(TypeError, match=said):
        await muxkit.serve(handler, URL)
    with pytest.raises(TypeError, match=said):
        async with bpmux.open_server(handler, "mem://rule"):
            pass


@wrong
def test_a_whole_program_refuses_it_as_well(handler: Any, said: str) -> None:  # noqa: ANN401 - that is the mistake
    with pytest.raises(TypeError, match=said):
        muxkit.run_server(handler, URL)


async def test_a_coroutine_is_refused_and_never_warned_about() -> None:
    called: Any = nothing()
    with pytest.raises(TypeError, match=r"got a coroutine\. Pass the function, uncalled"):
        async with muxkit.open_server(called, URL):
            pass


@pytest.mark.parametrize(
    "make",
    [
        muxkit.each_channel,
        muxkit.asyncio.each_channel,
        muxkit.each_request,
        lambda handler: muxkit.by_name({"a": handler}),
    ],
)
def test_the_makers_of_handlers_check_what_they_are_given(make: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="got one that isn't async"):
        make(sync)
    with pytest.raises(TypeError, match="can be called with one argument"):
        make(nothing)


def test_a_handler_of_sessions_is_not_one_of_channels() -> None:
    of_session: Any = of_sessions
    with pytest.raises(TypeError, match="expected one for channels, got one for sessions"):
        muxkit.each_channel(of_session)
    with pytest.raises(TypeError, match="don't wrap it a second time"):
        muxkit.each_channel(muxkit.each_channel(annotated))  # type: ignore[arg-type]  # that is the mistake


def test_asyncio_servers_have_the_same_rule_for_their_own_classes() -> None:
    on_trio: Any = annotated
    with pytest.raises(TypeError, match=r"expected muxkit\.asyncio\.Channel .* got the annotation muxkit\.runtime"):
        muxkit.asyncio.open_server(on_trio, URL)
    not_async: Any = sync
    with pytest.raises(TypeError, match="got one that isn't async"):
        muxkit.asyncio.open_server(not_async, URL)


async def test_a_listener_of_relink_checks_the_handlers_of_its_links() -> None:
    not_async: Any = sync
    with pytest.raises(TypeError, match="got one that isn't async"):
        await relink.listen(not_async, "relink+mem://rule")
    with pytest.raises(TypeError, match="got one that isn't async"):
        await relink.listen({"a": relink.Endpoint(not_async)}, "relink+mem://rule")


async def test_a_handler_of_requests_needs_a_protocol_that_has_them() -> None:
    async def answer(request: muxkit.IncomingRequest) -> None:
        await request.respond(b"")

    for handler in (muxkit.each_request(answer), muxkit.each_channel(annotated, requests=answer)):
        with pytest.raises(muxkit.Unsupported, match="this handler takes requests, and aqueduct has no requests"):
            async with aqueduct.open_server(handler, "mem://rule"):
                pass
