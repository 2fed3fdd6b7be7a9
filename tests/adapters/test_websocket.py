"""A WebSocket is a link like the others, and its peer is held to what a link may cost."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
import trio_websocket
from websockets.speedups import apply_mask

from muxkit import Limits
from muxkit.testing._links import MakePair, check_link
from muxkit_adapters import _addresses, memory, tcp, tls, websocket
from muxkit_adapters._frames import FRAGMENTS_MOST, FRAMES_AT_ONCE, PIECE_SIZE, FrameReader, data_frames
from muxkit_adapters._masking import masked, masked_in_python
from muxkit_adapters.websocket import HEAD_MOST, HandshakeFailed, UpgradeStream, WebSocketStream

from ._links import (
    NEVER,
    PATIENCE,
    Certificates,
    at_most,
    comes_down_to,
    descriptors_and_tasks,
    drain,
    echo,
    flood,
    paired,
    park,
    port_of,
    reset,
    serving,
    wire_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio.testing import MockClock

GOOD = Certificates()
QUICK = 0.2  # s, the close timeout of these tests
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)

Pair = tuple[WebSocketStream, WebSocketStream]


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    def connect(address: str) -> AbstractAsyncContextManager[WebSocketStream]:
        return websocket.connect(f"ws://{address}", close_timeout=QUICK)

    async with paired(websocket.serve, connect, close_timeout=QUICK) as streams:
        yield streams


@asynccontextmanager
async def secure_pair() -> AsyncIterator[Pair]:
    def connect(address: str) -> AbstractAsyncContextManager[WebSocketStream]:
        return websocket.connect(f"wss://{address}", ssl_context=GOOD.client(), close_timeout=QUICK)

    async with paired(websocket.serve, connect, ssl_context=GOOD.server(), close_timeout=QUICK) as streams:
        yield streams


@asynccontextmanager
async def library_client(address: str) -> AsyncIterator[trio_websocket.WebSocketConnection]:
    """A client of another implementation, which may send what ours never would."""
    # Its own `open_websocket` leaves the socket open when the other side was first to say goodbye.
    async with await trio.open_tcp_stream("127.0.0.1", port_of(address)) as wire, trio.open_nursery() as nursery:
        connection = await trio_websocket.wrap_client_stream(nursery, wire, "127.0.0.1", "/")
        yield connection
        with trio.move_on_after(QUICK):
            await connection.aclose()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def raw_client(address: str, *, headers: bytes = b"", answer: bytes = b"101") -> AsyncIterator[trio.SocketStream]:
    """A peer that has upgraded, and now writes bytes as it likes."""
    async with await trio.open_tcp_stream("127.0.0.1", port_of(address)) as wire:
        await wire.send_all(UPGRADE + headers + b"\r\n")
        got = b""
        while b"\r\n\r\n" not in got:
            got += await wire.receive_some()
        assert got.startswith(b"HTTP/1.1 " + answer)
        yield wire


def frame(opcode: int, payload: bytes = b"", *, final: bool = True, size: int | None = None) -> bytes:
    """A client's frame, masked with zeros."""
    size = len(payload) if size is None else size
    head = bytes([opcode | (0x80 if final else 0)])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 65_536:
        head += b"\xfe" + size.to_bytes(2, "big")
    else:
        head += b"\xff" + size.to_bytes(8, "big")
    return head + bytes(4) + payload


