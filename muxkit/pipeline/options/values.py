"""Options from text: numbers, sizes, times, servers and streams; each error names its option."""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

import attrs

from muxkit.pipeline.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_BYTES: Final = {"": 1, "b": 1, "k": _KIB, "kib": _KIB, "m": _MIB, "mib": _MIB, "g": _GIB, "gib": _GIB}
_MEASURE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_YES_NO: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

ChoiceT = TypeVar("ChoiceT", bound=Enum)
ValueT = TypeVar("ValueT")


class GivenOptions:
    """The options that Spark was given: names in any case, values as text."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): str(options[name]) for name in options}

    def refuse_unknown(self, known: Collection[str], *, passed_over: Collection[str] = ()) -> None:
        """Raise `OptionError` for an unknown name; Spark would not notice a misspelt one."""
        names = {name.lower(): name for name in known}
        for name in self._values:
            if name not in names and name not in {each.lower() for each in passed_over}:
                raise OptionError(name, f"there is no such option; there are {', '.join(sorted(names.values()))}")

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower(), "").strip()
        return value or None

    def read(self, name: str, parse: Callable[[str, str], ValueT], default: ValueT) -> ValueT:
        """Parse a value with a function of its text and the option's name."""
        value = self.text(name)
        return default if value is None else parse(value, name)


def count(value: str, name: str) -> int:
    """Parse a whole number above 0."""
    if not re.fullmatch(r"\d{1,18}", value) or int(value) < 1:
        raise OptionError(name, f"{value[:100]!r} is no whole number above 0")
    return int(value)


def seconds(value: str, name: str) -> float:
    """Parse a time above 0: a number of seconds, or with one of ms, s, m, h, d."""
    found = _MEASURE.fullmatch(value)
    unit = None if found is None else _SECONDS.get(found[2].lower())
    if found is None or unit is None or not 0 < float(found[1]) * unit < math.inf:
        raise OptionError(name, f"{value[:100]!r} is no time above 0, such as 30s, 500ms, 2h or a number of seconds")
    return float(found[1]) * unit


def size(value: str, name: str) -> int:
    """Parse a size of at least one byte: a number, or with one of k, m, g."""
    found = _MEASURE.fullmatch(value)
    unit = None if found is None else _BYTES.get(found[2].lower())
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise OptionError(name, f"{value[:100]!r} is no size, such as 65536, 64k or 16m")
    return int(float(found[1]) * unit)


def yes_or_no(value: str, name: str) -> bool:
    try:
        return _YES_NO[value.lower()]
    except KeyError:
        raise OptionError(name, f"{value[:100]!r} is neither true nor false") from None


def choice(of: type[ChoiceT]) -> Callable[[str, str], ChoiceT]:
    """Make a parser for the values of an enumeration."""

    def parse(value: str, name: str) -> ChoiceT:
        for each in of:
            if each.value == value.lower():
                return each
        raise OptionError(name, f"{value[:100]!r} is none of {', '.join(str(each.value) for each in of)}")

    return parse


_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ONE: Final = re.compile(rf"(?:(?P<server>restream\+[a-z][a-z0-9]*://[^\s#]+)#)?(?P<uuid>{_UUID})", re.IGNORECASE)
# A comma also separates the hosts of one URL: it ends an item only before another one, or at the end.
_BETWEEN: Final = re.compile(rf"\s+|,\s*(?={_UUID}|restream\+|$)", re.IGNORECASE)
_SERVER: Final = re.compile(r"restream\+[a-z][a-z0-9]*://[^\s#]+", re.IGNORECASE)


@attrs.frozen
class Reference:
    """A restream session; `server` is the URL of its server, or None if that has to be found."""

    uuid: str
    server: str | None = None

    def __str__(self) -> str:
        return self.uuid if self.server is None else f"{self.server}#{self.uuid}"


def parse_reference(text: str, option: str) -> Reference:
    """Parse one stream, `uuid` or `url#uuid`; raises `OptionError` for this option."""
    found = _ONE.fullmatch(text)
    if found is None:
        raise OptionError(option, f"{text[:200]!r} is neither a uuid nor url#uuid with a URL such as restream+tcp://…")
    return Reference(found["uuid"].lower(), found["server"])


def parse_references(text: str, option: str) -> tuple[Reference, ...]:
    """Parse streams between white space or commas; of duplicates the first one counts."""
    found = {each.uuid: each for each in reversed([parse_reference(item, option) for item in items(text)])}
    return tuple(sorted(found.values(), key=lambda each: each.uuid))


def parse_servers(text: str, option: str) -> tuple[str, ...]:
    """Parse URLs of servers between white space or commas."""
    servers = items(text)
    for server in servers:
        if not _SERVER.fullmatch(server):
            raise OptionError(option, f"{server[:200]!r} is no URL of a server, such as restream+tcp://127.0.0.1:7000")
    return tuple(dict.fromkeys(servers))


def items(text: str) -> list[str]:
    """Split text at white space and commas."""
    return [item for item in _BETWEEN.split(text.strip()) if item]
