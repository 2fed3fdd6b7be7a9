"""Draw the pictures of docs/explanation/architecture.md, and write a page for each engine.

    python docs/site/architecture.py [--check]

`--check` only compares the pictures and pages with the files.

`floors.svg` has the layers of the import rules in pyproject.toml. `message-out.svg` and `bytes-in.svg` list the
functions that process a message. `tests/test_architecture.py` runs a session and compares the functions that were
called with these lists, so the test fails if a listed function isn't called any more.

A page in docs/explanation/engines has the states of an engine, its theory of operation and its files. The states come
from the tables in the code, or from the tables in the docstring of the module that explains the engine.
"""

from __future__ import annotations

import ast
import html
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

import attrs

from muxkit.protocols.bpmux.entities import NEXT as BPMUX_NEXT
from muxkit.protocols.bpmux.entities import Life
from muxkit.protocols.restream.engine.server import NEXT as RESTREAM_NEXT

ROOT: Final = Path(__file__).resolve().parents[2]
PICTURES: Final = ROOT / "docs" / "explanation"
WIDTH: Final = 880
ROW, BOX, TOP = 40, 30, 14

STYLE: Final = """<style>
svg.map text{font:13px sans-serif;fill:var(--mux-text,#263238)}
svg.map .code{font:12.5px monospace}
svg.map .small{font-size:12px}
svg.map .box{fill:var(--mux-soft,#e0f2f1);stroke:var(--mux-line,#00796b);stroke-width:1.2}
svg.map .arrow{fill:none;stroke:var(--mux-line,#00796b);stroke-width:1.4}
svg.map .tip{fill:var(--mux-line,#00796b)}
</style>"""

# A caption for each layer of the import rules, top down. A layer may import those below it and nothing above.
FLOORS: Final[Sequence[tuple[str, str]]] = (
    ("cli", "the command line"),
    ("pipeline", "Spark sources and sinks, captures"),
    ("testing", "simulated networks and conformance suites for users' tests"),
    ("anyio", "channels and sessions as AnyIO's streams and listeners"),
    ("asyncio", "the same API for asyncio programs"),
    ("spans", "spans of OpenTelemetry"),
    ("rpc : topics", "typed calls; publish and subscribe"),
    ("forward : protocols", "port forwarding; one independent folder for each protocol"),
    ("_typed", "connect and open_server with the types of a protocol"),
    ("_server : _reconnecting : metrics", "running servers, reconnecting clients, counters"),
    ("_door", "creates the session for a URL, whose protocol and transport it finds by name"),
    ("_options", "the options of clients and servers, each declared once"),
    ("_authorize : _handlers : _racing : _redirect", "authorization, handlers of channels, choice between URLs"),
    ("storage", "databases and their worker threads"),
    ("_plugins", "loads protocols and transports by name"),
    ("runtime", "sessions, channels, halves and pumps; independent of wire formats"),
    ("codecs", "encoding and decoding of messages"),
    ("core", "windows, queues and timers for engines; independent of Trio and sockets"),
    ("trace", "recording of sessions"),
    ("_observer : _spans", "callbacks for traces, metrics and captures; the switch for spans"),
    ("_errors : _info : _limits : _quick_check", "errors, session information, limits"),
    ("_settings", "validation of settings"),
)

