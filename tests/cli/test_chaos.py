"""`muxkit chaos` relays as its options say, and reports what it does."""

from __future__ import annotations

import json
import re
import signal
import socket
from typing import TYPE_CHECKING, Any

import click
import pytest

from muxkit.cli.chaos import RATE, SECONDS, SHARE, Quantity
from tests.cli._command import PATIENCE, line_of, listening, muxkit, running

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


def sending(data: bytes) -> AbstractContextManager[str]:
    """Start a server that sends the same bytes to every client; return its address."""
    return listening(lambda connection: connection.sendall(data))


def received_from(address: str) -> tuple[int, bool]:
    """How many bytes came, and whether they ended in order."""
    host, _, port = address.rpartition(":")
    count = 0
    try:  # a reset may come as early as that
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            while data := connection.recv(65_536):
                count += len(data)
    except ConnectionResetError:
        return count, False
    return count, True


def test_it_tells_its_address_each_cut_and_the_total() -> None:
    with sending(bytes(10_000)) as target:
        arguments = ["chaos", "127.0.0.1:0", target, "--cut-after", "100-200", "--way", "back", "--seed", "7"]
        with running(*arguments) as process:
            said = re.fullmatch(rf"listening on (127\.0\.0\.1:\d+) for {target}, seed 7\n", line_of(process))
            assert said is not None
            counts = [received_from(said[1])[0] for _ in range(3)]
            cuts = [line_of(process) for _ in range(3)]
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=PATIENCE)
    assert all(100 <= count <= 200 for count in counts)
    assert [cut.split(", ")[0] for cut in cuts] == [
        f"connection {number}: ended after byte {count} to the client" for number, count in enumerate(counts)
    ]
    assert rest.startswith("3 connections, 0 of them without a target; 3 cuts (3 ended, 0 reset, 0 stalled); ")
    assert (process.returncode, errors.strip()) == (130, "muxkit: interrupted")


def test_by_default_the_bytes_of_both_directions_are_counted_together() -> None:
    """Was: one direction was drawn for each connection, often the one in which next to nothing goes."""
    with sending(bytes(10_000)) as target:
        with running("chaos", "127.0.0.1:0", target, "--cut-after", "100-200", "--seed", "7") as process:
            said = re.fullmatch(rf"listening on (127\.0\.0\.1:\d+) for {target}, seed 7\n", line_of(process))
            assert said is not None
            counts = [received_from(said[1])[0] for _ in range(8)]
            cuts = [line_of(process) for _ in counts]
    assert all(100 <= count <= 200 for count in counts)
    assert [cut.split(", ")[0] for cut in cuts] == [
        f"connection {number}: ended after byte {count} in both directions" for number, count in enumerate(counts)
    ]


def test_a_run_that_cut_nothing_says_so() -> None:
    with sending(bytes(10_000)) as target:
        arguments = ["chaos", "127.0.0.1:0", target, "--cut-after", "50000-60000", "--for", "3"]
        with running(*arguments) as process:
            said = re.search(r"on (127\.0\.0\.1:\d+) ", line_of(process))
            assert said is not None
            assert received_from(said[1]) == (10_000, True)
            rest, errors = process.communicate(timeout=PATIENCE)
    assert rest.startswith("1 connection, 0 of them without a target; 0 cuts ")
    assert errors.startswith("muxkit: nothing was cut: no connection carried as many bytes as --cut-after 50000-60000 ")


def test_json_is_an_object_a_line() -> None:
    with sending(bytes(10_000)) as target:
        arguments = ["chaos", "127.0.0.1:0", target, "--cut-after", "150", "--way", "back", "--reset", "1", "--json"]
        with running(*arguments) as process:
            listening: dict[str, Any] = json.loads(line_of(process))
            count, in_order = received_from(listening["address"])
            told = line_of(process)
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=PATIENCE)
    cut, total = map(json.loads, [told, *rest.splitlines()])
    assert (listening["event"], listening["target"]) == ("listening", target)
    assert isinstance(listening["seed"], int)
    assert (count <= 150, in_order) == (True, False)
    assert {name: cut[name] for name in ("event", "connection", "how", "way", "bytes_back")} == {
        "event": "cut",
        "connection": 0,
        "how": "reset",
        "way": "back",
        "bytes_back": 150,
    }
    assert (total["event"], total["connections"], total["cuts"], total["resets"]) == ("total", 1, 1, 1)
    assert process.returncode == 130


