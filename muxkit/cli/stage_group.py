"""`muxkit stage`: the server that a Spark sink writes to. Each command has a module of its own and one line here."""

from __future__ import annotations

import click

from muxkit.cli.stage import serve


@click.group()
def stage() -> None:
    """Rows that are staged by many and committed as one: what a Spark query writes to."""


stage.add_command(serve)
