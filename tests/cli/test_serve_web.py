"""`muxkit serve --web`: pages and the JavaScript client on the port of a WebSocket."""

from __future__ import annotations

import http.client
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from muxkit_web import MODULE
from tests._pages import command
from tests.cli._command import muxkit
from tests.cli.test_pipe import serving

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("<h1>Hello</h1>", encoding="utf-8")
    return tmp_path


def upgrade(page: str, origin: str) -> int:
    """Ask for a WebSocket as a page of this origin does; return the status."""
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
        "Origin": origin,
    }
    connection = http.client.HTTPConnection(urlsplit(page).netloc, timeout=30)
    try:
        connection.request("GET", "/", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_pages_and_the_client_are_delivered_and_foreign_pages_are_refused(folder: Path) -> None:
    _, _, shown, *options = command("docs/how-to/browser.md", "muxkit serve").replace("FOLDER", str(folder)).split()
    assert shown == "bpmux+ws://127.0.0.1:7000"
    options += ["--origin", "https://pages.example"]
    with serving("bpmux+ws://127.0.0.1:0", *options) as (process, url):
        assert process.stdout is not None
        page = url.replace("bpmux+ws", "http") + "/"
        assert process.stdout.readline() == f"pages on {page}\n"
        with urllib.request.urlopen(page, timeout=30) as answer:
            assert answer.read() == b"<h1>Hello</h1>"
        with urllib.request.urlopen(f"{page}muxkit.js", timeout=30) as answer:
            assert answer.read() == MODULE.read_bytes()
        assert upgrade(page, "https://evil.example") == 403
        assert upgrade(page, "https://pages.example") == 101
        assert upgrade(page, page.removesuffix("/")) == 101


def test_it_goes_with_websockets_only(folder: Path) -> None:
    done = muxkit("serve", "bpmux+tcp://127.0.0.1:0", "--echo", "--web", str(folder))
    assert done.returncode == 2
    assert "--web works with ws and wss URLs only, not with bpmux+tcp://127.0.0.1:0" in done.stderr


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://example.org/page", "ws://x"])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    done = muxkit("serve", "bpmux+ws://127.0.0.1:0", "--echo", "--origin", origin)
    assert done.returncode == 2
    assert "expected an origin without a path: https://example.org" in " ".join(done.stderr.split())
