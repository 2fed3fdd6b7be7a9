"""The command line `muxkit`: its commands, and the exit code of every error."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points

import click

import muxkit
from muxkit.cli.capture import capture
from muxkit.cli.chaos import chaos
from muxkit.cli.demo.command import demo
from muxkit.cli.fleet import fleet
from muxkit.cli.outcome import CommandFailed, Exit, failure_of
from muxkit.cli.plugins import plugins
from muxkit.cli.restream.read import read
from muxkit.cli.restream.serve import serve as serve_restream
from muxkit.cli.stage import serve as serve_stage
from muxkit.cli.terminal import printable

ADDED = "muxkit.commands"  # the group of entry points


class Commands(click.Group):
    """The commands of the library, and those that other packages add by entry points; one of these is imported late."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(entry.name for entry in entry_points(group=ADDED))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        found = [] if own is not None else [*entry_points(group=ADDED, name=cmd_name)]
        if not found:
            return own
        try:
            added: click.Command = found[0].load()
        except ImportError as error:
            return _unavailable(cmd_name, error)
        return added


def _unavailable(name: str, error: ImportError) -> click.Command:
    """Stand in for a command whose package is named and cannot be imported."""
    problem = printable(f"{name} is not installed: {error}")

    def fail() -> None:
        raise CommandFailed(problem, Exit.USAGE)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, context_settings=anything, callback=fail, add_help_option=False, help=problem)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(muxkit.__version__, prog_name="muxkit")
def commands() -> None:
    """Many flow-controlled channels over one connection.

    Exit codes: 0 ok, 1 it failed, 2 usage, 3 could not connect, 4 the peer broke the protocol, 5 timed out,
    130 interrupted.
    """


@commands.group()
def restream() -> None:
    """Streams that survive lost connections: no message is lost, repeated or invented."""


@commands.group()
def stage() -> None:
    """The staging server of a Spark sink: many tasks stage rows, which are committed as one transaction."""


restream.add_command(read)
restream.add_command(serve_restream)
stage.add_command(serve_stage)
for command in (capture, chaos, demo, fleet, plugins):
    commands.add_command(command)


def run() -> int:
    """Run the command of this process's arguments; return the exit code."""
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
