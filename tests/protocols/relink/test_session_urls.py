"""A link is found by its URL, over every transport, through `link`, `listen` and the generic entry points."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import pytest
import trio

from muxkit import Limits
from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Endpoint, Link
from muxkit.protocols.relink.dial.connect import protocol
from muxkit.protocols.relink.dial.urls import place_of, split_endpoint
from muxkit_adapters import memory
from tests.adapters._links import Certificates
from tests.protocols.relink._session_world import world

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trio.testing import MockClock


@pytest.mark.parametrize(
    ("url", "address", "endpoint"),
    [
        ("relink+tcp://127.0.0.1:7000/jobs", "127.0.0.1:7000", "jobs"),
        ("relink+tcp://127.0.0.1:7000", "127.0.0.1:7000", None),
        ("relink+tls://[::1]:7000/caf%C3%A9%2Fbar", "[::1]:7000", "café/bar"),
        ("relink+tcp://127.0.0.1:7000?endpoint=jobs", "127.0.0.1:7000", "jobs"),
        ("relink+mem://orders/jobs", "orders", "jobs"),
        ("relink+unix:///run/app.sock?endpoint=jobs", "/run/app.sock", "jobs"),
        ("relink+unix:///run/app.sock", "/run/app.sock", None),
        ("relink+ws://127.0.0.1:7000/chat?room=1&endpoint=a%26b&x=", "127.0.0.1:7000/chat?room=1&x=", "a&b"),
        ("relink+wss://example.org/chat", "example.org/chat", None),
    ],
)
def test_a_url_names_address_and_endpoint(url: str, address: str, endpoint: str | None) -> None:
    place = place_of(url)
    assert (place.address, place.endpoint) == (address, endpoint)
    assert place_of(place.url(address, endpoint or "")) == place


@pytest.mark.parametrize("url", ["bpmux+tcp://x:1", "relink://x", "relink+://x", "relink+tcp:x", ""])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected relink\+transport://address"):
        relink.link(url)


def test_an_endpoint_may_be_named_once() -> None:
    with pytest.raises(ValueError, match="'a', 'b'"):
        relink.link("relink+tcp://127.0.0.1:1/a", "b")
    with pytest.raises(ValueError, match="'a', 'b'"):
        relink.link("relink+tcp://127.0.0.1:1/a", config=Config(endpoint="b"))
    with pytest.raises(TypeError, match="takes no options"):
        relink.link(lambda: memory.connect("x"), insecure=True)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("relink+tcp://127.0.0.1:1/a?endpoint=b", "'a' in the path, 'b' behind it"),
        ("relink+mem://orders/a?endpoint=a", "'a' in the path, 'a' behind it"),
        ("relink+tcp://127.0.0.1:1/%ff", "endpoint '%ff' is not UTF-8"),
        ("relink+ws://127.0.0.1:1/chat?endpoint=%ff", "endpoint '%ff' is not UTF-8"),
    ],
)
def test_an_endpoint_that_a_url_cannot_mean_is_refused_before_anybody_dials(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        relink.link(url)


async def serve_one_message(link: Link) -> None:
    async for receiver in link.receivers():
        async for message in receiver:
            async with link.sender(receiver.channel) as sender:
                await sender.send(b"back", *message.parts)


TRANSPORTS = [
    "tcp",
    "tls",
    "ws",
    "wss",
    "mem",
    pytest.param("unix", marks=pytest.mark.skipif(sys.platform == "win32", reason="has none")),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_transport_carries_it(transport: str, tmp_path: Path) -> None:
    address = {
        "mem": "relink-urls/jobs",
        "unix": f"{tmp_path / 'socket'}?endpoint=jobs",
        "ws": "127.0.0.1:0/path?endpoint=jobs",
        "wss": "127.0.0.1:0?endpoint=jobs",
    }.get(transport, "127.0.0.1:0/jobs")
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if transport in ("tls", "wss"):
        certificates = Certificates()
        ours, theirs = {"ssl_context": certificates.server()}, {"ssl_context": certificates.client()}
    async with trio.open_nursery() as nursery:

        async def listen(task_status: trio.TaskStatus[relink.Listening]) -> None:
            url = f"relink+{transport}://{address}"
            await relink.listen(serve_one_message, url, task_status=task_status, **ours)

        listening: relink.Listening = await nursery.start(listen)
        async with relink.link(listening.url, **theirs) as link:
            async with link.sender(3) as sender, link.receiver(3) as receiver:
                await sender.send(b"over", transport.encode())
                with await receiver.receive() as message:
                    assert message.parts == (b"back", b"over", transport.encode())
            assert transport in link.info.peer
        await listening.shutdown(grace=1)


async def test_listen_serves_several_endpoints_and_stops_in_order(autojump_clock: MockClock) -> None:
    services = {name: Endpoint(serve_one_message) for name in ("a", "b")}
    async with trio.open_nursery() as nursery:

        async def listen(task_status: trio.TaskStatus[relink.Listening]) -> None:
            await relink.listen(services, "relink+mem://several", task_status=task_status)

        listening: relink.Listening = await nursery.start(listen)
        assert listening.url == "relink+mem://several"
        async with relink.link(listening.url, "a") as a, relink.link("relink+mem://several/b") as b:
            for link in (a, b):
                async with link.sender(1) as sender, link.receiver(1) as receiver:
                    await sender.send(b"x")
                    (await receiver.receive()).consume()
            assert listening.listener.links == 2
            with pytest.raises(ValueError, match="bring their own names"):
                await relink.listen(services, "relink+mem://several/a")
            nursery.start_soon(lambda: listening.shutdown(grace=60))
        await trio.sleep(100)


# --- the door, as it is: one connection, one link


async def test_the_door_opens_a_link_on_one_connection() -> None:
    config = Config(endpoint="jobs", keepalive=None)
    async with trio.open_nursery() as nursery:
        over = trio.Event()

        async def handle(stream: trio.abc.Stream) -> None:
            async with _as_door(stream, "server", "127.0.0.1:1", config) as other:
                async for channel in other.incoming():
                    async for message in channel:
                        await channel.send(message)
                    await channel.aclose()
            over.set()

        here, there = memory.pair()
        nursery.start_soon(handle, there)
        async with _as_door(here, "client", "127.0.0.1:1?endpoint=jobs", None) as one:
            async with one.open() as channel:
                await channel.send(b"x")
                assert await channel.receive() == b"x"
        await over.wait()


async def test_a_door_that_dials_again_opens_a_link_on_many_connections(autojump_clock: MockClock) -> None:
    async def echo(link: Link) -> None:
        async for channel in link.incoming():
            async for message in channel:
                await channel.send(message)
            await channel.aclose()

    common: dict[str, Any] = {"endpoint": "jobs", "limits": Limits(), "observer": None, "linger": 5.0}
    async with world() as made, protocol.listener(echo, **common) as listener:
        made.listener = listener
        async with protocol.link(made.dial, **common) as link, link.open() as channel:
            for number in range(3):
                await channel.send(b"%d" % number)
                assert await channel.receive() == b"%d" % number
                await made.cut()
        assert link.connections == 4


def _as_door(
    stream: trio.abc.Stream, role: Literal["client", "server"], address: str, config: Config | None
) -> AbstractAsyncContextManager[Link]:
    return protocol.session(
        stream, role=role, address=address, limits=Limits(), observer=None, linger=5.0, config=config
    )


def test_the_plugin_has_what_a_door_looks_for() -> None:
    assert protocol.options >= {"config", "backoff", "patience", "keep"}
    assert protocol.split("tcp", "h:1/e") == split_endpoint("tcp", "h:1/e") == ("h:1", "e")
