"""The worked example of `docs/how-to/protocol.md`: the channels of RFC 4254, over each transport and in each suite."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trustme
from trio.testing import MockClock

import muxkit
from muxkit import Limits
from muxkit.runtime import background
from muxkit.testing import (
    SessionPair,
    SimNetwork,
    check_cancellation,
    check_leaving,
    check_openings,
    check_pressure,
    check_reading,
    check_session,
    weather_pair,
)

if TYPE_CHECKING:
    from muxkit import Session

MakePair = Callable[[], AbstractAsyncContextManager[SessionPair]]

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "examples" / "custom_protocol"
PAGE = "docs/how-to/protocol.md"
README = "examples/custom_protocol/README.md"
SMALL = Limits(channel_bytes=1000, channel_floor=100, outbox=2000)  # windows that are soon full


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module of the package, which is installed without its wheel: its entry point is all that counts."""
    about = tmp_path / "muxkit_rfc4254-0.1.0.dist-info"
    about.mkdir()
    declared = tomllib.loads((PACKAGE / "pyproject.toml").read_text("utf-8"))["project"]
    points = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in names.items())
        for group, names in declared["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("".join(points))
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PACKAGE))
    import muxkit_rfc4254  # type: ignore[import-not-found]

    found: ModuleType = muxkit_rfc4254
    return found


@pytest.fixture(params=[Limits(), SMALL], ids=["usual windows", "small windows"])
def make_pair(
    module: ModuleType, request: pytest.FixtureRequest
) -> Callable[[], AbstractAsyncContextManager[SessionPair]]:
    def session(stream: trio.abc.Stream) -> AbstractAsyncContextManager[Session]:
        made: AbstractAsyncContextManager[Session] = module.protocol.session(
            stream, role="client", address="", limits=request.param, observer=None, linger=1
        )
        return made

    @asynccontextmanager
    async def pair() -> AsyncIterator[SessionPair]:
        """Open each session in a task of its own, since either may wait for the other when it is left."""
        here, there = weather_pair(4, latency=0.01, jitter=0.01, bandwidth=1e8)
        over = trio.Event()

        async def listen(task_status: trio.TaskStatus[Session]) -> None:
            async with session(there) as other:
                task_status.started(other)
                await over.wait()

        async with background() as nursery:
            other = await nursery.start(listen)
            async with session(here) as one:
                yield SessionPair(one, other, here.reset)
                over.set()

    return pair


SUITES: list[Callable[[Any], Awaitable[None]]] = [
    check_session,
    check_cancellation,
    check_reading,
    check_pressure,
    check_openings,
    check_leaving,
]


@pytest.mark.parametrize("suite", SUITES, ids=[suite.__name__ for suite in SUITES])
async def test_it_keeps_the_promises_of_each_suite(
    suite: Callable[[Any], Awaitable[None]], make_pair: MakePair, autojump_clock: MockClock
) -> None:
    await suite(make_pair)


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def talk(session: muxkit.Session, number: int) -> None:
    """Send messages up to one that is larger than the window, and expect each of them back."""
    async with session.open(f"channel {number}") as channel:
        for size in (0, 1, 1000, 100_000, 1_000_000):
            message = bytes([number]) * size
            await channel.send(message)
            assert await channel.receive() == message


async def all_talk(url: str, shown: muxkit.TLS | None, trusted: muxkit.TLS | None) -> None:
    async with muxkit.open_server(echo, url, tls=shown) as server:
        async with muxkit.connect(server.url, tls=trusted) as session, trio.open_nursery() as nursery:
            assert session.info.protocol == "rfc4254"
            for number in range(8):
                nursery.start_soon(talk, session, number)


@pytest.mark.parametrize("transport", ["tcp", "tls", "unix", "ws", "wss", "mem", "sim"])
async def test_it_runs_over_each_transport_that_carries_bytes(
    transport: str, module: ModuleType, tmp_path: Path
) -> None:
    authority = trustme.CA()
    shown = trusted = None
    if transport in ("tls", "wss"):
        certificate = authority.issue_cert("127.0.0.1")
        key, chain, root = tmp_path / "key.pem", tmp_path / "chain.pem", tmp_path / "root.pem"
        certificate.private_key_pem.write_to_path(key)
        for pem in certificate.cert_chain_pems:
            pem.write_to_path(chain, append=True)
        authority.cert_pem.write_to_path(root)
        shown, trusted = muxkit.TLS(cert=chain, key=key), muxkit.TLS(ca=root)
    address = {"unix": str(tmp_path / "socket"), "mem": "here", "sim": "here"}.get(transport, "127.0.0.1:0")
    network = SimNetwork(seed=4) if transport == "sim" else nullcontext()
    with network:
        await all_talk(f"rfc4254+{transport}://{address}", shown, trusted)