class Remembering:
    """A handler that reads until the end and remembers how it came."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.error: Exception | None = None
        self.over = trio.Event()

    async def __call__(self, stream: trio.abc.Stream) -> None:
        try:
            async for data in stream:
                self.got += data
        except Exception as error:
            self.error = error
        finally:
            self.over.set()


@pytest.mark.parametrize("make_pair", [pair, secure_pair])
async def test_a_websocket_connection_is_a_link(make_pair: MakePair) -> None:
    await check_link(make_pair, half_close=False)


async def test_by_url_with_path_and_query() -> None:
    async with serving(websocket.transport.serve, echo, "127.0.0.1:0/chat", limits=Limits()) as (address,):
        assert address.endswith("/chat")
        async with websocket.transport.connect(address + "?room=1&token=secret") as stream:
            assert isinstance(stream, WebSocketStream)
            assert stream.peer == f"ws {address}"  # a query may hold a token
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"hello"


async def test_wss_by_url() -> None:
    options = {"limits": Limits(), "ssl_context": GOOD.server()}
    async with serving(websocket.secure_transport.serve, echo, "127.0.0.1:0", **options) as (address,):
        async with websocket.secure_transport.connect(address, ssl_context=GOOD.client()) as stream:
            await stream.send_all(b"secret")
            assert await stream.receive_some() == b"secret"


@pytest.mark.requirement("R-62")
async def test_wss_refuses_a_certificate_that_nobody_vouches_for() -> None:
    async with serving(websocket.serve, echo, ssl_context=GOOD.server()) as (address,):
        with pytest.raises(HandshakeFailed, match="the certificate was refused"):
            async with websocket.connect(f"wss://{address}"):
                pass


@pytest.mark.requirement("R-62")
async def test_plaintext_off_loopback_is_refused_and_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"use wss, or pass insecure=True"):
        async with websocket.connect("ws://192.0.2.1:7000/"):
            pass
    with pytest.raises(ValueError, match=r"use wss, or pass insecure=True"):
        await websocket.serve(echo, 0, host="0.0.0.0")


@pytest.mark.requirement("R-62")
async def test_insecure_plaintext_warns_and_shows_in_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_addresses, "_warned", set())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with serving(websocket.serve, echo, host="0.0.0.0", insecure=True) as (address,):
            async with websocket.connect(f"ws://0.0.0.0:{port_of(address)}", insecure=True) as stream:
                assert stream.peer.endswith("(plaintext, insecure)")
    categories = [warning.category for warning in warned]
    assert [one for one in categories if issubclass(one, tcp.PlaintextWarning)] == [websocket.PlaintextWarning]


async def test_outgoing_messages_are_binary_and_capped() -> None:
    async def send(stream: trio.abc.Stream) -> None:
        await stream.send_all(bytes(200_000))

    async with serving(websocket.serve, send) as (address,), library_client(address) as client:
        sizes: list[int] = []
        while sum(sizes) < 200_000:
            message = await client.get_message()
            assert isinstance(message, bytes)
            sizes.append(len(message))
    assert max(sizes) == PIECE_SIZE


async def test_message_boundaries_carry_no_meaning() -> None:
    remembering = Remembering()
    async with serving(websocket.serve, remembering) as (address,):
        async with library_client(address) as client:
            for message in (b"", b"a", b"bc", b"", b"def"):
                await client.send_message(message)
        await remembering.over.wait()
    assert remembering.got == b"abcdef"
    assert remembering.error is None


async def test_a_text_message_is_an_error() -> None:
    remembering = Remembering()
    async with serving(websocket.serve, remembering) as (address,), raw_client(address) as wire:
        await wire.send_all(frame(1, b"canary"))
        await remembering.over.wait()
    assert isinstance(remembering.error, trio.BrokenResourceError)
    assert "only binary messages" in str(remembering.error)
    assert "canary" not in str(remembering.error)


@pytest.mark.requirement("R-15")
async def test_compression_is_not_agreed_to_and_a_compressed_message_is_not_inflated() -> None:
    remembering = Remembering()
    deflate = zlib.compressobj(wbits=-15)
    bomb = deflate.compress(bytes(1_000_000)) + deflate.flush(zlib.Z_SYNC_FLUSH)
    offer = b"Sec-WebSocket-Extensions: permessage-deflate\r\n"
    compressed = 0x42  # a binary message with the first reserved bit, which means: deflated
    async with serving(websocket.serve, remembering) as (address,), raw_client(address, headers=offer) as wire:
        with suppress(trio.BrokenResourceError):  # it may be hung up on before all is sent
            await wire.send_all(frame(compressed, bomb))
        await remembering.over.wait()
    assert isinstance(remembering.error, trio.BrokenResourceError)
    assert remembering.got == b""


@pytest.mark.parametrize("code", [1000, 1001, None])
async def test_a_clean_close_is_the_end_of_the_stream(code: int | None) -> None:
    remembering = Remembering()
    async with serving(websocket.serve, remembering) as (address,), raw_client(address) as wire:
        await wire.send_all(frame(2, b"all") + frame(8, b"" if code is None else code.to_bytes(2, "big")))
        await remembering.over.wait()
    assert remembering.got == b"all"
    assert remembering.error is None


async def test_any_other_close_is_an_error_with_its_code_and_reason() -> None:
    remembering = Remembering()
    async with serving(websocket.serve, remembering) as (address,), raw_client(address) as wire:
        await wire.send_all(frame(8, (4001).to_bytes(2, "big") + b"go away"))
        await remembering.over.wait()
    assert isinstance(remembering.error, trio.BrokenResourceError)
    assert "4001" in str(remembering.error)
    assert "go away" in str(remembering.error)


@pytest.mark.requirement("R-63")
@pytest.mark.parametrize("secure", [False, True])
async def test_an_end_without_a_close_frame_is_an_error_and_not_an_end(secure: bool) -> None:
    async with (secure_pair if secure else pair)() as (here, there):
        await trio.aclose_forcefully(wire_of(there))
        with pytest.raises(trio.BrokenResourceError, match=r"without a close|cut off without close_notify"):
            await here.receive_some()


async def test_a_request_for_another_path_is_answered_with_404() -> None:
    async with serving(websocket.serve, echo, path="/chat") as (address,):
        with pytest.raises(HandshakeFailed, match=r"/other: the upgrade was answered with HTTP 404"):
            async with websocket.connect(f"ws://{address.removesuffix('/chat')}/other"):
                pass


async def test_a_web_page_may_connect_only_when_its_origin_is_listed() -> None:
    page = b"Origin: https://pages.example\r\n"
    async with serving(websocket.serve, echo) as (address,):
        async with raw_client(address, headers=page, answer=b"403"):
            pass
    async with serving(websocket.serve, echo, origins=["https://pages.example"]) as (address,):
        async with raw_client(address, headers=page) as wire:
            await wire.send_all(frame(2, b"hello"))
            assert await wire.receive_some() == b"\x82\x05hello"


async def test_an_error_of_the_block_comes_out_bare() -> None:
    async with serving(websocket.serve, echo) as (address,):
        with pytest.raises(KeyError, match="mine"):
            async with websocket.connect(f"ws://{address}"):
                raise KeyError("mine")


async def test_a_deadline_around_the_block_ends_it_bare_and_quietly() -> None:
    async with serving(websocket.serve, park) as (address,):
        with trio.move_on_after(0.05) as scope:
            async with websocket.connect(f"ws://{address}") as stream:
                await stream.receive_some()
        assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (b"", "hung up"),
        (b"SSH-2.0-x\r\n\r\n", "does not speak WebSocket"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "HTTP 200"),
        (b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n" + b"4000\r\n" + bytes(0x4000), "more than 16384"),
        (b"HTTP/1.1 101 Switching\r\n" + b"x: y\r\n" * 4000, "more than 16384"),
    ],
)
async def test_a_server_that_does_not_upgrade_is_a_failure_with_a_reason(behaviour: bytes, reason: str) -> None:
    async def answer(stream: trio.abc.Stream) -> None:
        await stream.receive_some()
        await stream.send_all(behaviour)
        await stream.receive_some() if b"more" in reason.encode() else None

    async with serving(tcp.serve, answer) as (address,):
        with pytest.raises(HandshakeFailed, match=reason):
            async with websocket.connect(f"ws://{address}"):
                pass


async def test_a_server_that_never_answers_is_given_up() -> None:
    async with serving(tcp.serve, park) as (address,):
        with pytest.raises(HandshakeFailed, match=r"not over within 0\.05 s"):
            async with websocket.connect(f"ws://{address}", handshake_timeout=0.05):
                pass


async def test_clients_that_never_finish_the_upgrade_do_not_keep_a_good_one_out() -> None:
    async with serving(websocket.serve, echo, limits=Limits(half_open=100, handshake=3.0)) as (address,):
        slow = [await trio.open_tcp_stream("127.0.0.1", port_of(address)) for _ in range(300)]
        for stream in slow:
            await stream.send_all(b"GET / HT")
        async with websocket.connect(f"ws://{address}", handshake_timeout=PATIENCE) as good:
            await good.send_all(b"hello")
            assert await good.receive_some() == b"hello"
        for stream in slow:
            await stream.aclose()


@pytest.mark.requirement("R-35")
async def test_an_upgrade_that_trickles_is_dropped_at_the_deadline(mock_clock: MockClock) -> None:
    async with serving(websocket.serve, echo, limits=Limits(handshake=0.1)) as (address,):
        async with await trio.open_tcp_stream("127.0.0.1", port_of(address)) as wire:
            await wire.send_all(UPGRADE)
            with at_most(2, mock_clock):
                await drain(wire)


@pytest.mark.parametrize(
    "what", [b"\x16\x03\x01garbage\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", b""]
)
async def test_a_client_that_does_not_upgrade_is_hung_up_on_at_once(what: bytes) -> None:
    async with serving(websocket.serve, echo, limits=Limits(handshake=NEVER)) as (address,):
        async with await trio.open_tcp_stream("127.0.0.1", port_of(address)) as wire:
            await wire.send_all(what)
            if not what:
                await wire.send_eof()
            with trio.fail_after(PATIENCE):
                await drain(wire)


@pytest.mark.requirement("R-14")
async def test_endless_headers_are_cut_off_at_the_limit() -> None:
    async with serving(websocket.serve, echo, limits=Limits(handshake=NEVER)) as (address,):
        async with await trio.open_tcp_stream("127.0.0.1", port_of(address)) as wire:
            await wire.send_all(UPGRADE)
            with trio.fail_after(PATIENCE):
                await flood(wire)


@pytest.mark.requirement("R-14")
@pytest.mark.parametrize("piece", [1, 100, 10_000, 65_536])
async def test_no_more_than_one_read_beyond_the_limit_of_the_headers_is_looked_at(piece: int) -> None:
    here, there = memory.pair(capacity=1_000_000)
    upgrading = UpgradeStream(here)
    await there.send_all(b"h" * (HEAD_MOST + piece))
    for _ in range(HEAD_MOST // piece):
        await upgrading.receive_some(piece)
    with pytest.raises(trio.BrokenResourceError, match=f"more than {HEAD_MOST} bytes"):
        await upgrading.receive_some(piece)


async def test_frames_that_come_with_the_head_are_not_lost() -> None:
    async with serving(websocket.serve, echo) as (address,):
        async with await trio.open_tcp_stream("127.0.0.1", port_of(address)) as wire:
            await wire.send_all(UPGRADE + b"\r\n" + frame(2, b"hello") + frame(2, b" you")[:5])
            got = b""
            while not got.endswith(b"hello"):
                got += await wire.receive_some()
            await wire.send_all(frame(2, b" you")[5:])
            while not got.endswith(b" you"):
                got += await wire.receive_some()


@pytest.mark.parametrize("is_masked", [True, False])
def test_frames_are_read_at_any_split(is_masked: bool) -> None:
    sizes = (0, 1, 3, 125, 126, 511, 513, 65_535, 65_536, 65_537, 200_000)
    sent = [random.Random(size).randbytes(size) for size in sizes]
    stream = b"".join(bytes(part) for data in sent for part in data_frames([data], is_masked=is_masked))
    for seed in range(50):
        reader, choice = FrameReader(is_masked=is_masked, message_most=65_536), random.Random(seed)
        got, at = bytearray(), 0
        while at < len(stream):
            size = choice.choice((1, 2, 7, 5000, 100_000))
            reader.feed(stream[at : at + size])
            at += size
            got += reader.take(choice.choice((10, 10_000_000)))
            while reader.may_hold_more:
                got += reader.take(1000)
        assert got == b"".join(sent)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 511, 512, 513, 514, 515, 70_001])
@pytest.mark.parametrize("mask", [apply_mask, masked_in_python])
def test_masking_is_its_own_reverse_and_what_the_standard_says(
    mask: Callable[[bytes | memoryview, bytes], bytes], size: int
) -> None:
    data, key = random.Random(size).randbytes(size), b"\x01\x80\xfe\x37"
    found = mask(memoryview(data), key)
    assert found == bytes(byte ^ key[index % 4] for index, byte in enumerate(data))
    assert mask(found, key) == data


def test_masking_is_done_in_c_when_websockets_is_installed() -> None:
    assert masked is apply_mask


WITHOUT_WEBSOCKETS = """
import sys
sys.modules["websockets.speedups"] = None  # importing it fails
import trio, muxkit

