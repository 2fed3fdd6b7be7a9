"""Aqueduct over each real link, in each mode, and by URL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

import muxkit
from muxkit import Limits
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Config, Mode
from muxkit.testing import check_session
from tests.adapters._links import Certificates
from tests.adapters._quic import FILES
from tests.protocols.aqueduct._session_pairs import LINKS, REAL, carried_receiver, connected, session_pair

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

    from tests.protocols.aqueduct._session_pairs import MakeLinks

COUNT = 10_000
FEW = 500  # on the links that the normal run covers briefly
LINGER = 60.0  # s; reached only when something hangs


def skipped(name: str) -> ParameterSet:
    return pytest.param(name, marks=pytest.mark.skipif(name == "unix" and sys.platform == "win32", reason="has none"))


@pytest.mark.parametrize("link", [*map(skipped, REAL)])
async def test_the_promises_of_a_session_hold_over(link: str) -> None:
    await check_session(lambda: session_pair(REAL[link]))


@pytest.mark.parametrize("mode", Mode)
async def test_ten_thousand_messages_arrive_once_or_their_sender_hears_that_they_did_not(mode: Mode) -> None:
    await send_many(LINKS["quic"], mode, COUNT)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("link", [*map(skipped, LINKS)])
async def test_messages_of_each_mode_arrive_over_each_link(link: str, mode: Mode) -> None:
    await send_many(LINKS[link], mode, FEW)


@pytest.mark.soak
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("link", [*map(skipped, LINKS)])
async def test_ten_thousand_messages_of_each_mode_arrive_over_each_link(link: str, mode: Mode) -> None:
    await send_many(LINKS[link], mode, COUNT)


async def send_many(make_links: MakeLinks, mode: Mode, count: int) -> None:
    """Each message arrives once, or its sender learns that it did not."""
    receipts: list[aqueduct.Receipt] = []
    got: list[int] = []

    async def send(sender: aqueduct.Sender) -> None:
        for number in range(count):
            message = b"%d" % number
            # A receipt takes room until it is resolved, so not every message gets one.
            if mode is Mode.UNRELIABLE or number % 16 == 0:
                receipts.append(await sender.send_tracked(message, mode=mode))
            else:
                await sender.send(message, mode=mode)
        await sender.finish()

    limits = Limits(resets_per_second=100_000, resets_burst=100_000)
    async with connected(make_links, limits=limits, config=Config(unreliable_queue=count), linger=LINGER) as pair:
        sender, receiver = await carried_receiver(pair)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, sender)
            got.extend([int(message.payload) async for message in receiver])
        arrived = [await receipt.arrived() for receipt in receipts]
    assert len(set(got)) == len(got)
    if mode is Mode.UNRELIABLE:
        assert len(got) == sum(arrived)
        assert got == [number for number, fate in enumerate(arrived) if fate]
        assert len(got) > count // 2
    else:
        assert len(got) == count
        assert all(arrived)
        assert got == sorted(got) or mode is Mode.UNORDERED


@pytest.mark.parametrize("make_links", [pytest.param(LINKS[name], id=name) for name in ("memory", "tcp", "quic")])
async def test_large_messages_travel_in_every_mode(make_links: MakeLinks) -> None:
    payloads = [bytes([number]) * (1 << 20) for number in range(8)]
    async with connected(make_links, linger=LINGER) as pair:
        sender, receiver = await carried_receiver(pair)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for number, payload in enumerate(payloads):
                    # Unreliable ones that are too large for a datagram go in a stream, if that has room.
                    await sender.send(payload, mode=Mode.UNORDERED if number % 2 else Mode.ORDERED)
                await sender.finish()

            nursery.start_soon(send)
            got = [message.payload async for message in receiver]
    assert sorted(got) == payloads


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@pytest.mark.parametrize("transport", ["tcp", "tls", "ws", "wss", "mem", "unix", "quic"])
async def test_every_transport_carries_it_by_url(transport: str, tmp_path: Path) -> None:
    if transport == "unix" and sys.platform == "win32":
        pytest.skip("has none")
    address = {"mem": "aqueduct-urls", "unix": str(tmp_path / "socket")}.get(transport, "127.0.0.1:0")
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if transport == "quic":
        ours, theirs = {"certificate": FILES.certificate, "key": FILES.key}, {"ca": FILES.ca}
    elif transport in ("tls", "wss"):
        certificates = Certificates()
        ours, theirs = {"ssl_context": certificates.server()}, {"ssl_context": certificates.client()}
    async with trio.open_nursery() as nursery:

        async def serve(task_status: trio.TaskStatus[muxkit.Server]) -> None:
            url = f"aqueduct+{transport}://{address}"
            ours["headers"] = [(b"a", b"b")]
            await muxkit.serve(muxkit.each_channel(echo), url, task_status=task_status, **ours)

        served: muxkit.Server = await nursery.start(serve)
        async with muxkit.connect(served.url, config=Config(), **theirs) as session:
            assert isinstance(session, aqueduct.Client)
            async with session.open() as channel:
                await channel.send(transport.encode())
                assert await channel.receive() == transport.encode()
            assert await session.peer_headers() == ((b"a", b"b"),)
            assert transport in session.info.peer
        await served.shutdown(grace=1)


async def test_by_url_the_entrypoint_can_be_used_as_well() -> None:
    async def prices(session: muxkit.Session) -> None:
        assert isinstance(session, aqueduct.Server)
        async for message in session.entrypoint:
            async with message, message.sender() as sender:
                await sender.send(b"12.5")

    async with trio.open_nursery() as nursery:
        served: muxkit.Server = await nursery.start(muxkit.serve, prices, "aqueduct+mem://prices")
        async with muxkit.connect(served.url) as session:
            assert isinstance(session, aqueduct.Client)
            receiver, ticket = session.channel()
            await session.entrypoint.send(b"", attachments=[ticket])
            assert [message.payload async for message in receiver] == [b"12.5"]
        nursery.cancel_scope.cancel()


def test_every_setting_is_explained() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "reference" / "aqueduct.md"
    text = page.read_text(encoding="utf-8")
    assert [field.name for field in attrs.fields(Config) if f"`{field.name}`" not in text] == []
