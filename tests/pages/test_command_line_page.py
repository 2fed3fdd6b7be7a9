"""The commands of the page about the command line, as they stand there, with free ports."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from tests._pages import PATIENCE, ROOT, command, environment, free_ports, ports, run, running, until

PAGE = "docs/how-to/command-line.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it kills groups of processes"),
    pytest.mark.extras("cli"),
]


@contextmanager
def listening(arguments: str, folder: Path, log: str) -> Iterator[subprocess.Popen[bytes]]:
    with running(arguments, folder, log) as process:
        until(lambda: "listening on" in (folder / log).read_text(encoding="utf-8"), process)
        yield process


def shell(text: str, folder: Path, **more: str) -> str:
    """Run a line of bash to its end; return what it says."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment() | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def block(language: str, number: int = 0) -> str:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [str(text) for name, text in found if name == language][number]


def test_this_machine_and_a_url_are_well(tmp_path: Path) -> None:
    here = run(command(PAGE, "muxkit doctor"), tmp_path)
    assert here.returncode == 0, here.stdout
    with ports(7000) as free:
        serve, check, pipe, talk, script = (
            free_ports(command(PAGE, begin), free)
            for begin in (
                "muxkit serve bpmux+ws",
                "muxkit doctor bpmux+ws",
                "echo tea",
                "muxkit open bpmux+ws://127.0.0.1:7000/chat",
                "muxkit open bpmux+ws://127.0.0.1:7000/chat --json",
            )
        )
    with listening(serve, tmp_path, "serve") as server:
        said = run(check, tmp_path)
        shown = free_ports(re.findall(r"^bpmux\+ws:\S+ all is well$", TEXT, re.MULTILINE)[0], free)
        assert (said.returncode, said.stdout.splitlines()[-1]) == (0, shown)
        steps = re.findall(r"^(ok +\w+)", TEXT, re.MULTILINE)
        assert [line[:24].rstrip() for line in said.stdout.splitlines()[:-1]] == steps
        assert shell(pipe, tmp_path) == "tea\n"
        (tmp_path / "script").write_text(block("").strip() + "\n")
        events = [json.loads(line) for line in shell(script, tmp_path).splitlines()]
        messages = {(each["name"], each["text"]) for each in events if each["event"] == "message"}
        assert messages == {("first", "tea"), ("second", "cake")}
        assert "stats" in {each["event"] for each in events}
        assert ": ended" in shell(f"echo cake | {talk}", tmp_path)
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE) == 0


def test_a_tree_goes_through_a_command(tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one").write_text("tea")
    with ports(7001) as free:
        serve = free_ports(command(PAGE, "muxkit serve bpmux+tcp://127.0.0.1:7001"), free)
        pipe = free_ports(command(PAGE, "tar -cz"), free)
    with listening(serve, tmp_path, "serve"):
        assert shell(pipe, tmp_path) == "photos/\nphotos/one\n"
        assert (tmp_path / "inbox" / "photos" / "one").read_text() == "tea"


def test_files_go_there_and_come_back(tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one").write_text("tea")
    with ports(7002) as free:
        serve, send, recv = (
            free_ports(command(PAGE, f"muxkit {name} bpmux+tcp://127.0.0.1:7002"), free)
            for name in ("serve", "send", "recv")
        )
    with listening(serve, tmp_path, "serve"):
        for each in (send, recv):
            done = run(each, tmp_path)
            assert done.returncode == 0, done.stderr
    assert (tmp_path / "backup" / "photos" / "one").read_text() == "tea"


def test_a_client_with_a_token_is_let_in_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    (tmp_path / "tokens").write_text("alice a-long-random-token\n")
    (tmp_path / "token").write_text("a-long-random-token\n")
    with ports(7443) as free:
        serve = free_ports(command(PAGE, "muxkit serve bpmux+tls"), free)
        check = free_ports(command(PAGE, "muxkit doctor bpmux+tls"), free)
    with listening(serve, tmp_path, "serve"):
        let_in = run(check, tmp_path)
        assert let_in.returncode == 0, let_in.stdout
        (tmp_path / "token").write_text("a-guess\n")
        refused = run(check, tmp_path)
    assert refused.returncode == 3
    assert "FAILED  authorisation" in refused.stdout


def test_the_units_are_those_of_a_service_that_notifies_on_the_socket_that_it_is_given(tmp_path: Path) -> None:
    listens, unit = block("ini", 0), block("ini", 1)
    place = re.search(r"^ListenStream=(.*):(\d+)$", listens, re.MULTILINE)
    start = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert place is not None
    assert start is not None
    assert "Type=notify" in unit
    assert f"{place[1]}:{place[2]}" in start[1]
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(PATIENCE)
    with manager, socket.create_server((place[1], 0)) as listener:
        # As systemd does it: descriptor 3, and a shell that becomes the service keeps its number.
        descriptor = listener.fileno()
        line = f"exec 3<&{descriptor}; export LISTEN_PID=$$ LISTEN_FDS=1; exec {start[1]}"
        with subprocess.Popen(
            ["bash", "-c", line],
            pass_fds=[descriptor],
            cwd=tmp_path,
            env=environment() | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
            stdout=subprocess.DEVNULL,
        ) as service:
            assert manager.recv(100) == b"READY=1"
            port = listener.getsockname()[1]
            assert shell(f"echo tea | muxkit pipe bpmux+tcp://127.0.0.1:{port}", tmp_path) == "tea\n"
            service.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert service.wait(PATIENCE) == 0


def test_the_lines_for_completion_complete(tmp_path: Path) -> None:
    bash = block("bash").strip()
    said = shell(
        f"{bash}\ncomplete -p muxkit\nCOMP_WORDS=(muxkit do)\nCOMP_CWORD=1\n"
        '_muxkit_completion "$(type -P muxkit)"\necho "${COMPREPLY[@]}"',
        tmp_path,
    )
    assert "-F _muxkit_completion muxkit" in said
    assert said.splitlines()[-1] == "doctor"
    zsh, fish = block("zsh").strip(), block("fish").strip()
    inner = re.fullmatch(r'eval "\$\((.*)\)"', zsh)
    assert inner is not None
    assert shell(inner[1], tmp_path).startswith("#compdef muxkit")
    assert "complete --no-files --command muxkit" in shell(fish.removesuffix(" | source"), tmp_path)
    for name, line in (("zsh", zsh), ("fish", fish)):
        if program := shutil.which(name):
            done = subprocess.run(
                [program, "-c", f"{'autoload -U compinit; compinit; ' * (name == 'zsh')}{line}"],
                env=environment() | {"HOME": str(tmp_path)},
                check=False,
                timeout=PATIENCE,
            )
            assert done.returncode == 0


def test_the_manual_is_shown() -> None:
    shown = command(PAGE, "man ")
    page = ROOT / shown.split()[1]
    assert page.read_text(encoding="utf-8").startswith(".TH MUXKIT 1 ")
    if shutil.which("man"):
        said = shell(shown, ROOT, MANPAGER="cat", MANWIDTH="100", LC_ALL="C.UTF-8")
        assert "muxkit doctor [OPTIONS] [URL]" in said


def test_the_package_is_the_command(tmp_path: Path) -> None:
    assert "`python -m muxkit` is the same command" in TEXT
    assert run(command(PAGE, "python -m muxkit") + " --version", tmp_path).stdout.startswith("muxkit, version ")
