"""A rush of honest clients is served, and connections that say nothing keep nobody out, whatever the transport."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
import trustme

import muxkit
from muxkit._door import Door
from muxkit.metrics import Metrics
from muxkit.protocols import relink
from muxkit_adapters import memory

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

CLIENTS = 60  # three times what may be half-open at once
WITHIN = 120.0  # seconds, for a busy machine
FULL = muxkit.Limits(half_open=20, handshake=600.0)  # nobody may be asked to give way within a minute

PROTOCOLS = ("bpmux", "aqueduct", "e3x", "relink", "yamux")

AUTHORITY = trustme.CA()


@pytest.fixture
def tls(tmp_path: Path) -> tuple[muxkit.TLS, muxkit.TLS]:
    ca, chain = tmp_path / "ca.pem", tmp_path / "chain.pem"
    AUTHORITY.cert_pem.write_to_path(ca)
    AUTHORITY.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(chain)
    return muxkit.TLS(cert=str(chain), key=str(chain)), muxkit.TLS(ca=str(ca))


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def visit(session: muxkit.Session) -> None:
    async with session.open() as channel:
        await channel.send(b"hello")
        assert await channel.receive() == b"hello"


@pytest.mark.requirement("R-13")
@pytest.mark.parametrize(
    "url",
    [
        "bpmux+tcp://127.0.0.1:0",
        "bpmux+unix://{folder}/rush.sock",
        "bpmux+tls://127.0.0.1:0",
        "bpmux+ws://127.0.0.1:0",
        "bpmux+wss://127.0.0.1:0",
        "relink+tcp://127.0.0.1:0/jobs",
        "aqueduct+quic://127.0.0.1:0",
        "e3x+udp://127.0.0.1:0",
        "e3x+dtls://127.0.0.1:0",
    ],
)
async def test_a_rush_of_clients_is_served_to_the_last(
    url: str, tls: tuple[muxkit.TLS, muxkit.TLS], tmp_path: Path
) -> None:
    encrypts = any(kind in url for kind in ("+tls", "+wss", "+quic", "+dtls"))
    shown, trusted = tls if encrypts else (None, None)
    served, count = 0, CLIENTS // 2 if "quic" in url else CLIENTS
    async with muxkit.open_server(echo, url.format(folder=tmp_path), tls=shown, limits=FULL) as server:
        options = {"handshake_timeout": WITHIN} if "dtls" in url or "quic" in url else {}
        door = Door(server.url, {"linger": WITHIN, "tls": trusted, **options})

        async def come() -> None:
            nonlocal served
            async with door.session_to() as session:
                await visit(session)
                served += 1

        with trio.fail_after(WITHIN):
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(come)
    assert served == count


@pytest.mark.requirement("R-13")
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_silent_connections_give_way_when_the_listener_is_full(protocol: str, autojump_clock: MockClock) -> None:
    metrics, told = Metrics(), list[bytes]()
    limits = muxkit.Limits(connections=20)
    url = f"{protocol}+mem://house"

    async def stay_silent() -> None:
        async with memory.connect("house") as stream:
            with suppress(trio.BrokenResourceError):
                while data := await stream.receive_some():
                    told.append(data)

    async with muxkit.open_server(echo, url, limits=limits, observer=metrics), trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(stay_silent)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        async with muxkit.connect(url) as session:
            await visit(session)
        assert trio.current_time() - began < 5.0
        nursery.cancel_scope.cancel()
    reached = {labels[-1]: number for labels, number in _limits_reached(metrics).items()}
    assert reached["half_open"] > 0


@pytest.mark.requirement("R-13")
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_while_there_is_room_a_silent_session_lives_as_long_as_it_wants(
    protocol: str, autojump_clock: MockClock
) -> None:
    url = f"{protocol}+mem://quiet"
    async with muxkit.open_server(echo, url), muxkit.connect(url) as session:
        await trio.sleep(1000.0)
        await visit(session)


@pytest.mark.requirement("R-13")
async def test_the_session_that_is_idle_for_longest_gives_way_and_reads_why(autojump_clock: MockClock) -> None:
    url = "bpmux+mem://house"
    async with muxkit.open_server(echo, url, limits=muxkit.Limits(connections=3)):
        async with muxkit.connect(url) as busy, busy.open() as channel:
            await channel.send(b"hello")
            await channel.receive()
            with pytest.raises(muxkit.MuxError, match="the server is full"):  # noqa: PT012 - any of them may raise it
                async with muxkit.connect(url) as idle, muxkit.connect(url) as later:
                    await visit(idle)
                    await trio.sleep(5.0)
                    await visit(later)
                    async with muxkit.connect(url) as newcomer:
                        await visit(newcomer)
                        await visit(later)
                        await visit(idle)
            await channel.send(b"still here")
            assert await channel.receive() == b"still here"


@pytest.mark.requirement("R-13")
@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "yamux"])
async def test_who_cannot_be_served_is_told_so_after_a_while(protocol: str, autojump_clock: MockClock) -> None:
    url = f"{protocol}+mem://house"
    async with muxkit.open_server(echo, url, limits=muxkit.Limits(connections=1)):
        async with muxkit.connect(url) as busy, busy.open() as channel:
            await channel.send(b"hello")
            await channel.receive()
            with pytest.raises(muxkit.MuxError, match=r"the server is full: Limits\(connections=1\)"):
                async with muxkit.connect(url) as session:
                    await visit(session)
        await trio.testing.wait_all_tasks_blocked()  # until the server has seen that the other has left
        async with muxkit.connect(url) as session:
            await visit(session)


@pytest.mark.requirement("R-13")
async def test_a_listener_keeps_all_links_whose_connections_may_be_lost_in_the_same_moment() -> None:
    limits = muxkit.Limits(connections=4000)
    links, size = relink.Keep().bounds(limits)
    assert links == 4000
    assert size >= 4000 * (16 + 3) * 1024


@pytest.mark.parametrize("keep", [relink.Keep(links=10), relink.Keep(bytes=1024)])
async def test_a_listener_that_keeps_fewer_links_than_it_carries_says_so(
    keep: relink.Keep, caplog: pytest.LogCaptureFixture
) -> None:
    keep.bounds(muxkit.Limits())
    assert "links are lost if all connections are lost at once" in caplog.text


def _limits_reached(metrics: Metrics) -> dict[tuple[str, ...], float]:
    [family] = [each for each in metrics.collect() if "limits_reached" in str(each.metric.name)]
    values: Any = family.values
    return dict(values)
