"""UDP through a session: datagrams come whole and go back to their sender, what does not fit is dropped, rules hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
import trustme

import muxkit
from muxkit import forward
from muxkit.forward.datagrams import WAITING, WAITING_BYTES, Backlog, DatagramRelay
from muxkit.forward.relay import Tally
from muxkit.forward.wire import Datagrams, Done, ask, encode
from muxkit.protocols import aqueduct, e3x
from muxkit.runtime import Backoff
from tests.forward._targets import PATIENCE, PROTOCOLS, names, pair, port_of

URLS = [f"{each}+tcp://127.0.0.1:0" for each in PROTOCOLS]
OTHERS = ["e3x+udp://127.0.0.1:0", "bpmux+ws://127.0.0.1:0/mux", "aqueduct+quic://127.0.0.1:0"]


class Target:
    """A UDP program that sends back what it gets, and notes from where."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock
        self.port: int = sock.getsockname()[1]
        self.senders: list[object] = []
        self.answers = True

    async def run(self) -> None:
        while True:
            data, sender = await self._sock.recvfrom(65_535)
            self.senders.append(sender)
            if self.answers:
                await self._sock.sendto(data, sender)


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        program = Target(sock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(program.run)
            yield program
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def sender(to: forward.Forward) -> AsyncIterator[trio.socket.SocketType]:
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        await sock.connect(("127.0.0.1", port_of(to.address)))
        yield sock


async def heard(sock: trio.socket.SocketType, said: bytes) -> bytes:
    """Say it until something comes back, as programs that use UDP do."""
    while True:
        await sock.send(said)
        with trio.move_on_after(1.0):
            return await sock.recv(65_535)


@pytest.mark.parametrize("url", [*URLS, *OTHERS])
async def test_each_sender_hears_its_own_answers(url: str, tmp_path: Path) -> None:
    server_tls = client_tls = None
    if "quic" in url:
        authority = trustme.CA()
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
        server_tls, client_tls = muxkit.TLS(cert=tmp_path / "server.pem"), muxkit.TLS(ca=authority.cert_pem.bytes())
    with trio.fail_after(PATIENCE):
        async with target() as there, pair(url, [f"{there.port}/udp"], tls=(server_tls, client_tls)) as joined:
            async with (
                forward.open_datagrams(joined.session, "0", str(there.port)) as opened,
                sender(opened) as one,
                sender(opened) as other,
            ):
                for size in (1, 0, 1000, 9000, 40_000):
                    assert await heard(one, b"a" * size) == b"a" * size
                    assert await heard(other, b"b" * size) == b"b" * size
                assert len({*there.senders}) == 2
                assert (opened.stats().connections, opened.stats().total) == (2, 2)
                await opened.shutdown(grace=0)
            while joined.handler.stats().connections:
                await trio.testing.wait_all_tasks_blocked()


async def test_over_e3x_datagrams_that_fit_travel_unreliably(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, bool]] = []
    plain = e3x.Channel.send

    async def send(channel: e3x.Channel, message: bytes) -> None:
        sent.append((len(message), channel.is_reliable))
        await plain(channel, message)

    with trio.fail_after(PATIENCE):
        async with target() as there, pair("e3x+udp://127.0.0.1:0", [f"{there.port}/udp"]) as joined:
            async with forward.open_datagrams(joined.session, "0", str(there.port)) as opened, sender(opened) as sock:
                assert await heard(sock, b"tea") == b"tea"
                monkeypatch.setattr(e3x.Channel, "send", send)
                for size in (100, 20_000):
                    assert await heard(sock, b"x" * size) == b"x" * size
    # There behind the number of the sender, back without it.
    assert {*sent} == {(104, False), (100, False), (20_000, True)}


