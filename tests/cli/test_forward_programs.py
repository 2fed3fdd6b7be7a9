"""Programs that people use, through `muxkit forward`: PostgreSQL by psql and psycopg, and pages in a headless browser.

The browser is any Chromium, as of `apt-get install chromium`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from tests._pages import PATIENCE, running, until
from tests.cli._command import MUXKIT
from tests.soak.forward_peers import free_port

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PSQL = shutil.which("psql")
SCRIPTS = 40
PICTURE = b"<svg xmlns='http://www.w3.org/2000/svg' width='7' height='5'/>" + b" " * 300_000

pytest_plugins = ["tests.protocols.restream._postgres"]
pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it kills groups of processes"),
]


@contextmanager
def forwarding(allow: str, folder: Path, *wanted: str) -> Iterator[None]:
    """A server of forwards behind a WebSocket and a token, and a client of it."""
    url = f"bpmux+ws://127.0.0.1:{free_port()}/forward"
    (folder / "tokens").write_text("alice a-long-random-token\n")
    (folder / "token").write_text("a-long-random-token\n")
    serve = [*MUXKIT, "forward", "--serve", url, "--allow", allow, "--token-file", "tokens"]
    with running(serve, folder, "server") as server:
        until(lambda: "listening on" in (folder / "server").read_text(), server)
        with running([*MUXKIT, "forward", url, "--token-file", "token", *wanted], folder, "client") as client:
            until(lambda: "connected to" in (folder / "client").read_text(), client, server)
            yield


@pytest.fixture
def place(postgres: str, tmp_path: Path) -> Iterator[str]:
    """Where PostgreSQL is reached through a forward, from a port to its Unix socket."""
    (folder,) = parse_qs(urlsplit(postgres).query)["host"]
    (listens,) = Path(folder).glob(".s.PGSQL.*[0-9]")
    port = free_port()
    with forwarding(f"{folder}/.s.PGSQL.*", tmp_path, "-L", f"{port}:{listens}"):
        yield f"host=127.0.0.1 port={port} user=postgres dbname=postgres"


def test_psycopg_copies_in_asks_and_cancels(place: str) -> None:
    rows = [(number, "tea" * 100) for number in range(20_000)]
    with psycopg.connect(place) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE drinks (number int, name text)")
        with cursor.copy("COPY drinks FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        assert cursor.execute("SELECT * FROM drinks ORDER BY number").fetchall() == rows
        # A query is cancelled by another connection, which ends at once.
        thread = threading.Thread(target=cancel_when_busy, args=(place, connection))
        thread.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            cursor.execute("SELECT pg_sleep(300)")
        thread.join()


def cancel_when_busy(place: str, connection: psycopg.Connection) -> None:
    busy = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'"
    with psycopg.connect(place, autocommit=True) as other:
        while other.execute(busy, [connection.info.backend_pid]).fetchone() != (1,):
            pass
    connection.cancel()


def test_fifty_connections_are_open_together(place: str) -> None:
    opened = [psycopg.connect(place) for _ in range(50)]
    found = {each.execute("SELECT pg_backend_pid()").fetchone() for each in opened}
    for each in opened:
        each.close()
    assert len(found) == 50


@pytest.mark.skipif(PSQL is None, reason="there is no psql; it comes with postgresql-client")
def test_psql_answers(place: str) -> None:
    assert PSQL is not None
    done = subprocess.run(
        [PSQL, place, "-Atc", "SELECT sum(n) FROM generate_series(1, 100000) n"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (done.stdout, done.returncode) == ("5000050000\n", 0), done.stderr


# ---------------------------------------------------------------------------- a browser


class Pages(BaseHTTPRequestHandler):
    """A page with many scripts and a picture; the last script says what the others have made."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        match self.path.strip("/").split("/"):
            case ["script", number]:
                kind, body = "text/javascript", f"total = (self.total || 0) + {number};".encode()
            case ["picture"]:
                kind, body = "image/svg+xml", PICTURE
            case [""]:
                tags = "".join(f"<script src='/script/{number}'></script>" for number in range(SCRIPTS))
                last = 'onload="document.title = `${total} ${document.images[0].naturalWidth}`"'
                kind, body = "text/html", f"<body {last}><img src=/picture>{tags}".encode()
            case _:
                kind, body = "text/plain", b""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def pages() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def browse(url: str, folder: Path, *options: str) -> str:
    """Load a page in a browser without a window; return what became of it."""
    assert CHROMIUM is not None
    alone = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={folder / 'browser'}",
    )
    done = subprocess.run(
        [CHROMIUM, *alone, *options, "--dump-dom", url], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; it comes with: apt-get install chromium")
def test_a_browser_shows_a_page_with_all_that_belongs_to_it(pages: int, tmp_path: Path) -> None:
    expected = f"<title>{sum(range(SCRIPTS))} 7</title>"
    local, proxy = free_port(), free_port()
    with forwarding(f"localhost:{pages}", tmp_path, "-L", f"{local}:localhost:{pages}", "-D", str(proxy)):
        assert expected in browse(f"http://127.0.0.1:{local}/", tmp_path)
        by_proxy = (f"--proxy-server=socks5://127.0.0.1:{proxy}", "--proxy-bypass-list=<-loopback>")
        assert expected in browse(f"http://localhost:{pages}/", tmp_path, *by_proxy)