# Each stop: its module below muxkit or adapters, the function, and what it does.
OUT: Final[Sequence[tuple[str, str, str]]] = (
    ("runtime/channel", "MuxChannel.send", "the application's call"),
    ("runtime/halves/send", "SendHalf.send", "checks that no sender waits and the outbox has room"),
    ("protocols/bpmux/send", "Sender.try_send", "queues the message if the peer's credit covers it"),
    ("core/_queues", "Scheduler.add", "adds the channel to the round-robin queue"),
    ("runtime/connection", "MuxConnection.request_write", "tells the pump that there is something to write"),
    ("runtime/pumps/stream", "StreamPump.request_write", "writes now, or in the writer's task if more may follow"),
    ("runtime/pumps/stream", "StreamPump._write_once", "writes all queued frames with one call"),
    ("core/stream_engine", "StreamMuxEngine.buffers_to_send", "collects at most 256 KiB"),
    ("protocols/bpmux/engine", "Engine.write", "writes credit and acknowledgements first"),
    ("core/_queues", "Scheduler.pull", "gives each queued channel its turn"),
    ("protocols/bpmux/send", "Outgoing.write", "encodes the frame and uses the credit"),
    ("adapters/_sockets", "SocketStream.send_nowait", "passes the bytes to the kernel"),
)
IN: Final[Sequence[tuple[str, str, str]]] = (
    ("runtime/halves/receive", "ReceiveHalf.receive", "waits, because no message has arrived yet"),
    ("runtime/pumps/reading", "Reading.read_for", "reads in place of the reader's task"),
    ("adapters/_sockets", "SocketStream.wait_readable", "sleeps until the socket has bytes"),
    ("adapters/_sockets", "SocketStream.receive_nowait", "reads the bytes"),
    ("runtime/pumps/stream", "StreamPump.handle_bytes", "limits the work of one turn"),
    ("core/stream_engine", "StreamMuxEngine.receive_bytes", "keeps incomplete frames, and the time"),
    ("protocols/bpmux/engine", "Engine.parse", "parses the frames of this protocol"),
    ("protocols/bpmux/reader", "ChunkReader.parse_payloads", "checks each message against its window"),
    ("runtime/connection", "MuxConnection.handle_events", "finds the half that the message is for"),
    ("runtime/halves/receive", "ReceiveHalf.deliver", "wakes the task that waits in receive()"),
    ("protocols/bpmux/receive", "Receiver.consumed", "grants new credit if enough was consumed"),
)


def svg(height: int, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" aria-label="{html.escape(label)}">\n{STYLE}\n{body}\n</svg>\n'
    )


def rows(lines: Sequence[tuple[str, str]], *, box: int, has_arrows: bool) -> Iterator[str]:
    """Draw one box under the other, each with its text on the right."""
    for index, (name, text) in enumerate(lines):
        top = TOP + index * ROW
        middle = top + BOX / 2 + 4.5
        yield f'<rect class="box" x="10" y="{top}" width="{box}" height="{BOX}" rx="4"/>'
        yield f'<text class="code" x="20" y="{middle}">{html.escape(name)}</text>'
        yield f'<text class="small" x="{box + 24}" y="{middle}">{html.escape(text)}</text>'
        if has_arrows and index:
            x, tip = 10 + box / 2, top - 1
            yield f'<path class="arrow" d="M{x} {top - ROW + BOX}V{tip - 4}"/>'
            yield f'<path class="tip" d="M{x - 4} {tip - 6}L{x} {tip}L{x + 4} {tip - 6}z"/>'


