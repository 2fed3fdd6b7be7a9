"""The pages about certificates and about running a server: their commands, and programs that need files or signals."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import trio

import muxkit
from tests._pages import ROOT, command, free_ports, ports, program, python, run, running

TLS_PAGE = "docs/how-to/tls.md"
DEPLOY_PAGE = "docs/how-to/deploy.md"
DEPLOY = (ROOT / DEPLOY_PAGE).read_text(encoding="utf-8")

pytestmark = pytest.mark.timeout(400)  # programs start slowly on a busy machine


@pytest.mark.extras
@pytest.mark.skipif(shutil.which("openssl") is None, reason="its commands are openssl's")
def test_certificates_are_made_and_let_a_client_in(tmp_path: Path) -> None:
    for number in range(4):
        done = run(command(TLS_PAGE, "openssl ", number), tmp_path)
        assert done.returncode == 0, done.stderr
    encrypted = run(python(program(TLS_PAGE, 1)), tmp_path)
    assert re.match(r"b'tea' over tls (127\.0\.0\.1|\[::1\]):\d+\n", encrypted.stdout), encrypted.stderr
    known = run(python(program(TLS_PAGE, 3)), tmp_path)
    assert known.stdout == "you are alice\n", known.stderr


@pytest.mark.extras
@pytest.mark.skipif(sys.platform == "win32", reason="it is ended by a signal")
def test_the_first_server_of_the_page_serves_until_it_is_asked_to_stop(tmp_path: Path) -> None:
    with ports(7000) as free:
        (tmp_path / "server.py").write_text(free_ports(program(DEPLOY_PAGE, 1), free))
        with running([*python("")[:-2], "server.py"], tmp_path, "log") as process:

            async def talk() -> bytes:
                with trio.fail_after(300):
                    async with muxkit.reconnecting(f"bpmux+tcp://127.0.0.1:{free[7000]}") as sessions:
                        async for session in sessions:
                            async with session.open() as channel:
                                await channel.send(b"tea")
                                return await channel.receive()
                raise AssertionError

            assert trio.run(talk) == b"tea"
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0


@pytest.mark.extras
@pytest.mark.skipif(sys.platform == "win32", reason="it is ended by a signal")
def test_the_server_of_the_page_says_when_it_is_ready_and_drains(tmp_path: Path) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(300)
    with manager, ports(7000) as free:
        (tmp_path / "server.py").write_text(free_ports(program(DEPLOY_PAGE, 2), free))
        words = ["env", f"NOTIFY_SOCKET={tmp_path / 'notify'}", *python("")[:-2], "server.py"]
        with running(words, tmp_path, "log") as process:
            assert manager.recv(64) == b"READY=1"

            async def talk() -> bytes:
                async with muxkit.connect(f"bpmux+tcp://127.0.0.1:{free[7000]}") as session:
                    async with session.open() as channel:
                        await channel.send(b"tea")
                        received = await channel.receive()
                        process.send_signal(signal.SIGTERM)
                        await trio.to_thread.run_sync(manager.recv, 64)
                        await channel.send(b"cake")  # what is open goes on
                        return received + await channel.receive()

            assert trio.run(talk) == b"teacake"
            assert process.wait(300) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert f"listening on bpmux+tcp://127.0.0.1:{free[7000]}" in [line["text"] for line in lines]


def test_the_unit_and_the_container_run_the_program_and_let_it_drain() -> None:
    grace = re.search(r"grace=(\d+)", program(DEPLOY_PAGE, 2))
    stop = re.search(r"^TimeoutStopSec=(\d+)$", DEPLOY, re.MULTILINE)
    start = re.search(r"^ExecStart=(.*)$", DEPLOY, re.MULTILINE)
    starts = re.search(r"^CMD (\[.*\])$", DEPLOY, re.MULTILINE)
    assert grace is not None
    assert stop is not None
    assert start is not None
    assert starts is not None
    assert int(stop[1]) > int(grace[1])
    assert "Type=notify" in DEPLOY
    assert Path(shlex.split(start[1])[-1]).name == Path(json.loads(starts[1])[-1]).name == "server.py"
    assert [int(each) for each in re.findall(r"(?:--time |Seconds: )(\d+)", DEPLOY)] == [int(stop[1])] * 2
