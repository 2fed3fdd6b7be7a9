"""The plain Aqueduct peer on a QUIC connection: aioquic without its I/O, on a UDP socket of Trio's."""

import functools
import math
import shutil
import tempfile
from atexit import register
from collections.abc import Callable
from pathlib import Path

import trio
import trustme
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from tests.foreign.aqueduct_peer import Incoming, Outgoing, Pairs, Peer, Refused, Wire

ALPN = "muxkit-aqueduct"
ENDLESS = 2**62
Address = tuple[str, int]


@functools.cache
def certificates() -> dict[str, str]:
    """Make an authority and a certificate for localhost, and give their files: `ca`, `certificate` and `key`."""
    folder = Path(tempfile.mkdtemp())
    register(shutil.rmtree, folder)
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca")
    issued.private_key_pem.write_to_path(folder / "key")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(folder / "certificate", append=True)
    return {name: str(folder / name) for name in ("ca", "certificate", "key")}


class QuicPeer(Peer):
    """A plain peer whose streams and datagrams are those of QUIC, which also has the credit."""

    def __init__(self, *, is_client: bool, headers: Pairs = (), acks_version: bool = True) -> None:
        self.quic: QuicConnection | None = None
        self._held: list[Callable[[QuicConnection], None]] = []  # what was written before there was a connection
        super().__init__(is_client=is_client, headers=headers, acks_version=acks_version)
        self.out.clear()
        self.loses_datagrams = True
        self.lost = False  # the connection ended
        self.ending: tuple[int, str] | None = None  # how, code and reason
        self._may_open = ENDLESS

    def attach(self, quic: QuicConnection) -> None:
        """Write to this connection from now on."""
        self.quic = quic
        for each in self._held:
            each(quic)
        self._held.clear()

    def _do(self, what: Callable[[QuicConnection], None]) -> None:
        if self.quic is None:
            self._held.append(what)
        elif not self.lost:
            what(self.quic)

    def _open(self) -> Outgoing:
        stream = super()._open()
        stream.credit = ENDLESS
        return stream

    def _put(self, number: int, part: bytes, *, last: bool) -> None:
        self._do(lambda quic: quic.send_stream_data(4 * number + 2 + self.me, part, last))

    def _put_reset(self, number: int) -> None:
        self._do(lambda quic: quic.reset_stream(4 * number + 2 + self.me, 0))

    def _put_datagram(self, sequence: bytes) -> None:
        self._do(lambda quic: quic.send_datagram_frame(sequence))

    def _incoming(self, name: int) -> Incoming:
        if name & 3 != 3 - self.me:
            raise Refused(f"aqueduct-F01: stream {name} is not a unidirectional one of the other side")
        return self._streams.setdefault(name, Incoming(name))

    def take(self, event: events.QuicEvent) -> None:
        """Take what happened; after a refusal nothing more is taken."""
        if isinstance(event, events.ConnectionTerminated):
            self.lost = True
            self.ending = event.error_code, event.reason_phrase
        if self.refusals or self.is_silent:
            return
        try:
            if isinstance(event, events.ProtocolNegotiated):
                if event.alpn_protocol != ALPN:
                    raise Refused(f"quic: ALPN {event.alpn_protocol!r}")
            elif isinstance(event, events.StreamDataReceived):
                stream = self._incoming(event.stream_id)
                stream.buffer += event.data
                stream.ended = event.end_stream
                self._read(stream)
            elif isinstance(event, events.StreamReset):
                self._incoming(event.stream_id).is_ignored = True
                self.resets += 1
            elif isinstance(event, events.StopSendingReceived):
                for mine in self._mine:
                    if mine.number is not None and 4 * mine.number + 2 + self.me == event.stream_id:
                        self._reset(mine)
            elif isinstance(event, events.DatagramFrameReceived):
                self._read(Incoming(-1, is_datagram=True, buffer=bytearray(event.data), ended=True))
            self._answer()
        except Refused as refusal:
            self.refusals.append(str(refusal))


class QuicWire(Wire):
    """Runs a peer on a UDP socket, as the Wire of the carrier does on a stream."""

    def __init__(self, peer: QuicPeer, socket: trio.socket.SocketType, address: Address | None = None) -> None:
        """Speak with a server at `address`, or wait for a client."""
        self.peer: QuicPeer = peer
        self._socket = socket
        self.read = self.written = 0
        self.is_open = True
        self._configuration = QuicConfiguration(
            alpn_protocols=[ALPN],
            is_client=address is not None,
            max_datagram_frame_size=65536,
            server_name="localhost" if address is not None else None,
        )
        if address is not None:
            self._configuration.load_verify_locations(certificates()["ca"])
            quic = QuicConnection(configuration=self._configuration)
            quic.connect(address, now=trio.current_time())
            peer.attach(quic)
        else:
            self._configuration.load_cert_chain(certificates()["certificate"], certificates()["key"])

    async def until(self, fact: Callable[[], bool]) -> bool:
        """Take part in the conversation until something is so; False if the connection ended first."""
        await self.flush()
        while self.is_open and not fact():
            await self._take()
            await self.flush()
            self.is_open = not self.peer.lost
            if self.peer.refusals:
                await self.hang_up()
        return fact()

    async def _take(self) -> None:
        timer = self.peer.quic.get_timer() if self.peer.quic is not None else None
        with trio.move_on_at(math.inf if timer is None else timer):
            data, address = await self._socket.recvfrom(65536)
            if self.peer.quic is None:
                self._accept(data)
            assert self.peer.quic is not None
            self.peer.quic.receive_datagram(data, address, trio.current_time())
        quic = self.peer.quic
        assert quic is not None
        if timer is not None and timer <= trio.current_time():
            quic.handle_timer(trio.current_time())
        while (event := quic.next_event()) is not None:
            self.peer.take(event)

    def _accept(self, data: bytes) -> None:
        size = data[5]  # of the long header's destination, which a client chose for its first packets
        quic = QuicConnection(configuration=self._configuration, original_destination_connection_id=data[6 : 6 + size])
        self.peer.attach(quic)

    async def flush(self) -> None:
        if self.peer.quic is not None:
            for data, address in self.peer.quic.datagrams_to_send(trio.current_time()):
                await self._socket.sendto(data, address)

    async def hang_up(self) -> None:
        if self.peer.quic is not None:
            self.peer.quic.close()
            await self.flush()
        self.peer.lost, self.is_open = True, False