def test_the_same_seed_cuts_at_the_same_bytes() -> None:
    def cuts() -> list[int]:
        with sending(bytes(10_000)) as target:
            arguments = ["chaos", "127.0.0.1:0", target, "--cut-after", "0-9999", "--way", "back", "--seed", "3"]
            with running(*arguments, "--json") as process:
                address = json.loads(line_of(process))["address"]
                counts = [received_from(address)[0] for _ in range(5)]
                assert [json.loads(line_of(process))["bytes_back"] for _ in range(5)] == counts
                return counts

    assert cuts() == cuts()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="has no Unix sockets")
def test_it_relays_between_a_unix_socket_and_tcp(tmp_path: Path) -> None:
    path = tmp_path / "relay"
    with sending(b"hello") as target, running("chaos", f"unix://{path}", target) as process:
        assert line_of(process).startswith(f"listening on {path} for ")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            assert connection.recv(10) == b"hello"


def test_an_address_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = muxkit("chaos", address, "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"muxkit: {address}: Address already in use\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["127.0.0.1:0"],
        ["127.0.0.1", "127.0.0.1:1"],
        ["127.0.0.1:0", "http://127.0.0.1:1"],
        ["127.0.0.1:0", "127.0.0.1:1", "--cut-after", "9-3"],
        ["127.0.0.1:0", "127.0.0.1:1", "--reset", "1.5"],
        ["127.0.0.1:0", "127.0.0.1:1", "--for", "nan"],
        ["127.0.0.1:0", "127.0.0.1:1", "--reset", "0.7", "--stall", "0.7"],
    ],
    ids=" ".join,
)
def test_wrong_usage_has_its_own_exit_code(arguments: list[str]) -> None:
    done = muxkit("chaos", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: " in done.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_address_cannot_command_the_terminal(options: list[str], tmp_path: Path) -> None:
    target = f"{tmp_path}/\x1b[31mred\x9b"
    done = muxkit("chaos", "127.0.0.1:0", target, "--for", "0.1", *options)
    assert done.returncode == 0
    assert "red" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\x9b" not in done.stdout


@pytest.mark.parametrize(
    ("text", "quantity", "number"),
    [
        ("40ms", SECONDS, 0.04),
        ("0.04", SECONDS, 0.04),
        ("2s", SECONDS, 2.0),
        ("1gbit", RATE, 125e6),
        ("1000", RATE, 1000.0),
        ("100 mbit", RATE, 12.5e6),
        ("1%", SHARE, 0.01),
        ("0.5", SHARE, 0.5),
    ],
)
def test_numbers_may_have_a_unit(text: str, quantity: Quantity, number: float) -> None:
    assert quantity.convert(text, None, None) == pytest.approx(number)


@pytest.mark.parametrize(("text", "quantity"), [("40 ns", SECONDS), ("nan", SECONDS), ("x", RATE), ("101%", SHARE)])
def test_a_unit_that_there_is_not_and_a_number_out_of_range_are_refused(text: str, quantity: Quantity) -> None:
    with pytest.raises(click.BadParameter):
        quantity.convert(text, None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["127.0.0.1:0", "127.0.0.1:1", "--loss", "1%"], "--loss: a stream loses nothing"),
        (["udp://127.0.0.1:0", "127.0.0.1:1"], "expected udp:// before both"),
        (["udp://127.0.0.1:0", "udp://127.0.0.1:1", "--cut-after", "1-2"], "packets have no connection"),
        (["udp://nowhere", "udp://127.0.0.1:1"], "expected host:port"),
    ],
)
def test_what_makes_no_sense_for_packets_or_streams_is_refused(arguments: list[str], said: str) -> None:
    done = muxkit("chaos", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_it_relays_packets() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as target, socket.socket(type=socket.SOCK_DGRAM) as client:
        for sock in (target, client):
            sock.bind(("127.0.0.1", 0))
            sock.settimeout(PATIENCE)
        arguments = ["chaos", "udp://127.0.0.1:0", f"udp://127.0.0.1:{target.getsockname()[1]}", "--delay", "1ms"]
        with running(*arguments, "--seed", "7") as process:
            said = re.match(r"listening on 127\.0\.0\.1:(\d+) for ", line_of(process))
            assert said is not None
            client.sendto(b"there", ("127.0.0.1", int(said[1])))
            packet, back = target.recvfrom(100)
            target.sendto(packet + b" and back", back)
            assert client.recv(100) == b"there and back"
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=PATIENCE)
    assert rest == "1 client; 1 packet there, 1 back; 0 lost by plan, 0 by a full queue\n"
