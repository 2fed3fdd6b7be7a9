"""Measure what a hostile session costs its neighbours on the same server.

For each attack: a server process, a hostile process that writes raw bytes, and in this process echo clients (64 bytes a
time) and a task that opens new connections; beside their times stand the server's share of a core and its peak of
memory. The figures depend on the machine; with `--strict` the program fails when one of them is above its goal.

    hostile_neighbours.py --only aqueduct --seconds 5
    hostile_neighbours.py --only "opened and reset" --clients 10
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio
import trustme

import muxkit
from muxkit.core import Cursor, NeedMore, encode_varint
from muxkit.protocols import aqueduct, bpmux, relink, restream
from muxkit_adapters import dtls, udp

if TYPE_CHECKING:
    from collections.abc import Callable

ECHO: Final = bytes(64)
PACE: Final = 0.005  # s between two echoes
NEXT: Final = 0.1  # s between two new connections
PATIENCE: Final = 5.0  # s; an echo or a connection that takes longer counts as failed
ECHO_GOAL: Final = 0.050  # s, p99
CONNECT_GOAL: Final = 0.100
BLOCK: Final = 256 * 1024  # bytes that the flood writes at once
SMALL: Final = 64 * 1024
FIRST: Final = 2  # a Relink channel of the kind that our sessions take; odd ones belong to the other side's
OUTSTANDING: Final = 400  # messages a channel that the server has not consumed


# --- certificates and Unix sockets, for all processes

DIRECTORY: Final = "MUXKIT_HOSTILE_DIRECTORY"  # of certificates and Unix sockets, in the environment


def issue(directory: str) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(Path(directory, "ca.pem")))
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(Path(directory, "server.pem")))


def in_directory(name: str) -> str:
    return str(Path(os.environ[DIRECTORY], name))


def server_options(url: str) -> dict[str, Any]:
    transport = url.partition("://")[0].partition("+")[2]
    certificate = Path(os.environ[DIRECTORY], "server.pem")
    if transport in ("tls", "wss"):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        return {"ssl_context": context}
    if transport == "dtls":
        return {"ssl_context": dtls.server_context(certificate)}
    return {"certificate": certificate} if transport == "quic" else {}


def client_options(url: str) -> dict[str, Any]:
    transport = url.partition("://")[0].partition("+")[2]
    ca = Path(os.environ[DIRECTORY], "ca.pem")
    if transport in ("tls", "wss"):
        return {"ssl_context": ssl.create_default_context(cafile=ca)}
    if transport == "dtls":
        return {"ssl_context": dtls.client_context(ca=ca)}
    return {"ca": ca} if transport == "quic" else {}


# --- the server process


async def serve(url: str, handler: str) -> None:
    """Echo, or read and forget."""

    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async def drain(channel: muxkit.Channel) -> None:
        """Answer only what has the size of an honest client's message."""
        async for message in channel:
            if len(message) == len(ECHO):
                await channel.send(message)

    handle = {"echo": echo, "drain": drain}[handler]
    async with trio.open_nursery() as nursery:
        served = await nursery.start(partial(muxkit.serve, muxkit.each_channel(handle), url, **server_options(url)))
        print(served.url, flush=True)


GOOD, BAD = (f"{digit * 8}-0000-4000-8000-{'0' * 12}" for digit in "12")  # sessions of restream


async def serve_restream(url: str) -> None:
    """Sessions that are fed: what comes to a Unix socket is appended, so that there is an echo to be timed."""
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.bind(in_directory("bell"))
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        for uuid in (GOOD, BAD):
            await store.register(uuid, {}, params={}, attached=False, keep=math.inf)
            await store.append(uuid, 0)
        served = await nursery.start(partial(restream.serve, url, store, application=restream.Fed()))
        print(served.url, flush=True)
        rung = trio.socket.from_stdlib_socket(bell)
        while True:
            await rung.recv(1)
            await store.append(GOOD, 1)


# --- the hostile process


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.partition("://")[2].partition("/")[0].rpartition(":")
    return host, int(port)


