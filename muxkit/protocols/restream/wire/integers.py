"""Integers of any size as decimal text, without the interpreter's limit on digits.

Python refuses to convert more than 4,300 digits because its algorithm takes quadratic time. These take less, and no
single step holds the interpreter for long, so other threads run meanwhile.
"""

from __future__ import annotations

import decimal
from typing import Final

INLINE_DIGITS: Final = 20_000
"""Digits up to which a conversion is so short that it needs no thread of its own."""

_DIRECT_DIGITS: Final = 512  # the interpreter's limit can be set as low as 640
_DIRECT_BITS: Final = 1600  # of a number with fewer than 512 digits


def is_canonical(text: str) -> bool:
    """Return True for an integer without plus sign and leading zeros, and 0 without a sign."""
    digits = text[1:] if text[:1] == "-" else text
    return digits.isdigit() and digits.isascii() and (digits[0] != "0" or text == "0")


def count_digits(text: str) -> int:
    """Return the number of digits of canonical text."""
    return len(text) - (text[:1] == "-")


def parse_integer(text: str) -> int:
    """Return the integer of canonical text."""
    if len(text) <= _DIRECT_DIGITS:
        return int(text)
    if text[0] == "-":
        return -_parse(text, 1, len(text), {})
    return _parse(text, 0, len(text), {})


def format_integer(value: int) -> str:
    """Return the canonical text of an integer."""
    bits = value.bit_length()
    if bits <= _DIRECT_BITS:
        return str(value)
    with decimal.localcontext() as context:
        context.prec = decimal.MAX_PREC
        context.Emax = decimal.MAX_EMAX
        context.Emin = decimal.MIN_EMIN
        context.traps[decimal.Inexact] = True
        text = str(_decimal(abs(value), bits, {}))
    return f"-{text}" if value < 0 else text


def _parse(text: str, start: int, stop: int, powers: dict[int, int]) -> int:
    if stop - start <= _DIRECT_DIGITS:
        return int(text[start:stop])
    low = (stop - start) // 2
    upper = _parse(text, start, stop - low, powers)
    return upper * _power_of_ten(low, powers) + _parse(text, stop - low, stop, powers)


def _power_of_ten(exponent: int, powers: dict[int, int]) -> int:
    power = powers.get(exponent)
    if power is None:
        # 10 ** n as 5 ** n shifted: the smaller number is multiplied.
        power = powers[exponent] = 5**exponent << exponent
    return power


def _decimal(value: int, bits: int, powers: dict[int, decimal.Decimal]) -> decimal.Decimal:
    if bits <= _DIRECT_BITS:
        return decimal.Decimal(value)
    low = bits // 2
    upper = _decimal(value >> low, bits - low, powers)
    return upper * _power_of_two(low, powers) + _decimal(value & ((1 << low) - 1), low, powers)


def _power_of_two(exponent: int, powers: dict[int, decimal.Decimal]) -> decimal.Decimal:
    power = powers.get(exponent)
    if power is None:
        power = powers[exponent] = decimal.Decimal(2) ** exponent
    return power
