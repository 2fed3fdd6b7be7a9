"""`muxkit restream read` reads, verifies, saves its position, and reports errors with the right exit code."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click
import pytest
import trio

from muxkit.cli.reading import read
from muxkit.cli.terminal import CommandFailed, Exit
from muxkit.protocols import restream
from muxkit.protocols.restream.applications import next_value
from muxkit.protocols.restream.store import open_store
from tests.adapters._links import Certificates
from tests.cli._command import PATIENCE, line_of, listening, muxkit, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED = 99


def chain(count: int) -> list[int]:
    values = [next_value(SEED)]
    while len(values) < count:
        values.append(next_value(values[-1]))
    return values


@contextmanager
def serving(url: str = "restream+tcp://127.0.0.1:0", **options: Any) -> Iterator[str]:
    """A real server in a thread; gives its URL."""
    with serving_all(url, options) as (only,):
        yield only


@contextmanager
def serving_all(url: str, *options_of_each: dict[str, Any]) -> Iterator[list[str]]:
    """Several servers of the same sessions."""
    urls: list[str] = []
    started, stop = threading.Event(), trio.Event()
    token: trio.lowlevel.TrioToken | None = None

    async def main() -> None:
        nonlocal token
        token = trio.lowlevel.current_trio_token()

        async def serve(options: dict[str, Any], task_status: trio.TaskStatus[restream.Served]) -> None:
            await restream.serve(url, store, random32=lambda: SEED, task_status=task_status, **options)

        async with open_store("memory:") as store, trio.open_nursery() as nursery:
            for options in options_of_each:
                served: restream.Served = await nursery.start(serve, options)
                urls.append(served.url)
            started.set()
            await stop.wait()
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert started.wait(PATIENCE)
        yield urls
    finally:
        if token is not None:
            token.run_sync_soon(stop.set)
        thread.join(PATIENCE)


@contextmanager
def saying(data: bytes) -> Iterator[str]:
    """A server that gives every client the same answer."""

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(data)
        while connection.recv(1000):
            pass

    with listening(answer) as address:
        yield f"restream+tcp://{address}"


def nobody() -> str:
    """A URL without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"restream+tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_numbers_are_read_to_their_end_and_verified() -> None:
    with serving() as url:
        done = muxkit("restream", "read", url, "--count", "500")
    *_, total = done.stdout.splitlines()  # before it, one for each second that it took
    assert re.fullmatch(r"500 numbers in \d+\.\d\d s over 1 connection; their count and CRC are right", total)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_value_can_be_printed() -> None:
    with serving() as url:
        done = muxkit("restream", "read", url, "--count", "5", "--values")
    assert [*map(int, done.stdout.splitlines())] == chain(5)
    assert done.returncode == 0


def test_json_is_an_object_a_line() -> None:
    with serving() as url:
        done = muxkit("restream", "read", url, "--count", "2", "--values", "--json")
    *values, total = map(json.loads, done.stdout.splitlines())
    assert values == [{"event": "value", "id": id, "value": value} for id, value in enumerate(chain(2), 1)]
    assert total.pop("seconds") > 0
    assert len(total.pop("uuid")) == 36
    assert total == {
        "event": "total",
        "ok": True,
        "url": url,
        "mode": "stateful",
        "taken": 2,
        "taken_before": 0,
        "verified": True,
        "connections": 1,
        "failed_attempts": 0,
        "error": None,
    }


def test_json_has_integers_as_strings() -> None:
    with serving() as url:
        done = muxkit("restream", "read", url, "--count", "1", "--values", "--json", "--mode", "stateless")
    value, total = map(json.loads, done.stdout.splitlines())
    assert value == {"event": "value", "value": str(restream.Permutation().first(SEED))}
    assert (total["mode"], total["uuid"], total["verified"]) == ("stateless", None, False)


def saved_id(path: Path) -> int:
    """How far the saved stream is; the file is replaced as a whole, so it can be read at any time."""
    return int(json.loads(path.read_text())["id"]) if path.exists() else 0


