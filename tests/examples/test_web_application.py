"""The example of a web application under the commands of two ASGI servers: REST and sessions share a port."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import trio

import muxkit

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SERVERS = {
    "uvicorn": ["-m", "uvicorn", "web_application:application", "--fd", "{fd}"],
    "hypercorn": ["-m", "hypercorn", "web_application:application", "--bind", "fd://{fd}"],
}

pytestmark = pytest.mark.timeout(400)  # programs start slowly on a busy machine


def test_the_example_prints_each_change() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "web_application.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("tea costs 3.5\ntea costs 4.25\n", "")


@pytest.mark.parametrize("name", SERVERS)
async def test_rest_and_sessions_share_a_port(name: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it listens before the program runs, so nobody waits
        address, fd = f"127.0.0.1:{listener.getsockname()[1]}", listener.fileno()
        command = [sys.executable, *(part.format(fd=fd) for part in SERVERS[name])]
        with (tmp_path / "log").open("w") as log:
            program = await trio.lowlevel.open_process(command, cwd=EXAMPLES, pass_fds=[fd], stdout=log, stderr=log)
    try:
        with trio.fail_after(120):
            await watch_and_put(address)
    finally:
        with trio.CancelScope(shield=True):
            program.terminate()
            await program.wait()
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


async def watch_and_put(address: str) -> None:
    url = f"bpmux+ws://{address}/mux"
    async with muxkit.connect(url, headers={"X-User": "ann"}) as session, session.open("tea") as tea:
        for price in (3.5, 4.25):
            await trio.to_thread.run_sync(put, f"http://{address}/prices/tea", price)
            assert json.loads(await tea.receive()) == price
        tea.abort()
    with pytest.raises(muxkit.LinkLost, match="send the header X-User"):
        async with muxkit.connect(url) as session:
            await session.ping()
    answer = await trio.to_thread.run_sync(urllib.request.urlopen, f"http://{address}/prices")
    assert json.load(answer) == {"tea": 4.25}


def put(url: str, price: float) -> None:
    body = json.dumps({"price": price}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="PUT")
    urllib.request.urlopen(request).close()
