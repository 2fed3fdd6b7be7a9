"""The HTTP endpoint: metrics, health and sessions, and what it withstands."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock, memory_stream_pair

import muxkit
from muxkit.metrics import METRICS, Endpoint, Metrics, endpoint
from muxkit.metrics.endpoint import HEAD_MOST, HEAD_SECONDS, READERS_MOST
from muxkit.protocols import restream

from ._http import get, get_json, rest_of, stream_to

HERE = "127.0.0.1:0"


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@asynccontextmanager
async def served(address: str = HERE, **options: Any) -> AsyncIterator[tuple[muxkit.Server, Endpoint]]:
    async with muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0", observer=Metrics(), **options) as server:
        async with endpoint(server, address) as running:
            yield server, running


@asynccontextmanager
async def spoken_with(server: muxkit.Server) -> AsyncIterator[muxkit.Channel]:
    """A channel over which a message went there and back."""
    async with muxkit.connect(server.url) as session, session.open("tea for two") as channel:
        await channel.send(b"tea")
        await channel.receive()
        yield channel


# ---------------------------------------------------------------------------- metrics


async def test_prometheus_parses_what_it_scrapes() -> None:
    async with served() as (server, running), spoken_with(server):
        status, head, body = await get(running.url, "/metrics")
        assert status == 200
        assert "text/plain" in head
        parsed = text_string_to_metric_families(body)
        families = {family.name: family for family in parsed}
        assert set(families) == {metric.name for metric in METRICS}
        [sample] = [one for one in families["muxkit_messages"].samples if one.labels["direction"] == "in"]
        assert (sample.value, sample.labels["protocol"], sample.labels["transport"]) == (1.0, "bpmux", "tcp")


async def test_openmetrics_is_given_to_who_accepts_it() -> None:
    async with served() as (server, running), spoken_with(server):
        _, head, body = await get(running.url, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert "application/openmetrics-text" in head
        names = {family.name for family in openmetrics_families(body)}  # type: ignore[no-untyped-call]  # of prometheus-client
        assert "muxkit_sessions" in names
        assert len(names) == len(METRICS)


async def test_the_peer_stands_in_no_metric() -> None:
    async with served() as (server, running), muxkit.connect(server.url) as session:
        await session.ping()
        [there] = server.sessions()
        _, _, body = await get(running.url, "/metrics")
        assert "muxkit_sessions" in body
        assert there.info.peer.partition(" ")[2] not in body


async def test_without_metrics_there_is_no_such_page() -> None:
    async with muxkit.open_server(echo, "bpmux+mem://plain") as server, endpoint(server, HERE) as running:
        assert (await get(running.url, "/metrics"))[0] == 404
        assert (await get(running.url, "/healthz"))[0] == 200


# ---------------------------------------------------------------------------- health


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_health_counts_the_sessions(path: str) -> None:
    async with served() as (server, running), spoken_with(server):
        assert await get_json(running.url, path) == (200, {"status": "serving", "sessions": 1})


async def test_a_server_that_drains_is_not_ready() -> None:
    async with served() as (server, running), trio.open_nursery() as nursery:
        async with spoken_with(server) as channel:
            nursery.start_soon(lambda: server.shutdown(grace=60))
            while not server.is_draining:
                await trio.lowlevel.checkpoint()
            assert await get_json(running.url, "/readyz") == (503, {"status": "draining", "sessions": 1})
            await channel.finish()


async def test_a_server_of_restream_has_health_too(tmp_path: Path) -> None:
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        there = await nursery.start(restream.serve, "restream+mem://healthy", store)
        async with endpoint(there, HERE) as running:
            assert (await get(running.url, "/healthz"))[0] == 200
            await there.shutdown(grace=0)
            assert (await get(running.url, "/healthz"))[0] == 503


# ---------------------------------------------------------------------------- sessions


async def test_sessions_and_their_channels_are_listed() -> None:
    async with served() as (server, running), spoken_with(server):
        _, told = await get_json(running.url, "/sessions")
        assert told["urls"] == [*server.urls]
        [session] = told["sessions"]
        assert session["protocol"] == "bpmux"
        assert (session["messages_received"], session["messages_sent"], session["channels"]) == (1, 1, 1)
        [channel] = session["open"]
        assert channel["name"] == "tea for two"
        assert channel["credit_in"] > 0


async def test_sessions_are_told_to_no_page_of_a_browser() -> None:
    async with served() as (_, running):
        assert (await get(running.url, "/sessions", host="attacker.example:9464"))[0] == 403
        assert (await get(running.url, "/sessions", host="localhost:9464"))[0] == 200


@pytest.mark.filterwarnings("ignore::muxkit.PlaintextWarning")
async def test_sessions_are_listed_on_no_address_that_others_reach() -> None:
    async with muxkit.open_server(echo, "bpmux+mem://far", observer=Metrics()) as server:
        async with endpoint(server, "0.0.0.0:0", insecure=True) as running:
            url = running.url.replace("0.0.0.0", "127.0.0.1")
            assert (await get(url, "/sessions"))[0] == 404
            assert (await get(url, "/metrics"))[0] == 200


async def test_an_address_that_others_reach_has_to_be_meant() -> None:
    with pytest.raises(ValueError, match="insecure=True"):
        async with endpoint(None, "0.0.0.0:0"):
            pass


async def test_a_unix_socket_is_of_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    async with served(f"unix:{path}") as (server, running), spoken_with(server):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        status, told = await get_json(running.url, "/sessions")
        assert (status, len(told["sessions"])) == (200, 1)


async def test_long_lists_are_cut_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muxkit.metrics.listing.CHANNELS_MOST", 2)
    monkeypatch.setattr("muxkit.metrics.listing.SESSIONS_MOST", 1)
    async with served() as (server, running), spoken_with(server), muxkit.connect(server.url) as session:
        for number in range(3):
            channel = await session.open(f"{number}" * 250)
            await channel.send(b"tea")
            await channel.receive()
        _, told = await get_json(running.url, "/sessions")
        assert (len(told["sessions"]), told["sessions_left_out"]) == (1, 1)
        [newest] = told["sessions"]
        assert (len(newest["open"]), newest["open_left_out"]) == (2, 1)
        assert len(newest["open"][0]["name"]) == 200
        for each in session.channels():
            await each.aclose()


async def test_a_password_in_a_url_is_not_shown(tmp_path: Path) -> None:
    class Serving:
        urls = ("bpmux+ws://user:secret-canary@example.com/path",)
        is_draining = False

    async with endpoint(Serving(), f"unix:{tmp_path}/admin.sock") as running:
        _, told = await get_json(running.url, "/sessions")
        assert told["urls"] == ["bpmux+ws://example.com/path"]


# ---------------------------------------------------------------------------- clients that do not behave


async def answer_to(request: bytes) -> bytes:
    """What the endpoint answers to these bytes."""
    async with muxkit.open_server(echo, "bpmux+mem://odd") as server, endpoint(server, HERE) as running:
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.handle, theirs)
            await ours.send_all(request)
            await ours.send_eof()
            return await rest_of(ours)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"GET /healthz?verbose HTTP/1.0\n\n", 200),
        (b"GET /elsewhere HTTP/1.1\r\n\r\n", 404),
        (b"POST /healthz HTTP/1.1\r\n\r\n", 405),
        (b"GET /healthz HTTP/2\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\xff\x00\x80 / x\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * HEAD_MOST + b"\r\n\r\n", 431),
    ],
)
async def test_each_request_has_its_status(request_: bytes, status: int) -> None:
    assert (await answer_to(request_)).startswith(b"HTTP/1.1 %d " % status)


async def test_half_a_request_has_no_answer() -> None:
    assert await answer_to(b"GET /healthz HT") == b""


async def test_head_has_no_body() -> None:
    head, _, body = (await answer_to(b"HEAD /healthz HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"Content-Length: 37" in head
    assert body == b""


async def test_a_slow_client_is_let_go(autojump_clock: MockClock) -> None:
    running = Endpoint({})
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.handle, theirs)
        began = trio.current_time()
        await ours.send_all(b"GET ")
        assert await rest_of(ours) == b""
        assert trio.current_time() - began == pytest.approx(HEAD_SECONDS)


async def test_a_client_that_reads_nothing_is_let_go(autojump_clock: MockClock) -> None:
    running = Endpoint({})
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.handle, theirs)
        await ours.send_all(b"GET / HTTP/1.1\r\n\r\n")
        await trio.sleep(60)
        assert not nursery.child_tasks


async def test_many_silent_clients_keep_nobody_out() -> None:
    async with served() as (_, running):
        silent = [await stream_to(running.url) for _ in range(3 * READERS_MOST)]
        assert (await get(running.url, "/healthz"))[0] == 200
        for stream in silent:
            await stream.aclose()


async def test_a_page_that_fails_says_nothing_of_why(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: object) -> Any:  # noqa: ANN401 - it returns nothing
        raise ValueError("secret-canary")

    running = Endpoint({"/": fails})
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.handle, theirs)
        await ours.send_all(b"GET / HTTP/1.1\r\n\r\n")
        await ours.send_eof()
        answer = await rest_of(ours)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"canary" not in answer
    assert "canary" not in caplog.text


@pytest.mark.parametrize("address", ["", "9464", "host"])
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        async with endpoint(None, address):
            pass


def test_json_is_plain_ascii() -> None:
    from muxkit.metrics.endpoint import _json

    assert json.loads(_json({"name": "\x1b[31m\u202e"})) == {"name": "\x1b[31m\u202e"}
    assert _json({"name": "\u202e"}).isascii()
