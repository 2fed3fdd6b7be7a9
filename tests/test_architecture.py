"""The pictures of the architecture show what the code does, and the pages of the engines what it says."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import trio
import trio.testing

import muxkit

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"adapters": "adapters/muxkit_adapters"}


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    spec = spec_from_file_location("architecture", ROOT / "docs" / "site" / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_and_pages_are_up_to_date(architecture: ModuleType) -> None:
    folder = ROOT / "docs" / "explanation"
    assert [name for name, text in architecture.written().items() if (folder / name).read_text("utf-8") != text] == []


def test_each_engine_has_a_page_with_its_states(architecture: ModuleType) -> None:
    folders = {path.name for path in (ROOT / "muxkit" / "protocols").iterdir() if (path / "__init__.py").exists()}
    pages = {Path(name).stem: text for name, text in architecture.written().items() if name.endswith(".md")}
    assert set(pages) == folders
    assert all(text.count("-->") >= 4 for text in pages.values())


def test_a_table_of_states_is_found_in_a_docstring(architecture: ModuleType) -> None:
    docstring = """The theory.

    OPEN     it is open                  -> CLOSING, CLOSED
    CLOSING  it waits for the peer,
             perhaps for long            -> CLOSED
    CLOSED   (final)

Other words.

    no      table
"""
    assert [*architecture.tables_of(docstring)] == [[("OPEN", "CLOSING"), ("OPEN", "CLOSED"), ("CLOSING", "CLOSED")]]


class Calls:
    """Record which functions are called, in their order, as `module Class.function`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.seen.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    def have(self, stops: list[tuple[str, str, str]]) -> None:
        """Check that these stops were called one after the other, whatever was called between them."""
        position = 0
        for module, function, _ in stops:
            floor, _, rest = module.partition("/")
            path = f"{FOLDERS.get(floor, f'muxkit/{floor}')}/{rest}.py"
            later = [index for index, (file, name) in enumerate(self.seen) if file.endswith(path) and name == function]
            found = next((index for index in later if index >= position), None)
            assert found is not None, f"{function} of {path} was not called behind the stops before it"
            position = found


async def test_a_message_passes_all_stops_of_the_pictures(architecture: ModuleType) -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async with (
        muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server,
        muxkit.connect(server.url) as session,
        session.open() as channel,
    ):
        for _ in range(5):  # the receiver reads in the place of the reader's task once that has let it
            await channel.send(bytes(64))
            await channel.receive()
        await trio.testing.wait_all_tasks_blocked(0.01)
        with Calls() as sending:
            await channel.send(bytes(64))
        await channel.receive()
        await channel.send(b"x" * 64)
        with Calls() as receiving:
            assert await channel.receive() == b"x" * 64
    sending.have([*architecture.OUT])
    receiving.have([*architecture.IN])
