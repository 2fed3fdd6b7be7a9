"""`muxkit serve`: a server that echoes messages, runs a command for each channel, serves files, or forwards."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

import muxkit
from muxkit.cli.common import LinkOptions, allow_files, serve_until_signal, server_options
from muxkit.cli.forward import rules, serve_forwards
from muxkit.cli.processes import run_commands
from muxkit.cli.terminal import printable
from muxkit.cli.transfer.files import NAME, Folder, serve_folder
from muxkit.forward import AllowList


async def send_back(channel: muxkit.Channel) -> None:
    """Send back each message."""
    async for message in channel:
        await channel.send(message)
    await channel.finish()


def _command(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str] | None:
    if value is None:
        return None
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise click.BadParameter(f"{printable(value)}: {error}") from None
    if not words:
        raise click.BadParameter("expected a command")
    if shutil.which(words[0]) is None:
        raise click.BadParameter(f"{printable(words[0])}: command not found or not executable")
    return words


def _origins(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.netloc or value != f"{parts.scheme}://{parts.netloc}":
            raise click.BadParameter(f"{printable(value)}: expected an origin without a path: https://example.org")
    return values


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--echo", is_flag=True, help="Send back each message.")
@click.option(
    "--exec",
    "command",
    callback=_command,
    metavar="COMMAND",
    help="Run this command for each channel. It is split into words as a shell does, but no shell runs it.",
)
@click.option(
    "--files",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Let clients read the files in this folder with `muxkit recv`.",
)
@click.option("--upload", is_flag=True, help="With --files: let clients add files with `muxkit send`.")
@click.option("--overwrite", is_flag=True, help="With --upload: let clients replace files as well.")
@click.option(
    "--processes",
    type=click.IntRange(1, 10**6),
    default=64,
    show_default=True,
    help="With --exec: maximum number of concurrent commands.",
)
@click.option(
    "--allow",
    multiple=True,
    callback=rules,
    metavar="RULE",
    help="Let clients of `muxkit forward` connect to this target, such as db.internal@10.0.0.0/8:5432.",
)
@click.option(
    "--allow-listen",
    multiple=True,
    callback=rules,
    metavar="RULE",
    help="Let clients of `muxkit forward` listen on this address.",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 10**6),
    default=4096,
    show_default=True,
    help="With --allow and --allow-listen: maximum number of concurrent connections of one client.",
)
@click.option(
    "--web",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Deliver the pages of this folder, and /muxkit.js, on the port of a ws or wss URL.",
)
@click.option(
    "--origin",
    "origins",
    multiple=True,
    callback=_origins,
    metavar="ORIGIN",
    help="Let pages from this origin connect, such as https://example.org. Can be repeated.",
)
@click.option(
    "--balancer",
    "balancers",
    multiple=True,
    metavar="NETWORK",
    help="Learn the addresses of clients from the PROXY headers of this balancer, such as 10.0.0.5 or 10.1.0.0/16; may "
    "be repeated. It must send one with each connection.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0.0, 1e6),
    default=10.0,
    show_default=True,
    help="Seconds that sessions get to finish after Ctrl-C.",
)
@server_options
def serve(
    link: LinkOptions,
    urls: tuple[str, ...],
    echo: bool,
    command: list[str] | None,
    folder: Path | None,
    upload: bool,
    overwrite: bool,
    processes: int,
    allow: AllowList,
    allow_listen: AllowList,
    connections: int,
    web: Path | None,
    origins: tuple[str, ...],
    balancers: tuple[str, ...],
    grace: float,
) -> int:
    """Serve at one or several URLs, such as bpmux+tcp://127.0.0.1:7000.

    The first Ctrl-C stops accepting sessions and waits up to --grace seconds for live ones (exit code 0). The second
    ends them immediately (exit code 1). Under systemd, the server reports to NOTIFY_SOCKET and listens on the sockets
    of LISTEN_FDS, one for each URL.

    Web pages may connect if their origin is one of --origin, or if they come from --web and were requested by this
    machine's IP address or as localhost.

    A command finds the name of its channel in MUXKIT_CHANNEL and the client in MUXKIT_PEER and MUXKIT_USER.
    """
    forwards = bool(allow or allow_listen)
    if sum((echo, command is not None, folder is not None, forwards)) != 1:
        raise click.UsageError("expected one of --echo, --exec, --files and --allow (or --allow-listen)")
    if upload and folder is None:
        raise click.UsageError("--upload requires --files")
    if overwrite and not upload:
        raise click.UsageError("--overwrite requires --upload")
    more = _for_browsers(urls, web, origins)
    if balancers:
        more["balancers"] = balancers
    if command is None:  # which would get it too, and may not be made for it
        allow_files()
    if forwards:
        return serve_forwards(link, urls, allow, allow_listen, connections=connections, grace=grace, **more)
    handler = muxkit.each_channel(send_back)
    if command is not None:
        handler = muxkit.each_channel(run_commands(command, at_once=processes))
    elif folder is not None:
        handler = muxkit.by_name({NAME: serve_folder(Folder(folder), upload=upload, overwrite=overwrite)})
    return serve_until_signal(handler, urls, link, grace=grace, **more)


def _for_browsers(urls: tuple[str, ...], web: Path | None, origins: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of the WebSocket transport for web pages."""
    given = [name for name, value in (("--web", web), ("--origin", origins)) if value]
    others = [url for url in urls if url.partition("://")[0].partition("+")[2] not in ("ws", "wss")]
    if given and others:
        raise click.UsageError(f"{given[0]} works with ws and wss URLs only, not with {printable(others[0])}")
    more: dict[str, Any] = {"origins": origins} if origins else {}
    if web is not None:
        from muxkit_web import Pages  # needed by few servers

        more["pages"] = Pages(web)
    return more
