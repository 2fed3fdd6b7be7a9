"""Write docs/how-to/troubleshooting.md from the catalogue of errors; with --check only say whether it is stale.

Each text of the catalogue is one that a program really reads: a row of docs/reference/what-the-peer-reads.md, which
the suite makes happen between two programs, or one of `OWN`, which is made to happen here.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio

import muxkit
from muxkit import rpc
from tests.adapters._names import dns_server

ROOT: Final = Path(__file__).resolve().parent.parent
CATALOGUE: Final = ROOT / "tests" / "data" / "troubleshooting.toml"
PAGE: Final = ROOT / "docs" / "how-to" / "troubleshooting.md"
PEER_READS: Final = ROOT / "docs" / "reference" / "what-the-peer-reads.md"
PATIENCE: Final = 60.0  # s; reached only when something hangs
FOREIGN: Final = "Answered: "  # what a browser reads is no error of muxkit

HEAD: Final = """# Troubleshooting

This page lists the texts of errors with their causes and remedies. Search for a part of the text that you read. `…`
stands for the parts that vary. The test suite makes each of these errors happen, and `python tests/troubleshooting.py`
generates the page from the catalogue of errors.

Start with [the command `doctor`](command-line.md#diagnose-a-connection), which tries each step of a connection and
names the first one that fails. The log of the *other* side may know more, and a [trace](traces.md) shows what happened
on the wire. [Errors](../reference/errors.md) lists the types, and
[what the other side reads](../reference/what-the-peer-reads.md) has the whole text in each situation.
"""


@attrs.frozen
class Entry:
    """Texts that have one cause, and what to do about it."""

    texts: tuple[str, ...]
    cause: str
    fix: str
    see: tuple[str, ...] = ()
    title: str = ""

    def has(self, text: str) -> bool:
        return any(matches(part, text) for part in self.texts)


@attrs.frozen
class Seen:
    """A text that a program reads, and the situation in which it does; None if its own call raised it."""

    text: str
    situation: str | None = None


def matches(part: str, text: str) -> bool:
    return re.search(".*?".join(map(re.escape, part.split("…"))), text) is not None


@cache
def groups() -> dict[str, list[Entry]]:
    """Read the catalogue: the entries of each group."""
    data = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
    return {group["name"]: [_entry(each) for each in group["entry"]] for group in data["group"]}


def _entry(fields: dict[str, Any]) -> Entry:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Entry(**(fields | lists))


def read_by_peers() -> Iterator[Seen]:
    """Yield the texts of the page about what the other side reads."""
    situation = ""
    for line in PEER_READS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            situation = line.removeprefix("## ")
        elif line.startswith("| `"):
            text = line.partition(" | ")[2].removesuffix(" |").replace("\\|", "|").replace("\\<", "<")
            yield Seen(text, situation)


# ---------------------------------------------------------------------------- made to happen here


async def _echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def _connecting(url: str | Sequence[str], **options: Any) -> None:
    async with muxkit.connect(url, **options):
        pass


async def _serving(url: str) -> None:
    async with muxkit.open_server(_echo, url):
        pass


async def _serving_twice() -> None:
    async with muxkit.open_server(_echo, "bpmux+tcp://127.0.0.1:0") as server:
        await _serving(server.url)


async def _on_channel(use: Callable[[muxkit.Channel], Awaitable[None]], **limits: int) -> None:
    async with (
        muxkit.open_server(_echo, "bpmux+mem://own") as server,
        muxkit.connect(server.url, limits=muxkit.Limits(**limits)) as session,
    ):
        channel = await session.open()
        try:
            await use(channel)
        finally:
            await channel.aclose()


async def _use_after_end(channel: muxkit.Channel) -> None:
    await channel.aclose()
    await channel.send(b"tea")


async def _send_text(channel: muxkit.Channel) -> None:
    await channel.send("tea")  # type: ignore[arg-type]  # that is the mistake


async def _send_large(channel: muxkit.Channel) -> None:
    await channel.send(bytes(2000))


async def _waiting_for_credit() -> str:
    """Return what a channel looks like whose peer does not receive."""

    async def hold(channel: muxkit.Channel) -> None:
        await trio.sleep_forever()

    async def pour(channel: muxkit.Channel) -> None:
        with suppress(muxkit.LinkLost):  # if more credit has just arrived when the session is cancelled
            while True:
                await channel.send(bytes(60_000))

    async with muxkit.open_server(hold, "bpmux+mem://full", linger=0) as server, trio.open_nursery() as nursery:
        session = await nursery.start(_session, server.url)
        channel = await session.open()
        nursery.start_soon(pour, channel)
        while channel.stats().waiting_since is None:
            await trio.lowlevel.checkpoint()
        text = repr(channel)
        nursery.cancel_scope.cancel()
    return re.sub(r"\b\d+\.\d s\b", "N s", text)


async def _session(url: str, task_status: trio.TaskStatus[muxkit.Session]) -> None:
    async with muxkit.connect(url) as session:
        task_status.started(session)
        await trio.sleep_forever()


async def _failing_handler() -> str:
    """Return what is logged when a handler fails."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    async def fail(channel: muxkit.Channel) -> None:
        raise KeyError("payload")

    kept, log = Kept(), logging.getLogger("muxkit")
    log.addHandler(kept)
    was, log.propagate = log.propagate, False
    try:
        async with muxkit.open_server(fail, "bpmux+mem://fails") as server, muxkit.connect(server.url) as session:
            async with session.open() as channel:
                with suppress(muxkit.ChannelCancelled):
                    await channel.receive()
    finally:
        log.removeHandler(kept)
        log.propagate = was
    return lines[0]


async def _connecting_by_srv(*records: str, answers: bool = True) -> None:
    async with dns_server({"_bpmux._tcp.example.org": records} if records else {}, answers=answers) as resolver:
        resolver.lifetime = 1.0
        await _connecting("bpmux+tcp+srv://example.org", resolver=resolver)


async def _redirected() -> None:
    async with muxkit.open_server(_echo, "bpmux+mem://moves") as server, muxkit.connect(server.url) as session:
        await session.ping()
        await server.shutdown(grace=1, redirect="bpmux+tls://b.example.org:7000")
        await anext(session.incoming())


async def _certificate_missing() -> None:
    muxkit.TLS(cert="nowhere.pem", key="nowhere.key")


async def _limits_that_differ() -> None:
    muxkit.Limits(message=100 * 2**20)


class _Shop(rpc.Service):
    async def count(self, item: str) -> int: ...

    async def buy(self, item: str) -> int: ...


class _ShopService:
    __rpc_name__ = "_Shop"

    async def count(self, item: str) -> int:
        raise ZeroDivisionError


async def _calling(use: Callable[[muxkit.Session], Awaitable[object]]) -> None:
    logging.getLogger("muxkit").disabled = True  # the failure of the handler is meant
    try:
        topic = muxkit.Topic(int, keep=1)
        topic.publish_nowait(1)
        topic.publish_nowait(2)
        numbers = muxkit.handler(int)(_echo_values)
        handler = rpc.serve(_ShopService(), channels={"numbers": numbers, "topic": topic})
        async with muxkit.open_server(handler, "bpmux+mem://calls") as server, muxkit.connect(server.url) as session:
            await use(session)
    finally:
        logging.getLogger("muxkit").disabled = False


async def _echo_values(channel: muxkit.TypedChannel[int]) -> None:
    async for value in channel:
        await channel.send(value)


async def _send_a_wrong_value(session: muxkit.Session) -> None:
    channel = await session.open("numbers")
    await channel.send(b'"tea"')
    await channel.receive()


async def _use_an_unknown_codec(session: muxkit.Session) -> None:
    channel = await session.open("numbers", headers={"codec": "yaml"})
    await channel.receive()


async def _come_too_late(session: muxkit.Session) -> None:
    async with session.subscribe("topic", codec=muxkit.Json(int), since=0) as updates:
        await updates.__anext__()


async def _call_a_failing_handler(session: muxkit.Session) -> None:
    await rpc.client(_Shop, session).count("tea")


async def _call_a_missing_method(session: muxkit.Session) -> None:
    await rpc.client(_Shop, session).buy("tea")


def _without_extra() -> str:
    """Return what a program reads that lacks an extra, in a process in which the package cannot be imported."""
    code = """
import sys
sys.modules["aioquic"] = None
import trio, muxkit
async def main():
    async with muxkit.connect("aqueduct+quic://127.0.0.1:1"):
        pass
try:
    trio.run(main)
except muxkit.PluginError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    return done.stdout.strip()


def _without_trio() -> str:
    try:
        asyncio.run(_connecting("bpmux+tcp://127.0.0.1:1"))
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    raise AssertionError("it ran")


OWN: Final[list[Callable[[], Awaitable[object]]]] = [
    partial(_connecting, "bpmux+tcp://192.0.2.1:7000"),
    partial(_connecting, ["bpmux+tcp://127.0.0.1:1", "bpmux+tcp://127.0.0.1:2"]),
    _redirected,
    _connecting_by_srv,
    partial(_connecting_by_srv, "0 0 0 ."),
    partial(_connecting_by_srv, answers=False),
    partial(_connecting, "bpmux+tcp://127.0.0.1:7000", conect_timeout=3),
    partial(_connecting, "bpmux+tcp://127.0.0.1:7000", capacity=3),
    partial(_connecting, "bpmx+tcp://127.0.0.1:7000"),
    partial(_connecting, "bpmux+tpc://127.0.0.1:7000"),
    partial(_connecting, "tcp://127.0.0.1:7000"),
    partial(_connecting, "bpmux+quic://127.0.0.1:7000"),
    partial(_serving, "bpmux+tls://127.0.0.1:0"),
    _serving_twice,
    partial(_on_channel, _use_after_end),
    partial(_on_channel, _send_text),
    partial(_on_channel, _send_large, message=1000),
    _waiting_for_credit,
    _failing_handler,
    _certificate_missing,
    _limits_that_differ,
    partial(_calling, _send_a_wrong_value),
    partial(_calling, _use_an_unknown_codec),
    partial(_calling, _come_too_late),
    partial(_calling, _call_a_failing_handler),
    partial(_calling, _call_a_missing_method),
]


def own_texts() -> list[Seen]:
    """Make each mistake, and return what the program that makes it reads."""

    async def text_of(make: Callable[[], Awaitable[object]]) -> str:
        with trio.fail_after(PATIENCE):
            try:
                returned = await make()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        assert isinstance(returned, str), make
        return returned

    texts = [trio.run(text_of, each) for each in OWN]
    return [Seen(text) for text in [*texts, _without_extra(), _without_trio()]]


# ---------------------------------------------------------------------------- the page


def page() -> str:
    """Write the page."""
    seen = [each for each in read_by_peers() if not each.text.startswith(FOREIGN)]
    parts = [HEAD]
    for name, entries in groups().items():
        parts.append(f"## {name}\n")
        for entry in entries:
            parts.append(f"### {entry.title or _code(entry.texts[0])}\n")
            if entry.title or len(entry.texts) > 1:
                parts.append(
                    "Also: " * (not entry.title) + " · ".join(map(_code, entry.texts[not entry.title :])) + "\n"
                )
            parts.append(f"**Cause.** {entry.cause}\n\n**What to do.** {entry.fix}{_see(entry.see)}\n")
            found = dict.fromkeys(each.situation for each in seen if each.situation and entry.has(each.text))
            if found:
                parts.append(f"*Seen when:* {'; '.join(_situation(each) for each in found)}.\n")
    return "\n".join(parts)


def _code(text: str) -> str:
    return f"`{text}`"


def _see(pages: Sequence[str]) -> str:
    links = [f"[{_title(each)}]({each})" for each in pages]
    return f" See {' and '.join([', '.join(links[:-1]), links[-1]] if links[1:] else links)}." if links else ""


def _title(target: str) -> str:
    """Return the heading to which a link leads."""
    path, _, anchor = target.partition("#")
    headings: list[str] = re.findall(r"^#+ (.*)$", (PAGE.parent / path).read_text(encoding="utf-8"), re.MULTILINE)
    return next((each for each in headings if _anchor(each) == anchor), headings[0])


def _situation(heading: str) -> str:
    first = heading if heading.startswith(("QUIC", "TLS", "URL")) else heading[0].lower() + heading[1:]
    return f"[{first}](../reference/what-the-peer-reads.md#{_anchor(heading)})"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    check = parser.parse_args(arguments).check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} is stale: run `make conformance` and commit it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
