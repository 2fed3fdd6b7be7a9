"""Why does one allocation at the start make bulk transfers faster? It keeps the C library from giving memory back.

glibc returns what is free at the end of its heap to the kernel as soon as that is more than 128 KiB, and each page
costs a fault when it is wanted again: a few messages of 64 KiB in flight then cost 20 times as much to make as to
copy. It raises that bound by itself to twice the size of the largest block that was ever freed. Elsewhere this does
nothing.
"""

from __future__ import annotations

from functools import cache

BLOCK = 8 * 1024 * 1024  # bytes; larger than what one connection's windows hold at a time


@cache  # once is enough, and later the block would have to be cleared
def keep_freed_memory() -> None:
    """Let freed memory up to twice `BLOCK` stay with the process. Its pages are never touched, so this is quick."""
    bytes(BLOCK)
