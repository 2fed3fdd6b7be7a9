"""`muxkit restream`: try restream by hand. Each of its commands has a module of its own and one line here."""

from __future__ import annotations

import click

from muxkit.cli.restream.read import read
from muxkit.cli.restream.serve import serve


@click.group()
def restream() -> None:
    """Streams that survive lost connections: no message is lost, repeated or invented."""


for command in (read, serve):
    restream.add_command(command)