@pytest.mark.requirement("R-51")
def test_killed_and_started_again_it_goes_on_where_it_was(tmp_path: Path) -> None:
    path, runs, begins = tmp_path / "state", list[list[int]](), list[int]()
    # Reading all of it from the slow server would take 50 s, so each reader is killed before its end.
    with serving_all("restream+tcp://127.0.0.1:0", {"pace": 400.0}, {}) as (slow, url):
        for _ in range(2):
            begins.append(saved_id(path))
            with running("restream", "read", slow, "--count", "20000", "--state", str(path), "--values") as process:
                runs.append([])
                while saved_id(path) == begins[-1]:
                    runs[-1].append(int(line_of(process)))
                process.kill()
        begins.append(saved_id(path))
        rest = muxkit("restream", "read", url, "--state", str(path), "--values")
        again = muxkit("restream", "read", url, "--state", str(path))
    assert rest.returncode == 0, rest.stderr
    runs.append([*map(int, rest.stdout.splitlines())])
    expected = chain(20_000)
    for begin, run in zip(begins, runs, strict=True):
        assert run == expected[begin : begin + len(run)]  # what was printed and not saved is printed again
    assert 0 < begins[1] < begins[2] < 20_000
    assert begins[2] + len(runs[2]) == 20_000
    assert again.stdout.startswith("0 numbers after 20,000 of another run in ")
    assert json.loads(path.read_text())["finished"] is True


def test_interrupted_it_has_saved_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with serving(pace=100.0) as url:
        with running("restream", "read", url, "--state", str(path), "--values") as process:
            first = [int(line_of(process)) for _ in range(20)]
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=PATIENCE)
        printed = [*first, *map(int, rest.splitlines())]
        assert (process.returncode, errors.strip()) == (130, "muxkit: interrupted")
        assert json.loads(path.read_text())["id"] == len(printed)
    assert printed == chain(len(printed))
    assert [each.name for each in tmp_path.iterdir()] == ["state"]
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600


def test_integers_go_on_as_well(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    with serving() as url:
        arguments = ["restream", "read", url, "--count", "3", "--state", path, "--values"]
        one = muxkit(*arguments, "--mode", "stateless")
        other = muxkit(*arguments)
    got = [*map(int, (one.stdout + other.stdout).splitlines())]
    assert len(got) == 6
    assert got[0] == restream.Permutation().first(SEED)
    assert all(later == restream.Permutation().next(earlier) for earlier, later in pairwise(got))


def test_without_a_server_it_says_so_and_tries_again_until_its_time_is_over() -> None:
    url = nobody()
    done = muxkit("restream", "read", url, "--timeout", "4", "--json")  # the next attempt would be after 5 s
    attempt, sentence = done.stderr.splitlines()
    told = r"muxkit: no connection: tcp 127.0.0.1:\d+: connection refused .*; trying again in \d\.\d s"
    assert re.fullmatch(told, attempt)
    assert sentence.startswith(f"muxkit: could not connect to {url}: not within 4 s: ")
    assert done.returncode == 3
    total = json.loads(done.stdout)
    assert (total["ok"], total["failed_attempts"], total["error"]["exit"]) == (False, 1, 3)


def test_a_certificate_has_to_be_trusted(tmp_path: Path) -> None:
    certificates, ca = Certificates(), tmp_path / "ca.pem"
    certificates.authority.cert_pem.write_to_path(str(ca))
    with serving("restream+tls://127.0.0.1:0", ssl_context=certificates.server()) as url:
        trusted = muxkit("restream", "read", url, "--count", "5", "--ca", str(ca))
        strange = muxkit("restream", "read", url, "--count", "5")
    assert trusted.returncode == 0, trusted.stderr
    assert (strange.returncode, strange.stdout) == (3, "")
    assert "certificate" in strange.stderr


def test_a_stream_that_takes_too_long_is_given_up() -> None:
    with serving(pace=1.0) as url:
        done = muxkit("restream", "read", url, "--timeout", "3", "--count", "60000")
    assert (done.returncode, done.stderr) == (5, "muxkit: not within 3 s\n")


def test_what_the_server_says_is_told_and_cannot_command_the_terminal() -> None:
    with saying(json.dumps({"error": "\x1b[31mno\n"}).encode() + b"\n") as url:
        done = muxkit("restream", "read", url)
    assert (done.returncode, done.stderr) == (
        1,
        f"muxkit: {url.replace('restream+tcp://', 'tcp ')}: the server refused: \\x1b[31mno\\n\n",
    )


def test_a_server_that_lies_has_an_exit_code_of_its_own() -> None:
    with saying(b'{"id":2,"data":{"value":1}}\n') as url:
        done = muxkit("restream", "read", url)
    assert (done.returncode, done.stdout) == (4, "")
    assert "1 are missing" in done.stderr


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "restream+tcp://192.0.2.1:1"])
def test_wrong_usage_has_its_own_exit_code(address: str) -> None:
    done = muxkit("restream", "read", address)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("muxkit: ")


