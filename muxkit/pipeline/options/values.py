"""What does the text of an option mean? Numbers, sizes, times, yes and no; each error names its option."""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

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


class Given:
    """Options as they came: names in any case, values as text. It knows which of them were asked for."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): str(options[name]) for name in options}

    def refuse_unknown(self, known: Collection[str], *, passed_over: Collection[str] = ()) -> None:
        """Raises `OptionError` for a name that is none of these; Spark would not notice a slip."""
        names = {name.lower(): name for name in known}
        for name in self._values:
            if name not in names and name not in {each.lower() for each in passed_over}:
                raise OptionError(name, f"there is no such option; there are {', '.join(sorted(names.values()))}")

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower(), "").strip()
        return value or None

    def read(self, name: str, parse: Callable[[str, str], ValueT], default: ValueT) -> ValueT:
        """The value, parsed by a function of the text and the option's name."""
        value = self.text(name)
        return default if value is None else parse(value, name)


def count(value: str, name: str) -> int:
    """A whole number above 0."""
    if not re.fullmatch(r"\d{1,18}", value) or int(value) < 1:
        raise OptionError(name, f"{value[:100]!r} is no whole number above 0")
    return int(value)


def seconds(value: str, name: str) -> float:
    """A time above 0: a number of seconds, or with one of ms, s, m, h, d."""
    found = _MEASURE.fullmatch(value)
    unit = None if found is None else _SECONDS.get(found[2].lower())
    if found is None or unit is None or not 0 < float(found[1]) * unit < math.inf:
        raise OptionError(name, f"{value[:100]!r} is no time above 0, such as 30s, 500ms, 2h or a number of seconds")
    return float(found[1]) * unit


def size(value: str, name: str) -> int:
    """A size of at least one byte: a number, or with one of k, m, g."""
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
    """One of the values of an enumeration."""

    def parse(value: str, name: str) -> ChoiceT:
        for each in of:
            if each.value == value.lower():
                return each
        raise OptionError(name, f"{value[:100]!r} is none of {', '.join(str(each.value) for each in of)}")

    return parse