def layers() -> list[str]:
    """Return the layers that the import rules name, top down."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    found: list[str] = next(each["layers"] for each in contracts if each["id"] == "floors")
    return found


def drawings() -> dict[str, str]:
    """Return each picture by its file name."""
    if layers() != [floor for floor, _ in FLOORS]:
        raise SystemExit("FLOORS differs from the layers of the contract 'floors' in pyproject.toml; change both")
    pictures = {}
    floors = [(floor.replace(" : ", ", "), text) for floor, text in FLOORS]
    height = 2 * TOP + len(floors) * ROW - (ROW - BOX)
    pictures["floors.svg"] = svg(height, "The layers of muxkit", [*rows(floors, box=330, has_arrows=False)])
    for name, label, stops in (
        ("message-out.svg", "The path of a message from send to the socket", OUT),
        ("bytes-in.svg", "The path of bytes from the socket to receive", IN),
    ):
        lines = [(function, f"{text} ({module})") for module, function, text in stops]
        height = 2 * TOP + len(lines) * ROW - (ROW - BOX)
        pictures[name] = svg(height, label, [*rows(lines, box=250, has_arrows=True)])
    return pictures


# ---------------------------------------------------------------------------- engines


@attrs.frozen
class Engine:
    """An engine, and what its page says first."""

    folder: str
    title: str
    intro: str
    theory: str = "state.py"
    """The module whose docstring is the theory of operation."""
    titles: Sequence[str] = ()
    """Those of the tables in its docstring."""
    tables: Mapping[str, Mapping[Any, Iterable[Enum]]] = {}
    """Tables in the code, by their titles, for an engine that has some."""


ENGINES: Final[Sequence[Engine]] = (
    Engine(
        "bpmux",
        "bpmux",
        "An entity is one half of a channel, or a request. The engine keeps six maps of them with one kind of life.",
        tables={"The life of an entity": {life: BPMUX_NEXT[life] for life in Life}},
    ),
    Engine(
        "yamux",
        "yamux",
        "A stream has two halves that end independently. Channels of messages are a layer on top of streams of bytes.",
        titles=("The half that sends", "The half that receives"),
    ),
    Engine(
        "relink",
        "Relink",
        "A link outlives its connections, so the engine keeps every message until the peer's application has it.",
        titles=("A link", "A channel that this side sends on", "A channel that this side receives from"),
    ),
    Engine(
        "aqueduct",
        "Aqueduct",
        "Halves of channels travel inside messages, over streams and datagrams that may overtake each other.",
        titles=("The half that sends", "The half that receives"),
    ),
    Engine(
        "e3x",
        "e3x",
        "Channels number their packets and repair losses, so the engine works over links that lose packets.",
        titles=("A channel",),
    ),
    Engine(
        "restream/engine",
        "restream",
        "A connection serves one request. What is kept beyond a connection is in the store, not in the engine.",
        theory="server.py",
        tables={"The phases of a server's connection": RESTREAM_NEXT},
    ),
)
ROW_START: Final = re.compile(r"^    (?P<name>\w+)  +(?P<rest>\S.*)$")
STEP: Final = re.compile(r"-> (?P<after>[\w, ]+?)(?:, immediately)?$")


def tables_of(docstring: str) -> Iterator[list[tuple[str, str]]]:
    """Find the tables of states in a docstring, and return the steps of each from one state to another."""
    rows: list[tuple[str, str]] = []
    for line in [*docstring.splitlines(), "end"]:
        if started := ROW_START.match(line):
            rows.append((started["name"], started["rest"]))
        elif rows and line.startswith("     "):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]}  {line.strip()}")
        elif line and rows:
            steps = [(name, after) for name, rest in rows for after in _after(rest)]
            if steps:
                yield steps
            rows = []


def _after(rest: str) -> list[str]:
    found = STEP.search(rest)
    return found["after"].split(", ") if found else []


def diagram(steps: Iterable[tuple[str, str]]) -> str:
    """Return the picture of a table, in the notation that code hosts draw."""
    steps = [*steps]
    lines = [f"    {before} --> {after}" for before, after in steps]
    finals = dict.fromkeys(after for _, after in steps if after not in {before for before, _ in steps})
    return "\n".join(("```mermaid", "stateDiagram-v2", *lines, *(f"    {each} --> [*]" for each in finals), "```"))


def page(engine: Engine) -> str:
    """Write the page of an engine."""
    folder = ROOT / "muxkit" / "protocols" / engine.folder
    texts = {path.name: _docstring(path) for path in sorted(folder.glob("*.py"))}
    source = f"../../../muxkit/protocols/{engine.folder}"
    theory = texts[engine.theory]
    drawn = [(title, _steps(table)) for title, table in engine.tables.items()]
    drawn += zip(engine.titles, tables_of(theory), strict=True)
    parts = [
        f"# The {engine.title} engine",
        f"<!-- written by docs/site/architecture.py from {engine.folder}/{engine.theory} -->",
        engine.intro,
        "## States",
        *(f"**{title}**\n\n{diagram(steps)}" for title, steps in drawn),
        "## Theory of operation",
        f"This is the docstring of [`{engine.theory}`]({source}/{engine.theory}).",
        _as_markdown(theory),
        "## Files",
        "\n".join(
            (
                "| file | what it has |",
                "|---|---|",
                *(f"| [`{name}`]({source}/{name}) | {text.splitlines()[0]} |" for name, text in texts.items()),
            )
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _steps(table: Mapping[Any, Iterable[Enum]]) -> list[tuple[str, str]]:
    """Return the steps of a table, in the order in which the states are declared."""
    states = [*table]
    return [(one.name, other.name) for one in states for other in states if other in table[one] and other is not one]


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _as_markdown(docstring: str) -> str:
    """Return a docstring below the headings of a page: its own become smaller, its first line is said before."""
    rest = docstring.partition("\n")[2].strip()
    rest = re.sub(r"^Theory of operation\n=+\n+", "", rest, flags=re.MULTILINE)
    return re.sub(r"^(?P<title>\S.*)\n=+$", r"### \g<title>", rest, flags=re.MULTILINE)


def written() -> dict[str, str]:
    """Return each picture and page by its path below docs/explanation."""
    pages = {f"engines/{engine.folder.partition('/')[0]}.md": page(engine) for engine in ENGINES}
    return drawings() | pages


def main() -> None:
    is_check = sys.argv[1:] == ["--check"]
    stale = []
    for name, text in written().items():
        path = PICTURES / name
        if is_check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        raise SystemExit(f"out of date: {', '.join(stale)}. Run: python docs/site/architecture.py")


if __name__ == "__main__":
    main()
