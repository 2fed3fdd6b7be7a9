"""The links of the pages lead somewhere, and their tables follow the code; `tests/pages` runs their programs."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from muxkit import Limits
from muxkit._plugins import OWN, PROTOCOLS, TRANSPORTS
from muxkit.core import RECEIVING, SENDING, draw
from muxkit.protocols.bpmux import Config
from muxkit.protocols.restream import StoreLimits
from muxkit.runtime.pumps.reading import READER
from tests._pages import DOCS, PAGES, ROOT, page_name, program

ANY_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def test_the_readme_begins_with_the_echo_example() -> None:
    assert program("README.md", 1) == (ROOT / "examples" / "echo.py").read_text(encoding="utf-8")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Where the links of a page lead inside the project: file and heading."""
    for found in LINK.finditer(ANY_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        target, _, heading = found["target"].partition("#")
        if "://" not in target:
            yield (page.parent / target).resolve() if target else page, heading


def headings(page: Path) -> set[str]:
    """The names by which a page's headings can be linked to."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert [target for target, _ in links(page) if not target.exists()] == []
    assert [heading for target, heading in links(page) if heading and heading not in headings(target)] == []


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, waiting = {DOCS / "index.md"}, [DOCS / "index.md"]
    while waiting:
        found = {target for target, _ in links(waiting.pop()) if target.suffix == ".md"} - reached
        reached |= found
        waiting += found
    assert sorted(page_name(page) for page in PAGES if page.is_relative_to(DOCS) and page not in reached) == []


# ---------------------------------------------------------------------------- tables that follow the code


def rows(page: str) -> dict[str, list[str]]:
    """The cells of every table row that begins with a name in backticks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in cells}


IN_BYTES = {
    "channel_memory",
    "channel_bytes",
    "channel_first",
    "channel_floor",
    "connection_bytes",
    "message",
    "reassembly",
    "outbox",
}


OF_STREAM_ENGINES = ("stream_engine.py", "mux_state.py")


def shown(field: "attrs.Attribute[object]") -> str:
    """A default as the pages write it."""
    value = field.default
    if field.name in IN_BYTES and isinstance(value, int):
        return f"{value // 2**20} MiB" if value % 2**20 == 0 else f"{value // 2**10} KiB"
    return f"{value:g} s" if isinstance(value, float) else f"{value:,}"


def test_every_extra_is_on_the_page_about_installing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert rows("docs/how-to/install.md").keys() == project["optional-dependencies"].keys()


def test_every_limit_is_explained_with_its_default() -> None:
    table = rows("docs/how-to/limits.md")
    expected = {field.name: shown(field) for field in attrs.fields(Limits)}
    assert {field: cells[0] for field, cells in table.items()} == expected


def test_the_limits_that_a_protocol_ignores_are_those_that_its_sources_do_not_name() -> None:
    """Was: the page said of every limit that every protocol had it."""
    section = (ROOT / "docs/how-to/limits.md").read_text("utf-8").partition("### Where a limit has nothing to bound")[2]
    table = [line.split("|")[1:3] for line in section.partition("###")[0].splitlines() if line.startswith("| ")][1:]
    of_transports = {"connections", "half_open", "half_open_per_address", "handshake"}
    for protocol, ignored in table:
        folder = ROOT / "muxkit/protocols" / protocol.strip().lower()
        sources = "".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
        if "MuxConnection" in sources:
            sources += (ROOT / "muxkit/runtime/connection.py").read_text("utf-8")
        if "StreamMuxEngine" in sources:
            sources += "".join((ROOT / "muxkit/core" / name).read_text("utf-8") for name in OF_STREAM_ENGINES)
        named = set(re.findall(r"limits\.(\w+)", sources))
        named |= {"channel_memory"} if "CHANNEL_PRICE" in sources else set()
        unused = {field.name for field in attrs.fields(Limits)} - named - of_transports
        assert set(re.findall(r"`(\w+)`", ignored)) == unused, protocol
    assert len(table) == 5


def test_every_limit_of_a_store_is_explained_with_its_default() -> None:
    table = rows("docs/reference/restream-stores.md")
    sizes = {"message_bytes": "1 MiB", "bytes": "1 TiB"}
    for field in attrs.fields(StoreLimits):
        assert table.get(field.name, ["missing"])[0] == sizes.get(field.name, shown(field))
    assert (StoreLimits().message_bytes, StoreLimits().bytes) == (2**20, 2**40)


def test_every_setting_of_bpmux_is_explained_with_its_default() -> None:
    table = rows("docs/reference/bpmux.md")
    for field in attrs.fields(Config):
        default = f"{field.default:g} s" if isinstance(field.default, float) else str(field.default)
        assert table.get(field.name, ["missing"])[0] == default


@pytest.mark.parametrize("page", ["README.md", "docs/reference/feature-matrix.md", "docs/reference/url.md"])
def test_a_page_names_every_protocol_and_transport(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = [*OWN[PROTOCOLS], *OWN[TRANSPORTS]]
    assert [each for each in names if not re.search(rf"\b{each}\b", text)] == []


def test_the_state_diagrams_are_those_of_the_tables() -> None:
    text = (ROOT / "docs" / "explanation" / "why-halves.md").read_text(encoding="utf-8")
    diagrams = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    assert diagrams == [draw(SENDING), draw(RECEIVING)]


def test_the_state_diagram_of_the_reader_is_that_of_its_table() -> None:
    text = (ROOT / "docs" / "explanation" / "decisions" / "0015-a-receiver-may-read.md").read_text(encoding="utf-8")
    assert re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL) == [draw(READER)]