def dial(url: str) -> socket.socket:
    if "+unix:" in url:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(url.partition("://")[2])
        return sock
    sock = socket.create_connection(address_of(url))
    options = client_options(url)
    return options["ssl_context"].wrap_socket(sock, server_hostname="127.0.0.1") if options else sock


def discard(sock: socket.socket) -> None:
    """Read what the server says, or it would be the server's writer that waits."""

    def read() -> None:
        with suppress(OSError):
            while sock.recv(SMALL):
                pass

    threading.Thread(target=read, daemon=True).start()


def blast(sock: socket.socket, data: bytes) -> None:
    """The same bytes over and over."""
    block = data * max(1, BLOCK // len(data))
    discard(sock)
    while True:
        sock.sendall(block)


def flood(url: str, *, first: bytes = b"", again: bytes) -> None:
    sock = dial(url)
    sock.sendall(first)
    blast(sock, again)


def bpmux_chunks(url: str, *, chunk: bpmux.Chunk) -> None:
    flood(url, again=bpmux.encode_chunk(chunk))


def bpmux_openings(url: str) -> None:
    """Channels that are opened and ended, on one connection."""
    some = b"".join(bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.OUT_SINK, id, b"x", end=b"")) for id in range(300, 600))
    flood(url, again=some)


def bpmux_reconnect(url: str) -> None:
    """200 openings and a reset, over and over."""
    openings = b"".join(
        bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.DUPLEX, id, b"x", credit=1000)) for id in range(300, 500)
    )
    while True:
        with suppress(OSError), dial(url) as sock:
            sock.sendall(openings)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def connect_only(url: str) -> None:
    """A connection and a reset, over and over."""
    while True:
        with suppress(OSError), dial(url) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def relink_link(url: str) -> socket.socket:
    sock = dial(url)
    sock.sendall(relink.handshake.encode_version(0))
    sock.recv(8, socket.MSG_WAITALL)
    sock.sendall(relink.handshake.encode_request(relink.Config()))
    sock.recv(16, socket.MSG_WAITALL)
    return sock


def relink_general(url: str, *, general: relink.frames.General) -> None:
    blast(relink_link(url), relink.frames.encode_packet(general, 2))


class RelinkAcks(threading.Thread):
    """Reads the server's answers, so that a flood stays within the window and the flood is legal."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self._sock = sock
        self._changed = threading.Condition()
        self.consumed = -1
        self.closed = 0
        self._is_over = False
        self.start()

    def run(self) -> None:
        with suppress(OSError):
            self._read()
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _read(self) -> None:
        bounds = relink.frames.bounds_of(relink.Config(), is_connector=True, message=2**24)
        held = b""
        while data := self._sock.recv(SMALL):
            cursor = Cursor(held + data)
            with suppress(NeedMore), self._changed:
                while True:
                    self._take(relink.frames.parse_packet(cursor, bounds))
            held = cursor.data[cursor.position :]
            with self._changed:
                self._changed.notify()

    def _take(self, packet: relink.frames.Packet) -> None:
        if isinstance(packet, relink.frames.AckPacket):
            if packet.ack is relink.frames.Ack.CONSUMED and FIRST in packet.channels:
                self.consumed = self.consumed + 1 if packet.sequence is None else packet.sequence
            elif packet.ack is relink.frames.Ack.CLOSED:
                self.closed += len(packet.channels)

    def are_consumed(self, count: int) -> bool:
        return self.consumed >= count

    def are_closed(self, count: int) -> bool:
        return self.closed >= count

    def wait_until(self, is_enough: Callable[[], bool]) -> None:
        """Raises OSError once the server has hung up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or is_enough())
        if self._is_over:
            raise ConnectionResetError


