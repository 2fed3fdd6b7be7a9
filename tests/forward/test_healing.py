"""A line that is cut: Relink loses no byte, over the others new connections wait, and listeners are asked for again."""

from __future__ import annotations

import hashlib
import os
import random

import pytest
import trio
import trio.testing

import muxkit
from muxkit import forward
from muxkit.runtime import Backoff
from muxkit.testing import ChaosPlan, chaos_relay
from tests.forward._targets import PATIENCE, dial, echo, read_all, target, until_refused

CUTS = 200 if os.environ.get("MUXKIT_SOAK", "0") not in ("", "0") else 20
CONNECTIONS = 8
FAST = Backoff(first=0.01, most=0.1)


async def test_relink_loses_no_byte_of_any_connection_when_its_line_is_cut_again_and_again() -> None:
    """Both directions of each connection are busy during all cuts, and each ends with the checksum of what came."""

    async def digest(stream: trio.SocketStream) -> None:
        """Send back what comes, then a checksum of it."""
        seen = hashlib.sha256()
        async for data in stream:
            seen.update(data)
            await stream.send_all(data)
        await stream.send_all(seen.digest())

    cuts_are_over = trio.Event()
    whole = 0

    async def call(address: str, seed: int) -> None:
        nonlocal whole
        dice = random.Random(seed)
        sent, heard = hashlib.sha256(), bytearray()
        async with await dial(address) as stream, trio.open_nursery() as nursery:

            async def listen() -> None:
                heard.extend(await read_all(stream))

            nursery.start_soon(listen)
            size = 0
            while not cuts_are_over.is_set():
                data = dice.randbytes(dice.randint(1, 40_000))
                sent.update(data)
                size += len(data)
                await stream.send_all(data)
            await stream.send_eof()
        assert len(heard) == size + 32
        assert heard[-32:] == sent.digest() == hashlib.sha256(heard[:-32]).digest()
        whole += 1

    with trio.fail_after(3 * PATIENCE):
        async with (
            target(digest) as port,
            muxkit.open_server(
                forward.handler([str(port)], listen=["*"]), "relink+tcp://127.0.0.1:0/f", linger=1
            ) as server,
        ):
            there = server.url.partition("://")[2].partition("/")[0]
            async with chaos_relay(there, ChaosPlan(), 1) as relay:
                url = f"relink+tcp://{relay.address}/f"
                async with (
                    forward.line(url, backoff=FAST, linger=1) as line,
                    forward.open_local(line, "0", str(port)) as local,
                    forward.open_remote(line, "0", str(port)) as remote,
                    trio.open_nursery() as nursery,
                ):
                    at_server = await remote.listening()
                    for number in range(CONNECTIONS):
                        nursery.start_soon(call, local.address if number % 2 else at_server, number)
                    for cut in range(CUTS):
                        passed = local.stats().bytes_out + remote.stats().bytes_out
                        while local.stats().bytes_out + remote.stats().bytes_out < passed + 200_000:
                            await trio.lowlevel.checkpoint()
                        if cut % 5 == 4:
                            relay.refuse(0.05)
                        before = relay.cuts
                        while relay.cuts == before:  # the line may not be back from the last cut
                            relay.cut_all()
                            await trio.lowlevel.checkpoint()
                    cuts_are_over.set()
                assert relay.cuts >= CUTS
                assert line.sessions == 1
    assert whole == CONNECTIONS


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "relink", "yamux"])
async def test_new_connections_wait_while_the_line_is_down_and_listeners_come_back(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{protocol}+tcp://127.0.0.1:0"
    handler = forward.handler(["loopback:*"], listen=["*"])
    with trio.fail_after(PATIENCE):
        async with target() as port, muxkit.open_server(handler, url, linger=0.2) as server:
            there = server.url.partition("://")[2].partition("/")[0]
            async with chaos_relay(there, ChaosPlan(), 1) as relay:
                async with (
                    forward.line(f"{protocol}+tcp://{relay.address}", backoff=FAST, linger=0.2) as line,
                    forward.open_local(line, "0", str(port)) as local,
                    forward.open_remote(line, "0", str(port)) as remote,
                ):
                    was = await remote.listening()
                    relay.refuse()
                    relay.cut_all()
                    while line.is_up:
                        await trio.testing.wait_all_tasks_blocked(0.01)
                    async with await dial(local.address) as stream:
                        await stream.send_all(b"tea")
                        await stream.send_eof()
                        await trio.testing.wait_all_tasks_blocked(0.05)
                        relay.admit()
                        assert await read_all(stream) == b"tea"
                    again = await remote.listening()
                    if protocol == "relink":
                        assert again == was
                    async with await dial(again) as stream:
                        await stream.send_all(b"milk")
                        await stream.send_eof()
                        assert await read_all(stream) == b"milk"
                    if protocol != "relink":
                        await until_refused(was)
    outages = [record for record in caplog.records if getattr(record, "event", "") == "disconnected"]
    assert len(outages) <= 1
    assert [record.levelname for record in outages] in ([], ["WARNING"])


async def test_an_outage_of_a_relink_line_is_reported_as_over_once(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each failed attempt had a task of its own that logged "connected" when the outage ended."""
    caplog.set_level("DEBUG", "muxkit.forward")

    def logged(event: str) -> int:
        return sum(getattr(record, "event", "") == event for record in caplog.records)

    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(
            forward.handler(["loopback:*"]), "relink+tcp://127.0.0.1:0", linger=0.2
        ) as server:
            there = server.url.partition("://")[2]
            async with (
                chaos_relay(there, ChaosPlan(), 1) as relay,
                forward.line(f"relink+tcp://{relay.address}", backoff=FAST, linger=0.2) as line,
            ):
                while logged("connected") < 1:  # noqa: ASYNC110 - a log has no event
                    await trio.sleep(0.01)
                relay.refuse()
                relay.cut_all()
                while logged("disconnected") < 1:  # noqa: ASYNC110 - a log has no event
                    await trio.sleep(0.01)
                while sum("trying again" in record.message for record in caplog.records) < 5:  # noqa: ASYNC110 - a log has no event
                    await trio.sleep(0.01)
                relay.admit()
                while logged("connected") < 2:  # noqa: ASYNC110 - a log has no event
                    await trio.sleep(0.01)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert line.is_up
    assert (logged("connected"), logged("disconnected")) == (2, 1)


async def test_a_listener_of_a_relink_client_that_is_away_makes_way_for_the_same_user() -> None:
    """Its link is kept for minutes, so that it may come back; a new process of the same user asks for the same port."""
    url = "relink+tcp://127.0.0.1:0/f"
    handler = forward.handler(listen=["*"])
    authorize = muxkit.tokens({"alice": "tea", "eve": "milk"})
    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(handler, url, authorize=authorize, linger=0.2) as server:
            there = server.url.partition("://")[2].partition("/")[0]
            async with (
                chaos_relay(there, ChaosPlan(), 1) as relay,
                muxkit.connect(f"relink+tcp://{relay.address}/f", token="tea", linger=0.1) as lost,
            ):
                async with forward.open_remote(lost, "0", "9") as remote:
                    relay.refuse()
                    relay.cut_all()
                    (at_server,) = server.sessions()
                    while getattr(at_server, "is_connected", True):
                        await trio.testing.wait_all_tasks_blocked(0.01)
                    async with muxkit.connect(server.url, token="milk") as other:
                        with pytest.raises(forward.ForwardRefused, match="in use"):
                            await forward.open_remote(other, remote.address, "9").__aenter__()
                    async with muxkit.connect(server.url, token="tea") as anew:
                        async with forward.open_remote(anew, remote.address, "9") as taken:
                            assert taken.address == remote.address
                            assert handler.listeners == [taken.address]
                    relay.admit()


async def test_a_line_that_no_attempt_can_mend_raises_the_reason() -> None:
    authorize = muxkit.tokens({"alice": "tea"})

    async def keep(url: str) -> None:
        async with forward.line(url, token="a-guess") as line:
            await line.session()
            await trio.sleep_forever()

    with trio.fail_after(PATIENCE):
        for url in ("bpmux+tcp://127.0.0.1:0", "relink+tcp://127.0.0.1:0/f"):
            async with muxkit.open_server(echo_nothing, url, authorize=authorize) as server:
                with pytest.raises(muxkit.Refused, match="does not know the token"):
                    await keep(server.url)


async def echo_nothing(channel: muxkit.Channel) -> None:
    channel.abort()


async def test_patience_bounds_how_long_a_connection_waits() -> None:
    async with target(echo) as port:
        pass
    with trio.fail_after(PATIENCE):
        async with (
            forward.line(f"bpmux+tcp://127.0.0.1:{port}", backoff=FAST) as line,
            forward.open_local(line, "0", "9", patience=0.1) as local,
            await dial(local.address) as stream,
        ):
            with pytest.raises(trio.BrokenResourceError):
                await read_all(stream)
            assert local.stats().refused == 1
            assert not line.is_up
