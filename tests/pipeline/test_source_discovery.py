"""Streams join by themselves: from a list, a file, and a directory, which is a stream too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from muxkit.pipeline import OptionError
from muxkit.pipeline.options import Reference
from tests.pipeline._source_place import place, ranges, step
from tests.pipeline._source_servers import DIRECTORY, ONE, THREE, TWO, feed

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock


@pytest.mark.parametrize("status", [True, False])
async def test_a_stream_joins_when_the_directory_tells_of_it(autojump_clock: MockClock, status: bool) -> None:
    async with place(status=status) as there:
        await feed(there.store, DIRECTORY, [ONE, {"stream": f"{there.url}#{TWO}"}])
        await there.feed(ONE, 5)
        await there.feed(TWO, 5)
        await there.feed(THREE, 5)
        options: dict[str, Any] = {
            "streams": None,
            "directory": DIRECTORY,
            "planning": "auto" if status else "prefetch",
        }
        planner = there.planner(**options)
        first = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), first) == {ONE: (0, 5), TWO: (0, 5)}
        await feed(there.store, DIRECTORY, [THREE])
        second = await step(planner, first)
        assert await ranges(planner, first, second) == {THREE: (0, 5)}
        again = there.planner(**options)
        assert await ranges(again, first, second) == {THREE: (0, 5)}
        assert await there.acknowledged(DIRECTORY) == 0


async def test_what_a_directory_cannot_mean_is_passed_over_with_a_warning(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with place() as there:
        await feed(there.store, DIRECTORY, [7, {"other": 1}, "nonsense", ONE])
        await there.feed(ONE, 5)
        planner = there.planner(streams=None, directory=DIRECTORY)
        end = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), end) == {ONE: (0, 5)}
        assert caplog.text.count("a message of the directory was passed over") == 3


async def test_a_directory_that_nobody_knows_is_an_error_of_the_option(autojump_clock: MockClock) -> None:
    async with place() as there:
        planner = there.planner(streams=None, directory=DIRECTORY)
        with pytest.raises(OptionError, match=f"option directory: no server knows the session {DIRECTORY}"):
            await step(planner, planner.initial())


async def test_a_file_is_read_again_for_each_batch(autojump_clock: MockClock, tmp_path: Path) -> None:
    listed = tmp_path / "streams.txt"
    async with place() as there:
        for uuid in (ONE, TWO):
            await there.feed(uuid, 5)
        listed.write_text(f"# those of today\n{ONE}  # the first\n")
        planner = there.planner(streams=None, streamsFile=listed)
        first = await step(planner, planner.initial())
        assert await ranges(planner, planner.initial(), first) == {ONE: (0, 5)}
        listed.write_text(f"{ONE}\n{there.url}#{TWO}\n")
        assert await ranges(planner, first, await step(planner, first)) == {TWO: (0, 5)}


async def test_a_file_that_is_not_there_is_an_error_of_the_option(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with place() as there:
        planner = there.planner(streams=None, streamsFile=tmp_path / "nothing")
        with pytest.raises(OptionError, match=r"option streamsFile: .*nothing"):
            await step(planner, planner.initial())


def test_a_reference_is_shown_as_it_is_written() -> None:
    assert str(Reference(ONE)) == ONE
    assert str(Reference(ONE, "restream+tcp://a:1")) == f"restream+tcp://a:1#{ONE}"
