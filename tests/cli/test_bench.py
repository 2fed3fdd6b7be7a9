"""`muxkit bench` measures with real processes, notices what is wrong, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from muxkit_bench.run.awake import awake
from tests.cli._command import is_there, muxkit, needs_proc, running

if TYPE_CHECKING:
    import subprocess

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="stops processes by signals"),
    pytest.mark.timeout(600),  # dozens of processes start here one after the other
]

SMALL_CELLS = {"small/1", "small/10", "rtt/1"}


@attrs.frozen
class Done:
    """A run, and the files that it wrote."""

    process: subprocess.CompletedProcess[str]
    report: dict[str, Any]
    page: str


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", str(folder / "run.json"), "--html", str(folder / "run.html")]
    process = muxkit("bench", "--quick", "--jobs", "small,rtt", "--no-peers", "--rounds", "2", *files)
    report = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return Done(process, report, (folder / "run.html").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------- a run


def test_a_run_without_a_fault_exits_with_zero_and_complains_of_nothing(quick: Done) -> None:
    assert (quick.process.returncode, quick.process.stderr) == (0, "")


def test_each_job_is_measured_for_each_that_takes_part_in_each_round(quick: Done) -> None:
    measured = {(one["round"], one["cell"], one["peer"]) for one in quick.report["passes"]}
    cells = {cell for _, cell, _ in measured}
    assert cells == SMALL_CELLS
    for number in (1, 2):
        assert {peer for at, cell, peer in measured if (at, cell) == (number, "rtt/1")} == {"bpmux+tcp", "raw tcp"}
        small = {peer for at, cell, peer in measured if (at, cell) == (number, "small/10")}
        assert small == {"bpmux+tcp", "raw tcp", "raw tcp, coalesced"}


def test_both_ends_used_time_of_their_cores(quick: Done) -> None:
    assert all(one["client_cpu"] > 0 and one["server_cpu"] > 0 for one in quick.report["passes"])


def test_the_table_shows_each_cell_beside_its_baseline(quick: Done) -> None:
    rows = [line.split() for line in quick.process.stdout.splitlines() if line.startswith("│")]
    assert any(row[1:6:2] == ["small", "1", "bpmux+tcp"] and row[7] == "messages/s" for row in rows)
    assert any(row[1:6:2] == ["rtt", "1", "raw"] for row in rows)


def test_a_quick_run_judges_no_target(quick: Done, tmp_path: Path) -> None:
    assert "rtt, to raw" not in quick.process.stdout
    assert "rtt, to raw" not in quick.page
    stored = tmp_path / "as_if_it_were_not.json"
    stored.write_text(json.dumps({**quick.report, "quick": False}), encoding="utf-8")
    said = muxkit("bench", "--from", str(stored)).stdout
    assert "rtt, to raw" in said
    assert "idle channel" not in said  # what it has not measured


def test_the_page_shows_what_the_file_holds(quick: Done) -> None:
    assert quick.page.count("<svg") == 4  # figures and CPU time of two jobs
    assert quick.report["machine"]["python"] in quick.page


def test_it_is_said_whether_the_cores_could_sleep(quick: Done, tmp_path: Path) -> None:
    assert "free to sleep" in quick.process.stdout
    assert "free to sleep" in quick.page
    if sys.platform == "linux":
        stored = tmp_path / "run.json"
        done = muxkit("bench", "--quick", "--no-peers", "--jobs", "rtt", "--awake", "--json", str(stored))
        assert "kept awake" in done.stdout
        assert json.loads(stored.read_text(encoding="utf-8"))["machine"]["awake"] is True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has work that gives way to all other")
async def test_cores_are_kept_awake_by_what_gives_way_until_the_run_is_over() -> None:
    async with awake([min(os.sched_getaffinity(0))]) as processes:
        (process,) = processes
        assert os.sched_getscheduler(process) == os.SCHED_IDLE
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_stored_run_is_shown_again_without_measuring(quick: Done, tmp_path: Path) -> None:
    stored, page = tmp_path / "stored.json", tmp_path / "again.html"
    stored.write_text(json.dumps(quick.report), encoding="utf-8")
    again = muxkit("bench", "--from", str(stored), "--html", str(page))
    assert again.returncode == 0
    assert again.stdout in quick.process.stdout
    assert page.read_text(encoding="utf-8") == quick.page


def test_both_ends_can_share_a_process_over_memory(tmp_path: Path) -> None:
    stored = tmp_path / "run.json"
    done = muxkit(
        *("bench", "--quick", "--no-peers", "--jobs", "idle", "--json", str(stored)),
        *("--transport", "mem", "--transport", "unix"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(stored.read_text(encoding="utf-8"))
    measured = {(one["cell"], one["peer"]) for one in report["passes"]}
    for peer in ("bpmux+mem", "bpmux+unix", "raw tcp", "raw unix"):
        assert ("idle/500", peer) in measured


def measured_in(stored: Path) -> set[tuple[str, str]]:
    return {(one["cell"], one["peer"]) for one in json.loads(stored.read_text(encoding="utf-8"))["passes"]}


def test_aqueduct_is_measured_over_quic_and_over_tcp(tmp_path: Path) -> None:
    stored = tmp_path / "run.json"
    done = muxkit(
        *("bench", "--quick", "--no-peers", "--jobs", "small,rtt", "--json", str(stored)),
        *("--protocol", "aqueduct", "--transport", "tcp", "--transport", "quic"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = ("small/1", "small/10", "rtt/1")
    ours = {(cell, f"aqueduct+{transport}") for cell in cells for transport in ("tcp", "quic")}
    assert ours <= measured_in(stored)


def test_a_protocol_that_does_not_fit_a_transport_is_left_out(tmp_path: Path) -> None:
    stored = tmp_path / "run.json"
    done = muxkit(
        *("bench", "--quick", "--no-peers", "--jobs", "rtt", "--json", str(stored)),
        *("--transport", "quic", "--transport", "tcp"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: bpmux+quic: bpmux does not speak over what quic carries" in done.stdout
    assert measured_in(stored) == {("rtt/1", "bpmux+tcp"), ("rtt/1", "raw tcp")}


# ---------------------------------------------------------------------------- other programs

PROGRAM = '''
"""A connection for each channel, on which not all is well."""
import sys, trio
from contextlib import asynccontextmanager
from bench_work import Connection, Peer, StreamConversation, play

class Spoiled(StreamConversation):
    def __init__(self, stream):
        self.sent = 0
        async def send(data):
            self.sent += 1
            SPOIL
            await stream.send_all(data)
        super().__init__(send, stream.receive_some)
        self.stream = stream

class To(Connection):
    def __init__(self, port): self.port = port
    async def open(self): return Spoiled(await trio.open_tcp_stream("127.0.0.1", self.port))
    async def close(self, conversation): await conversation.stream.aclose()
    async def echo_once(self, message): raise NotImplementedError

class Wrong(Peer):
    async def serve(self, server, address, started):
        async def handle(stream):
            async with stream: await server.serve(Spoiled(stream))
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        started(str(listeners[0].socket.getsockname()[1]))
        await trio.serve_listeners(handle, listeners)
    @asynccontextmanager
    async def connect(self, address): yield To(int(address))

sys.exit(play(Wrong()))
'''
LIST = """
[[peer]]
name = "odd one"
title = "of a test"
program = "peer.py"

