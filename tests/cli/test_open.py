"""`muxkit open`: a script of lines for it, and a terminal."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

import muxkit as library
from tests.cli._command import ESCAPE, MUXKIT, PATIENCE, completed, environment, muxkit
from tests.cli._forking import Muxkit
from tests.cli._terminal import on_a_terminal
from tests.cli.test_pipe import PROTOCOLS, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]


def script(url: str, *lines: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return completed(
        "open",
        url,
        "--wait",
        str(PATIENCE),
        *options,
        input="\n".join(lines),
        text=True,
        env=environment(FORCE_COLOR="1"),
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_messages_on_several_channels_come_back_on_theirs(protocol: str) -> None:
    with serving(f"{protocol}+tcp://127.0.0.1:0", "--echo") as (_, url):
        done = script(url, ":open a", "one", ":open b", "two", ":use a", "three", ":use 2", "four", "::five")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[0].startswith("connected to tcp 127.0.0.1:")
    assert [line for line in said if line.startswith("1 a")] == ["1 a: opened", "1 a< one", "1 a< three", "1 a: ended"]
    shown = [line for line in said if line.startswith("2 b")]
    assert shown == ["2 b: opened", "2 b< two", "2 b< four", "2 b< :five", "2 b: ended"]
    assert ESCAPE not in done.stdout


def test_bytes_go_and_come_as_hex_and_as_json() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--echo") as (_, url):
        plain = script(url, ":bytes 00 ff 1b", options=("--hex",))
        escaped = script(url, ":bytes ff 1b 5b 32 4a")
        told = script(url, ":open x", "tea", ":stats", options=("--json",))
    assert "1< 00 ff 1b" in plain.stdout
    assert "1< \\\\xff\\x1b[2J" in escaped.stdout or "1< \\xff\\x1b[2J" in escaped.stdout
    assert ESCAPE not in escaped.stdout
    events: list[dict[str, Any]] = [json.loads(line) for line in told.stdout.splitlines()]
    by_name = {each["event"]: each for each in events}
    assert by_name["message"] == {"event": "message", "channel": 1, "name": "x", "text": "tea"}
    assert by_name["stats"]["session"]["channels"] == 1
    assert set(by_name["stats"]["channels"]) == {"1 x"}


def test_gauges_and_round_trips_are_shown() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--echo") as (_, url):
        done = script(url, ":open a", ":stats", ":ping", ":channels", ":help", ":quit", "not sent")
    assert done.returncode == 0
    assert "session: bytes received " in done.stdout
    assert "channel 1 a: queued 0, unread 0, credit out " in done.stdout
    assert " ms\n" in done.stdout
    assert "1 a: in use\n" in done.stdout
    assert ":abort [REASON]" in done.stdout
    assert "not sent" not in done.stdout


def test_a_line_that_cannot_be_done_is_told_and_the_next_one_is_done() -> None:
    mistakes = [":unheard-of", ":close", ":use nothing", ":bytes xyz", ":hex maybe"]
    with serving("bpmux+tcp://127.0.0.1:0", "--echo") as (_, url):
        done = script(url, *mistakes, "tea", ":close", "on another")
    assert done.returncode == 1
    assert "1< tea" in done.stdout
    assert "2< on another" in done.stdout
    assert len(done.stderr.splitlines()) == len(mistakes) + 1, done.stderr
    assert "unknown command :unheard-of" in done.stderr
    assert done.stderr.endswith("muxkit: 5 commands failed\n")


@pytest.mark.parametrize(
    ("command", "option", "timeout"), [("open", ["--timeout", "0.3"], "300"), ("pipe", [], "0.3"), ("recv", [], "0.3")]
)
def test_a_server_that_says_nothing_is_waited_for_as_long_as_the_option_or_the_environment_says(
    command: str, option: list[str], timeout: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"bpmux+tcp://127.0.0.1:{listener.getsockname()[1]}"
        where = [str(tmp_path)] if command == "recv" else []
        done = muxkit(command, url, *where, *option, MUXKIT_TIMEOUT=timeout)
    assert (done.returncode, done.stderr) == (3, f"muxkit: {url}: no answer within 0.3 s\n")


class Conversation:
    """`muxkit open` at work: what it says is read, and what is typed may depend on it."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self.said = b""

    async def until(self, text: bytes) -> None:
        assert self._process.stdout is not None
        with trio.fail_after(PATIENCE):
            while text not in self.said:
                data = await self._process.stdout.receive_some()
                assert data, self.said
                self.said += data

    async def type(self, *lines: str) -> None:
        assert self._process.stdin is not None
        with trio.fail_after(PATIENCE):
            await self._process.stdin.send_all("".join(f"{line}\n" for line in lines).encode())

    async def end(self) -> None:
        """End its input, and read what it still says."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        await self._process.stdin.aclose()
        with trio.fail_after(PATIENCE):
            async for data in self._process.stdout:
                self.said += data
            await self._process.wait()


@asynccontextmanager
async def talking(url: str) -> AsyncIterator[Conversation]:
    process = await trio.lowlevel.open_process(
        [*MUXKIT, "open", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(FORCE_COLOR="1")
    )
    try:
        yield Conversation(process)
    finally:
        if process.poll() is None:
            process.kill()


async def test_reasons_go_both_ways() -> None:
    heard: list[str] = []
    told = trio.Event()

    async def handle(channel: library.Channel) -> None:
        if channel.name == "no":
            channel.abort("not \x1b[31mtoday", code=7)
            return
        await channel.send(b"go on")
        try:
            async for _ in channel:
                pass
        except library.ChannelCancelled as error:
            heard.append(error.reason)
            told.set()

    async with library.open_server(handle, "bpmux+tcp://127.0.0.1:0") as server, talking(server.url) as user:
        await user.type(":open no")
        await user.until(b"1 no: aborted: ")
        await user.type(":open yes")
        await user.until(b"2 yes< go on\n")  # so the handler waits for messages
        await user.type(":abort the user is tired")
        with trio.fail_after(PATIENCE):
            await told.wait()
        await user.end()
    assert heard == ["the user is tired"]
    assert b"not \\\\x1b[31mtoday (code 7)" in user.said or b"not \\x1b[31mtoday (code 7)" in user.said
    assert b"2 yes: given up\n" in user.said
    assert ESCAPE.encode() not in user.said


async def test_channels_that_the_server_opens_are_shown_and_can_be_used() -> None:
    async def handle(session: library.Session) -> None:
        async with session.open("news") as channel:
            await channel.send(b"tea is ready")
            assert await channel.receive() == b"coming"

    async with library.open_server(handle, "bpmux+tcp://127.0.0.1:0") as server, talking(server.url) as user:
        await user.until(b"1 news< tea is ready\n")
        await user.type(":use news", "coming")
        await user.until(b"1 news: ended\n")
        await user.end()
    assert b"1 news: opened by the other side\n" in user.said


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct"])
def test_the_end_of_the_server_ends_it_while_its_input_is_open(protocol: str) -> None:
    for with_channel, expected in ((False, (0, 1)), (True, (1,))):
        with serving(f"{protocol}+tcp://127.0.0.1:0", "--echo") as (server, url):
            with Muxkit(
                "open",
                url,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            ) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stdout.readline().startswith("connected")
                if with_channel:
                    process.stdin.write("tea\n")
                    process.stdin.flush()
                    assert process.stdout.readline() == "1: opened\n"
                    assert process.stdout.readline() == "1< tea\n"
                server.kill()
                assert process.wait(PATIENCE) in expected
                assert process.stderr is not None
                errors = process.stderr.read()
        assert errors.startswith("muxkit: tcp 127.0.0.1") or not with_channel


def test_a_terminal_is_talked_to() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--echo") as (_, url):
        code, written = on_a_terminal(
            "open", url, when=lambda text: ":help lists the commands" in text, press=b"tea\n\x04"
        )
    assert code == 0
    assert "1< tea" in written
