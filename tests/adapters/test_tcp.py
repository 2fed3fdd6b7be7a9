"""TCP keeps the promises of a link, and its plaintext on the local machine."""

from __future__ import annotations

import socket
import warnings
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits
from muxkit.testing._links import check_link
from muxkit_adapters import _addresses, tcp
from muxkit_adapters._addresses import parse_host_port
from muxkit_adapters._sockets import SocketStream

from ._links import IPV6, at_most, comes_down_to, descriptors_and_tasks, echo, flood, paired, port_of, reset, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from trio.testing import MockClock

Pair = tuple[SocketStream, SocketStream]


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    async with paired(tcp.serve, tcp.transport.connect) as streams:
        yield streams


async def socket_pair() -> Pair:
    one, other = socket.socketpair()
    return SocketStream(one, "one"), SocketStream(other, "other")


async def clogged_pair() -> Pair:
    one, other = await socket_pair()
    while one.send_nowait([bytes(65_536)]):
        pass
    while other.send_nowait([bytes(65_536)]):
        pass
    return one, other


@pytest.fixture
def closed_port() -> Iterator[Callable[[], int]]:
    """Give ports without a listener, which no other process can bind while the test runs."""
    with ExitStack() as stack:

        def make() -> int:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            port: int = taken.getsockname()[1]
            return port

        yield make


async def test_a_tcp_connection_is_a_link() -> None:
    await check_link(pair, half_close=True)


async def test_a_socket_stream_passes_trios_own_checks() -> None:
    await trio.testing.check_half_closeable_stream(socket_pair, clogged_pair)


async def test_a_call_on_a_closed_stream_is_still_a_checkpoint() -> None:
    one, other = await socket_pair()
    await one.aclose()
    for call in (one.receive_some, one.wait_send_all_might_not_block, one.send_eof):
        with trio.testing.assert_checkpoints(), pytest.raises(trio.ClosedResourceError):
            await call()
    with trio.testing.assert_checkpoints(), pytest.raises(trio.ClosedResourceError):
        await one.send_all(b"x")
    await other.aclose()


async def test_a_cancelled_send_has_sent_nothing_when_it_had_not_begun() -> None:
    one, other = await socket_pair()
    with trio.CancelScope() as scope:
        scope.cancel()
        await one.send_all(b"never")
    await one.send_all(b"sent")
    assert await other.receive_some() == b"sent"
    await one.aclose()
    await other.aclose()


async def test_many_small_buffers_go_out_in_order() -> None:
    one, other = await socket_pair()
    await one.send_buffers([b"%d," % number for number in range(5000)])
    await one.aclose()
    got = b"".join([data async for data in other])
    assert got == b"".join(b"%d," % number for number in range(5000))
    await other.aclose()


async def test_more_large_buffers_than_the_kernel_takes_in_one_call_go_out_in_order() -> None:
    one, other = await socket_pair()
    buffers = [bytes([number % 251]) * 5000 for number in range(1500)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.send_buffers, buffers)
        got = bytearray()
        while len(got) < 1500 * 5000:
            got += await other.receive_some()
    assert got == b"".join(buffers)
    await one.aclose()
    await other.aclose()


async def test_send_nowait_during_a_send_is_refused() -> None:
    one, other = await clogged_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.send_all, b"waits")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError, match="already sending"):
            one.send_nowait([b"x"])
        nursery.cancel_scope.cancel()
    await one.aclose()
    await other.aclose()


async def test_both_ends_know_whom_they_talk_to() -> None:
    async with pair() as (here, there):
        assert here.peer == f"tcp 127.0.0.1:{here.socket.getpeername()[1]}"
        assert there.peer == f"tcp 127.0.0.1:{here.socket.getsockname()[1]}"
        assert here.peer in repr(here)


async def test_small_writes_leave_at_once_and_the_unsent_backlog_is_bounded() -> None:
    async with pair() as streams:
        for stream in streams:
            assert stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            if tcp.NOTSENT_LOWAT is not None:
                assert stream.socket.getsockopt(socket.IPPROTO_TCP, tcp.NOTSENT_LOWAT) == tcp.UNSENT


async def test_the_second_host_is_tried_when_the_first_refuses(closed_port: Callable[[], int]) -> None:
    refuses = closed_port()
    async with serving(tcp.serve, echo) as (address,):
        async with tcp.connect([("127.0.0.1", refuses), ("127.0.0.1", port_of(address))]) as stream:
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"hello"