async def test_over_aqueduct_datagrams_are_messages_that_may_be_lost(tmp_path: Path) -> None:
    """Where the transport has packets, in both directions."""
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    theirs, ours = muxkit.TLS(cert=tmp_path / "server.pem"), muxkit.TLS(ca=authority.cert_pem.bytes())
    came: list[tuple[bytes, bool]] = []

    async def serve(channel: muxkit.Channel) -> None:
        """Grant the request, and note how each datagram comes."""
        assert isinstance(channel, aqueduct.Channel)
        await channel.send(encode(Done("", 1)))
        while True:
            message = await channel.receiver.receive()
            came.append((message.payload, message.is_unreliable))

    url = "aqueduct+quic://127.0.0.1:0"
    with trio.fail_after(PATIENCE):
        async with (
            muxkit.open_server(serve, url, tls=theirs, linger=0.5) as server,
            muxkit.connect(server.url, tls=ours) as session,
            forward.open_datagrams(session, "0", "9") as opened,
            sender(opened) as sock,
        ):
            for said in (b"tea", bytes(40_000)):
                while (said, len(said) < 1000) not in came:
                    await sock.send(said)
                    await trio.testing.wait_all_tasks_blocked(0.01)
        async with target() as there, pair(url, [f"{there.port}/udp"], tls=(theirs, ours)) as joined:
            channel, _done = await ask(joined.session, Datagrams(f"127.0.0.1:{there.port}"))
            assert isinstance(channel, aqueduct.Channel)
            heard: list[tuple[bytes, bool]] = []
            while not heard:
                await channel.send(b"milk")
                with trio.move_on_after(1.0):  # said again until it is answered, as it is with UDP
                    message = await channel.receiver.receive()
                    heard.append((message.payload, message.is_unreliable))
            assert heard == [(b"milk", True)]
            channel.abort()


@pytest.mark.parametrize(
    ("rules", "is_allowed"),
    [
        (["{}/udp"], True),
        (["loopback:*/udp"], True),
        (["app.test@loopback:{}/udp"], False),
        (["{}"], False),
        (["any:*"], False),
        (["any:*/udp", "!loopback:*"], False),
        (["any:*/udp", "!loopback:*/udp"], False),
        ([], False),
    ],
)
async def test_a_rule_of_its_own_allows_udp(rules: list[str], is_allowed: bool) -> None:
    with trio.fail_after(PATIENCE):
        async with target() as there, pair("bpmux+mem://udp", [each.format(there.port) for each in rules]) as joined:
            if is_allowed:
                channel, _ = await ask(joined.session, Datagrams(str(there.port)))
                channel.abort()
            else:
                with pytest.raises(forward.ForwardRefused) as caught:
                    await ask(joined.session, Datagrams(str(there.port)))
                assert caught.value.code == forward.Code.NOT_ALLOWED


async def test_a_rule_about_udp_allows_no_connection_and_its_denial_denies_none() -> None:
    allow = forward.AllowList(["5432/udp", "80", "!127.0.0.1:80/udp"])
    address = forward.Address("127.0.0.1").ip
    assert address is not None
    assert not allow.allows(None, address, 5432)
    assert allow.allows(None, address, 80)
    assert allow.allows(None, address, 5432, udp=True)


async def test_a_name_that_resolves_to_loopback_gets_no_datagram() -> None:
    names().known["www.example.com"] = ["127.0.0.1"]
    with trio.fail_after(PATIENCE):
        async with target() as there, pair("bpmux+mem://udp", ["*.example.com:*/udp", "*:*/udp"]) as joined:
            with pytest.raises(forward.ForwardRefused, match="resolves to an address that is not allowed"):
                await ask(joined.session, Datagrams(f"www.example.com:{there.port}"))
        assert there.senders == []


async def test_a_silent_sender_is_forgotten_and_its_socket_closed() -> None:
    limits = forward.ForwardLimits(idle=0.05)
    with trio.fail_after(PATIENCE):
        async with target() as there, pair("bpmux+mem://udp", [f"{there.port}/udp"], limits=limits) as joined:
            async with forward.open_datagrams(joined.session, "0", str(there.port)) as opened, sender(opened) as sock:
                assert await heard(sock, b"tea") == b"tea"
                while joined.handler.stats().connections or opened.stats().connections:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                assert await heard(sock, b"milk") == b"milk"
                assert len({*there.senders}) >= 2


async def test_senders_above_the_limit_are_dropped() -> None:
    limits = forward.ForwardLimits(connections=2)
    with trio.fail_after(PATIENCE):
        async with target() as there, pair("bpmux+mem://udp", [f"{there.port}/udp"]) as joined:
            async with (
                forward.open_datagrams(joined.session, "0", str(there.port), limits=limits) as opened,
                sender(opened) as one,
                sender(opened) as two,
                sender(opened) as three,
            ):
                assert await heard(one, b"1") == b"1"
                assert await heard(two, b"2") == b"2"
                await three.send(b"3")
                while not opened.stats().refused:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                assert opened.stats().connections == 2


