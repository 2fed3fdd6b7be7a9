"""Every attribute that a page names in inline code, such as `session.open` or `muxkit.connect`, exists."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

import muxkit
import muxkit.asyncio
from muxkit.metrics.collecting import METRICS
from muxkit.protocols import aqueduct, bpmux, e3x, relink, yamux
from muxkit_adapters.packets.listeners import PeerLink
from muxkit_web import TYPES
from tests._pages import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

DOCS = ROOT / "docs"
LEFT_OUT = ("changes", "decisions", "migrate.md")  # they speak of names that are gone
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
NAMED = re.compile(r"(?<![\w./\"'@-])(session|channel|link|server|muxkit)((?:\.[A-Za-z_]\w*)+)")
FILES = re.compile(r"\.(py|log|toml|service|socket|local|example|sock|key|pem|db|md|json|txt|conf)$")
PROTOCOLS: dict[str, ModuleType] = {"aqueduct": aqueduct, "bpmux": bpmux, "e3x": e3x, "relink": relink, "yamux": yamux}
SESSIONS: dict[str, tuple[type, ...]] = {
    "aqueduct": (aqueduct.Session,),
    "bpmux": (bpmux.Session,),
    "e3x": (e3x.Session,),
    "relink": (relink.Link,),
    "yamux": (yamux.Session,),
}
CHANNELS: dict[str, tuple[type, ...]] = {
    "aqueduct": (aqueduct.Channel,),
    "bpmux": (bpmux.Duplex,),
    "e3x": (e3x.Channel,),
}


def pages() -> list[Path]:
    return [page for page in sorted(DOCS.rglob("*.md")) if not set(page.relative_to(DOCS).parts) & {*LEFT_OUT}]


def names_on(text: str) -> Iterator[str]:
    """Give each dotted name of the kinds above that stands in inline code."""
    for code in INLINE.findall(FENCED.sub("", text)):
        for owner, rest in NAMED.findall(code):
            name = owner + rest
            if not FILES.search(name):
                yield name


def classes_of(owner: str, page: str) -> Sequence[type]:
    """Return the classes that a name may stand for on a page: those of its protocol, or on other pages of any."""
    if owner == "server":
        return (muxkit.Server, *((aqueduct.Server,) if page == "aqueduct" else ()))
    common: type = muxkit.Channel if owner == "channel" else muxkit.Session
    own = CHANNELS if owner == "channel" else SESSIONS
    if owner == "link" and page == "udp":
        return (PeerLink,)
    if page == "asyncio":
        return (muxkit.asyncio.Session, muxkit.asyncio.Channel)
    if page in PROTOCOLS:
        return (common, *own.get(page, ()))
    return (common, *(each for classes in own.values() for each in classes))


@cache
def sources() -> str:
    """Return the text in which names that are no attributes stand: entry points, metrics, channel types."""
    files = [ROOT / "pyproject.toml", *(ROOT / "muxkit").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    return "".join(file.read_text(encoding="utf-8") for file in files)


@cache
def attributes_of(owner: type) -> frozenset[str]:
    """Return the public attributes of a class and of what its methods set on an instance."""
    found = set(dir(owner))
    for each in owner.__mro__:
        if each.__module__.startswith("muxkit"):
            found |= set(re.findall(r"self\.([a-z]\w*)\b *(?::[^=\n]+)?=", inspect.getsource(each)))
            found |= set(getattr(each, "__annotations__", ()))
    return frozenset(name for name in found if not name.startswith("_"))


@cache
def attributes_in_javascript() -> frozenset[str]:
    """Return the names of all methods and properties that the types of the JavaScript client declare."""
    return frozenset(re.findall(r"^  (?:readonly )?(\w+)[(:?]", TYPES.read_text(encoding="utf-8"), re.MULTILINE))


def exists(name: str, page: str) -> bool:
    owner, first, *_ = name.split(".")
    if page == "browser" and owner in ("session", "channel"):
        return first in attributes_in_javascript()
    if owner == "muxkit":
        is_metric = any(metric.name.startswith(name.replace(".", "_")) for metric in METRICS)
        return is_importable(name) or is_metric or f'"{name}"' in sources()
    return any(first in attributes_of(each) for each in classes_of(owner, page))


def is_importable(name: str) -> bool:
    """Return True for a module, or for an attribute of one, of a class in it, or of an instance of that."""
    found: object = muxkit
    path = "muxkit"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if isinstance(found, type):
            if part not in attributes_of(found):
                return False
            found = getattr(found, part, None)
            continue
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_the_attributes_that_a_page_names_exist(page: Path) -> None:
    missing = {name for name in names_on(page.read_text(encoding="utf-8")) if not exists(name, page.stem)}
    assert not missing


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("session.messages", "bpmux"),
        ("session.streams", "relink"),
        ("channel.recieve", "sessions"),
        ("muxkit.dial", ""),
    ],
)
def test_an_attribute_that_does_not_exist_is_found(name: str, page: str) -> None:
    assert [*names_on(f"Call `await {name}()`, or `open`.")] == [name]
    assert not exists(name, page)