async def test_a_url_may_name_several_hosts(closed_port: Callable[[], int]) -> None:
    async with serving(tcp.serve, echo) as (address,):
        async with tcp.transport.connect(f"127.0.0.1:{closed_port()},{address}") as stream:
            await stream.send_all(b"hello")


async def test_a_refusal_names_every_host_that_was_tried(closed_port: Callable[[], int]) -> None:
    one, other = closed_port(), closed_port()
    with pytest.raises(ConnectionRefusedError) as caught:
        async with tcp.connect([("127.0.0.1", one), ("127.0.0.1", other)]):
            pass
    assert f"127.0.0.1:{one}: " in str(caught.value)
    assert f"127.0.0.1:{other}: " in str(caught.value)


@IPV6
async def test_an_ipv6_listener_gives_an_address_that_connects() -> None:
    async with serving(tcp.transport.serve, echo, "[::1]:0", limits=Limits()) as (address,):
        assert address.startswith("[::1]:")
        async with tcp.transport.connect(address) as stream:
            await stream.send_all(b"six")
            assert await stream.receive_some() == b"six"


@pytest.mark.requirement("R-67")
async def test_a_server_listens_on_loopback_unless_told_otherwise() -> None:
    async with serving(tcp.serve, echo) as (address,):
        assert address.startswith("127.0.0.1:")


@pytest.mark.requirement("R-62")
@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:192.0.2.1"])
async def test_plaintext_off_loopback_is_refused_and_the_error_says_what_to_do(host: str) -> None:
    with pytest.raises(ValueError, match=r"use tls, or pass insecure=True"):
        async with tcp.connect(host, 7000):
            pass
    with pytest.raises(ValueError, match=r"use tls, or pass insecure=True"):
        await tcp.serve(echo, 0, host=host)


@pytest.mark.requirement("R-62")
async def test_insecure_plaintext_warns_once_and_shows_in_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_addresses, "_warned", set())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with serving(tcp.serve, echo, host="0.0.0.0", insecure=True) as (address,):
            async with tcp.connect("0.0.0.0", port_of(address), insecure=True) as stream:
                assert stream.peer.endswith("(plaintext, insecure)")
                assert "insecure" in repr(stream)
    categories = [warning.category for warning in warned]
    assert [one for one in categories if issubclass(one, tcp.PlaintextWarning)] == [tcp.PlaintextWarning]


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":7000", "host:port", "host:70000", "::1:7000", "[::1]", "[::1]7000", "a b:1", "h:1/x"],
)
def test_a_bad_address_is_refused_with_the_form_that_is_expected(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_host_port(address)


@pytest.mark.parametrize(
    ("address", "parsed"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:7000", ("::1", 7000)), ("localhost:65535", ("localhost", 65535))],
)
def test_an_address_is_taken_apart(address: str, parsed: tuple[str, int]) -> None:
    assert parse_host_port(address) == parsed


@pytest.mark.requirement("R-38")
@pytest.mark.parametrize("behaviour", ["stalls", "resets", "floods", "hangs up"])
async def test_close_is_quick_whatever_the_peer_does(behaviour: str, mock_clock: MockClock) -> None:
    async with pair() as (here, there):
        async with trio.open_nursery() as nursery:
            if behaviour == "stalls":
                while here.send_nowait([bytes(65_536)]):
                    pass
            elif behaviour == "resets":
                trio.lowlevel.notify_closing(there.socket)
                reset(there.socket)
            elif behaviour == "floods":
                nursery.start_soon(flood, there)
            else:
                await there.aclose()
            with at_most(0.5, mock_clock):
                await here.aclose()
                await here.aclose()
            nursery.cancel_scope.cancel()


async def test_a_reset_breaks_the_link_and_the_error_names_the_peer() -> None:
    async with pair() as (here, there):
        reset(there.socket)
        with pytest.raises(trio.BrokenResourceError, match=r"tcp 127\.0\.0\.1:\d+: Connection reset") as caught:
            await here.receive_some()
        assert isinstance(caught.value.__cause__, ConnectionResetError)


@pytest.mark.requirement("R-43")
async def test_many_connections_leave_no_descriptor_behind() -> None:
    async with serving(tcp.serve, echo) as (address,):
        await visit(address, 30)
        before = await descriptors_and_tasks()
        await visit(address, 300)
        await comes_down_to(before)


async def visit(address: str, times: int) -> None:
    for _ in range(times):
        async with tcp.transport.connect(address) as stream:
            await stream.send_all(b"x")
            await stream.receive_some()
