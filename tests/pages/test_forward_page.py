"""The commands of the page about forwards, as they stand there, with free ports."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from tests._pages import PATIENCE, ROOT, command, free_ports, ports, run, running, until

CURL = shutil.which("curl")
PAGE = "docs/how-to/forward.md"
TEXT = (ROOT / "docs/how-to/forward.md").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32" or CURL is None, reason="it kills groups of processes, and runs curl"),
    pytest.mark.extras("cli"),
]


def prepare(folder: Path) -> None:
    """Make the files that the page speaks of."""
    shown = re.search(r"^alice (\S+)$", TEXT, re.MULTILINE)
    assert shown is not None
    (folder / "tokens").write_text(shown[0] + "\n")
    (folder / "token").write_text(shown[1] + "\n")
    (folder / "hello").write_text("tea")


def says(log: Path, text: str, *alive: subprocess.Popen[bytes]) -> None:
    until(lambda: text in log.read_text(encoding="utf-8"), *alive)


def curl(text: str) -> str:
    """Run curl as the page does, apart from proxies of this environment, until the target is there."""
    words = text.split()
    done = subprocess.run(
        [str(CURL), "--noproxy", "", "-sS", "--retry", "9", "--retry-all-errors", *words[1:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_user_reaches_a_page_through_a_websocket_with_a_token(tmp_path: Path) -> None:
    prepare(tmp_path)
    with ports(3000, 7000, 8080, 9000, 1080) as free:
        shown = {
            name: free_ports(command(PAGE, name), free)
            for name in ("python -m http.server", "muxkit forward --serve bpmux+ws:", "muxkit forward bpmux+ws:")
        }
        curls = [free_ports(command(PAGE, "curl", number), free) for number in range(3)]
    web, serve, client = shown.values()
    with running(web, tmp_path, "web"), running(serve, tmp_path, "serve") as server:
        says(tmp_path / "serve", "listening on", server)
        with running(client, tmp_path, "client") as forwarding:
            says(tmp_path / "client", "the server listens on", forwarding, server)
            for each in curls:
                assert "hello" in curl(each)
            forwarding.send_signal(signal.SIGINT)
            assert forwarding.wait(PATIENCE) == 130
    said = (tmp_path / "client").read_text(encoding="utf-8")
    for line in re.findall(r"^(?:listening on \d|connected to|the server listens).*$", TEXT, re.MULTILINE):
        assert free_ports(line, free) in said
    token = (tmp_path / "token").read_text().strip()
    assert token not in said + (tmp_path / "serve").read_text(encoding="utf-8")


def test_a_server_of_tls_is_reached_with_a_token(tmp_path: Path) -> None:
    prepare(tmp_path)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    with ports(3000, 7443, 8080) as free:
        web = free_ports(command(PAGE, "python -m http.server"), free)
        serve = free_ports(command(PAGE, "muxkit forward --serve bpmux+wss"), free)
        client = free_ports(command(PAGE, "muxkit forward bpmux+wss"), free)
    with running(web, tmp_path, "web"), running(serve, tmp_path, "serve") as server:
        says(tmp_path / "serve", "listening on", server)
        with running(client, tmp_path, "client") as forwarding:
            says(tmp_path / "client", "connected to", forwarding, server)
            assert "hello" in curl(f"curl http://127.0.0.1:{free[8080]}/")


def test_the_options_come_from_the_file_of_the_page(tmp_path: Path) -> None:
    prepare(tmp_path)
    shown = re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    with ports(3000, 7000, 8080, 9000, 1080) as free:
        web = free_ports(command(PAGE, "python -m http.server"), free)
        serve = free_ports(command(PAGE, "muxkit forward --serve bpmux+ws:"), free)
        client = command(PAGE, "muxkit forward --config")
        (tmp_path / "forward.toml").write_text(free_ports(shown[1], free))
    with running(web, tmp_path, "web"), running(serve, tmp_path, "serve") as server:
        says(tmp_path / "serve", "listening on", server)
        with running(client, tmp_path, "client") as forwarding:
            says(tmp_path / "client", '"connected"', forwarding, server)
            assert "hello" in curl(f"curl http://127.0.0.1:{free[8080]}/")


def test_a_token_is_made_as_the_page_says(tmp_path: Path) -> None:
    done = run(command(PAGE, "python -c"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 40
