"""Validators for the fields of settings, such as `Limits` and the `Config` of each protocol.

Their errors name the class, the field, the value and what was expected:
`Config(keepalive=0): expected a finite number above 0`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import attrs

Validator = Callable[[object, "attrs.Attribute[Any]", Any], None]


def must_be(what: str, is_right: Callable[[Any], bool]) -> Validator:
    """Make a validator that raises ValueError unless a value is right."""

    def check(instance: object, field: attrs.Attribute[Any], value: Any) -> None:  # noqa: ANN401 - of any field
        if not is_right(value):
            raise ValueError(f"{type(instance).__name__}({field.name}={value!r}): expected {what}")

    return check


def between(least: float, most: float) -> Validator:
    """Make a validator for a number in a range, with both its ends."""
    return must_be(f"a number from {least} to {most}", lambda value: least <= value <= most)


ABOVE_ZERO: Final = must_be("a finite number above 0", lambda value: 0 < value < math.inf)
ABOVE_ZERO_OR_NONE: Final = must_be(
    "a finite number above 0, or None", lambda value: value is None or 0 < value < math.inf
)
AT_LEAST_ONE: Final = must_be("a number of at least 1", lambda value: value >= 1)
NOT_NEGATIVE: Final = must_be("a finite number, and none below 0", lambda value: 0 <= value < math.inf)
