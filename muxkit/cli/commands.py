"""The command line `muxkit`: its table of commands, its version, and the process that runs one of them.

A command is imported when it runs, because importing all of them takes half a second: together they import Trio, rich,
every protocol and the staging server. This module therefore knows only the name of each command, where it is, and the
line that `muxkit --help` shows. It imports click and the names of muxkit, and nothing that needs Trio or rich.
`tests/cli/test_start.py` checks the imported modules.

Other packages add commands with entry points in the group `muxkit.commands`. The entry points are read only for a name
that isn't in the table, and for `muxkit --help`. An entry point names a click command, or a `Later`, which keeps
`muxkit --help` fast.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import attrs
import click

import muxkit
from muxkit.cli.terminal import CommandFailed, Exit, failure_of, printable

ADDED = "muxkit.commands"  # the group of entry points


@attrs.frozen
class Later:
    """A command that is imported when it is run."""

    place: str
    """Where it is: "package.module:name"."""
    line: str
    """The line about it in the list of commands; a longer one than the terminal is wide is wrapped."""

    def load(self) -> click.Command:
        """Import the command. Raises `ImportError` if its module or a dependency isn't installed."""
        module, _, name = self.place.partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


class Commands(click.Group):
    """A group whose commands are imported when they run or when their own help is requested."""

    def __init__(self, *arguments: Any, table: Mapping[str, Later], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted({*self.table, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, imported, or None if there is none."""
        later = self.table.get(cmd_name)
        return super().get_command(ctx, cmd_name) if later is None else later.load()

    def line(self, name: str) -> str:
        """Return the line about a command in the list of commands."""
        return self.table[name].line if name in self.table else self.commands[name].get_short_help_str()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them, as click would."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.line(name)) for name in self.list_commands(ctx)])


class Library(Commands):
    """The commands of muxkit and those that other packages add with entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, those of other packages included, sorted."""
        from importlib.metadata import entry_points

        return sorted({*super().list_commands(ctx), *(entry.name for entry in entry_points(group=ADDED))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name; for an added one that cannot be imported, a command that says why."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        try:
            added = _added(cmd_name)
            return added.load() if isinstance(added, Later) else added
        except ImportError as error:
            return _unavailable(cmd_name, error)

    def line(self, name: str) -> str:
        """Return the line about a command in the list of commands."""
        if name in self.table or name in self.commands:
            return super().line(name)
        try:
            added = _added(name)
        except ImportError as error:
            return _problem(name, error)
        if isinstance(added, Later):
            return added.line
        return "" if added is None else added.get_short_help_str()


def _added(name: str) -> click.Command | Later | None:
    """Return another package's command with this name. Raises `ImportError` if it can't be imported."""
    from importlib.metadata import entry_points  # reads the metadata of every installed package

    for entry in entry_points(group=ADDED, name=name):
        found: click.Command | Later = entry.load()
        return found
    return None


def _problem(name: str, error: ImportError) -> str:
    return printable(f"{name} is not installed: {error}")


def _unavailable(name: str, error: ImportError) -> click.Command:
    """Return a placeholder for a command of a package that can't be imported."""
    problem = _problem(name, error)

    def fail() -> None:
        raise CommandFailed(problem, Exit.USAGE)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, context_settings=anything, callback=fail, add_help_option=False, help=problem)


# ---------------------------------------------------------------------------- the commands


OWN = {
    "call": Later("muxkit.cli.calling:call", "Call a method of a server, with JSON in and out."),
    "capture": Later("muxkit.cli.pipeline.capture:capture", "Report on recorded traffic."),
    "chaos": Later("muxkit.cli.chaos:chaos", "Relay connections over a bad network."),
    "describe": Later("muxkit.cli.calling:describe", "List the methods of a server."),
    "doctor": Later("muxkit.cli.doctor:doctor", "Check this machine, or find the step at which a URL fails."),
    "forward": Later("muxkit.cli.forward:forward", "Forward TCP, UDP and Unix sockets, or serve forwards."),
    "open": Later("muxkit.cli.interactive:open_", "Open a session and send messages interactively."),
    "pipe": Later("muxkit.cli.pipe:pipe", "Connect standard input and output to a channel."),
    "plugins": Later("muxkit.cli.plugins:plugins", "List the installed protocols and transports."),
    "recv": Later("muxkit.cli.transfer.commands:recv", "Receive files and folders."),
    "send": Later("muxkit.cli.transfer.commands:send", "Send files and folders."),
    "serve": Later("muxkit.cli.serve:serve", "Serve an echo, a command, files or forwards."),
    "top": Later("muxkit.cli.watching.top:top", "Show the sessions and channels of a running program."),
    "trace": Later("muxkit.cli.watching.trace:trace", "View, compare and follow traces of sessions."),
}
RESTREAM = {
    "read": Later("muxkit.cli.reading:read", "Read a stream."),
    "serve": Later("muxkit.cli.serving:serve_restream", "Serve streams from memory, SQLite or PostgreSQL."),
}
STAGE = {"serve": Later("muxkit.cli.serving:serve_stage", "Serve the staging store of a Spark sink.")}


def _show_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


@click.group(cls=Library, table=OWN, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def commands() -> None:
    """Many flow-controlled channels over one connection.

    Exit codes: 0 success, 1 failure, 2 invalid usage, 3 no connection, 4 the peer violated the protocol, 5 timeout, 130
    interrupted.
    """


@commands.group(cls=Commands, table=RESTREAM, short_help="Serve and read streams that survive lost connections.")
def restream() -> None:
    """Streams that survive lost connections: no message is lost, repeated or invented."""


@commands.group(cls=Commands, table=STAGE, short_help="Serve the staging store of a Spark sink.")
def stage() -> None:
    """The staging server of a Spark sink: tasks stage rows, and each batch is committed as one transaction."""


# ---------------------------------------------------------------------------- the version


def build() -> str:
    """Return how this muxkit was built: compiled with mypyc, or pure Python."""
    # The module `_windows` is compiled in every compiled build. It is looked for without importing its package.
    found = PathFinder.find_spec("muxkit.core._windows", [str(Path(folder, "core")) for folder in muxkit.__path__])
    is_source = found is None or found.origin is None or found.origin.endswith(".py")
    return "pure Python" if is_source else "compiled"


def version_line() -> str:
    """Return the line of `muxkit --version`: the version, the build, and the versions of Python and Trio."""
    from importlib.metadata import version  # importing Trio for its version would take four times as long

    python = f"{platform.python_implementation()} {platform.python_version()}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        python += " without GIL"
    return f"muxkit, version {muxkit.__version__}, {build()} ({python}, Trio {version('trio')})"


# ---------------------------------------------------------------------------- the process


def run() -> int:
    """Run the command in this process's arguments, and return the exit code."""
    try:
        # Without click's standalone mode, which knows the exit codes 0, 1 and 2 only.
        done = commands.main(prog_name="muxkit", standalone_mode=False)
        return done if isinstance(done, int) else Exit.OK
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return _say("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of standard output is gone; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except BaseException as error:
        failure = failure_of(error)
        if failure is None:
            raise
        return _say(failure.sentence, failure.exit)


def _say(sentence: str, code: Exit) -> Exit:
    print(f"muxkit: {printable(sentence)}", file=sys.stderr)
    return code
