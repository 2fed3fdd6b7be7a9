"""`muxkit top`, and the endpoint that `--metrics` opens."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from rich.console import Console

import muxkit as library
from muxkit.cli.watching.top import Rates, Told, ToldChannel, ToldSession, picture, rates, seconds_of, short
from muxkit.metrics import Metrics, endpoint

from ._command import ESCAPE, line_of, listening, muxkit, running
from ._terminal import CTRL_C, on_a_terminal

EVIL = "tea\x1b]0;owned\x07\u202e"


async def _echo(channel: library.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def _serve(place: str, name: str, started: threading.Event, found: list[str], stop: trio.Event) -> None:
    async with library.open_server(_echo, "bpmux+tcp://127.0.0.1:0", observer=Metrics()) as server:
        async with (
            endpoint(server, place) as there,
            library.connect(server.url) as session,
            session.open(name) as channel,
        ):
            await channel.send(b"payload-canary")
            await channel.receive()
            found.append(there.url)
            started.set()
            await stop.wait()


@contextmanager
def program(place: str = "127.0.0.1:0", name: str = "tea for two") -> Iterator[str]:
    """A program with one session and one channel of this name, in a thread; gives the URL of its endpoint."""
    started, found, tokens = threading.Event(), list[str](), list[trio.lowlevel.TrioToken]()
    stop: list[trio.Event] = []

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        stop.append(trio.Event())
        await _serve(place, name, started, found, stop[0])

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert started.wait(300)
    try:
        yield found[0]
    finally:
        tokens[0].run_sync_soon(stop[0].set)
        thread.join(300)


def test_once_prints_both_tables() -> None:
    with program() as url:
        done = muxkit("top", url, "--once", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    assert "1 session, 1 channel" in done.stdout
    assert re.search(r"^1 +bpmux +tcp 127\.0\.0\.1:\d+", done.stdout, re.MULTILINE)
    assert "tea for two" in done.stdout
    assert "canary" not in done.stdout


def test_json_is_what_the_endpoint_tells() -> None:
    with program() as url:
        done = muxkit("top", url, "--once", "--json")
    told = json.loads(done.stdout)
    assert [each["protocol"] for each in told["sessions"]] == ["bpmux"]
    assert told["sessions"][0]["open"][0]["name"] == "tea for two"
    assert "canary" not in done.stdout


def test_a_unix_socket_is_asked_by_its_path(tmp_path: Path) -> None:
    with program(f"unix:{tmp_path}/admin.sock"):
        done = muxkit("top", f"{tmp_path}/admin.sock", "--once", "--json")
        assert json.loads(done.stdout)["sessions"]


def test_a_terminal_shows_a_table_until_ctrl_c() -> None:
    with program() as url:
        code, text = on_a_terminal(
            "top", url, "--interval", "0.1", when=lambda seen: "tea for two" in seen, press=CTRL_C
        )
    assert code == 0
    assert "round trip" in text


def test_what_a_peer_named_is_escaped() -> None:
    with program(name=EVIL) as url:
        _, text = on_a_terminal("top", url, "--interval", "0.1", when=lambda seen: "owned" in seen, press=CTRL_C)
        plain = muxkit("top", url, "--once", "--interval", "0.1").stdout
        as_json = muxkit("top", url, "--once", "--json").stdout
    for shown in (text, plain, as_json):
        assert f"{ESCAPE}]0" not in shown
        assert "\u202e" not in shown
    assert "tea\\x1b]0;owned\\x07\\u202e" in plain


@pytest.mark.parametrize(
    ("target", "code", "says"),
    [
        ("/nowhere/admin.sock", 3, "no such file"),
        ("ftp://127.0.0.1:1", 2, "expected http://HOST:PORT"),
        ("127.0.0.1", 2, "expected http://HOST:PORT"),
    ],
)
def test_a_target_that_is_none_is_told(target: str, code: int, says: str) -> None:
    done = muxkit("top", target, "--once")
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not a muxkit endpoint"),
        (b"HTTP/1.1 404 Not Found\r\n\r\nnothing \x1b[31mhere", "it answered 404 to /sessions: nothing \\x1b[31mhere"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"sessions": 3}', "not a muxkit endpoint"),
    ],
)
def test_what_is_no_endpoint_is_told(answer: bytes, says: str) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)

    with listening(serve) as address:
        done = muxkit("top", address, "--once")
    assert done.returncode == 1
    assert says in done.stderr
    assert ESCAPE not in done.stderr


def test_a_server_shows_metrics_while_it_serves_and_ends() -> None:
    with running("serve", "bpmux+tcp://127.0.0.1:0", "--echo", "--metrics", "127.0.0.1:0", "--json") as process:
        shown, listens = json.loads(line_of(process)), json.loads(line_of(process))
        assert (shown["event"], listens["event"]) == ("metrics", "listening")
        done = muxkit("top", shown["url"], "--once", "--json")
        assert json.loads(done.stdout)["urls"] == [listens["url"]]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_forwards_show_the_session_that_they_use(tmp_path: Path) -> None:
    serving = ("forward", "--serve", "--allow", "127.0.0.1:1", "--json", "bpmux+tcp://127.0.0.1:0")
    with running(*serving) as server:
        url = json.loads(line_of(server))["url"]
        place = f"unix:{tmp_path}/admin.sock"
        forwarding = ("forward", url, "--local", "127.0.0.1:0=127.0.0.1:1", "--metrics", place, "--json")
        with running(*forwarding) as client:
            assert json.loads(line_of(client))["url"] == place
            line_of(client)  # it listens
            while not (told := json.loads(muxkit("top", place, "--once", "--json").stdout))["sessions"]:
                pass
            assert told["sessions"][0]["protocol"] == "bpmux"
            client.send_signal(signal.SIGTERM)
            client.wait()
        server.send_signal(signal.SIGTERM)
        server.wait()


# ---------------------------------------------------------------------------- figures


def told(*sessions: ToldSession, time: float = 0.0, process: int = 1) -> Told:
    return Told(process=process, urls=[], draining=False, time=time, sessions=[*sessions])


def session(number: int, received: int) -> ToldSession:
    return ToldSession(number, "bpmux", "tcp", "tcp 127.0.0.1:1", received, 0, 0, 0, 0, 0)


def test_rates_are_of_the_seconds_between_two_answers() -> None:
    found = rates(told(session(1, 3000), session(2, 500), time=12.0), told(session(1, 1000), time=10.0))
    assert found == {1: Rates(bytes_in=1000.0), 2: Rates()}


def test_another_process_has_no_rates_yet() -> None:
    assert rates(told(session(1, 3000), time=2.0, process=2), told(session(1, 0))) == {1: Rates()}


def test_more_rows_than_there_is_room_for_are_counted() -> None:
    many = [session(number, 0) for number in range(100)]
    many[0].open = [ToldChannel(f"channel {number}", 0, 0) for number in range(100)]
    out = Console(width=120, height=30, record=True, file=io.StringIO())
    out.print(picture(told(*many), None, out))
    text = out.export_text()
    assert "and 90 more sessions" in text
    assert "and 90 more channels" in text


HEADS = {
    "#",
    "protocol",
    "peer",
    "user",
    "channels",
    "in/s",
    "out/s",
    "msgs in/s",
    "msgs out/s",
    "queued",
    "round trip",
}
HEADS |= {"blocked", "channel", "unread", "credit in", "credit out"}


def drawn(width: int) -> list[str]:
    busy = session(7, 123_456_789)
    busy.user, busy.round_trip, busy.peer = "alice", 0.0123, "wss 2001:db8::17:443/a/path/that/is/rather/long"
    busy.open = [ToldChannel("greetings", 12_345, 6, 65_536, 65_536, 4.5)]
    out = Console(width=width, height=30, record=True, file=io.StringIO())
    out.print(picture(told(busy), None, out))
    return out.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_headings_are_whole_words_at_each_width(width: int) -> None:
    """Was: at 80 columns `user` was headed "u…" and the last columns "…"."""
    lines = drawn(width)
    heads = [line for line in lines if line.startswith("#")]
    assert len(heads) == 2
    for line in heads:
        assert {*re.split(r" {2,}", line.strip())} <= HEADS
    assert all(len(line) <= width for line in lines)
    assert any("4.5 s" in line for line in lines)  # the number for which people look here


def test_a_wide_terminal_shows_all_columns_and_a_narrow_one_the_most_telling() -> None:
    assert all(head in "\n".join(drawn(200)) for head in HEADS)
    narrow = "\n".join(drawn(60))
    assert all(head in narrow for head in ("peer", "channels", "in/s", "out/s", "channel ", "unread", "blocked"))
    assert "msgs" not in narrow


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (1540, "1.54k"), (23_000_000, "23M"), (0.5, "0.5")]
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.5e-5, "35 µs"), (0.0012, "1.2 ms"), (4.0, "4 s"), (180.0, "3 min"), (float("inf"), "?")]
)
def test_times_have_a_unit_that_fits(seconds: float, text: str) -> None:
    assert seconds_of(seconds) == text
