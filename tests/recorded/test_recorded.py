"""Every protocol still puts the same bytes on the wire, and a difference is found and described."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from muxkit.protocols import bpmux
from tests.recorded.conversations import CONVERSATIONS, STEADY, both_closed, joined, opened
from tests.recorded.wire import FOLDER, HASHES, Recording, Step, Wire, first_difference, load, path_of, record, save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_puts_the_recorded_bytes_on_the_wire(name: str) -> None:
    difference = first_difference(load(path_of(name)), record(CONVERSATIONS[name]))
    assert not difference, f"{difference}\n`python -m tests.recorded` explains when the recordings may be written again"


@pytest.mark.parametrize("name", STEADY)
def test_the_bytes_of_a_steady_conversation_do_not_depend_on_the_order_of_tasks(name: str) -> None:
    assert not first_difference(load(path_of(name)), record(STEADY[name], shuffled=True))


def test_the_stored_hashes_are_those_of_the_stored_bytes() -> None:
    assert {path.name for path in FOLDER.glob("*.xz")} == {path_of(name).name for name in CONVERSATIONS}
    assert json.loads(HASHES.read_text()) == {name: load(path_of(name)).digest() for name in CONVERSATIONS}


def test_a_conversation_gives_the_same_bytes_twice() -> None:
    conversation = CONVERSATIONS["bpmux-kinds"]
    assert record(conversation) == record(conversation)


async def greeting(wire: Wire, *, name: str = "", config: bpmux.Config | None = None) -> None:
    async with joined("bpmux", config=config or bpmux.Config()) as (here, there):
        await wire.step("one channel")
        await both_closed(await opened(here, there, name))
        await wire.step("leave")


def test_a_byte_that_differs_is_described_with_its_step_and_side() -> None:
    told = first_difference(record(partial(greeting, name="tea")), record(partial(greeting, name="tee")))
    assert told.startswith("in the step 'one channel', connection 0 client: byte ")
    assert "tea" in told
    assert "tee" in told


def test_a_different_setting_of_one_side_is_found() -> None:
    other = partial(greeting, config=bpmux.Config(initial_credit=0))
    assert first_difference(record(greeting), record(other)) != ""


def recording_of(*steps: tuple[str, dict[str, list[str]]]) -> Recording:
    return Recording(tuple(Step(name, sent) for name, sent in steps))


@pytest.mark.parametrize(
    ("got", "told"),
    [
        (recording_of(("a", {"0 client": ["0102"]})), ""),
        (recording_of(("a", {"0 client": ["01"]})), "byte 1, from byte 0 on"),
        (recording_of(("a", {"0 client": ["0102", "03"]})), "expected 1 pieces, got 2"),
        (recording_of(("a", {"0 client": ["0102"], "0 server": ["03"]})), "connection 0 server: expected 0 pieces"),
        (recording_of(("b", {"0 client": ["0102"]})), "expected the step 'a' next, got 'b'"),
        (recording_of(("a", {"0 client": ["0102"]}), ("b", {"0 client": ["03"]})), "only one has 'b'"),
    ],
)
def test_each_kind_of_difference_is_described(got: Recording, told: str) -> None:
    difference = first_difference(recording_of(("a", {"0 client": ["0102"]})), got)
    assert (told in difference) if told else not difference


def test_a_recording_is_stored_and_read_back(tmp_path: Path) -> None:
    recording = record(greeting)
    save("greeting", recording, tmp_path)
    assert load(path_of("greeting", tmp_path)) == recording
