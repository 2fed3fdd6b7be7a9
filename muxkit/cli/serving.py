"""`muxkit restream serve` and `muxkit stage serve`: their options, startup and shutdown."""

from __future__ import annotations

import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import click
import trio

import muxkit
from muxkit import Limits
from muxkit.cli.terminal import CommandFailed, Exit, in_options, printable, say
from muxkit.pipeline import Staging, StagingLimits, forward, open_staging, serve_staging, tokens
from muxkit.protocols import restream
from muxkit.protocols.restream.store import SessionStore, open_store
from muxkit.runtime import background

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
STORES: Final = "memory:, sqlite:PATH or postgresql://…"

GIB: Final = 1 << 30

StoreT = TypeVar("StoreT")
ServedT = TypeVar("ServedT", muxkit.Server, restream.Served)


@attrs.frozen(kw_only=True)
class ServingOptions:
    """The options of all servers."""

    url: str
    connections: int
    grace: float
    link: dict[str, Any]
    """Options of the transport."""
    as_json: bool


_OPTIONS: Final = (
    click.option(
        "--connections",
        type=click.IntRange(1, 10**6),
        default=1024,
        show_default=True,
        help="Maximum number of concurrent connections.",
    ),
    click.option(
        "--grace",
        type=click.FloatRange(0.0, 3600.0),
        default=5.0,
        show_default=True,
        help="Seconds that clients get to close their connections when the server shuts down.",
    ),
    click.option(
        "--cert", type=click.Path(exists=True, dir_okay=False), help="For tls and wss: the certificate chain, PEM."
    ),
    click.option(
        "--key", type=click.Path(exists=True, dir_okay=False), help="The private key, if it isn't in the same file."
    ),
    click.option("--insecure", is_flag=True, help="Allow plaintext beyond this machine."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line."),
)


def serving_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of all servers. Its function gets them as its first argument."""

    @wraps(command)
    def with_options(cert: str | None, key: str | None, insecure: bool, **given: Any) -> int:
        link: dict[str, Any] = {"insecure": True} if insecure else {}
        if cert is not None:
            link["ssl_context"] = context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(cert, key)
        common = {name: given.pop(name) for name in ("url", "connections", "grace", "as_json")}
        return command(ServingOptions(link=link, **common), **given)

    decorated: Callable[..., int] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def check_store(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Validate the address of a store."""
    kind, colon, rest = value.partition(":")
    if colon and (not rest if kind == "memory" else bool(rest) and kind in ("sqlite", "postgresql", "postgres")):
        return value
    raise click.BadParameter(f"{printable(value)!r}: expected {STORES}")


def serve_until_signal(
    options: ServingOptions,
    opened: AbstractAsyncContextManager[StoreT],
    start: Callable[[trio.Nursery, StoreT], Awaitable[ServedT]],
    live: Callable[[ServedT], dict[str, object]],
) -> int:
    """Run a server over a store until SIGINT or SIGTERM, then shut it down, or abort it at the next signal.

    `live` returns the part of the last line that describes clients that are still connected. Returns the exit code.
    """

    async def serve() -> int:
        with trio.open_signal_receiver(*SIGNALS) as signals:
            async with opened as store, background() as nursery:
                served = await start(nursery, store)
                listening = {"event": "listening", "urls": served.urls}
                say(f"listening on {served.url}", listening, as_json=options.as_json)
                number = await anext(signals)
                say("ending", {"event": "ending", **live(served)}, as_json=options.as_json)
                nursery.start_soon(_cancel_at_the_next, signals, nursery.cancel_scope)
                await served.shutdown(grace=options.grace)
                nursery.cancel_scope.cancel()
        return number

    try:
        number = trio.run(serve)
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise CommandFailed("PostgreSQL needs psycopg; it comes with: pip install 'muxkit[postgres]'") from error
    if number == signal.SIGINT:
        raise CommandFailed("interrupted", Exit.INTERRUPTED)
    return Exit.OK


async def _cancel_at_the_next(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()


async def start_task(nursery: trio.Nursery, options: ServingOptions, start: Callable[..., Awaitable[object]]) -> Any:  # noqa: ANN401 - the value that the task starts with
    """Start a task of the server. Addresses and options that it rejects become usage errors."""
    try:
        return await nursery.start(start)
    except (ValueError, muxkit.Unsupported) as error:
        raise click.UsageError(printable(in_options(str(error)))) from None
    except TypeError as error:
        if not options.link:
            raise
        names = ", ".join(options.link)
        raise click.UsageError(f"{printable(options.url)}: this transport does not take {names}") from error


# ---------------------------------------------------------------------------- muxkit restream serve


APPLICATIONS = {"numbers": restream.Numbers, "fed": restream.Fed}
STATELESS: dict[str, type[restream.StatelessApplication]] = {
    "permutation": restream.Permutation,
    "doubling": restream.Doubling,
}


@click.command("serve")
@click.argument("url")
@click.option("--store", callback=check_store, default="memory:", show_default=True, help=f"{STORES}.")
@click.option(
    "--application",
    type=click.Choice([*APPLICATIONS]),
    default="numbers",
    show_default=True,
    help="What sessions stream: the specification's numbers, or messages that a program appends to the store.",
)
@click.option(
    "--stateless",
    type=click.Choice([*STATELESS]),
    default="permutation",
    show_default=True,
    help="What stateless streams send.",
)
@click.option(
    "--pace",
    type=click.FloatRange(0.0, 1e9, min_open=True),
    help="Maximum number of messages per second on one connection.",
)
@click.option(
    "--expiry",
    type=click.FloatRange(0.0, 1e9),
    default=30.0,
    show_default=True,
    help="Seconds that a session survives without a connection.",
)
@click.option(
    "--takeover/--no-takeover",
    default=True,
    show_default=True,
    help="Whether a second connection of a session replaces the first or is refused.",
)
@click.option("--status", is_flag=True, help="Answer status requests, an extension of the protocol.")
@click.option(
    "--listing", is_flag=True, help="Also list all sessions to every client, so that clients can subscribe by pattern."
)
@serving_options
def serve_restream(
    options: ServingOptions,
    store: str,
    application: str,
    stateless: str,
    pace: float | None,
    expiry: float,
    takeover: bool,
    status: bool,
    listing: bool,
) -> int:
    """Serve stateful and stateless streams at URL, such as restream+tcp://127.0.0.1:7000. Port 0 picks a free port.

    Ctrl-C shuts the server down between two messages, and clients resume at the next server. There is no password:
    every client that reaches the address may start sessions, and read any session whose uuid it knows.
    """

    async def start(nursery: trio.Nursery, sessions: SessionStore[object, object]) -> restream.Served:
        serve = partial(
            restream.serve,
            options.url,
            sessions,
            application=APPLICATIONS[application](),
            stateless=STATELESS[stateless](),
            config=restream.ServerConfig(status=status or listing, listing=listing),
            limits=Limits(connections=options.connections),
            takeover=takeover,
            pace=pace,
            **options.link,
        )
        served: restream.Served = await start_task(nursery, options, serve)
        return served

    opened = open_store(store, keep=expiry)
    return serve_until_signal(options, opened, start, lambda served: {"connections": served.connections})


# ---------------------------------------------------------------------------- muxkit stage serve


def _forwards(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if not all(stream and uuid for stream, uuid in pairs.items()) or len(pairs) < len(values):
        raise click.BadParameter("expected STREAM=UUID, each stream once")
    return pairs


@click.command("serve")
@click.argument("url")
@click.option("--store", callback=check_store, default="memory:", show_default=True, help=f"{STORES}.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    help="A file with the tokens of clients that may write, one per line. Without it, every client may.",
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
    help="Append the committed rows of a stream to this restream session. Can be repeated.",
)
@click.option(
    "--restream",
    "restream_url",
    metavar="URL",
    help="Serve the forwarded sessions at this address, such as restream+tcp://127.0.0.1:7001.",
)
@click.option(
    "--sessions",
    callback=check_store,
    default="memory:",
    show_default=True,
    help=f"The store of the forwarded sessions: {STORES}.",
)
@serving_options
def serve_stage(
    options: ServingOptions,
    store: str,
    token_file: str | None,
    staged: int,
    forwards: dict[str, str],
    restream_url: str | None,
    sessions: str,
) -> int:
    """Serve staging at URL, such as bpmux+tcp://127.0.0.1:7000. Port 0 picks a free port.

    Ctrl-C shuts the server down. Staged rows are still there when it starts again, unless the store is in memory.
    """
    if restream_url is not None and not forwards:
        raise click.UsageError("--restream requires --forward STREAM=UUID")
    known: tuple[str, ...] = ()
    if token_file is not None and not (known := tuple(Path(token_file).read_text(encoding="utf-8").split())):
        raise click.UsageError(f"{printable(token_file)}: expected at least one token, or no client could write")

    async def start(nursery: trio.Nursery, staging: Staging) -> muxkit.Server:
        serve = partial(
            serve_staging,
            options.url,
            staging,
            authorize=tokens(*known) if known else None,
            limits=Limits(connections=options.connections),
            **options.link,
        )
        served: muxkit.Server = await start_task(nursery, options, serve)
        if forwards:
            await start_task(nursery, options, partial(_forward, options, staging, forwards, sessions, restream_url))
        return served

    opened = open_staging(store, limits=StagingLimits(staged=staged))
    return serve_until_signal(options, opened, start, lambda served: {"sessions": len(served.sessions())})


async def _forward(
    options: ServingOptions,
    staging: Staging,
    forwards: dict[str, str],
    store: str,
    url: str | None,
    task_status: trio.TaskStatus[None],
) -> None:
    """Append committed rows to the sessions of a restream store, and serve these if there is a URL for them."""
    async with open_store(store) as sessions, background() as nursery:
        if url is not None:
            serve = partial(
                restream.serve,
                url,
                sessions,
                application=restream.Fed(),
                config=restream.ServerConfig(status=True),
                **options.link,
            )
            served = await nursery.start(serve)
            announced = {"event": "restream", "urls": served.urls}
            say(f"restream on {served.url}", announced, as_json=options.as_json)
        for stream, uuid in forwards.items():
            nursery.start_soon(forward, staging, stream, sessions, uuid)
        task_status.started()
        await trio.sleep_forever()