def relink_multicast(url: str, *, channels: int, reopen: bool) -> None:
    """Empty messages to many channels; with `reopen` the channels are closed and opened again all the time."""
    sock = relink_link(url)
    acks = RelinkAcks(sock)
    ids = tuple(range(FIRST, FIRST + 2 * channels, 2))
    message = relink.frames.encode_packet(relink.frames.MessagePacket(ids, (b"",), multicast=True), 2)
    if reopen:
        close = relink.frames.encode_packet(
            relink.frames.OperationPacket(relink.frames.Operation.CLOSE, ids, multicast=True), 2
        )
        for count in itertools.count(1):
            sock.sendall(message + close)
            acks.wait_until(partial(acks.are_closed, count * channels))
    for count in itertools.count(1):
        sock.sendall(message)
        acks.wait_until(partial(acks.are_consumed, count - OUTSTANDING))


def relink_parts(url: str, *, parts: int, size: int) -> None:
    sock = relink_link(url)
    acks = RelinkAcks(sock)
    message = relink.frames.encode_packet(relink.frames.MessagePacket((FIRST,), (bytes(size),) * parts), 2)
    for count in itertools.count(1):
        sock.sendall(message)
        acks.wait_until(partial(acks.are_consumed, count - 8))


def carrier(tag: int, *numbers: int) -> bytes:
    return bytes([tag]) + b"".join(map(encode_varint, numbers))


LAST, STOP, CREDIT, STREAMS, DATAGRAM = 1, 3, 4, 5, 6


def aqueduct_connection(url: str) -> socket.socket:
    """With a stream of the server's own, which is what floods are about."""
    sock = dial(url)
    greeting = aqueduct.Carrier(aqueduct.Engine(aqueduct.Role.CLIENT)).buffers_to_send(SMALL)
    sock.sendall(b"".join(greeting))
    time.sleep(0.3)
    return sock


def aqueduct_frames(url: str, *, again: bytes) -> None:
    blast(aqueduct_connection(url), again)


def aqueduct_empty_streams(url: str) -> None:
    """As many new streams without a byte as the server allows."""
    sock = aqueduct_connection(url)
    held, opened, allowed = sock.recv(SMALL)[8:], 1, 16
    while True:
        while held:
            cursor = Cursor(held)
            try:
                tag = cursor.byte()
                if tag == STREAMS:
                    allowed += cursor.varint()
                elif tag in (0, 1):
                    cursor.varint()
                    cursor.exact(cursor.varint())
                elif tag == DATAGRAM:
                    cursor.exact(cursor.varint())
                else:
                    cursor.varint()
                    if tag == CREDIT:
                        cursor.varint()
            except NeedMore:
                break
            held = held[cursor.position :]
        sock.sendall(b"".join(carrier(LAST, index, 0) for index in range(opened, allowed)))
        opened = allowed
        held += sock.recv(SMALL)


def websocket_frames(url: str, *, frame: bytes) -> None:
    sock = dial(url)
    sock.sendall(
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    sock.recv(SMALL)
    blast(sock, frame)


def masked(first: int, payload: bytes = b"") -> bytes:
    return bytes((first, 0x80 | len(payload))) + bytes(4) + payload


def udp_packets(url: str, *, packet: bytes) -> None:
    async def run() -> None:
        host, port = address_of(url)
        async with udp.connect(host, port) as link:
            while True:
                await link.send(packet)
                await trio.lowlevel.checkpoint()

    trio.run(run)


def honest_bytes(url: str, *, message: bytes) -> None:
    """Through our own client: as many messages as it can send."""

    async def one(session: muxkit.Session) -> None:
        async with session.open() as channel, trio.open_nursery() as nursery:

            async def read() -> None:
                while True:
                    await channel.receive_many()

            nursery.start_soon(read)
            while True:
                await channel.send(message)

    async def run() -> None:
        async with muxkit.connect(url, **client_options(url)) as session, trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one, session)

    trio.run(run)


def honest_openings(url: str, *, abort: bool) -> None:
    """Through our own client: channels without a message, one after the other, aborted or finished."""

    async def one(session: muxkit.Session) -> None:
        while True:
            with suppress(muxkit.ChannelStopped):
                async with session.open() as channel:
                    await trio.lowlevel.checkpoint()
                    if abort:
                        channel.abort()

    async def run() -> None:
        async with muxkit.connect(url, **client_options(url)) as session, trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one, session)

    trio.run(run)