[[peer]]
name = "one that lacks something"
title = "of a test"
program = "peer.py"
needs = ["trio", "nobody_has_this"]

[[peer]]
name = "one in Go that lacks something"
title = "of a test"
program = "go_peer"

[peer.go]
"example.org/nobody/has/this" = "golang-nobody-has-this-dev"
"""
GO_PROGRAM = Path(__file__).parents[1] / "bench" / "go_muxes"
GO_LIBRARIES = ("github.com/hashicorp/yamux", "github.com/xtaci/smux")


def folder_with(folder: Path, *, spoil: str = "pass") -> list[str]:
    """The options for a run with a program like this."""
    (folder / "peers.toml").write_text(LIST, encoding="utf-8")
    (folder / "peer.py").write_text(PROGRAM.replace("SPOIL", spoil), encoding="utf-8")
    return ["--peers", str(folder), "--json", str(folder / "run.json")]


def test_aioquic_holds_idle_channels(tmp_path: Path) -> None:
    pytest.importorskip("aioquic")
    program = Path(__file__).parents[1] / "bench" / "aioquic_trio.py"
    listed = LIST.partition('[[peer]]\nname = "one that')[0].replace("peer.py", str(program))
    (tmp_path / "peers.toml").write_text(listed, encoding="utf-8")
    files = ["--peers", str(tmp_path), "--json", str(tmp_path / "run.json")]
    done = muxkit("bench", "--quick", "--jobs", "idle", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("idle/500", "odd one") in measured_in(tmp_path / "run.json")


def peers_of(folder: Path) -> set[str]:
    return {one["peer"] for one in json.loads((folder / "run.json").read_text(encoding="utf-8"))["passes"]}


def test_a_program_in_a_folder_takes_part_and_one_that_lacks_a_package_does_not(tmp_path: Path) -> None:
    done = muxkit("bench", "--quick", "--jobs", "rtt", *folder_with(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert peers_of(tmp_path) == {"odd one", "bpmux+tcp", "raw tcp"}
    why = "needs nobody_has_this, which --side-env DIR installs there"
    assert f"left out: one that lacks something: {why}" in done.stdout
    assert re.search(r"one in Go that lacks something: needs (golang-go and )?golang-nobody-has-this-dev", done.stdout)


@pytest.mark.skipif(
    not shutil.which("go") or not all(Path("/usr/share/gocode/src", name).is_dir() for name in GO_LIBRARIES),
    reason="needs golang-go and the Debian packages of yamux and smux",
)
def test_the_multiplexers_in_go_do_every_job(tmp_path: Path) -> None:
    listed = "".join(
        f'[[peer]]\nname = "{kind}"\ntitle = "of a test"\nprogram = "{GO_PROGRAM}"\narguments = ["{kind}"]\n'
        f'[peer.go]\n"{GO_LIBRARIES[0]}" = "golang-go"\n'
        for kind in ("yamux", "smux")
    )
    (tmp_path / "peers.toml").write_text(listed, encoding="utf-8")
    files = ["--peers", str(tmp_path), "--json", str(tmp_path / "run.json")]
    done = muxkit("bench", "--quick", "--jobs", "bulk,small,among,rtt,storm,openclose,idle,neighbour", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {(cell, kind) for cell, kind in measured_in(tmp_path / "run.json") if kind in ("yamux", "smux")}
    jobs = {(cell.split("/")[0].split(" ")[0], kind) for cell, kind in cells}
    wanted = ("bulk", "small", "among", "rtt", "storm", "openclose", "idle", "neighbour")
    assert jobs == {(job, kind) for job in wanted for kind in ("yamux", "smux")}


def test_the_run_says_first_what_machine_it_is(quick: Done) -> None:
    machine = quick.report["machine"]
    first = quick.process.stdout.splitlines()[0]
    assert first.startswith(machine["processor"])
    assert f"takes {machine['wake_up'] * 1e6:.1f} µs" in first
    assert 0 < machine["wake_up"] < 1
    assert machine["copy_rate"] > 1_000_000


@pytest.mark.parametrize(
    ("job", "spoil", "said"),
    [
        ("small", "if len(data) == 68: data = data[:67] + bytes([data[67] ^ 1])", "client: of "),
        ("small", "if len(data) == 68: data = bytes([0, 0, 0, 63]) + data[4:67]", "server: message 0 has 63 bytes"),
        ("rtt", "if self.sent > 9 and 'client' in sys.argv: data = bytes(64)", "client: an echo of 64 bytes is not"),
    ],
    ids=["bit", "length", "echo"],
)
def test_a_wrong_payload_makes_the_run_fail_and_the_others_go_on(
    tmp_path: Path, job: str, spoil: str, said: str
) -> None:
    done = muxkit("bench", "--quick", "--jobs", job, *folder_with(tmp_path, spoil=spoil))
    assert done.returncode == 1
    failure = next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert f"odd one, {said}" in failure
    assert {"bpmux+tcp", "raw tcp"} <= peers_of(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--jobs", "small,unheard-of"],
        ["--rounds", "0"],
        ["--transport", "carrier"],
        ["--from", __file__],
        ["--quick", "--peers", str(Path(__file__).parent)],
    ],
    ids=lambda arguments: arguments[-2].strip("-"),
)
def test_wrong_usage_has_its_own_exit_code(arguments: list[str]) -> None:
    done = muxkit("bench", *arguments)
    assert (done.returncode, done.stdout) == (2, "")


# ---------------------------------------------------------------------------- when it is stopped


def children_of(parent: int) -> list[int]:
    """All of them: both ends run the same module."""
    lists = [path.read_text(encoding="ascii") for path in Path(f"/proc/{parent}/task").glob("*/children")]
    return [int(process) for text in lists for process in text.split()]


def wait_until_at_work(bench: subprocess.Popen[str]) -> None:
    assert bench.stdout is not None
    bench.stdout.readline()  # which describes the machine
    assert bench.stdout.readline().startswith("round 1")


AWAKE = min(2, len(os.sched_getaffinity(0))) if sys.platform == "linux" else 0  # cores, each by a process

LONG = ["bench", "--jobs", "rtt", "--rounds", "99", "--seconds", "1", "--no-peers", *(["--awake"] if AWAKE else [])]


@needs_proc
def test_an_interrupt_exits_with_130_and_leaves_no_process() -> None:
    with running(*LONG) as bench:
        wait_until_at_work(bench)
        children = children_of(bench.pid)
        bench.send_signal(signal.SIGINT)
        _, said = bench.communicate()
    assert (bench.returncode, said.strip()) == (130, "muxkit: interrupted")
    assert len(children) == 4 + AWAKE
    assert [process for process in children if is_there(process)] == []


@needs_proc
def test_no_process_outlives_a_bench_that_was_killed() -> None:
    with running(*LONG) as bench:
        wait_until_at_work(bench)
        ends = [os.pidfd_open(process) for process in children_of(bench.pid)]
        bench.kill()
        for end in ends:
            select.select([end], [], [])  # until it has ended; the time limit of the test sees to it that it does
            os.close(end)
    assert len(ends) == 4 + AWAKE
