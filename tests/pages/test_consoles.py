"""The commands on the pages do what the pages say, each as it stands there; only ports are others."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.pipeline import Encoding, Key, StagingClient, make_block
from muxkit.protocols import restream
from tests._pages import PATIENCE, command, free_ports, kill, ports, program, python, run, running, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator

    from muxkit.pipeline.staging.records import Block

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it kills groups of processes"),
]

TUTORIAL = "docs/tutorial/restream.md"
CHAOS = "docs/how-to/chaos.md"
FLEET = "docs/how-to/fleet.md"
SINK = "docs/how-to/spark-sink.md"
CAPTURES = "docs/how-to/captures.md"
TRANSPORT = "docs/how-to/transport.md"


def listening(process: subprocess.Popen[bytes], log: Path, times: int = 1) -> None:
    until(lambda: log.read_text(encoding="utf-8").count("listening on") >= times, process)


@pytest.mark.extras("cli")
def test_server_relay_and_reader_go_on_after_each_was_killed_and_started_again(tmp_path: Path) -> None:
    with ports(7000, 7001) as free:
        serve = free_ports(command(TUTORIAL, "muxkit restream serve"), free)
        chaos = free_ports(command(TUTORIAL, "muxkit chaos"), free)
        read = free_ports(command(TUTORIAL, "muxkit restream read"), free)
    state = tmp_path / "state.json"
    with running(serve, tmp_path, "serve") as server:
        listening(server, tmp_path / "serve")
        with running(chaos, tmp_path, "chaos") as relay:
            listening(relay, tmp_path / "chaos")
            with running(read, tmp_path, "read") as reader:
                until(state.exists, server, relay, reader)
                kill(reader)
            with running(read, tmp_path, "read") as reader:
                saved = state.read_bytes()
                until(lambda: state.read_bytes() != saved, server, relay, reader)
                kill(server)
                with running(serve, tmp_path, "serve") as server:
                    listening(server, tmp_path / "serve", 2)
                    kill(relay)
                    with running(chaos, tmp_path, "chaos") as relay:
                        reader.wait(PATIENCE)
                        said = (tmp_path / "read").read_text(encoding="utf-8")
                        assert reader.returncode == 0, said
                        assert "1,000" in said


@pytest.mark.extras("cli")
def test_the_relay_says_where_it_listens_and_with_which_seed(tmp_path: Path) -> None:
    _says_where_it_listens("127.0.0.1", tmp_path)


@pytest.mark.extras("cli")
def test_the_relay_of_packets_says_where_it_listens_and_with_which_seed(tmp_path: Path) -> None:
    _says_where_it_listens("udp://127.0.0.1", tmp_path)


def _says_where_it_listens(host: str, tmp_path: Path) -> None:
    with ports(7000, 7001) as free:
        chaos = free_ports(command(CHAOS, f"muxkit chaos {host}"), free)
    with running(chaos, tmp_path, "chaos") as relay:
        listening(relay, tmp_path / "chaos")
        relay.send_signal(signal.SIGINT)
        assert relay.wait(PATIENCE) == 128 + signal.SIGINT
    expected = free_ports(f"listening on 127.0.0.1:7001 for {host}:7000, seed 17", free)
    assert (tmp_path / "chaos").read_text(encoding="utf-8").splitlines()[0] == expected


@pytest.mark.extras("cli")
def test_a_thousand_seeds_are_run_and_one_is_run_again(tmp_path: Path) -> None:
    done = run(command(FLEET, "muxkit fleet run relink"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.match(r"1,000 seeds in [\d.]+ s, \d+ per second: 0 failed", done.stdout), done.stdout
    again = run(command(FLEET, "muxkit fleet replay"), tmp_path)
    assert again.returncode == 0, again.stderr
    assert re.fullmatch(r"relink, seed 17: ok: \d+ messages over \d+ connections, [0-9a-f]{8}\n", again.stdout)


@pytest.mark.extras("cli")
def test_a_simulation_of_ones_own_runs_in_a_fleet(tmp_path: Path) -> None:
    package = tmp_path / "yourpackage"
    package.mkdir()
    (package / "simulations.py").write_text(program(FLEET, 1))
    done = run(command(FLEET, "muxkit fleet run yourpackage"), tmp_path, path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.match(r"1,000 seeds in .*: 0 failed", done.stdout), done.stdout


@pytest.mark.extras("cli", "duckdb")
def test_the_command_makes_the_page_about_a_folder_of_captures(tmp_path: Path) -> None:
    code = program(CAPTURES, 1).replace('Capture("captures")', 'Capture("captures", raw=True)')
    made = run(python(code), tmp_path)
    assert (made.returncode, made.stdout.strip()) == (0, str(Path("captures", "report.html"))), made.stderr
    page = tmp_path / "captures" / "report.html"
    assert "to the echo" in page.read_text(encoding="utf-8")
    assert "out-sink 1" in page.read_text(encoding="utf-8")
    asked = run(python(program(CAPTURES, 2)), tmp_path)
    assert re.search(r"out .* payload .* 1000 .* 1000000", asked.stdout), asked.stderr
    for report in ("muxkit capture report captures", "muxkit capture report captures --raw bpmux"):
        page.unlink()
        done = run(command(CAPTURES, report), tmp_path)
        assert done.returncode == 0, done.stderr
        assert "to the echo" in page.read_text(encoding="utf-8")


@pytest.mark.extras("cli")
def test_the_list_of_plugins_has_every_protocol_and_transport(tmp_path: Path) -> None:
    done = run(command(TRANSPORT, "muxkit plugins"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"bpmux", "relink", "restream", "aqueduct", "e3x", "tcp", "quic", "wss"} <= {*done.stdout.split()}


KEY = Key(stream="orders", app="nightly")


async def write(url: str) -> None:
    async def blocks() -> AsyncIterator[Block]:
        yield make_block(0, [b"first", b"second"])

    client = StagingClient(url)
    written = await client.write("txn 1", KEY, 0, blocks(), encoding=Encoding.TEXT)
    await client.commit(KEY, 0, {"txn 1": written.rows})


@pytest.mark.extras("cli")
def test_a_staging_server_takes_rows_and_keeps_them_in_its_file(tmp_path: Path) -> None:
    with ports(7000) as free:
        serve = free_ports(command(SINK, "muxkit stage serve", 0), free)
    with running(serve, tmp_path, "stage") as server:
        listening(server, tmp_path / "stage")
        trio.run(write, f"bpmux+tcp://127.0.0.1:{free[7000]}")
    assert (tmp_path / "staged.db").exists()


@pytest.mark.extras("cli")
def test_what_is_committed_is_forwarded_to_a_session_of_restream(tmp_path: Path) -> None:
    with ports(7000, 7001) as free:
        serve = free_ports(command(SINK, "muxkit stage serve", 1), free)
    found = re.search(r"--forward orders=(\S+)", serve)
    assert found is not None

    async def read() -> list[object]:
        await write(f"bpmux+tcp://127.0.0.1:{free[7000]}")
        async with restream.stream(f"restream+tcp://127.0.0.1:{free[7001]}", uuid=found[1]) as stream:
            return [(await stream.receive()).data for _ in range(2)]

    with running(serve, tmp_path, "stage") as server:
        listening(server, tmp_path / "stage")
        assert trio.run(read) == ["first", "second"]


def test_every_option_of_the_long_benchmarks_exists() -> None:
    """They take ten minutes each; what they measure is tried by the tests of the command, in short passes."""
    import click

    from muxkit_bench.command import bench
    from tests._pages import ROOT, items

    page = ROOT / "docs" / "reference" / "bench.md"
    shown = [item.text.split()[2:] for item in items(page) if item.text.startswith("muxkit bench")]
    assert len(shown) > 5
    for arguments in shown:
        bench.make_parser(click.Context(bench)).parse_args([*arguments])
