"""A QUIC connection ends in order, with an error or in silence, and each waiting task is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit_adapters import quic
from muxkit_adapters.quic import ConnectionEnded, QuicLink
from muxkit_adapters.quic.options import QuicOptions

from ._quic import FILES, Collected, on_a_line, real_pair, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock


async def test_an_orderly_end_comes_after_what_was_sent() -> None:
    async with real_pair() as (here, there):
        here.write(here.open(), b"last words", True)
        await here.wait_delivered()
        await here.aclose()
        got = Collected(there)
        await got.until(lambda: got.is_over)
        assert got.streams == {2: b"last words"}
        assert await there.receive() == ()
        assert there.ended is None
        with pytest.raises(trio.BrokenResourceError, match="the peer closed"):
            await there.wait_writable()


async def test_each_side_hears_with_which_code_and_words_the_other_closed() -> None:
    for closes in (0, 1):
        async with real_pair() as ends:
            ends[closes].close(error="the orders\x1b[2J do not add up", code=4242)
            with pytest.raises(ConnectionEnded) as caught:
                await ends[1 - closes].receive()
            error = caught.value
            assert (error.code, error.is_application, error.by) == (4242, True, "peer")
            assert error.reason == "the orders\N{REPLACEMENT CHARACTER}[2J do not add up"
            assert "code 4242: the orders" in str(error)


async def test_an_end_with_an_error_has_a_code_of_its_own(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        pair.client.close(error="long " * 1000)
        with pytest.raises(ConnectionEnded, match="code 1: long long"):
            await pair.server.receive()


async def test_after_closing_everything_says_that_it_was_closed_here(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        pair.client.write(pair.client.open(), b"x", True)
        await pair.client.aclose()
        await pair.client.aclose()
        assert repr(pair.client).endswith(", closed>")
        for call in (pair.client.receive, pair.client.wait_writable):
            with pytest.raises(trio.ClosedResourceError):
                await call()


async def test_closing_wakes_everybody_who_waits(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        here, began = pair.client, trio.current_time()
        pair.line.fate = lambda data: []  # a peer that confirms what came would end the waiting in its own way

        async def expect_closed(call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(trio.ClosedResourceError):
                await call()

        async with trio.open_nursery() as nursery:
            stream = here.open()
            here.write(stream, bytes(here.room(stream)), False)
            for call in (here.receive, here.wait_writable, here.wait_delivered):
                nursery.start_soon(expect_closed, call)
            await trio.testing.wait_all_tasks_blocked()
            here.close()
        assert trio.current_time() == began, "a task was told only when the connection's own timeout had passed"


async def test_leaving_the_block_by_an_error_hangs_up() -> None:
    ended = trio.Event()

    async def handle(link: QuicLink) -> None:
        with pytest.raises(ConnectionEnded, match="code 1: hung up"):
            await link.receive()
        ended.set()

    async with serving(handle) as (host, port):
        with pytest.raises(ValueError, match="mine"):
            async with quic.connect(host, port, ca=FILES.ca):
                raise ValueError("mine")
        await ended.wait()


async def test_a_goodbye_that_was_lost_is_repeated_to_a_peer_who_goes_on(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        pair.line.fate = lambda data: []
        pair.server.close(code=9)
        pair.line.fate = lambda data: [0.01]
        pair.client.write(pair.client.open(), b"are you there?", True)
        with pytest.raises(ConnectionEnded, match="code 9"):
            await pair.client.receive()


@pytest.mark.requirement("R-46")
async def test_a_silent_peer_is_given_up_after_the_idle_time(autojump_clock: MockClock) -> None:
    async with on_a_line(QuicOptions(idle_timeout=20, keep_alive=5)) as pair:
        pair.line.fate = lambda data: []
        began = trio.current_time()
        with pytest.raises(ConnectionEnded, match="no data from the peer for 20 s") as caught:
            await pair.client.receive()
        assert caught.value.by == "network"
        assert 19 < trio.current_time() - began <= 26
        with pytest.raises(ConnectionEnded, match="no data from the peer"):
            await pair.server.receive()


async def test_pings_keep_a_quiet_connection_alive(autojump_clock: MockClock) -> None:
    async with on_a_line(
        QuicOptions(idle_timeout=20, keep_alive=5), QuicOptions(idle_timeout=20, keep_alive=None)
    ) as pair:
        await trio.sleep(3600)
        pair.client.write(pair.client.open(), b"still here", True)
        got = Collected(pair.server)
        await got.until(lambda: got.ended)


async def test_without_pings_a_quiet_connection_ends(autojump_clock: MockClock) -> None:
    quiet = QuicOptions(idle_timeout=20, keep_alive=None)
    async with on_a_line(quiet, quiet) as pair:
        await trio.sleep(30)
        with pytest.raises(ConnectionEnded, match="no data from the peer for 20 s"):
            await pair.client.receive()
