"""What the tests of the packet transports share: pairs of links, plain sockets on the other side, and real loss."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
import trustme

from muxkit_adapters import dtls

from ._links import PATIENCE, port_of, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from muxkit_adapters.packets.sockets import PacketSocket

    from ._links import Serve

Link = trio.abc.Channel[bytes]

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux offers this to a socket")


@asynccontextmanager
async def paired(
    serve: Serve, connect: Callable[[str], AbstractAsyncContextManager[Link]], **options: object
) -> AsyncIterator[tuple[Any, Any]]:
    """The two ends of one conversation, once both have heard each other."""
    accepted: list[Link] = []
    arrived, over = trio.Event(), trio.Event()

    async def keep(link: Link) -> None:
        accepted.append(link)
        arrived.set()
        await over.wait()

    async with serving(serve, keep, **options) as addresses:
        async with connect(addresses[0]) as link:
            await link.send(b"hello")
            await arrived.wait()
            (other,) = accepted
            await other.receive()
            await other.send(b"hello yourself")
            await link.receive()
            await link.send(b"so it is me")
            await other.receive()
            try:
                yield link, other
            finally:
                await trio.aclose_forcefully(link)
                await trio.aclose_forcefully(other)
                over.set()


def packets_of(link: Any) -> PacketSocket:  # noqa: ANN401 - a link of UDP or DTLS
    """Return the layer between a link and its socket, which sends and receives batches of packets."""
    found: PacketSocket = link._packets
    return found


def socket_of(link: Any) -> socket.socket:  # noqa: ANN401 - a link of UDP or DTLS
    """Return the socket under a link, to send past the link or to set what the kernel does."""
    return packets_of(link).socket


def channel_of(link: dtls.DtlsLink) -> trio.DTLSChannel:
    """Return Trio's channel under a link of DTLS."""
    return link._channel


def refuse_runs(link: Any) -> None:  # noqa: ANN401 - a link of UDP or DTLS
    """Make the kernel refuse to cut a run into packets (EIO), as it does for some network cards."""
    socket_of(link).setsockopt(socket.SOL_SOCKET, 11, 1)  # SO_NO_CHECK


async def echo(link: Link) -> None:
    async for packet in link:
        await link.send(packet)


class Plain:
    """A plain socket that can be anybody on loopback; it waits for answers, but not for ever."""

    def __init__(self, address: str, *, host: str = "127.0.0.1") -> None:
        self._to = ("127.0.0.1", port_of(address))
        self._host = host

    async def __aenter__(self) -> Plain:
        self.socket = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        await self.socket.bind((self._host, 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, packet: bytes) -> None:
        await self.socket.sendto(packet, self._to)

    async def receive(self) -> bytes:
        with trio.fail_after(PATIENCE):
            packet, _ = await self.socket.recvfrom(65_535)
            return packet

    def waiting(self) -> list[bytes]:
        """What has come already."""
        packets = []
        with socket.socket(fileno=socket.dup(self.socket.fileno())) as plain:
            plain.setblocking(False)
            while True:
                try:
                    packets.append(plain.recv(65_535))
                except BlockingIOError:
                    return packets


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition without a notification has become true."""
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.testing.wait_all_tasks_blocked(0.001)


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port without a listener, which no other process can bind."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.connect(taken.getsockname())  # it hears only itself, and the kernel refuses what others send there
        yield taken.getsockname()[1]


def lose(sock: socket.socket, chance: float) -> None:
    """From now on the kernel drops what arrives there, each packet with that chance, before the socket has it."""
    random, accept, drop = 0xFFFFF000 + 56, 0xFFFFFFFF, 0  # SKF_AD_OFF + SKF_AD_RANDOM
    program = [
        struct.pack("=HBBI", 0x20, 0, 0, random),  # load a random 32-bit number
        struct.pack("=HBBI", 0x35, 0, 1, int(chance * 2**32)),  # if it is at least that
        struct.pack("=HBBI", 0x06, 0, 0, accept),
        struct.pack("=HBBI", 0x06, 0, 0, drop),
    ]
    code = b"".join(program)
    kept = ctypes.create_string_buffer(code)
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", len(program), ctypes.addressof(kept)))  # SO_ATTACH_FILTER


@asynccontextmanager
async def wiretap(link: dtls.DtlsLink) -> AsyncIterator[list[bytes]]:
    """What a link hands to the kernel."""
    seen: list[bytes] = []
    packets = packets_of(link)
    send = packets.send

    def listen(packets: list[bytes], address: tuple[str, int]) -> int:
        seen.extend(packets)
        return send(packets, address)

    packets.send = listen  # type: ignore[method-assign, assignment]
    yield seen
    assert seen


class Authority:
    """An authority with certificates in files, as DTLS contexts want them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self._count = 0
        self.ca = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, *names: str, **options: object) -> Path:
        """A file with a certificate, its chain and its key."""
        self._count += 1
        path = self._directory / f"{self._count}.pem"
        certificate = self._authority.issue_cert(*names, **options)  # type: ignore[arg-type]
        certificate.private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    def server(self, *names: str, **options: object) -> dtls.Context:
        return dtls.server_context(self.issue(*(names or ("127.0.0.1", "localhost", "::1")), **options))

    def client(self) -> dtls.Context:
        return dtls.client_context(ca=self.ca)
