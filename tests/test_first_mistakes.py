"""The mistakes of the first hour: each is answered with what to write instead."""

from __future__ import annotations

import asyncio
import gc
import re
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio

import muxkit
import muxkit.asyncio
from muxkit import forward
from muxkit.core import Reason
from muxkit.protocols import relink, restream

URL = "bpmux+mem://mistakes"


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def echo_on_asyncio(channel: muxkit.asyncio.Channel) -> None:
    async for message in channel:
        await channel.send(message)


# ---------------------------------------------------------------------------- blocks

MAKERS: dict[str, Callable[[], Any]] = {
    "connect": lambda: muxkit.connect(URL),
    "open_server": lambda: muxkit.open_server(echo, URL),
    "reconnecting": lambda: muxkit.reconnecting(URL),
    "link": lambda: relink.link(URL.replace("bpmux", "relink")),
    "open_local": lambda: forward.open_local(cast("Any", None), "127.0.0.1:0", "127.0.0.1:1"),
    "asyncio's connect": lambda: muxkit.asyncio.connect(URL),
    "asyncio's open_server": lambda: muxkit.asyncio.open_server(echo_on_asyncio, URL),
    "asyncio's reconnecting": lambda: muxkit.asyncio.reconnecting(URL),
}
EACH_BLOCK = pytest.mark.parametrize("name", MAKERS)


def expected(name: str, got: str) -> str:
    call = rf"{name.rpartition(' ')[2]}\(\.\.\.\)"
    return rf"^{call} is not open yet: expected 'async with {call} as \.\.\.:', got {got}$"


@EACH_BLOCK
async def test_a_block_that_is_awaited_says_async_with(name: str) -> None:
    with pytest.raises(TypeError, match=expected(name, "'await'")):
        await MAKERS[name]()


@EACH_BLOCK
async def test_a_loop_over_a_block_that_is_not_open_says_async_with(name: str) -> None:
    with pytest.raises(TypeError, match=expected(name, "'async for'")):
        async for _ in MAKERS[name]():
            pass


@EACH_BLOCK
def test_a_block_that_is_entered_without_async_says_async_with(name: str) -> None:
    with pytest.raises(TypeError, match=expected(name, "'with'")), MAKERS[name]():
        pass


@EACH_BLOCK
def test_a_method_of_a_block_that_was_not_entered_says_async_with(name: str) -> None:
    with pytest.raises(AttributeError, match=expected(name, r"\.open")):
        MAKERS[name]().open()


@pytest.mark.parametrize("use", [lambda opening: opening.send(b"tea"), lambda opening: opening.name])
async def test_a_channel_that_was_not_opened_says_how_it_is(use: Callable[[Any], object]) -> None:
    said = r"the channel is not open yet: expected 'async with session\.open\(\) as channel:' or 'channel = await "
    async with muxkit.open_server(echo, URL), muxkit.connect(URL) as session:
        with pytest.raises(AttributeError, match=said):
            use(session.open())
        with pytest.raises(TypeError, match=said), cast("Any", session.open()):
            pass


async def test_a_block_has_no_private_attributes_beside_its_own() -> None:
    """Copying, pickling and debuggers ask for some; these get an error of the usual form."""
    async with muxkit.open_server(echo, URL), muxkit.connect(URL) as session:
        for each in (muxkit.connect(URL), session.open()):
            with pytest.raises(AttributeError, match="object has no attribute '_ipython_display_'"):
                cast("Any", each)._ipython_display_()


async def test_a_session_that_is_used_behind_its_block_says_so() -> None:
    async with muxkit.open_server(echo, URL):
        async with muxkit.connect(URL) as session:
            pass
        with pytest.raises(muxkit.LinkLost, match="this side closed the session, which ends with its async with block"):
            await session.open()


# ---------------------------------------------------------------------------- await

