"""What is the number after this one? The first output of a Mersenne twister that is seeded with it."""

from __future__ import annotations

from typing import Final

U32_MAX: Final = 0xFFFFFFFF
_STEPS: Final = range(2, 398)


def next_value(value: int) -> int:
    """The first 32 bits of MT19937, seeded as `init_genrand` does.

    That output needs only the words 0, 1 and 397 of the twister's 624, so the seeding stops there.
    """
    first = word = value
    second = word = (1812433253 * (word ^ word >> 30) + 1) & U32_MAX
    for step in _STEPS:
        word = (1812433253 * (word ^ word >> 30) + step) & U32_MAX
    mixed = (first & 0x80000000) | (second & 0x7FFFFFFF)
    word ^= mixed >> 1
    if mixed & 1:
        word ^= 0x9908B0DF
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ word >> 18
