"""`muxkit stage serve`: a staging server, with its transactions in memory, in a file or in a database."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click
import trio

import muxkit
from muxkit import Limits
from muxkit.cli.serving import (
    STORES,
    ServingOptions,
    check_store,
    link_options,
    say,
    serve_until_signal,
    serving_options,
    start_task,
)
from muxkit.cli.terminal import printable
from muxkit.pipeline import StagingLimits, forward, open_staging, serve_staging, tokens
from muxkit.protocols import restream
from muxkit.runtime import background

if TYPE_CHECKING:
    from muxkit.pipeline import Staging

GIB: Final = 1 << 30


def _forwards(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if not all(stream and uuid for stream, uuid in pairs.items()) or len(pairs) < len(values):
        raise click.BadParameter("expected STREAM=UUID, each stream once")
    return pairs


@attrs.frozen(kw_only=True)
class Options(ServingOptions):
    """What the arguments say."""

    store: str
    tokens: tuple[str, ...]
    staged: int
    forwards: dict[str, str]
    restream: str | None
    sessions: str


@click.command()
@click.argument("url")
@click.option("--store", callback=check_store, default="memory:", show_default=True, help=f"{STORES}.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    help="A file with the tokens of clients that may write, one per line; without it every client may.",
)
@click.option(
    "--staged",
    type=click.IntRange(1, 1 << 50),
    default=4 * GIB,
    show_default=True,
    help="Bytes that one application may have staged and not committed.",
)
@click.option(
    "--forward",
    "forwards",
    multiple=True,
    callback=_forwards,
    metavar="STREAM=UUID",
    help="Append what is committed to a stream to this restream session; may be repeated.",
)
@click.option(
    "--restream", metavar="URL", help="Serve those sessions at this address, such as restream+tcp://127.0.0.1:7001."
)
@click.option(
    "--sessions",
    callback=check_store,
    default="memory:",
    show_default=True,
    help=f"The store of those sessions: {STORES}.",
)
@serving_options
def serve(cert: str | None, key: str | None, insecure: bool, token_file: str | None, **given: Any) -> int:
    """Serve staging at URL, such as bpmux+tcp://127.0.0.1:7000; port 0 chooses a free one.

    Ends in order on Ctrl-C. Rows that are staged then are there when it is started again, unless they were in memory.
    """
    if given["restream"] is not None and not given["forwards"]:
        raise click.UsageError("--restream serves what is forwarded: say --forward STREAM=UUID as well")
    known: tuple[str, ...] = ()
    if token_file is not None and not (known := tuple(Path(token_file).read_text(encoding="utf-8").split())):
        raise click.UsageError(f"{printable(token_file)}: there is no token in it, so no client could write")
    options = Options(link=link_options(cert, key, insecure), tokens=known, **given)
    opened = open_staging(options.store, limits=StagingLimits(staged=options.staged))
    return serve_until_signal(options, opened, partial(_start, options), lambda served: {"sessions": served.sessions})


async def _start(options: Options, nursery: trio.Nursery, store: Staging) -> muxkit.Served:
    serve = partial(
        serve_staging,
        options.url,
        store,
        authorize=tokens(*options.tokens) if options.tokens else None,
        limits=Limits(connections=options.connections),
        **options.link,
    )
    served: muxkit.Served = await start_task(nursery, options, serve)
    if options.forwards:
        await start_task(nursery, options, partial(_forward, options, store))
    return served


async def _forward(options: Options, store: Staging, task_status: trio.TaskStatus[None]) -> None:
    async with restream.open_store(options.sessions) as sessions, background() as nursery:
        if options.restream is not None:
            served = await nursery.start(
                partial(
                    restream.serve,
                    options.restream,
                    sessions,
                    application=restream.Fed(),
                    config=restream.ServerConfig(status=True),
                    **options.link,
                )
            )
            say(options, f"restream on {served.url}", {"event": "restream", "urls": served.urls})
        for stream, uuid in options.forwards.items():
            nursery.start_soon(forward, store, stream, sessions, uuid)
        task_status.started()
        await trio.sleep_forever()