CHANNEL_CALLS: dict[str, Callable[[muxkit.Channel], object]] = {
    "send": lambda channel: channel.send(b"tea"),
    "send_many": lambda channel: channel.send_many([b"tea"]),
    "receive": lambda channel: channel.receive(),
    "receive_many": lambda channel: channel.receive_many(),
    "finish": lambda channel: channel.finish(),
}


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
@pytest.mark.parametrize("name", CHANNEL_CALLS)
async def test_a_call_that_is_not_awaited_is_named_as_the_program_wrote_it(protocol: str, name: str) -> None:
    url = f"{protocol}+mem://mistakes"
    async with muxkit.open_server(echo, url), muxkit.connect(url) as session, session.open() as channel:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            CHANNEL_CALLS[name](channel)
            gc.collect()
    public = "Channel|Duplex|Sender"  # classes that the reference shows
    (warning,) = caught
    assert re.fullmatch(rf"coroutine '({public})\.{name}' was never awaited", str(warning.message).splitlines()[0])


# ---------------------------------------------------------------------------- arguments


async def enter(block: Any) -> None:  # noqa: ANN401 - of any function
    async with block:
        pass


@pytest.mark.parametrize(
    "start",
    [
        lambda: trio.run(enter, muxkit.open_server(cast("Any", URL), cast("Any", echo))),
        lambda: trio.run(muxkit.serve, cast("Any", URL), cast("Any", echo)),
        lambda: muxkit.run_server(cast("Any", URL), cast("Any", echo)),
    ],
)
def test_a_handler_and_a_url_in_the_wrong_order_are_to_be_swapped(start: Callable[[], object]) -> None:
    said = "expected an async function, got 'str'. The handler is the first argument, and the URL the second"
    with pytest.raises(TypeError, match=said):
        start()


def test_the_same_of_an_asyncio_server() -> None:
    with pytest.raises(TypeError, match=r"got 'str'\. The handler is the first argument"):
        muxkit.asyncio.open_server(cast("Any", URL), cast("Any", echo))


@pytest.mark.parametrize("handler", [None, 7])
async def test_a_handler_that_cannot_be_called_is_refused(handler: object) -> None:
    with pytest.raises(TypeError, match=r"handler: expected an async function, got '(NoneType|int)'"):
        async with muxkit.open_server(cast("Any", handler), URL):
            pass


async def test_something_else_in_place_of_a_url_is_refused() -> None:
    with pytest.raises(TypeError, match=r"invalid URL: expected a string such as bpmux\+tcp://.*, got a function"):
        async with muxkit.connect(cast("Any", echo)):
            pass


# ---------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("http://example.org/chat", "bpmux+ws://example.org/chat"),
        ("https://example.org/chat", "bpmux+wss://example.org/chat"),
        ("HTTPS://example.org", "bpmux+wss://example.org"),
        ("ws://127.0.0.1:7000/chat", "bpmux+ws://127.0.0.1:7000/chat"),
        ("wss://127.0.0.1:7000", "bpmux+wss://127.0.0.1:7000"),
        ("tcp://127.0.0.1:7500", "bpmux+tcp://127.0.0.1:7500"),
        ("udp://127.0.0.1:7500", "e3x+udp://127.0.0.1:7500"),
        ("quic://127.0.0.1:7500", "aqueduct+quic://127.0.0.1:7500"),
        ("127.0.0.1:7500", "bpmux+tcp://127.0.0.1:7500"),
        ("alice:secret@127.0.0.1:7500", "bpmux+tcp://127.0.0.1:7500"),
        ("relink://127.0.0.1:7500", "relink+tcp://127.0.0.1:7500"),
        ("tcp+bpmux://127.0.0.1:7500", "bpmux+tcp://127.0.0.1:7500"),
        ("ws+relink://127.0.0.1:7500", "relink+ws://127.0.0.1:7500"),
        ("bpmux+://127.0.0.1:7500", "bpmux+tcp://127.0.0.1:7500"),
        ("+tls://127.0.0.1:7500", "bpmux+tls://127.0.0.1:7500"),
    ],
)
async def test_a_url_of_another_form_is_answered_with_the_one_that_was_meant(url: str, meant: str) -> None:
    for use in (muxkit.connect(url), muxkit.open_server(echo, url)):
        with pytest.raises(ValueError, match=r"^invalid URL .*: expected protocol\+transport://address") as caught:
            async with use:
                pass
        assert str(caught.value).endswith(f"; did you mean {meant!r}?")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "bpmux", "gopher://127.0.0.1", "bpmux+tcp:x", "://"])
