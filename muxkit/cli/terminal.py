"""What a command prints: lines or JSON, no colours in a pipe, and no text that a terminal would obey."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import click
import msgspec
from rich.console import Console

from muxkit.cli.outcome import CommandFailed

WIDE = 200  # columns without a terminal: tables in a pipe are not folded


def console() -> Console:
    """Make the console of standard output. rich uses colours only on a terminal and without NO_COLOR."""
    width = None if sys.stdout.isatty() else WIDE
    return Console(width=width, markup=False, emoji=False, highlight=False)


def is_live(out: Console) -> bool:
    """Return True if lines can be redrawn. FORCE_COLOR does not make a pipe a terminal."""
    return sys.stdout.isatty() and out.is_terminal and not out.is_dumb_terminal


def printable(text: str) -> str:
    """Escape all characters that a terminal would obey, or would show as something else.

    These are the characters that Unicode calls control, format, surrogate, private or a separator other than the
    space: escape sequences, line breaks, and marks that turn the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def say(line: str, fields: Mapping[str, object], *, as_json: bool) -> None:
    """Print a line for people, or its fields as JSON; what a terminal would obey is escaped in both."""
    safe = {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}
    click.echo(msgspec.json.encode(safe).decode() if as_json else printable(line))


def failure_as_fields(failure: CommandFailed | None) -> dict[str, object] | None:
    """Return a failure as JSON shows it."""
    return None if failure is None else {"sentence": printable(failure.sentence), "exit": int(failure.exit)}
