"""Which commands are there? Each has a module of its own and one line here."""

from __future__ import annotations

import os
import sys

import click

import muxkit
from muxkit.cli._bench._command import bench
from muxkit.cli._capture import capture
from muxkit.cli._chaos import chaos
from muxkit.cli._demo import demo
from muxkit.cli._fleet import fleet
from muxkit.cli._outcome import Exit, failure_of
from muxkit.cli._plugins_command import plugins
from muxkit.cli._restream import restream
from muxkit.cli._stage import stage
from muxkit.cli._terminal import printable


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(muxkit.__version__, prog_name="muxkit")
def commands() -> None:
    """Many flow-controlled channels over one connection.

    Exit codes: 0 ok, 1 it failed, 2 usage, 3 could not connect, 4 the peer broke the protocol, 5 timed out,
    130 interrupted.
    """


for command in (bench, capture, chaos, demo, fleet, plugins, restream, stage):
    commands.add_command(command)


def run() -> int:
    """Do what the arguments of this process say; every way out of it is here."""
    try:
        # Outside of click's standalone mode the exit codes are ours: it knows 0, 1 and 2 only.
        done = commands.main(prog_name="muxkit", standalone_mode=False)
        return done if isinstance(done, int) else Exit.OK
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return _say("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output is gone; what is still buffered must not complain at exit.
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