async def test_nothing_is_guessed_where_nothing_can_be(url: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected protocol\+transport://address, for example bpmux\+tcp://"
    ) as caught:
        async with muxkit.connect(url):
            pass
    assert "did you mean" not in str(caught.value)


def test_the_functions_of_one_protocol_guess_that_protocol() -> None:
    with pytest.raises(
        ValueError, match=r"expected restream\+transport://.*did you mean 'restream\+ws://127\.0\.0\.1:1'"
    ):
        restream.numbers("http://127.0.0.1:1", count=1)
    with pytest.raises(ValueError, match=r"expected relink\+transport://.*did you mean 'relink\+tcp://127\.0\.0\.1:1'"):
        relink.link("bpmux+tcp://alice:secret@127.0.0.1:1")


@pytest.mark.parametrize("transport", ["tcp", "tls"])
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:7000/chat", "expected no path, which only ws and wss have"),
        ("127.0.0.1", "the port is missing"),
        ("127.0.0.1:", "the port is missing"),
        ("[::1]", "the port is missing"),
        ("127.0.0.1:http", "the port must be a number up to 65535"),
    ],
)
async def test_an_address_says_what_is_wrong_with_it(transport: str, address: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}; expected host:port, such as"):
        async with muxkit.connect(f"bpmux+{transport}://{address}"):
            pass


@pytest.mark.parametrize(
    ("url", "said"),
    [("bmpux+tcp://127.0.0.1:1", "did you mean 'bpmux'"), ("bpmux+tpc://127.0.0.1:1", "did you mean 'tcp'")],
)
async def test_a_misspelt_half_of_a_url_is_answered_with_the_one_that_was_meant(url: str, said: str) -> None:
    with pytest.raises(muxkit.PluginError, match=said):
        async with muxkit.connect(url):
            pass


# ---------------------------------------------------------------------------- loops


async def test_muxkit_asyncio_within_trio_names_the_function_for_trio() -> None:
    with pytest.raises(RuntimeError, match=r"muxkit\.asyncio runs on asyncio: .* got a Trio task\. .*muxkit\.connect"):
        async with muxkit.asyncio.connect(URL):
            pass


def test_muxkit_within_asyncio_names_the_function_for_asyncio() -> None:
    async def main() -> None:
        async with muxkit.connect(URL):
            pass

    with pytest.raises(RuntimeError, match=r"muxkit runs on Trio: .*use muxkit\.asyncio\.connect"):
        asyncio.run(main())


# ---------------------------------------------------------------------------- errors as loggers print them


def test_the_repr_of_an_error_shows_its_reason_and_its_code() -> None:
    """Was: ChannelCancelled('the peer gave up on this channel before it was done')."""
    told = Reason("cancelled by client", 499)
    for kind in (muxkit.ChannelCancelled, muxkit.ChannelStopped):
        assert repr(kind("the peer gave up", told=told)) == (
            f"{kind.__name__}('the peer gave up', reason='cancelled by client', code=499)"
        )
        assert repr(kind("the peer gave up")) == f"{kind.__name__}('the peer gave up')"
    assert repr(muxkit.Refused("too slow", code=429)) == "Refused('too slow', code=429)"
    lost = muxkit.LinkLost("the connection is over", by="peer", peer_reason="bye", code=7)
    assert repr(lost) == "LinkLost('the connection is over', by='peer', peer_reason='bye', code=7)"
    broken = muxkit.RemoteProtocolError("too large", rule="bpmux-R1", limit="message")
    assert repr(broken) == "RemoteProtocolError('too large', rule='bpmux-R1', limit='message')"
