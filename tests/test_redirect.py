"""`server.shutdown(redirect=url)`: clients of `muxkit.reconnecting` move on, if they allow it."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import MockClock

import muxkit
from muxkit._redirect import RedirectPolicy, moved_to, redirect_for, redirected_by
from muxkit.protocols import relink
from muxkit.runtime import can_heal
from muxkit.testing import SimNetwork, SimWeather

PROTOCOLS = ["bpmux", "aqueduct", "e3x", "yamux", "relink"]
UNTIL_THE_REASON = [each for each in PROTOCOLS if each != "yamux"]
"""Yamux announces the shutdown by its go-away, which ends `incoming` before the session has ended for a reason."""
OLD, NEW, THIRD = "bpmux+sim://old.example.org", "bpmux+sim://new.example.org", "bpmux+sim://third.example.org"
ALLOWED = ["*.example.org"]


@pytest.fixture
async def sim(weather: SimNetwork, autojump_clock: MockClock) -> SimNetwork:
    return weather


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


def places_of(protocol: str) -> tuple[str, str]:
    """Return the URLs of the old server and of the new one."""
    return f"{protocol}+sim://old.example.org", f"{protocol}+sim://new.example.org"


async def used(session: muxkit.Session) -> None:
    """Wait until the server serves this session."""
    await session.open("used", payload=b"used")
    await trio.sleep(1)


async def peers(url: str | list[str], servers: int, redirects: list[str]) -> list[str]:
    """Use session after session until each has had its turn; return the peers."""
    seen: list[str] = []
    async with muxkit.reconnecting(url, redirects=redirects) as sessions:
        async for session in sessions:
            try:
                if isinstance(session, relink.Link):
                    await session.connected()  # Relink's session begins before its connection
                seen.append(session.info.peer.removeprefix("sim "))
                if len(seen) == servers:
                    break
                async for _ in session.incoming():
                    pass
            except muxkit.LinkLost:
                pass
    return seen


async def moves(
    server: muxkit.Server, url: str, redirect: str | list[str], redirects: list[str], *, servers: int = 2
) -> list[str]:
    """Return the peers of a client whose first server is shut down after a while."""
    seen: list[str] = []
    async with trio.open_nursery() as nursery:

        async def client() -> None:
            seen.extend(await peers(url, servers, redirects))
            nursery.cancel_scope.cancel()

        nursery.start_soon(client)
        await trio.sleep(10)
        await server.shutdown(grace=5, redirect=redirect)
        await trio.sleep(100)
    return seen


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_client_moves_to_the_url_that_the_server_names(
    protocol: str, weather: SimNetwork, autojump_clock: MockClock
) -> None:
    old, new = places_of(protocol)
    async with muxkit.open_server(echo, old) as server, muxkit.open_server(echo, new):
        assert await moves(server, old, new, ALLOWED) == ["old.example.org", "new.example.org"]


async def test_a_client_stays_by_default_when_the_url_is_of_another_host(
    caplog: pytest.LogCaptureFixture, weather: SimNetwork, autojump_clock: MockClock
) -> None:
    async with muxkit.open_server(echo, OLD) as server, muxkit.open_server(echo, NEW):
        assert {*await moves(server, OLD, NEW, [])} == {"old.example.org"}
    assert (
        f"{OLD}: ignoring the redirect to {NEW}: new.example.org isn't a host of this client's URLs; "
        "allow it with redirects=['new.example.org']"
    ) in caplog.messages


async def test_another_port_of_the_same_host_is_followed_by_default() -> None:
    async with (
        muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as old,
        muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as new,
    ):
        seen = await moves(old, old.url, new.url, [])
    assert [f"bpmux+{peer.replace(' ', '://')}" for peer in seen] == [old.url, new.url]


@pytest.mark.parametrize("protocol", UNTIL_THE_REASON)
async def test_calls_under_way_end_before_the_client_moves(protocol: str, sim: SimNetwork) -> None:
    old, new = places_of(protocol)

    async def slow(channel: muxkit.Channel) -> None:
        await channel.send(b"answer to " + await channel.receive() + b" " * 100_000)
        await trio.sleep(3)
        await channel.send(b"done")

    answers: list[bytes] = []

    async def talk(session: muxkit.Session, server: muxkit.Server, nursery: trio.Nursery) -> None:
        async with session.open() as channel:
            await channel.send(b"question")
            answers.append((await channel.receive()).strip())
            nursery.start_soon(partial(server.shutdown, grace=10, redirect=new))
            answers.extend([message async for message in channel])
        await anext(session.incoming())  # until the session ends

    async with muxkit.open_server(slow, old) as server, trio.open_nursery() as nursery:
        with pytest.raises(muxkit.LinkLost) as caught:
            async with muxkit.connect(old) as session:
                await talk(session, server, nursery)
        assert answers == [b"answer to question", b"done"]
        assert (caught.value.code, caught.value.peer_reason) == (307, f"the server has moved to {new}")


@pytest.mark.parametrize("protocol", UNTIL_THE_REASON)
async def test_messages_under_way_arrive_before_the_session_ends(protocol: str, sim: SimNetwork) -> None:
    """A handler that sends and returns without waiting, as `async with` around the session allows."""
    old, new = places_of(protocol)
    sim.set_weather(SimWeather(delay=0.5, rate=100_000.0))
    taken, shut_down = trio.Event(), trio.Event()
    received: list[bytes] = []

    async def send(session: muxkit.Session) -> None:
        async for channel in session.incoming():
            taken.set()
            await shut_down.wait()
            await channel.send(b"x" * 200_000)
            return

    async def talk(session: muxkit.Session, server: muxkit.Server, nursery: trio.Nursery) -> None:
        channel = await session.open()
        await channel.send(b"go")
        await taken.wait()
        nursery.start_soon(partial(server.shutdown, grace=10, redirect=new))
        await trio.sleep(2)
        shut_down.set()
        received.extend([message async for message in channel])
        await channel.aclose()
        await anext(session.incoming())

    async with muxkit.open_server(send, old) as server, trio.open_nursery() as nursery:
        with pytest.raises(muxkit.LinkLost, match="has moved to"):
            async with muxkit.connect(old) as session:
                await talk(session, server, nursery)
    assert [*map(len, received)] == [200_000]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_leaving_a_session_tells_of_the_redirect_even_if_no_call_has(protocol: str, sim: SimNetwork) -> None:
    old, new = places_of(protocol)
    async with muxkit.open_server(echo, old) as server:
        with pytest.raises(muxkit.LinkLost, match="has moved to"):  # noqa: PT012 - leaving raises it
            async with muxkit.connect(old) as session:
                await used(session)
                await server.shutdown(grace=5, redirect=new)
                await trio.sleep(1)


@pytest.mark.parametrize("protocol", UNTIL_THE_REASON)
async def test_a_session_that_does_not_end_in_time_is_told_as_well(
    protocol: str, weather: SimNetwork, autojump_clock: MockClock
) -> None:
    async def stay(session: muxkit.Session) -> None:
        await trio.sleep_forever()

    old, new = places_of(protocol)
    async with muxkit.open_server(stay, old) as server, muxkit.open_server(echo, new):
        assert await moves(server, old, new, ALLOWED) == ["old.example.org", "new.example.org"]


async def test_a_client_that_leaves_when_the_shutdown_is_announced_is_sent_on_when_it_returns(
    weather: SimNetwork, autojump_clock: MockClock
) -> None:
    async def stay(session: muxkit.Session) -> None:
        await trio.sleep_forever()

    old, new = places_of("yamux")
    async with muxkit.open_server(stay, old) as server, muxkit.open_server(echo, new):
        seen = await moves(server, old, new, ALLOWED, servers=3)
    assert seen == ["old.example.org", "old.example.org", "new.example.org"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_client_that_connects_during_the_shutdown_is_sent_on(
    protocol: str, weather: SimNetwork, autojump_clock: MockClock
) -> None:
    async def stay(session: muxkit.Session) -> None:
        await trio.sleep_forever()

    old, new = places_of(protocol)
    async with muxkit.open_server(stay, old) as server, muxkit.open_server(echo, new):
        async with trio.open_nursery() as nursery, muxkit.connect(old) as session:
            await used(session)
            nursery.start_soon(partial(server.shutdown, grace=1000, redirect=new))
            await trio.sleep(1)
            assert (await peers(old, 2, ALLOWED))[-1] == "new.example.org"
            nursery.cancel_scope.cancel()


def test_a_client_without_redirects_reconnects_to_its_own_url() -> None:
    """What a client sees that knows nothing of redirects: a loss after which another attempt makes sense."""
    error = muxkit.LinkLost("ended", by="peer", code=307, peer_reason=moved_to(NEW).text)
    assert can_heal(error)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_client_returns_to_its_own_url_when_the_new_one_is_down(
    protocol: str, caplog: pytest.LogCaptureFixture, weather: SimNetwork, autojump_clock: MockClock
) -> None:
    old, new = places_of(protocol)
    seen: list[str] = []

    async def client() -> None:
        seen.extend(await peers(old, 2, ALLOWED))
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        async with muxkit.open_server(echo, old) as server:
            nursery.start_soon(client)
            await trio.sleep(10)
            await server.shutdown(grace=5, redirect=new)
        await trio.sleep(10)
        async with muxkit.open_server(echo, old):
            await trio.sleep(100)
    assert seen == ["old.example.org", "old.example.org"]
    assert any("returning from a redirect: " in line for line in caplog.messages)


async def test_two_servers_that_send_a_client_to_each_other_do_not_keep_it_busy(
    weather: SimNetwork, autojump_clock: MockClock
) -> None:
    attempts = 0

    async def to(url: str, session: muxkit.Session) -> None:
        nonlocal attempts
        attempts += 1
        await session.ping()  # a client has to be ready before it can be told
        reason = moved_to(url)
        raise muxkit.Refused(reason.text, code=reason.code)

    async def to_new(session: muxkit.Session) -> None:
        await to(NEW, session)

    async def to_old(session: muxkit.Session) -> None:
        await to(OLD, session)

    async with muxkit.open_server(to_new, OLD), muxkit.open_server(to_old, NEW):
        with trio.move_on_after(60):
            await peers(OLD, 10_000, ALLOWED)
    assert 5 < attempts < 60


async def test_a_redirect_that_the_server_does_not_serve_is_a_mistake(
    weather: SimNetwork, autojump_clock: MockClock
) -> None:
    async with muxkit.open_server(echo, OLD) as server:
        with pytest.raises(ValueError, match="expected a URL of bpmux"):
            await server.shutdown(grace=0, redirect="e3x+sim://new")
        with pytest.raises(ValueError, match="invalid URL"):
            await server.shutdown(grace=0, redirect="new")
        assert not server.is_draining


def test_each_url_of_a_server_has_a_redirect_of_its_own() -> None:
    urls = ["bpmux+tcp://b:1", "bpmux+wss://b:2", "e3x+udp://b:3"]
    assert redirect_for("bpmux+wss", urls) == "bpmux+wss://b:2"
    assert redirect_for("bpmux+ws", urls) == "bpmux+tcp://b:1"
    assert redirect_for("yamux+tcp", urls) is None


@pytest.mark.parametrize(
    ("own", "hosts", "url"),
    [
        ("bpmux+tls://a.example.org:1", [], "bpmux+tls://a.example.org:2"),
        ("bpmux+tls://A.example.org:1", [], "bpmux+tls://a.EXAMPLE.org:2"),
        ("bpmux+tls://a.example.org:1", ["b.example.org"], "bpmux+tls://b.example.org:1"),
        ("bpmux+tls://a.example.org:1", ["*.example.org"], "bpmux+tls://b.example.org:1"),
        ("bpmux+tls://a.example.org:1", ["*"], "bpmux+tls://elsewhere.net:1"),
        ("bpmux+wss://a/x", [], "bpmux+wss://a/y"),
        ("bpmux+tls+srv://example.org", ["one.example.org"], "bpmux+tls://one.example.org:1"),
        ("bpmux+unix:///run/a", ["*"], "bpmux+unix:///run/b"),
    ],
)
def test_a_redirect_is_followed(own: str, hosts: list[str], url: str) -> None:
    assert RedirectPolicy((own,), hosts).objection(url) is None


@pytest.mark.parametrize(
    ("own", "hosts", "url", "why"),
    [
        ("bpmux+tls://a:1", ["*"], "bpmux+tcp://a:1", "expected a URL of bpmux"),
        ("bpmux+tls://a:1", ["*"], "e3x+tls://a:1", "expected a URL of bpmux"),
        ("bpmux+tls://a:1", ["*"], "bpmux+unix:///run/a", "expected a URL of bpmux"),
        ("bpmux+unix:///run/a", [], "bpmux+unix:///run/b", "an address without a host"),
        ("bpmux+tls://a:1", ["*.example.org"], "bpmux+tls://example.org:1", "isn't a host of"),
        ("bpmux+tls://a:1", ["*.example.org"], "bpmux+tls://evilexample.org:1", "isn't a host of"),
        ("bpmux+tls://a:1", [], "bpmux+tls://a@evil.net:1", "evil.net isn't a host of"),
        ("bpmux+tls://a:1", [], "bpmux+tls://a:1,evil.net:1", "evil.net isn't a host of"),
        ("bpmux+tls://a:1", [], "bpmux+tls://evil.net:1/a", "evil.net isn't a host of"),
        ("bpmux+tls://a:1", ["*"], "https://a/", "invalid URL"),
        ("bpmux+tls://a:1", [], "bpmux+tls://[::1", "Invalid IPv6 URL"),
    ],
)
def test_a_redirect_is_not_followed(own: str, hosts: list[str], url: str, why: str) -> None:
    assert why in (RedirectPolicy((own,), hosts).objection(url) or "")


def test_a_reason_that_names_no_url_is_no_redirect() -> None:
    for reason in (None, "", "moved", f"moved to bpmux+tcp://{'a' * 1000}:1"):
        assert redirected_by(muxkit.LinkLost("ended", by="peer", code=307, peer_reason=reason)) is None
    assert redirected_by(muxkit.LinkLost("ended", by="peer", code=401, peer_reason=f"to {NEW}")) is None


def test_hosts_are_given_as_a_list() -> None:
    with pytest.raises(TypeError, match="expected a list of hosts"):
        muxkit.reconnecting(OLD, redirects="example.org")
    with pytest.raises(ValueError, match="expected a host"):
        muxkit.reconnecting(OLD, redirects=["a*.example.org"])


async def test_a_link_without_a_connection_moves_when_its_client_returns(
    weather: SimNetwork, autojump_clock: MockClock
) -> None:
    old, new = places_of("relink")
    async with muxkit.open_server(echo, old) as server, muxkit.open_server(echo, new):
        seen: list[str] = []
        async with trio.open_nursery() as nursery:

            async def client() -> None:
                seen.extend(await peers(old, 2, ALLOWED))
                nursery.cancel_scope.cancel()

            nursery.start_soon(client)
            await trio.sleep(10)
            weather.partition("client", "old.example.org")
            await trio.sleep(60)
            nursery.start_soon(partial(server.shutdown, grace=1000, redirect=new))
            await trio.sleep(60)
            weather.heal()
            await trio.sleep(500)
        assert seen == ["old.example.org", "new.example.org"]


async def test_a_link_of_senders_and_receivers_ends_in_order_without_a_redirect(
    sim: SimNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    """Each message of such a link is the application's, so Relink has no place for the reason."""
    old, new = places_of("relink")
    received: list[relink.Message] = []

    async def receive(link: relink.Link) -> None:
        async for receiver in link.receivers():
            received.extend([message async for message in receiver])

    async with relink.open_server(receive, old) as server, trio.open_nursery() as nursery:
        async with relink.connect(old) as link:
            sender = link.sender(0)
            await sender.send(b"one")
            await trio.sleep(1)
            nursery.start_soon(partial(server.shutdown, grace=10, redirect=new))
            await trio.sleep(1)
            await sender.send(b"two")
            await sender.aclose()
    assert [message.parts for message in received] == [(b"one",), (b"two",)]


async def test_a_link_opens_no_channel_after_the_server_began_to_shut_down(sim: SimNetwork) -> None:
    old, new = places_of("relink")
    async with muxkit.open_server(echo, old) as server, trio.open_nursery() as nursery:
        with pytest.raises(muxkit.LinkLost, match="has moved to"):  # noqa: PT012 - leaving raises it
            async with muxkit.connect(old) as session, session.open("first") as first:
                await first.send(b"hello")
                await first.receive()
                nursery.start_soon(partial(server.shutdown, grace=10, redirect=new))
                await trio.sleep(1)
                late = await session.open("second")
                with pytest.raises(muxkit.ChannelCancelled, match="closing the session"), trio.fail_after(5):
                    await late.receive()
                await first.send(b"still here")
                assert await first.receive() == b"still here"