def unpaced_resets(url: str) -> None:
    """Channels that are opened, used and reset as fast as one process can, by a client without a pace of its own."""
    unpaced = muxkit.Limits(resets_per_second=10**9, resets_burst=10**9)

    async def one(session: muxkit.Session) -> None:
        while True:
            with suppress(muxkit.ChannelStopped, muxkit.ChannelCancelled):
                async with session.open() as channel:
                    await channel.send(b"x")
                    channel.abort()

    async def run() -> None:
        async with (
            muxkit.connect(url, limits=unpaced, **client_options(url)) as session,
            trio.open_nursery() as nursery,
        ):
            for _ in range(100):
                nursery.start_soon(one, session)

    trio.run(run)


def honest_leaving(url: str, *, channels: int) -> None:
    """Through our own client: so many channels, all with a handler that waits, and then no goodbye."""

    async def run() -> None:
        while True:
            with trio.CancelScope() as left:
                async with muxkit.connect(url, **client_options(url)) as session, AsyncExitStack() as stack:
                    opened = [await stack.enter_async_context(session.open()) for _ in range(channels)]
                    for channel in opened:
                        await channel.send(b"x")
                    await opened[-1].receive()
                    left.cancel()
                    await trio.lowlevel.checkpoint()

    trio.run(run)


def honest_reconnect(url: str) -> None:
    """Handshakes, over and over."""

    async def run() -> None:
        while True:
            with suppress(OSError, trio.BrokenResourceError, muxkit.LinkLost):
                async with muxkit.connect(url, linger=0.01, **client_options(url)):
                    pass

    trio.run(run)


def restream_session(uuid: str) -> bytes:
    return b'{"uuid":"%b","state":0}\n' % uuid.encode()


def restream_requests(url: str, *, request: bytes, connections: int = 1) -> None:
    """Connections with a request each, whose answers are read as fast as they come."""
    socks = [dial(url) for _ in range(connections)]
    for sock in socks:
        sock.sendall(request)
        discard(sock)
    nothing(url)


def restream_reconnect(url: str, *, request: bytes) -> None:
    """A request, its first answer and a reset, over and over."""
    while True:
        with suppress(OSError), dial(url) as sock:
            sock.sendall(request)
            sock.recv(SMALL)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def e3x_packet(head: bytes, body: bytes = b"") -> bytes:
    return len(head).to_bytes(2, "big") + head + body


@attrs.frozen
class Attack:
    """One way to be a bad neighbour."""

    url: str
    run: Callable[[str], None]
    handler: str = "echo"


TCP: Final = "tcp://127.0.0.1:0"
UNIX: Final = "unix://DIRECTORY/socket"


def nothing(url: str) -> None:
    """For comparison."""
    threading.Event().wait()