async def echo(channel):
    async for message in channel:
        await channel.send(message)

async def main():
    async with muxkit.open_server(echo, "bpmux+ws://127.0.0.1:0") as server, muxkit.connect(server.url) as session:
        async with session.open() as channel:
            await channel.send(bytes(range(256)) * 1000)
            print(await channel.receive() == bytes(range(256)) * 1000)

trio.run(main)
from muxkit_adapters._masking import masked, masked_in_python
print(masked is masked_in_python)
"""


def test_websockets_work_without_the_extension() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_WEBSOCKETS], capture_output=True, text=True, check=True)
    assert done.stdout == "True\nTrue\n"


@pytest.mark.parametrize("cuts", [[100], [1, 99], [0, 50, 0, 50], [30_000, 65_536, 4], [300_000], [65_536, 65_536]])
@pytest.mark.parametrize("is_masked", [True, False])
def test_messages_are_no_larger_than_promised_however_the_buffers_are_cut(cuts: list[int], is_masked: bool) -> None:
    data = random.Random(1).randbytes(sum(cuts))
    starts = [sum(cuts[:number]) for number in range(len(cuts))]
    buffers = [memoryview(data)[start : start + size] for start, size in zip(starts, cuts, strict=True)]
    reader = FrameReader(is_masked=is_masked, message_most=65_536)  # it refuses a larger one
    reader.feed(b"".join(map(bytes, data_frames(buffers, is_masked=is_masked))))
    assert reader.take(1_000_000) == data


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (bytes((0x83, 0x80)) + bytes(4), "a frame of the unknown kind 0x3"),
        (bytes((0x8B, 0x80)) + bytes(4), "a frame of the unknown kind 0xb"),
        (bytes((0xC2, 0x80)) + bytes(4), "a reserved bit is set"),
        (b"\x82\x01x", "a client's frame is not masked"),
        (frame(9, b"x", final=False), "a control frame in fragments"),
        (frame(0, b"x"), "the rest of a message that has not begun"),
        (frame(2, b"x", final=False) + frame(2, b"x"), "a message within another"),
        (b"\x82\xfe\x00\x05" + bytes(9), "a size of 5 written in 2 bytes"),
        (b"\x82\xff" + (300).to_bytes(8, "big") + bytes(304), "a size of 300 written in 8 bytes"),
        (frame(8, b"x"), "a close frame of 1 byte"),
        (frame(8, (999).to_bytes(2, "big")), "a close frame with the code 999"),
        (frame(8, (1005).to_bytes(2, "big")), "a close frame with the code 1005"),
        (frame(8, (2500).to_bytes(2, "big")), "a close frame with the code 2500"),
        (frame(8, (1000).to_bytes(2, "big") + b"\xff"), "the text of a close frame is not UTF-8"),
    ],
)
async def test_what_breaks_a_rule_of_the_frames_is_an_error_and_told_by_a_close_frame(sent: bytes, reason: str) -> None:
    remembering = Remembering()
    async with serving(websocket.serve, remembering) as (address,), raw_client(address) as wire:
        await wire.send_all(sent)
        await remembering.over.wait()
        told = await wire.receive_some()
    assert isinstance(remembering.error, trio.BrokenResourceError)
    assert reason in str(remembering.error)
    assert told[0] == 0x88
    assert int.from_bytes(told[2:4], "big") == (1007 if "UTF-8" in reason else 1002)


async def test_a_masked_frame_of_a_server_is_refused() -> None:
    reader = FrameReader(is_masked=False, message_most=1000)
    reader.feed(frame(2, b"x"))
    with pytest.raises(Exception, match="a server's frame is masked"):
        reader.take(1000)


async def test_a_ping_is_answered_between_messages_and_inside_of_one() -> None:
    async with serving(websocket.serve, echo) as (address,), raw_client(address) as wire:
        await wire.send_all(frame(9, b"one"))
        assert await wire.receive_some() == b"\x8a\x03one"
        await wire.send_all(frame(2, b"be", final=False) + frame(9, b"two") + frame(0, b"fore"))
        got = b""
        while len(got) < 5 + 8:
            got += await wire.receive_some()
        assert b"\x8a\x03two" in got
        assert b"before" in got.replace(b"\x82\x06", b"")


@pytest.mark.requirement("R-14")
async def test_pings_of_a_peer_that_reads_nothing_do_not_pile_up() -> None:
    async with serving(websocket.serve, drain) as (address,), raw_client(address) as wire:
        ping = frame(9, bytes(125))
        tracemalloc.start()
        for _ in range(400):
            await wire.send_all(ping * 500)
        await trio.testing.wait_all_tasks_blocked(0.01)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert held < 1_000_000


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (frame(2, size=262_145), "against message_most=262144"),
        (frame(2, size=2**63), "against message_most=262144"),
        (frame(2, bytes(200_000), final=False) + frame(0, bytes(100_000)), "against message_most=262144"),
        (frame(2, final=False) + frame(0, final=False) * FRAGMENTS_MOST, f"more than {FRAGMENTS_MOST} fragments"),
        (frame(9, size=126), "a control frame of 126 bytes"),
    ],
)
async def test_what_would_cost_too_much_ends_the_connection_with_a_reason(frames: bytes, reason: str) -> None:
    remembering = Remembering()
    async with serving(websocket.serve, remembering) as (address,), raw_client(address) as wire:
        with suppress(trio.BrokenResourceError):  # it may be hung up on before all is sent
            await wire.send_all(frames)
        with trio.fail_after(PATIENCE):
            await remembering.over.wait()
    assert isinstance(remembering.error, trio.BrokenResourceError)
    assert reason in str(remembering.error)


@pytest.mark.requirement("R-03")
async def test_a_message_that_trickles_in_costs_little_more_than_its_size() -> None:
    remembering = Remembering()
    async with serving(websocket.serve, remembering) as (address,), raw_client(address) as wire:
        await wire.send_all(frame(2, size=200_000))
        await trio.testing.wait_all_tasks_blocked()
        tracemalloc.start()
        for _ in range(2000):
            await wire.send_all(b"x")
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked(0.01)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert held < 32 * 1024


@pytest.mark.requirement("R-38", "R-35")
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "behaviour", ["stalls", "does not answer", "resets", "floods", "hangs up", "cuts", "reads nothing of a flood"]
)
async def test_close_is_over_in_time_whatever_the_peer_does(
    behaviour: str, secure: bool, mock_clock: MockClock
) -> None:
    async with (secure_pair if secure else pair)() as (here, there):
        below = wire_of(there)
        wire = wire_of(below) if isinstance(below, tls.TLSStream) else below
        assert isinstance(wire, tcp.SocketStream)
        async with trio.open_nursery() as nursery:
            if behaviour == "stalls":
                # Its reader waits with a message that no task takes, so it will not see our close frame.
                for _ in range(4):
                    await here.send_all(b"x")
            elif behaviour == "does not answer":
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(flood, there)
            elif behaviour == "resets":
                trio.lowlevel.notify_closing(wire.socket)
                reset(wire.socket)
            elif behaviour == "floods":
                nursery.start_soon(flood, there)
                await here.receive_some()
            elif behaviour == "hangs up":
                nursery.start_soon(there.aclose)
            elif behaviour == "cuts":
                await trio.aclose_forcefully(wire)
            else:
                nursery.start_soon(flood, here)
                await trio.testing.wait_all_tasks_blocked(0.01)
            with at_most(2 * QUICK + 0.5, mock_clock):
                await here.aclose()
                await here.aclose()
            nursery.cancel_scope.cancel()


async def test_a_send_that_was_cut_short_says_so_afterwards(mock_clock: MockClock) -> None:
    async with pair() as (here, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.send_all, bytes(100_000_000))
            await trio.testing.wait_all_tasks_blocked(0.01)  # the kernel takes no more
            nursery.cancel_scope.cancel()
        with pytest.raises(trio.BrokenResourceError, match="an earlier send was cut short"):
            await here.send_all(b"x")
        # A close frame in the middle of another frame would say nothing, so there is none to wait for.
        with at_most(QUICK / 2, mock_clock):
            await here.aclose()


@pytest.mark.parametrize("address", ["", "/path", "127.0.0.1:x", "127.0.0.1:1/a b", "127.0.0.1:1/#x", "[::1"])
def test_a_bad_address_is_refused_with_the_form_that_is_expected(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port and an optional path"):
        websocket.transport.connect(address)


@pytest.mark.requirement("R-43")
async def test_many_connections_leave_no_descriptor_and_no_task_behind() -> None:
    async with serving(websocket.serve, echo) as (address,):
        await visit(address, 10)
        before = await descriptors_and_tasks()
        await visit(address, 100)
        await comes_down_to(before)


async def visit(address: str, times: int) -> None:
    for _ in range(times):
        async with websocket.connect(f"ws://{address}") as stream:
            await stream.send_all(b"x")
            await stream.receive_some()


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
def test_small_frames_are_read_a_few_at_a_time_and_a_long_one_whole() -> None:
    """Was: All control frames of a read reached the WebSocket library at once: 64 KiB of pongs kept a server busy for a
    second.
    """
    reader = FrameReader(is_masked=True, message_most=1_000_000)
    reader.feed(frame(0xA) * 5000 + frame(2, bytes(20_000)))
    steps = 0
    while not (got := reader.take(65_536)):
        assert reader.may_hold_more
        steps += 1
    assert steps == 5000 // FRAMES_AT_ONCE
    assert got == bytes(20_000)
