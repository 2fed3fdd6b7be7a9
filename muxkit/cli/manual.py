"""The manual page of the command, made from its help: `python -m muxkit.cli.manual > docs/man/muxkit.1`.

It is written for groff's man macros, and holds every command with its arguments and options.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import click

import muxkit
from muxkit.cli.commands import commands

FILES_AND_VARIABLES = (
    ("MUXKIT_TOKEN", "The token that a client shows, or the only one that a server lets in, without --token-file."),
    ("MUXKIT_TIMEOUT", "Seconds until a server must have answered, without --timeout."),
    ("NO_COLOR", "No colours, on a terminal too; there are none in a pipe."),
    ("NOTIFY_SOCKET, LISTEN_FDS, LISTEN_PID", "Set by systemd for muxkit serve: readiness, and sockets to listen on."),
)


def manual() -> str:
    """Return the page."""
    lines = [f'.TH MUXKIT 1 "" "muxkit {muxkit.__version__}" "User Commands"', ".SH NAME"]
    lines += ["muxkit \\- many flow\\-controlled channels over one connection", ".SH SYNOPSIS"]
    lines += [".B muxkit", ".I COMMAND", "[OPTIONS] [ARGUMENTS]", ".SH DESCRIPTION"]
    lines += _paragraphs(commands.help or "")
    lines.append(".SH COMMANDS")
    for path, command in _all(commands, ("muxkit",)):
        lines += [f'.SS "{_escaped(" ".join(path))}"', ".PP", *_usage(path, command), *_paragraphs(command.help or "")]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                lines += _option(parameter, click.Context(command))
    lines.append(".SH ENVIRONMENT")
    for name, text in FILES_AND_VARIABLES:
        lines += [".TP", f".B {_escaped(name)}", _escaped(text)]
    return "\n".join(lines) + "\n"


def _all(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from _all(command, (*path, name))
        else:
            yield (*path, name), command


def _usage(path: tuple[str, ...], command: click.Command) -> list[str]:
    pieces = command.collect_usage_pieces(click.Context(command))
    return [f".B {_escaped(' '.join(path))}", _escaped(" ".join(pieces))]


def _option(option: click.Option, context: click.Context) -> list[str]:
    record = option.get_help_record(context)
    if record is None:
        return []
    name, text = record
    return [".TP", f".B {_escaped(name)}", _escaped(" ".join(text.split())) or "\\&"]


def _paragraphs(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\b", "").strip()):
        lines += [".PP", _escaped(" ".join(paragraph.split()))]
    return lines


def _escaped(text: str) -> str:
    """Escape what groff would obey: backslashes, hyphens that are typed, and dots and quotes that begin a line."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "").replace('"', "\\(dq").replace("…", "...")
    return f"\\&{text}" if text[:1] in (".", "'") else text


if __name__ == "__main__":
    sys.stdout.write(manual())