ONE = e3x_packet(b'{"c":1,"ack":0}')
ATTACKS: Final[dict[str, Attack]] = {
    "bpmux: none": Attack(f"bpmux+{TCP}", nothing),
    "bpmux: pings": Attack(f"bpmux+{TCP}", partial(bpmux_chunks, chunk=bpmux.Chunk(bpmux.Type.IN_SINK, 0, ping=True))),
    "bpmux: empty messages": Attack(
        f"bpmux+{TCP}", partial(bpmux_chunks, chunk=bpmux.Chunk(bpmux.Type.IN_SINK, 0, b""))
    ),
    "bpmux: credits of 0": Attack(
        f"bpmux+{TCP}", partial(bpmux_chunks, chunk=bpmux.Chunk(bpmux.Type.IN_STREAM, 0, credit=0))
    ),
    "bpmux: openings and ends": Attack(f"bpmux+{TCP}", bpmux_openings),
    "bpmux: reconnecting, 200 openings": Attack(f"bpmux+{TCP}", bpmux_reconnect),
    "bpmux: reconnecting, none": Attack(f"bpmux+{TCP}", connect_only),
    "bpmux: leaving 6000 channels": Attack(f"bpmux+{TCP}", partial(honest_leaving, channels=6000)),
    "relink: none": Attack(f"relink+{TCP}", nothing),
    "relink: nothing packets": Attack(f"relink+{TCP}", partial(relink_general, general=relink.frames.General.NOP)),
    "relink: pings": Attack(f"relink+{TCP}", partial(relink_general, general=relink.frames.General.PING)),
    "relink: multicast to 100, opened again": Attack(
        f"relink+{TCP}", partial(relink_multicast, channels=100, reopen=True)
    ),
    "relink: multicast to 1000, opened again": Attack(
        f"relink+{TCP}", partial(relink_multicast, channels=1000, reopen=True)
    ),
    "relink: multicast to 100, read": Attack(
        f"relink+{TCP}", partial(relink_multicast, channels=100, reopen=False), "drain"
    ),
    "relink: multicast to 1000, read": Attack(
        f"relink+{TCP}", partial(relink_multicast, channels=1000, reopen=False), "drain"
    ),
    "relink: 60000 empty parts": Attack(f"relink+{TCP}", partial(relink_parts, parts=60_000, size=0), "drain"),
    "relink: 60000 parts of 8": Attack(f"relink+{TCP}", partial(relink_parts, parts=60_000, size=8), "drain"),
    "relink: 1000 parts of 1000": Attack(f"relink+{TCP}", partial(relink_parts, parts=1000, size=1000), "drain"),
    "relink: leaving 1300 channels": Attack(f"relink+{TCP}", partial(honest_leaving, channels=1300)),
    "aqueduct: none": Attack(f"aqueduct+{TCP}", nothing),
    "aqueduct: credits of 0": Attack(f"aqueduct+{TCP}", partial(aqueduct_frames, again=carrier(CREDIT, 0, 0))),
    "aqueduct: credits of 1": Attack(f"aqueduct+{TCP}", partial(aqueduct_frames, again=carrier(CREDIT, 0, 1))),
    "aqueduct: stops": Attack(f"aqueduct+{TCP}", partial(aqueduct_frames, again=carrier(STOP, 0))),
    "aqueduct: streams of 0": Attack(f"aqueduct+{TCP}", partial(aqueduct_frames, again=carrier(STREAMS, 0))),
    "aqueduct: empty datagrams": Attack(f"aqueduct+{TCP}", partial(aqueduct_frames, again=carrier(DATAGRAM, 0))),
    "aqueduct: empty streams": Attack(f"aqueduct+{TCP}", aqueduct_empty_streams),
    "aqueduct: leaving 1300 channels": Attack(f"aqueduct+{TCP}", partial(honest_leaving, channels=1300)),
    "ws: none": Attack("bpmux+ws://127.0.0.1:0", nothing),
    "ws: pongs": Attack("bpmux+ws://127.0.0.1:0", partial(websocket_frames, frame=masked(0x8A))),
    "ws: pings": Attack("bpmux+ws://127.0.0.1:0", partial(websocket_frames, frame=masked(0x89))),
    "ws: empty messages": Attack("bpmux+ws://127.0.0.1:0", partial(websocket_frames, frame=masked(0x82))),
    "ws: pings in messages of 2": Attack(
        "bpmux+ws://127.0.0.1:0",
        partial(
            websocket_frames, frame=masked(0x82, bpmux.encode_chunk(bpmux.Chunk(bpmux.Type.IN_SINK, 0, ping=True)))
        ),
    ),
    "e3x+tcp: none": Attack(f"e3x+{TCP}", nothing),
    "e3x+tcp: zeros": Attack(f"e3x+{TCP}", partial(flood, again=bytes(1000))),
    "e3x+tcp: chunks of 1": Attack(f"e3x+{TCP}", partial(flood, again=b"\1x" * 1000 + b"\0")),
    "e3x+tcp: packets of 2": Attack(f"e3x+{TCP}", partial(flood, again=b"\2\0\0\0")),
    "e3x+tcp: acks": Attack(f"e3x+{TCP}", partial(flood, again=bytes((len(ONE),)) + ONE + b"\0")),
    "e3x+udp: none": Attack("e3x+udp://127.0.0.1:0", nothing),
    "e3x+udp: packets of 2": Attack("e3x+udp://127.0.0.1:0", partial(udp_packets, packet=bytes(2))),
    "e3x+udp: acks": Attack("e3x+udp://127.0.0.1:0", partial(udp_packets, packet=ONE)),
    "tls: none": Attack("bpmux+tls://127.0.0.1:0", nothing),
    "tls: pings": Attack(
        "bpmux+tls://127.0.0.1:0", partial(bpmux_chunks, chunk=bpmux.Chunk(bpmux.Type.IN_SINK, 0, ping=True))
    ),
    "tls: openings and ends": Attack("bpmux+tls://127.0.0.1:0", bpmux_openings),
    "tls: handshakes": Attack("bpmux+tls://127.0.0.1:0", honest_reconnect),
    "wss: none": Attack("bpmux+wss://127.0.0.1:0", nothing),
    "wss: pongs": Attack("bpmux+wss://127.0.0.1:0", partial(websocket_frames, frame=masked(0x8A))),
    "wss: empty messages": Attack("bpmux+wss://127.0.0.1:0", partial(websocket_frames, frame=masked(0x82))),
    "quic: none": Attack("aqueduct+quic://127.0.0.1:0", nothing),
    "quic: messages": Attack("aqueduct+quic://127.0.0.1:0", partial(honest_bytes, message=b"x")),
    "quic: empty channels": Attack("aqueduct+quic://127.0.0.1:0", partial(honest_openings, abort=False)),
    "quic: aborted channels": Attack("aqueduct+quic://127.0.0.1:0", partial(honest_openings, abort=True)),
    "quic: handshakes": Attack("aqueduct+quic://127.0.0.1:0", honest_reconnect),
    "unix: none": Attack(f"bpmux+{UNIX}", nothing),
    "unix: pings": Attack(f"bpmux+{UNIX}", partial(bpmux_chunks, chunk=bpmux.Chunk(bpmux.Type.IN_SINK, 0, ping=True))),
    "unix: openings and ends": Attack(f"bpmux+{UNIX}", bpmux_openings),
    "unix: reconnecting, none": Attack(f"bpmux+{UNIX}", connect_only),
    "unix: stops": Attack(f"aqueduct+{UNIX}", partial(aqueduct_frames, again=carrier(STOP, 0))),
    "restream: none": Attack(f"restream+{TCP}", nothing),
    "restream: acks": Attack(
        f"restream+{TCP}", partial(flood, first=restream_session(BAD), again=b'{"uuid":"%b","ack":1}\n' % BAD.encode())
    ),
    "restream: integers to one": Attack(f"restream+{TCP}", partial(restream_requests, request=b"{}\n")),
    "restream: integers to twenty": Attack(
        f"restream+{TCP}", partial(restream_requests, request=b"{}\n", connections=20)
    ),
    "restream: reconnecting, integers": Attack(f"restream+{TCP}", partial(restream_reconnect, request=b"{}\n")),
    "restream: reconnecting, a session": Attack(
        f"restream+{TCP}", partial(restream_reconnect, request=restream_session(BAD))
    ),
    "restream: reconnecting, none": Attack(f"restream+{TCP}", connect_only),
    "dtls: none": Attack("e3x+dtls://127.0.0.1:0", nothing),
    "dtls: messages": Attack("e3x+dtls://127.0.0.1:0", partial(honest_bytes, message=b"x")),
    "dtls: handshakes": Attack("e3x+dtls://127.0.0.1:0", honest_reconnect),
    "e3x+udp: leaving 4000 channels": Attack("e3x+udp://127.0.0.1:0", partial(honest_leaving, channels=4000)),
    "e3x+udp: messages": Attack("e3x+udp://127.0.0.1:0", partial(honest_bytes, message=b"x")),
    **{
        f"{scheme}: opened and reset": Attack(f"{scheme}://127.0.0.1:0", unpaced_resets)
        for scheme in ("bpmux+tcp", "relink+tcp", "aqueduct+tcp", "aqueduct+quic", "e3x+tcp", "e3x+udp")
    },
}


