"""What may go to a terminal? Consoles that put nothing but text into a pipe, and text that commands no terminal."""

from __future__ import annotations

import sys

from rich.console import Console

WIDE = 200  # columns of what is no terminal: a table in a pipe is not folded


def console() -> Console:
    """Standard output. Colours only on a terminal and without NO_COLOR; rich sees to that."""
    width = None if sys.stdout.isatty() else WIDE
    return Console(width=width, markup=False, emoji=False, highlight=False)


def is_live(out: Console) -> bool:
    """Can what was printed be printed over? FORCE_COLOR does not make a terminal of a pipe."""
    return sys.stdout.isatty() and out.is_terminal and not out.is_dumb_terminal


def printable(text: str) -> str:
    """The text with everything escaped that a terminal would obey, or would show as something else.

    That is each character which Unicode calls control, format, surrogate, private or a separator other than the
    space: escape sequences, line breaks, and marks that turn the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)
