"""A QUIC connection is refused whenever it should be, and the error says why."""

from __future__ import annotations

import datetime
import errno
import socket
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit import Limits
from muxkit_adapters import quic
from muxkit_adapters.quic import HandshakeFailed, QuicLink, Tickets
from muxkit_adapters.quic.options import IssuedTickets

from ._packets import refusing_port
from ._quic import FILES, Collected, Files, real_pair, serving

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager


async def refused(*, files: Files = FILES, server: dict[str, Any] | None = None, **options: Any) -> str:
    """Why a client was refused, or refused the server; no connection was served."""
    served = []

    async def remember(link: QuicLink) -> None:
        served.append(link)

    async with serving(remember, files=files, **(server or {})) as (host, port):
        with pytest.raises(HandshakeFailed) as caught:
            async with quic.connect(host, port, **({"ca": files.ca} | options)):
                pass
    assert f"quic 127.0.0.1:{port}: " in str(caught.value)
    return str(caught.value)


@pytest.mark.requirement("R-62")
async def test_an_unknown_authority_is_refused() -> None:
    assert "unable to get local issuer certificate" in await refused(ca=Files().ca)


@pytest.mark.requirement("R-62")
async def test_the_roots_of_the_system_are_the_default() -> None:
    assert "unable to get local issuer certificate" in await refused(ca=None)


@pytest.mark.requirement("R-62")
async def test_a_certificate_for_somebody_else_is_refused() -> None:
    assert "elsewhere.test" in await refused(server_hostname="elsewhere.test")


@pytest.mark.requirement("R-62")
async def test_a_certificate_that_has_expired_is_refused() -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    assert "no longer valid" in await refused(files=Files("127.0.0.1", not_after=past))


@pytest.mark.requirement("R-62")
async def test_a_peer_who_speaks_another_protocol_is_refused() -> None:
    assert "ALPN" in await refused(alpn=["chess"])


async def test_no_protocol_at_all_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="alpn"):
        async with quic.connect("127.0.0.1", 1, alpn=[]):
            pass


@pytest.mark.requirement("R-62")
async def test_a_host_name_and_an_authority_in_memory_are_verified_as_well() -> None:
    pem = await trio.Path(FILES.ca).read_bytes()
    async with serving() as (_, port):
        async with quic.connect("localhost", port, ca=pem, server_hostname="server.test") as link:
            assert link.alpn == "muxkit-aqueduct"


@pytest.mark.requirement("R-62")
async def test_without_verification_the_link_says_so() -> None:
    async with serving() as (host, port):
        async with quic.connect(host, port, insecure=True) as link:
            assert "(not verified, insecure)" in repr(link)


async def test_the_first_protocol_that_both_know_is_spoken() -> None:
    async with real_pair(server={"alpn": ["b", "c"]}, alpn=["a", "c", "b"]) as (here, there):
        assert here.alpn == there.alpn
        assert here.alpn in ("b", "c")


