"""The QUIC server: it routes packets by connection id, proves addresses, and limits new connections.

Packets with a known connection id go to their link, even if the client's address has changed. With `retry`, the server
keeps no state for a client until it has proved its address. `muxkit.runtime.Admission` limits connections and
handshakes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

import trio
from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # it is documented there
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE
from aioquic.quic.packet import QuicPacketType, encode_quic_retry, encode_quic_version_negotiation, pull_quic_header
from aioquic.quic.retry import QuicRetryTokenHandler

from muxkit.runtime import Admission, Place, bare_nursery, source_of, turned_away, turns

from .._addresses import join_host_port
from .._listen import log_failure, report_slow_handshake
from ..packets.options import TURN, Address
from ..packets.sockets import PacketSocket
from .connection import LimitedConnection
from .link import Packet, QuicLink, send_now
from .options import IssuedTickets, QuicOptions

if TYPE_CHECKING:
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.packet import QuicHeader

log: Final = logging.getLogger("muxkit.adapters")

LONG_HEADER = 0x80
TOKEN_ID_SIZE = 8  # bytes of the connection id that belongs to a token
LEAVING_MOST = 1024  # ended connections that are kept in case they have to repeat their close frame


class Server:
    """The connections by their ids, over one or several sockets."""

    _nursery: trio.Nursery

    def __init__(
        self,
        configuration: Callable[[], QuicConfiguration],
        handler: Callable[[QuicLink], Awaitable[None]],
        *,
        options: QuicOptions,
        retry: bool,
        tickets: IssuedTickets | None,
    ) -> None:
        self._configuration = configuration()
        self._renewed = configuration
        self._handler = handler
        self._options = options
        self._limits = options.limits
        self._tokens = QuicRetryTokenHandler() if retry else None
        self._tickets = tickets
        self._links: dict[bytes, QuicLink] = {}
        self._admission = Admission(options.limits)
        self._places: dict[QuicLink, Place] = {}  # of connections during their handshake
        self._leaving: dict[QuicLink, trio.CancelScope] = {}
        self._is_full = False
        self._turns = turns()
        self.refused: int = 0
        """The number of first packets that were refused."""

    async def serve(self, sockets: Sequence[PacketSocket], started: Callable[[], None]) -> None:
        """Serve until cancelled, and close the sockets afterwards."""
        try:
            async with bare_nursery() as nursery:
                self._nursery = nursery
                for wire in sockets:
                    nursery.start_soon(self._receive, wire)
                started()
        finally:
            for wire in sockets:
                wire.close()

    async def _receive(self, wire: PacketSocket) -> None:
        while True:
            await wire.wait_readable()
            touched: dict[QuicLink, None] = {}
            began = perf_counter()
            for packet in [(data, address) for address, run in wire.receive() for data in run]:
                link = self._route(packet, wire)
                if link is None:
                    continue
                link.feed(packet)
                touched[link] = None
                if (place := self._places.get(link)) is not None:
                    place.progressed()
                if perf_counter() - began > TURN:
                    _finish_feeding(touched)
                    await trio.lowlevel.checkpoint()
                    began = perf_counter()
            _finish_feeding(touched)
            await trio.lowlevel.checkpoint()

    # --- routing

    def _route(self, packet: Packet, wire: PacketSocket) -> QuicLink | None:
        data = packet[0]
        if not data:
            return None
        if not data[0] & LONG_HEADER:
            return self._links.get(data[1 : 1 + self._configuration.connection_id_length])
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=self._configuration.connection_id_length)
        except ValueError:
            return None
        link = self._links.get(header.destination_cid)
        if link is not None or len(data) < SMALLEST_MAX_DATAGRAM_SIZE:
            return link
        if header.version is not None and header.version not in self._configuration.supported_versions:
            self._offer_versions(header, packet, wire)
            return None
        if header.packet_type is not QuicPacketType.INITIAL:
            return None
        return self._admit(header, packet, wire)

    def _offer_versions(self, header: QuicHeader, packet: Packet, wire: PacketSocket) -> None:
        if header.packet_type is QuicPacketType.VERSION_NEGOTIATION:
            return  # an answer could make two servers answer each other forever
        answer = encode_quic_version_negotiation(
            source_cid=header.destination_cid,
            destination_cid=header.source_cid,
            supported_versions=self._configuration.supported_versions,
        )
        send_now(wire, [(answer, packet[1])])

    def _admit(self, header: QuicHeader, packet: Packet, wire: PacketSocket) -> QuicLink | None:
        """Open a connection for the first packet of a new peer, if its address is proved and there is room."""
        original, token_id = header.destination_cid, None
        if not self._admission.make_room():
            self.refused += 1  # the client will send its packet again
            turned_away("connections" if self._admission.half_open < self._limits.half_open else "half_open")
            if not self._is_full:
                self._is_full = True
                # log: A QUIC server is full. New clients are refused until one leaves.
                log.info("refusing new connections until one ends: Limits(connections=%d)", self._limits.connections)
            return None
        if self._tokens is not None:
            if not header.token:
                self._ask_for_token(header, packet, wire)
                return None
            token_id = header.destination_cid
            try:
                original = self._tokens.validate_token(
                    address=packet[1], destination_cid=token_id, token=header.token, now=trio.current_time()
                )
            except ValueError:
                self.refused += 1
                return None
        place = self._admission.admit(source_of(packet[1][0]))
        if place is None:
            self.refused += 1
            return None
        return self._open(original, token_id, header.destination_cid, packet[1], wire, place)

    def _ask_for_token(self, header: QuicHeader, packet: Packet, wire: PacketSocket) -> None:
        """Ask for proof of the address with a Retry packet. The token contains all state, so the server keeps none."""
        assert self._tokens is not None
        assert header.version is not None
        token_id = os.urandom(TOKEN_ID_SIZE)
        token = self._tokens.create_token(
            address=packet[1],
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=token_id,
            now=trio.current_time(),
        )
        answer = encode_quic_retry(
            version=header.version,
            source_cid=token_id,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )
        send_now(wire, [(answer, packet[1])])

    # --- connections

    def _open(
        self,
        original: bytes,
        token_id: bytes | None,
        first_id: bytes,
        address: Address,
        wire: PacketSocket,
        place: Place,
    ) -> QuicLink:
        self._configuration = self._renewed()
        quic = LimitedConnection(
            self._configuration,
            streams=self._options.most_streams,
            window_most=self._limits.channel_bytes,
            original_destination_connection_id=original,
            retry_source_connection_id=token_id,
            session_ticket_fetcher=self._tickets.take if self._tickets is not None else None,
            session_ticket_handler=self._tickets.keep if self._tickets is not None else None,
        )
        ids = {first_id, quic.host_cid}

        def on_id(connection_id: bytes, is_new: bool) -> None:
            if is_new:
                ids.add(connection_id)
                self._links[connection_id] = link
            else:
                ids.discard(connection_id)
                self._links.pop(connection_id, None)

        link = QuicLink(
            quic, wire, role="server", name=f"quic {join_host_port(*address[:2])}", options=self._options, on_id=on_id
        )
        for connection_id in ids:
            self._links[connection_id] = link
        self._turns.connection_came()
        self._places[link] = place
        self._nursery.start_soon(self._live, link, place, ids)
        return link

    async def _live(self, link: QuicLink, place: Place, ids: set[bytes]) -> None:
        try:
            with place.held():
                try:
                    async with bare_nursery() as nursery:
                        nursery.start_soon(self._run, link, nursery.cancel_scope)
                        await link.established.wait()
                        del self._places[link]
                        place.establish()  # even if the connection has ended, there may be data to receive
                        await self._handle(link)
                        self._leave(link, place, nursery.cancel_scope)
                finally:
                    if place.timed_out:
                        report_slow_handshake(self._limits)
        finally:
            self._places.pop(link, None)
            self._leaving.pop(link, None)
            link.drop("the server was stopped")
            for connection_id in ids:
                self._links.pop(connection_id, None)

    async def _run(self, link: QuicLink, scope: trio.CancelScope) -> None:
        """Run a connection. If it ends before its handshake is done, cancel its tasks, because no handler will."""
        try:
            await link.run()
        finally:
            if not link.established.is_set():
                scope.cancel()

    async def _handle(self, link: QuicLink) -> None:
        try:
            await self._handler(link)
            await link.aclose()
        except Exception as error:
            log_failure("connection", error)
        link.close(error="hung up")

    def _leave(self, link: QuicLink, place: Place, scope: trio.CancelScope) -> None:
        """Keep a connection for a moment in case it has to repeat its close frame. It no longer counts as connected."""
        place.leave()
        self._is_full = False
        link.close()
        self._leaving[link] = scope
        if len(self._leaving) > LEAVING_MOST:
            self._leaving.pop(next(iter(self._leaving))).cancel()


def _finish_feeding(touched: dict[QuicLink, None]) -> None:
    for link in touched:
        link.finish_feeding()
    touched.clear()
