"""`muxkit restream serve`: a server of restream, with its sessions in memory, in a file or in a database."""

from __future__ import annotations

import signal
import ssl
from typing import TYPE_CHECKING, Any

import attrs
import click
import msgspec
import trio

from muxkit import Limits
from muxkit.cli._outcome import CommandFailed, Exit
from muxkit.cli._terminal import printable
from muxkit.protocols import restream
from muxkit.protocols.restream.store import open_store
from muxkit.runtime import background
from muxkit.storage import KINDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from muxkit.protocols.restream.store import SessionStore

APPLICATIONS = {"numbers": restream.Numbers, "fed": restream.Fed}
STATELESS: dict[str, type[restream.StatelessApplication]] = {
    "permutation": restream.Permutation,
    "doubling": restream.Doubling,
}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _store(context: click.Context, parameter: click.Parameter, value: str) -> str:
    kind, colon, rest = value.partition(":")
    if colon and (not rest if kind == "memory" else bool(rest) and kind in ("sqlite", "postgresql", "postgres")):
        return value
    raise click.BadParameter(f"{printable(value)!r}: expected {KINDS}")


@attrs.frozen(kw_only=True)
class Options:
    """What the arguments say."""

    url: str
    store: str
    application: str
    stateless: str
    pace: float | None
    expiry: float
    takeover: bool
    status: bool
    connections: int
    grace: float
    link: dict[str, Any]
    as_json: bool


@click.command()
@click.argument("url")
@click.option("--store", callback=_store, default="memory:", show_default=True, help=f"{KINDS}.")
@click.option(
    "--application",
    type=click.Choice([*APPLICATIONS]),
    default="numbers",
    show_default=True,
    help="What sessions stream: the document's numbers, or what somebody appends to the store.",
)
@click.option(
    "--stateless",
    type=click.Choice([*STATELESS]),
    default="permutation",
    show_default=True,
    help="What the streams without a session are.",
)
@click.option("--pace", type=click.FloatRange(0.0, 1e9, min_open=True), help="Messages a second, a connection at most.")
@click.option(
    "--expiry",
    type=click.FloatRange(0.0, 1e9),
    default=30.0,
    show_default=True,
    help="Seconds that a session outlives its connection.",
)
@click.option(
    "--takeover/--no-takeover",
    default=True,
    show_default=True,
    help="Whether a second connection of a session ends the first, or gets the error itself.",
)
@click.option("--status", is_flag=True, help="Answer status requests, an addition to the protocol.")
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
def serve(cert: str | None, key: str | None, insecure: bool, **options: Any) -> int:
    """Serve both modes at URL, such as restream+tcp://127.0.0.1:7000; with port 0 a free one is found.

    Ends in order on Ctrl-C: what is being sent goes out whole, and clients go on with the next server. There is no
    password: whoever reaches the address may begin sessions, and whoever knows the uuid of one may read it.
    """
    link: dict[str, Any] = {"insecure": True} if insecure else {}
    if cert is not None:
        link["ssl_context"] = context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
    try:
        return trio.run(_serve, Options(link=link, **options))
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise CommandFailed("PostgreSQL needs psycopg; it comes with: pip install 'muxkit[postgres]'") from error


async def _serve(options: Options) -> int:
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async with open_store(options.store, keep=options.expiry) as store, background() as nursery:
            served = await _start(nursery, options, store)
            _say(options, f"listening on {served.url}", {"event": "listening", "urls": served.urls})
            number = await anext(signals)
            _say(options, "ending", {"event": "ending", "connections": served.connections})
            nursery.start_soon(_cut_at_the_next, signals, nursery.cancel_scope)
            await served.shutdown(grace=options.grace)
            nursery.cancel_scope.cancel()
    if number == signal.SIGINT:
        raise CommandFailed("interrupted", Exit.INTERRUPTED)
    return Exit.OK


async def _cut_at_the_next(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()


async def _start(nursery: trio.Nursery, options: Options, store: SessionStore[object, object]) -> restream.Served:
    def serve(task_status: trio.TaskStatus[restream.Served]) -> Any:  # noqa: ANN401 - what a nursery awaits
        return restream.serve(
            options.url,
            store,
            application=APPLICATIONS[options.application](),
            stateless=STATELESS[options.stateless](),
            config=restream.ServerConfig(status=options.status),
            limits=Limits(connections=options.connections),
            takeover=options.takeover,
            pace=options.pace,
            task_status=task_status,
            **options.link,
        )

    try:
        served: restream.Served = await nursery.start(serve)
    except ValueError as error:
        raise click.UsageError(printable(str(error))) from None
    except TypeError as error:
        if not options.link:
            raise
        names = ", ".join(options.link)
        raise click.UsageError(f"{printable(options.url)}: this transport does not take {names}") from error
    return served


def _say(options: Options, line: str, fields: dict[str, object]) -> None:
    click.echo(msgspec.json.encode(fields).decode() if options.as_json else printable(line))