async def test_a_server_may_have_its_key_in_the_same_file() -> None:
    async with trio.open_nursery() as nursery:

        async def serve(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await quic.serve(_nothing, certificate=FILES.both, task_status=task_status)

        (address,) = await nursery.start(serve)
        async with quic.connect("127.0.0.1", int(address.rpartition(":")[2]), ca=FILES.ca):
            nursery.cancel_scope.cancel()


async def _nothing(link: QuicLink) -> None: ...


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"certificate": "/nowhere.pem"}, "certificate='/nowhere.pem': No such file"),
        ({"certificate": FILES.certificate, "key": "/nowhere.key"}, "key='/nowhere.key': No such file"),
        ({"certificate": FILES.key}, "no chain with its key in PEM"),
        ({"certificate": FILES.certificate}, "no chain with its key in PEM"),
    ],
)
async def test_a_server_without_its_papers_does_not_start(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        await quic.serve(_nothing, **options)


async def test_a_missing_authority_is_named() -> None:
    with pytest.raises(ValueError, match=r"ca='/nowhere\.pem'"):
        async with quic.connect("127.0.0.1", 1, ca="/nowhere.pem"):
            pass


async def test_by_url_a_server_needs_a_certificate() -> None:
    with pytest.raises(ValueError, match=r"quic://127.0.0.1:0: a server needs its certificate and key: tls="):
        await quic.transport.serve(_nothing, "127.0.0.1:0", limits=Limits(), task_status=trio.TASK_STATUS_IGNORED)


# --- no server there


async def test_a_port_where_nobody_listens_refuses_at_once() -> None:
    with refusing_port() as port:
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: connection refused") as caught:
            async with quic.connect("127.0.0.1", port, ca=FILES.ca):
                pass
    assert caught.value.errno == errno.ECONNREFUSED


async def test_a_port_where_nobody_answers_is_given_up_in_time() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(HandshakeFailed, match=r"no handshake within 0\.1 s"):
            async with quic.connect("127.0.0.1", port, ca=FILES.ca, handshake_timeout=0.1):
                pass


async def test_the_next_place_is_tried_and_all_failures_are_told() -> None:
    with refusing_port() as dead:
        async with serving() as (host, port):
            async with quic.connect([("127.0.0.1", dead), (host, port)], ca=FILES.ca) as link:
                assert link.peer.endswith(f":{port}")
        with pytest.raises(OSError, match=rf"{dead}: connection refused .*; .*{dead}: connection refused"):
            async with quic.connect([("127.0.0.1", dead), ("127.0.0.1", dead)], ca=FILES.ca):
                pass


async def test_a_name_that_does_not_exist_is_in_the_error() -> None:
    with pytest.raises(OSError, match=r"quic no-such-host\.invalid:1: "):
        async with quic.connect("no-such-host.invalid", 1, ca=FILES.ca):
            pass


# --- tickets


async def test_a_ticket_makes_the_next_handshake_a_short_one_once() -> None:
    tickets = Tickets()
    async with serving(tickets=True) as (host, port):

        def connect() -> AbstractAsyncContextManager[QuicLink]:
            return quic.connect(host, port, ca=FILES.ca, tickets=tickets)

        async with connect() as link:
            assert not link.is_resumed
            while not tickets:
                await trio.lowlevel.checkpoint()
        async with connect() as link:
            assert link.is_resumed
            assert link.alpn == "muxkit-aqueduct"


@pytest.mark.requirement("R-65")
async def test_nothing_is_sent_or_accepted_before_the_handshake() -> None:
    tickets = Tickets()
    async with serving(tickets=True) as (host, port):
        async with quic.connect(host, port, ca=FILES.ca, tickets=tickets):
            while not tickets:
                await trio.lowlevel.checkpoint()
        ticket = tickets.take("127.0.0.1")
        assert ticket is not None
        assert ticket.max_early_data_size is None
        # A client that insists: the server offered no early data, so there is nothing that it could use.
        ticket.max_early_data_size = 0xFFFFFFFF
        tickets._tickets["127.0.0.1"] = ticket
        async with quic.connect(host, port, ca=FILES.ca, tickets=tickets) as link:
            assert not link.had_early_data


async def test_without_being_asked_a_server_gives_no_tickets() -> None:
    tickets = Tickets()
    async with serving(_echo) as (host, port):
        async with quic.connect(host, port, ca=FILES.ca, tickets=tickets) as link:
            link.write(link.open(), b"x", True)
            got = Collected(link)
            await got.until(lambda: got.ended)
    assert len(tickets) == 0


async def _echo(link: QuicLink) -> None:
    got = Collected(link)
    await got.until(lambda: got.ended)
    link.write(link.open(), b"y", True)
    await link.wait_delivered()


def test_tickets_are_bounded_on_both_sides() -> None:
    class Ticket:
        def __init__(self, number: int) -> None:
            self.server_name = f"{number}.test"
            self.ticket = bytes([number])
            self.max_early_data_size = 5

    mine, issued = Tickets(2), IssuedTickets(2)
    for number in range(3):
        ticket: Any = Ticket(number)
        mine.keep(ticket)
        issued.keep(ticket)
    assert mine.take("0.test") is None
    assert mine.take("2.test") is not None
    assert mine.take("2.test") is None
    assert issued.take(b"\0") is None
    assert issued.take(b"\2") is not None
    assert issued.take(b"\2") is None