async def test_datagrams_that_find_the_queue_full_are_dropped_and_no_memory_grows() -> None:
    """While there is no line; when it comes the first ones are still there."""
    async with (
        target() as there,
        muxkit.open_server(forward.handler([f"{there.port}/udp"]), "bpmux+tcp://127.0.0.1:0") as server,
    ):
        place = server.url
        there.answers = False
        await server.shutdown(grace=0)
    with trio.fail_after(PATIENCE):
        async with (
            target() as there,
            forward.line(place, backoff=Backoff(first=0.01, most=0.1)) as line,
            forward.open_datagrams(line, "0", str(there.port)) as opened,
            sender(opened) as sock,
        ):
            there.answers = False
            for number in range(10 * WAITING):
                await sock.send(b"%d" % number)
                if number % 16 == 0:
                    await trio.testing.wait_all_tasks_blocked()
            assert opened.stats().bytes_in == 0
            handler = forward.handler([f"{there.port}/udp"])
            async with muxkit.open_server(handler, place, linger=0.1):
                while len(there.senders) < WAITING:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert len(there.senders) == WAITING
                await sock.send(b"last")
                while len(there.senders) == WAITING:
                    await trio.testing.wait_all_tasks_blocked(0.01)


async def test_large_datagrams_of_many_senders_are_dropped_once_they_are_many_bytes() -> None:
    """Each may have a queue, and all of them together cannot have as much as that allows."""
    size = 60_000
    many = WAITING_BYTES // (WAITING * size) + 5
    backlog = Backlog()
    tally = Tally(most=many)

    async def deliver(data: bytes) -> None:
        """Drop what comes back."""

    with trio.fail_after(PATIENCE):
        async with target() as there, pair("bpmux+mem://large", [f"{there.port}/udp"]) as peers:
            relays = []
            for _ in range(many):
                channel, _done = await ask(peers.session, Datagrams(f"127.0.0.1:{there.port}"))
                relays.append(DatagramRelay(channel, tally, backlog, deliver, idle=60))
            for _ in range(WAITING):
                for relay in relays:
                    relay.push(bytes(size))
            assert WAITING_BYTES - size < backlog.bytes <= WAITING_BYTES
            assert tally.bytes_in == backlog.bytes
            assert sum(relay.dropped for relay in relays) == many * WAITING - backlog.bytes // size
            async with trio.open_nursery() as nursery:
                for relay in relays:
                    nursery.start_soon(relay.run)
                while backlog.bytes > WAITING_BYTES // 2:
                    await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert backlog.bytes == 0  # what was sent, and what was given up


async def test_a_target_that_is_not_there_costs_datagrams_and_nothing_else() -> None:
    async with target() as gone:
        pass
    with trio.fail_after(PATIENCE):
        async with pair("bpmux+mem://udp", [f"{gone.port}/udp"]) as joined:
            async with forward.open_datagrams(joined.session, "0", str(gone.port)) as opened, sender(opened) as sock:
                for _ in range(5):
                    await sock.send(b"tea")
                    await trio.testing.wait_all_tasks_blocked(0.01)
                assert opened.stats().connections == 1


async def test_a_unix_socket_and_an_address_in_use_are_refused() -> None:
    async with target() as there, pair("bpmux+mem://udp") as joined:
        with pytest.raises(ValueError, match="support Unix sockets"):
            async with forward.open_datagrams(joined.session, "0", "/run/x.sock"):
                pass
        with pytest.raises(OSError, match="cannot listen on 127"):
            async with forward.open_datagrams(joined.session, str(there.port), "9"):
                pass


@pytest.mark.parametrize(
    ("text", "rest"),
    [("5353:53/udp", "5353:53"), ("0:db:53/udp", "0:db:53"), ("8080:/run/udp", None), ("8080:/run/5/udp", None)],
)
def test_udp_stands_behind_the_port(text: str, rest: str | None) -> None:
    assert forward.without_udp(text) == (rest or text, rest is not None)