def refused(*arguments: str) -> Exception:
    """What the command says, in this process."""
    with pytest.raises((CommandFailed, click.UsageError)) as caught:
        read.main(["restream+tcp://127.0.0.1:1", *arguments], standalone_mode=False)
    return caught.value


@pytest.mark.parametrize("arguments", [["--count", "0"], ["--mode", "other"], ["--timeout", "0"]], ids=" ".join)
def test_an_option_without_sense_is_refused(arguments: list[str]) -> None:
    assert isinstance(refused(*arguments), click.UsageError)


def test_a_session_has_a_largest_count() -> None:
    failure = refused("--count", "65536")
    assert isinstance(failure, CommandFailed)
    assert failure.exit is Exit.USAGE


@pytest.mark.parametrize("text", ["", "nope", "[]", '{"version":7}', "[" * 100_000, " " * 2_000_000], ids=len)
def test_a_file_that_holds_no_state_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text(text)
    failure = refused("--state", str(path))
    assert isinstance(failure, CommandFailed)
    assert failure.exit is Exit.FAILED
    assert path.read_text() == text


@pytest.mark.parametrize("option", [["--mode", "stateless"], ["--count", "6"]], ids=" ".join)
def test_what_contradicts_the_saved_state_is_refused(option: list[str], tmp_path: Path) -> None:
    path = tmp_path / "state"
    engine = restream.ClientEngine.stateful(restream.new_uuid(), {"count": 5})
    path.write_text(json.dumps(engine.snapshot()))
    failure = refused("--state", str(path), *option)
    assert isinstance(failure, CommandFailed)
    assert failure.exit is Exit.USAGE
    assert "saved" in failure.sentence


def test_a_state_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with serving() as url, pytest.raises(CommandFailed, match="No such file or directory"):
        read.main([url, "--count", "3", "--state", str(tmp_path / "nowhere" / "state")], standalone_mode=False)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudoterminals")
def test_a_terminal_gets_a_bar() -> None:
    from tests.cli._terminal import on_a_terminal

    with serving(pace=400.0) as url:
        code, written = on_a_terminal("restream", "read", url, "--count", "200")
    assert code == 0
    assert "of 200 numbers, connection 1" in written
    assert "━" in written
    assert "200 numbers in " in written


def test_a_pipe_gets_a_line_a_second() -> None:
    with serving(pace=40.0) as url:
        done = muxkit("restream", "read", url, "--count", "60")
    *progress, total = done.stdout.splitlines()
    took = re.match(r"60 numbers in (\d+\.\d\d) s ", total)
    assert took is not None
    assert 1 <= len(progress) <= float(took[1])
    assert all(re.fullmatch(r"\d+ of 60 numbers, connection 1", line) for line in progress)
