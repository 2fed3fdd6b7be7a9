"""What the tests of captures share: traffic to record, rows as they were recorded, rows made by hand."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import attrs
import duckdb
import pyarrow.dataset as ds
import pytest
import trio

from muxkit import Limits
from muxkit.pipeline import Answers, Capture
from muxkit.pipeline.capture.analysis import ask, load
from muxkit.pipeline.capture.files import to_batch
from muxkit.protocols import bpmux
from muxkit_adapters import memory

if TYPE_CHECKING:
    from pathlib import Path

    from muxkit import Channel
    from muxkit._observer import Direction
    from muxkit.pipeline.capture.analysis import Ask
    from muxkit.pipeline.capture.files import FileWriter, FramesRow, Kind

SMALL = Limits(channel_bytes=5000, channel_first=3000, channel_floor=100)
SIZES = (0, 3, 300, 9000, 60_000)


def writer_of(capture: Capture) -> FileWriter:
    """Return the thread that writes the files of a capture."""
    return capture._writer


def files_of(writer: FileWriter, kind: Kind = "frames") -> Any:  # noqa: ANN401 - it belongs to the writer
    """Return the files of one kind, which a writer writes."""
    return writer._files[kind]


def buffered(capture: Capture) -> tuple[int, int]:
    """Return the number of rows that the writer of a capture doesn't have yet, and their raw bytes."""
    buffers = [buffer for buffer in (capture._frames, capture._raw) if buffer is not None]
    return sum(len(buffer._rows) for buffer in buffers), sum(buffer._bytes for buffer in buffers)


def assert_same(told: Answers, found: Answers) -> None:
    """Fail unless two answers are the same, but for the last digits of sums, which depend on the order of the rows."""
    for field in attrs.fields(Answers):
        one, other = getattr(told, field.name), getattr(found, field.name)
        if isinstance(one, list):
            assert len(one) == len(other), field.name
            for row, again in zip(one, other, strict=True):
                assert again == pytest.approx(row), field.name
        else:
            assert other == pytest.approx(one), field.name


async def record_sessions(folder: Path, *, channels: int = 4, messages: int = 10) -> None:
    """Two bpmux sessions that echo, both recorded, with frames and raw bytes; and a ping."""
    one, other = memory.pair()
    with Capture(folder, raw=True, name="test") as capture:
        here = bpmux.session(one, observer=capture.connection("one"), limits=SMALL)
        there = bpmux.session(other, observer=capture.connection("other"))
        async with here as session, there as peer, trio.open_nursery() as nursery:

            async def echo(channel: Channel) -> None:
                async for message in channel:
                    await channel.send(message)
                await channel.aclose()

            async def serve() -> None:
                async for channel in peer.incoming():
                    nursery.start_soon(echo, channel)

            async def talk(number: int) -> None:
                dice = random.Random(number)
                async with session.open() as channel, trio.open_nursery() as talking:
                    told = [dice.randbytes(dice.choice(SIZES)) for _ in range(messages)]

                    async def tell() -> None:
                        for message in told:
                            await channel.send(message)

                    talking.start_soon(tell)
                    for message in told:
                        assert await channel.receive() == message

            nursery.start_soon(serve)
            async with trio.open_nursery() as talks:
                for number in range(channels):
                    talks.start_soon(talk, number)
            await session.ping()
            nursery.cancel_scope.cancel()


Row = dict[str, Any]  # a row of a table


def rows_of(folder: Path, kind: str = "frames") -> list[Row]:
    """What a capture holds, connection by connection, in order."""
    table = ds.dataset(folder / kind, format="parquet").to_table()
    order = [("capture", "ascending"), ("connection", "ascending"), ("number", "ascending")]
    rows: list[Row] = table.sort_by(order).to_pylist()
    return rows


class Made:
    """Rows of frames that a test makes, of one connection unless it says otherwise."""

    def __init__(self) -> None:
        self.rows: list[FramesRow] = []

    def add(
        self,
        us: int,
        event: str,
        direction: str | None = None,
        channel: str | None = None,
        kind: str | None = None,
        size: int | None = None,
        *,
        credit: int | None = None,
        id: int | None = None,
        rule: str | None = None,
        text: str | None = None,
        connection: str = "a",
    ) -> None:
        number = len(self.rows)
        way: Direction | None = None if direction is None else "in" if direction == "in" else "out"
        row: FramesRow = (
            us / 1e6, "test", connection, number, event, way, channel, kind, size, credit, id, rule, text,
        )  # fmt: skip
        self.rows.append(row)

    def frame(
        self, us: int, direction: str, channel: str, kind: str, size: int = 0, id: int | None = None, of: str = "a"
    ) -> None:
        self.add(us, "frame", direction, channel, kind, size, id=id, connection=of)

    def ask(self) -> Ask:
        """Questions about these rows."""
        connection = duckdb.connect()
        load(connection, [to_batch("frames", self.rows)])
        return ask(connection)
