"""`muxkit stage serve`: a staging server, with its transactions in memory, in a file or in a database."""

from __future__ import annotations

import signal
import ssl
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click
import msgspec
import trio

from muxkit import Limits
from muxkit.cli.outcome import CommandFailed, Exit
from muxkit.cli.terminal import printable
from muxkit.pipeline import StagingLimits, forward, open_staging, serve_staging, tokens
from muxkit.protocols import restream
from muxkit.runtime import background

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from muxkit.pipeline import Staging

KINDS: Final = "memory:, sqlite:PATH or postgresql://…"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
GIB: Final = 1 << 30


def _store(context: click.Context, parameter: click.Parameter, value: str) -> str:
    kind, colon, rest = value.partition(":")
    if colon and (not rest if kind == "memory" else bool(rest) and kind in ("sqlite", "postgresql", "postgres")):
        return value
    raise click.BadParameter(f"{printable(value)!r}: expected {KINDS}")


def _forwards(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if not all(stream and uuid for stream, uuid in pairs.items()) or len(pairs) < len(values):
        raise click.BadParameter("expected STREAM=UUID, each stream once")
    return pairs


@attrs.frozen(kw_only=True)
class Options:
    """What the arguments say."""

    url: str
    store: str
    tokens: tuple[str, ...]
    staged: int
    connections: int
    grace: float
    forwards: dict[str, str]
    restream: str | None
    sessions: str
    link: dict[str, Any]
    as_json: bool


@click.command()
@click.argument("url")
@click.option("--store", callback=_store, default="memory:", show_default=True, help=f"{KINDS}.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    help="A file with the tokens of those who may write, one a line; without it everybody may.",
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
    help="Make messages of what is committed to a stream, in this session of restream; may be repeated.",
)
@click.option(
    "--restream", metavar="URL", help="Serve those sessions at this address, such as restream+tcp://127.0.0.1:7001."
)
@click.option("--sessions", callback=_store, default="memory:", show_default=True, help=f"Where they are: {KINDS}.")
@click.option("--connections", type=click.IntRange(1, 10**6), default=1024, show_default=True, help="At once, at most.")
@click.option(
    "--grace",
    type=click.FloatRange(0.0, 3600.0),
    default=5.0,
    show_default=True,
    help="Seconds that clients have to take leave when the server ends.",
)
@click.option("--cert", type=click.Path(exists=True, dir_okay=False), help="For tls and wss: the certificates, PEM.")
@click.option("--key", type=click.Path(exists=True, dir_okay=False), help="The key, if it is not in the same file.")
@click.option("--insecure", is_flag=True, help="Allow plaintext beyond this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a line.")
def serve(cert: str | None, key: str | None, insecure: bool, token_file: str | None, **options: Any) -> int:
    """Serve staging at URL, such as bpmux+tcp://127.0.0.1:7000; with port 0 a free one is found.

    Ends in order on Ctrl-C. Whatever is staged when it ends is there when it is started again, unless it was in memory.
    """
    link: dict[str, Any] = {"insecure": True} if insecure else {}
    if cert is not None:
        link["ssl_context"] = context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
    if options["restream"] is not None and not options["forwards"]:
        raise click.UsageError("--restream serves what is forwarded: say --forward STREAM=UUID as well")
    known: tuple[str, ...] = ()
    if token_file is not None and not (known := tuple(Path(token_file).read_text(encoding="utf-8").split())):
        raise click.UsageError(f"{printable(token_file)}: there is no token in it, so nobody could write")
    try:
        return trio.run(_serve, Options(link=link, tokens=known, **options))
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise CommandFailed("PostgreSQL needs psycopg; it comes with: pip install 'muxkit[postgres]'") from error


async def _serve(options: Options) -> int:
    limits = StagingLimits(staged=options.staged)
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async with open_staging(options.store, limits=limits) as store, background() as nursery:
            served = await _started(nursery, options, partial(_staging, options, store))
            if options.forwards:
                await _started(nursery, options, partial(_forwarding, options, store))
            _say(options, f"listening on {served.url}", {"event": "listening", "urls": served.urls})
            number = await anext(signals)
            _say(options, "ending", {"event": "ending", "sessions": served.sessions})
            nursery.start_soon(_cut_at_the_next, signals, nursery.cancel_scope)
            await served.shutdown(grace=options.grace)
            nursery.cancel_scope.cancel()
    if number == signal.SIGINT:
        raise CommandFailed("interrupted", Exit.INTERRUPTED)
    return Exit.OK


async def _cut_at_the_next(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()


async def _staging(options: Options, store: Staging, task_status: trio.TaskStatus[Any]) -> None:
    await serve_staging(
        options.url,
        store,
        authorize=tokens(*options.tokens) if options.tokens else None,
        limits=Limits(connections=options.connections),
        task_status=task_status,
        **options.link,
    )


async def _forwarding(options: Options, store: Staging, task_status: trio.TaskStatus[None]) -> None:
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
            _say(options, f"restream on {served.url}", {"event": "restream", "urls": served.urls})
        for stream, uuid in options.forwards.items():
            nursery.start_soon(forward, store, stream, sessions, uuid)
        task_status.started()
        await trio.sleep_forever()


async def _started(nursery: trio.Nursery, options: Options, start: Callable[..., Awaitable[None]]) -> Any:  # noqa: ANN401 - what the task starts with
    try:
        return await nursery.start(start)
    except ValueError as error:
        raise click.UsageError(printable(str(error))) from None
    except TypeError as error:
        if not options.link:
            raise
        names = ", ".join(options.link)
        raise click.UsageError(f"{printable(options.url)}: this transport does not take {names}") from error


def _say(options: Options, line: str, fields: dict[str, object]) -> None:
    click.echo(msgspec.json.encode(fields).decode() if options.as_json else printable(line))
