"""`muxkit plugins`: the protocols and transports that are installed."""

from __future__ import annotations

import click
import msgspec
from rich.table import Table
from rich.text import Text

from muxkit._plugins import Plugin, installed
from muxkit.cli.terminal import console, printable


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(as_json: bool) -> None:
    """List the installed protocols and transports.

    A URL names one of each: bpmux+tcp://127.0.0.1:7000 is the protocol bpmux over the transport tcp.
    """
    found = installed()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([_as_fields(plugin) for plugin in found])).decode())
    else:
        console().print(_table(found))


# Escaped in JSON too: JSON leaves control characters above 127 unchanged.
def _as_fields(plugin: Plugin) -> dict[str, str | None]:
    fields = (plugin.kind, plugin.name, plugin.package, plugin.target, plugin.problem)
    kind, name, package, target, problem = (None if field is None else printable(field) for field in fields)
    return {"kind": kind, "name": name, "package": package, "target": target, "problem": problem}


def _table(found: list[Plugin]) -> Table:
    table = Table()
    for title in ("kind", "name", "package", "state"):
        table.add_column(title)
    for plugin in found:
        style = "green" if plugin.problem is None else "red" if plugin.extra is None else "yellow"
        state = Text(printable(plugin.problem or "ok"), style=style)
        table.add_row(*(Text(printable(cell)) for cell in (plugin.kind, plugin.name, plugin.package)), state)
    return table