# --- the neighbours


@attrs.define
class Figures:
    """Seconds that each echo and each connection took; those that failed count as infinite."""

    echoes: list[float] = attrs.field(factory=list)
    connections: list[float] = attrs.field(factory=list)
    memory: int = 0
    """Bytes that the server's resident memory grew by at most."""
    busy: float = 0.0
    """The server's share of a core."""

    def row(self) -> tuple[float, float, float, float]:
        return (
            percentile(self.echoes, 0.5),
            percentile(self.echoes, 0.99),
            percentile(self.connections, 0.5),
            percentile(self.connections, 0.99),
        )


def percentile(times: list[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.inf


async def echo_on(session: muxkit.Session) -> float:
    """Seconds for one message there and back on a new channel; infinite if it takes too long."""
    began = trio.current_time()
    with trio.move_on_after(PATIENCE):
        async with session.open() as channel:
            await channel.send(ECHO)
            await channel.receive()
            return trio.current_time() - began
    return math.inf


async def neighbour(url: str, times: list[float], until: float) -> None:
    """Echo until the time is over, at least once."""
    is_first = True
    async with muxkit.connect(url, **client_options(url)) as session, session.open() as channel:
        while is_first or trio.current_time() < until:
            is_first = False
            began = trio.current_time()
            with trio.move_on_after(PATIENCE) as late:
                await channel.send(ECHO)
                await channel.receive()
            times.append(math.inf if late.cancelled_caught else trio.current_time() - began)
            if late.cancelled_caught:
                channel.abort()
                return
            await trio.sleep(PACE)


async def newcomer(url: str, times: list[float], until: float) -> None:
    """Seconds until the first echo on a new connection has come."""
    while trio.current_time() < until:
        began = trio.current_time()
        took = math.inf
        with suppress(OSError, muxkit.LinkLost):
            with trio.move_on_after(PATIENCE) as late:
                async with muxkit.connect(url, linger=0.01, **client_options(url)) as session:
                    await echo_on(session)
                    took = trio.current_time() - began
            if late.cancelled_caught:
                took = math.inf
        times.append(took)
        await trio.sleep(NEXT)


async def fed_neighbour(url: str, times: list[float], until: float) -> None:
    """The echo of restream: what is fed to a session arrives at its reader."""
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with bell:
        bell.connect(in_directory("bell"))
        async with restream.stream(url, uuid=GOOD) as reader:
            await reader.receive()
            while trio.current_time() < until:
                began = trio.current_time()
                with trio.move_on_after(PATIENCE) as late:
                    bell.send(b"x")
                    await reader.receive()
                times.append(math.inf if late.cancelled_caught else trio.current_time() - began)
                if late.cancelled_caught:
                    return
                await trio.sleep(PACE)


async def reading_newcomer(url: str, times: list[float], until: float) -> None:
    """Seconds until the first value on a new connection has come."""
    while trio.current_time() < until:
        began = trio.current_time()
        took = math.inf
        with trio.move_on_after(PATIENCE):
            async with restream.integers(url) as reader:
                await reader.receive()
                took = trio.current_time() - began
        times.append(took)
        await trio.sleep(NEXT)


def resident(process: int, which: str) -> int:
    """Bytes of resident memory, `VmRSS` now or `VmHWM` at most; 0 where the system does not say."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(which):
                return int(line.split()[1]) * 1024
    return 0


def processor_time(process: int) -> float:
    """Seconds; 0 where the system does not say."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


async def measure(url: str, seconds: float, clients: int) -> Figures:
    figures = Figures()
    is_restream = url.startswith("restream")
    # The first connection of a process imports what it needs, which would be the p99 of so few.
    await (reading_newcomer if is_restream else newcomer)(url, [], trio.current_time() + 0.001)
    until = trio.current_time() + seconds
    with trio.move_on_after(seconds + 3 * PATIENCE):
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(fed_neighbour if is_restream else neighbour, url, figures.echoes, until)
            nursery.start_soon(reading_newcomer if is_restream else newcomer, url, figures.connections, until)
    return figures


def run(name: str, seconds: float, *, hostile: int = 1, clients: int = 1, verbose: bool = False) -> Figures:
    attack = ATTACKS[name]
    url = attack.url.replace("DIRECTORY", os.environ[DIRECTORY])
    Path(in_directory("bell")).unlink(missing_ok=True)
    processes = []
    try:
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", url, "--handler", attack.handler],
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            text=True,
        )
        processes.append(server)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        at_first = resident(server.pid, "VmRSS")
        order = [sys.executable, __file__, "--attack", name, "--at", url]
        processes += [subprocess.Popen(order, stderr=subprocess.PIPE, text=True) for _ in range(hostile)]
        trio.run(trio.sleep, 1.0)
        began, spent = time.monotonic(), processor_time(server.pid)
        figures = trio.run(measure, url, seconds, clients)
        figures.busy = (processor_time(server.pid) - spent) / (time.monotonic() - began)
        figures.memory = resident(server.pid, "VmHWM") - at_first
        for process in processes[1:]:
            if process.poll() is not None and process.stderr is not None:
                sys.exit(f"{name}: the hostile process ended: {process.stderr.read()}")
        return figures
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes the pipes too


def milliseconds(seconds: float) -> str:
    return f"> {PATIENCE * 1000:.0f}" if math.isinf(seconds) else f"{seconds * 1000:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--handler", default="echo", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each attack is measured")
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument("--clients", type=int, default=1, help="how many echo clients")
    parser.add_argument("--hostile", type=int, default=1, help="how many hostile processes")
    parser.add_argument("--verbose", action="store_true", help="show the log of the server")
    parser.add_argument("--strict", action="store_true", help="fail when a figure is above its goal")
    arguments = parser.parse_args()
    if arguments.serve:
        logging.basicConfig(level=logging.INFO)
        if arguments.serve.startswith("restream"):
            trio.run(serve_restream, arguments.serve)
        else:
            trio.run(serve, arguments.serve, arguments.handler)
        return
    if arguments.attack:
        while True:  # a flood that is above a limit goes on with a new connection
            try:
                ATTACKS[arguments.attack].run(arguments.at)
            except* (OSError, trio.BrokenResourceError, muxkit.LinkLost):
                time.sleep(0.01)
    with tempfile.TemporaryDirectory() as directory:
        issue(directory)
        os.environ[DIRECTORY] = directory
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    print(f"{'attack':<42}{'echo p50':>10}{'p99':>10}{'connect p50':>13}{'p99':>10}  ms   cores   +MiB   load")
    missed = []
    for name in ATTACKS:
        if arguments.only not in name:
            continue
        figures = run(
            name, arguments.seconds, hostile=arguments.hostile, clients=arguments.clients, verbose=arguments.verbose
        )
        row = figures.row()
        cells = [milliseconds(seconds) for seconds in row]
        print(
            f"{name:<42}{cells[0]:>10}{cells[1]:>10}{cells[2]:>13}{cells[3]:>10}"
            f"{figures.busy:>12.2f}{figures.memory / 2**20:>7.1f}{os.getloadavg()[0]:>7.1f}"
            f"   {len(figures.echoes)} echoes, {len(figures.connections)} connections",
            flush=True,
        )
        if row[1] > ECHO_GOAL or row[3] > CONNECT_GOAL:
            missed.append(name)
    if arguments.strict and missed:
        sys.exit(
            f"above the goals of {ECHO_GOAL * 1000:.0f} ms an echo, {CONNECT_GOAL * 1000:.0f} ms a connection: "
            + "; ".join(missed)
        )


if __name__ == "__main__":
    main()
