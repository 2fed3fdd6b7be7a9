"""Each program of the pages is run as it stands there."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests._pages import ROOT, entries, everything, free_ports, ports, program, python, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)  # programs start slowly on a busy machine

# What a page says is to be installed for its programs; the others need the library alone.
OUTAGE = re.compile(r"; (trying again in|reconnecting now) ")  # what a program that loses its connection logs
EXTRAS = {
    "docs/how-to/anyio.md": ["anyio"],
    "docs/how-to/captures.md": ["duckdb"],
    "docs/how-to/metrics.md": ["cli", "otel", "prometheus"],
}
LISTED = {entry.key for entry in entries()}
WHOLE = [item for item in everything() if item.kind == "program" and item.key not in LISTED]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(item.text, id=f"{item.page}:{item.line}", marks=pytest.mark.extras(*EXTRAS.get(item.page, [])))
        for item in WHOLE
    ],
)
def test_a_program_on_a_page_runs(code: str, tmp_path: Path) -> None:
    done = run(python(code), tmp_path)
    # A link that is cut as soon as it was made tells of the outage; whether a program's own cuts do that is chance.
    assert [line for line in done.stderr.splitlines() if not OUTAGE.search(line)] == []
    assert done.returncode == 0


@pytest.mark.parametrize("page", EXTRAS)
def test_a_page_says_what_its_programs_need(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "(install.md)" in text
    assert [extra for extra in EXTRAS[page] if f"`{extra}`" not in text] == []


# ---------------------------------------------------------------------------- parts of programs

FRAGMENT = """
import ast, json, sys
from contextlib import AsyncExitStack
import trio
before, code = json.loads(sys.argv[1])
space = {"__name__": "page"}
async def main():
    global space
    async def run(text):
        result = eval(compile(text, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), space)
        if result is not None:
            await result
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        space |= {"stack": stack, "nursery": nursery}
        await run(before)
        await run(code)
        nursery.cancel_scope.cancel()
trio.run(main)
"""

STREAM = """
from muxkit.protocols import restream
store = await stack.enter_async_context(restream.open_store("memory:"))
await nursery.start(restream.serve, "restream+tcp://127.0.0.1:7000", store)
"""

CHANNELS = """
import muxkit
from muxkit.protocols import bpmux
from muxkit_adapters import tcp
async def handler(session: bpmux.Session):
    async for source, _ in session.sources():
        async with source:
            print(await source.receive())
await nursery.start(muxkit.serve, handler, "bpmux+tcp://127.0.0.1:7000")
"""

TRANSPORT = """
from __future__ import annotations
from contextlib import asynccontextmanager
"""


def run_part(before: str, code: str, folder: Path) -> str:
    """Run a part of a program behind what its page takes for granted; gives what it prints."""
    with ports(7000) as free:
        given = json.dumps([free_ports(before, free), free_ports(code, free)])
        done = run([*python(FRAGMENT), given], folder)
    # A link that is cut as soon as it was made tells of the outage; whether a program's own cuts do that is chance.
    assert [line for line in done.stderr.splitlines() if not OUTAGE.search(line)] == []
    assert done.returncode == 0
    return done.stdout


@pytest.mark.extras
def test_a_reader_with_a_deadline_of_its_own_runs(tmp_path: Path) -> None:
    printed = run_part(STREAM, program("docs/tutorial/restream.md", 3), tmp_path)
    assert len(printed.splitlines()) == 500


@pytest.mark.extras
def test_a_session_over_a_stream_that_is_there_already_runs(tmp_path: Path) -> None:
    run_part(CHANNELS, program("docs/reference/url.md", 1), tmp_path)


@pytest.mark.extras
def test_the_outline_of_a_transport_is_a_class_with_its_methods(tmp_path: Path) -> None:
    after = "\nprint(*sorted(name for name in vars(_Transport) if name[0] != '_'))\n"
    code = "from __future__ import annotations\n" + program("docs/how-to/transport.md", 1) + after
    assert run_part(TRANSPORT, code, tmp_path).split() == ["connect", "serve"]


@pytest.mark.extras
def test_a_topic_with_a_store_continues_after_a_restart(tmp_path: Path) -> None:
    done = run(
        python(program("docs/how-to/publish-subscribe.md", 3)), tmp_path
    )  # it may log about old versions of SQLite
    assert done.stdout.splitlines() == ["updates so far: 1", "updates so far: 2"]


def test_a_web_application_serves_rest_and_sessions(tmp_path: Path) -> None:
    done = run(python(program("docs/how-to/web-applications.md", 1)), tmp_path)
    assert done.stdout.splitlines() == ["b'hello over a channel'"]


def test_a_fastapi_application_serves_rest_and_sessions(tmp_path: Path) -> None:
    done = run(python(program("docs/how-to/web-applications.md", 2)), tmp_path)
    assert done.stdout.splitlines() == ["b'hello over a channel'"]


def test_hypercorn_serves_an_application_on_a_session(tmp_path: Path) -> None:
    done = run(python(program("docs/how-to/web-applications.md", 3)), tmp_path)
    assert "HTTP/1.1 200" in done.stdout