def test_its_packets_are_those_of_the_document(module: ModuleType) -> None:
    """RFC 4254, sections 5.1 to 5.3, written out by hand."""
    client, server = module.Engine(Limits()), module.Engine(Limits())
    halves = client.open_channel(b"why")
    opening = b"".join(client.buffers_to_send())
    window = (256 * 1024).to_bytes(4, "big")
    kind = b"\0\0\0\x0echannel@muxkit"
    assert opening == (b"\0\0\0\x26" + b"\x5a" + kind + b"\0\0\0\0" + window + b"\0\0\x80\0" + b"\0\0\0\x03why")
    (opened,) = server.receive_bytes(opening, 0.0)
    assert opened.opening == b"why"
    server.accept(opened.channel)
    confirmation = b"".join(server.buffers_to_send())
    assert confirmation == b"\0\0\0\x11" + b"\x5b" + b"\0\0\0\0" * 2 + window + b"\0\0\x80\0"
    client.receive_bytes(confirmation, 0.0)
    halves.sender.send(b"hi")
    assert b"".join(client.buffers_to_send()) == b"\0\0\0\x0f" + b"\x5e" + b"\0\0\0\0" + b"\0\0\0\x06\0\0\0\x02hi"


@pytest.mark.parametrize(
    ("packet", "problem"),
    [
        (b"\xff\xff\xff\xff", "expected a packet of 1 to 35000 bytes"),
        (b"\0\0\0\x05\x5e\0\0\0\x07", "channel 7, which isn't open"),
        (b"\0\0\0\x01\x5e", "is too short"),
        (b"\0\0\0\x01\x32", "unexpected packet 50"),
    ],
)
def test_a_peer_that_breaks_a_rule_ends_the_connection(module: ModuleType, packet: bytes, problem: str) -> None:
    engine = module.Engine(Limits())
    (failed,) = engine.receive_bytes(packet, 0.0)
    assert problem in str(failed.error)
    assert engine.over


def test_the_page_shows_the_code_of_the_example() -> None:
    page = (ROOT / PAGE).read_text("utf-8")
    code = (PACKAGE / "muxkit_rfc4254.py").read_text("utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 7
    for program in programs:
        for part in program.split("    ...\n\n"):  # what the page leaves out
            assert part.strip() in code or indent(part, "    ").strip() in code


async def test_the_program_of_the_readme_runs(module: ModuleType) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / README).read_text("utf-8"), re.DOTALL)
    got: list[bytes] = []

    async def note(channel: muxkit.Channel) -> None:
        got.extend([message async for message in channel])

    async with muxkit.open_server(note, "rfc4254+tcp://127.0.0.1:0") as server:
        names: dict[str, Any] = {"muxkit": muxkit}
        exec("async def main():\n" + indent(program, "    ").replace("rfc4254+tcp://127.0.0.1:7000", server.url), names)
        await names["main"]()
    assert got == [b"hello"]


@pytest.mark.parametrize("page", [PAGE, README])
def test_it_installs_and_tries_itself_as_the_pages_say(page: str, tmp_path: Path) -> None:
    """pip gets a copy of the package as its source, since building leaves files in the folder."""
    commands = re.findall(r"(pip install \S+|python -m \w+)[`\n]", (ROOT / page).read_text("utf-8"))
    install, attempt = (shlex.split(command) for command in commands)
    source = shutil.copytree(ROOT / install[-1], tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "installed"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [sys.executable, "-m", *install[:-1], *options, "--target", str(target), str(source)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    environment = os.environ | {"PYTHONPATH": str(target)}
    tried = subprocess.run([sys.executable, *attempt[1:]], env=environment, capture_output=True, text=True, timeout=300)
    assert (tried.stdout, tried.stderr) == ("hello over RFC 4254\n", "")
    listed = subprocess.run(
        [sys.executable, "-m", "muxkit", "plugins"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "rfc4254" in listed.stdout
