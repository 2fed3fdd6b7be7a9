"""`muxkit restream serve`: a server of restream, with its sessions in memory, in a file or in a database."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import click

from muxkit import Limits
from muxkit.cli.serving import (
    STORES,
    ServingOptions,
    check_store,
    link_options,
    serve_until_signal,
    serving_options,
    start_task,
)
from muxkit.protocols import restream
from muxkit.protocols.restream.store import open_store

if TYPE_CHECKING:
    import trio

    from muxkit.protocols.restream.store import SessionStore

APPLICATIONS = {"numbers": restream.Numbers, "fed": restream.Fed}
STATELESS: dict[str, type[restream.StatelessApplication]] = {
    "permutation": restream.Permutation,
    "doubling": restream.Doubling,
}


@attrs.frozen(kw_only=True)
class Options(ServingOptions):
    """What the arguments say."""

    store: str
    application: str
    stateless: str
    pace: float | None
    expiry: float
    takeover: bool
    status: bool


@click.command()
@click.argument("url")
@click.option("--store", callback=check_store, default="memory:", show_default=True, help=f"{STORES}.")
@click.option(
    "--application",
    type=click.Choice([*APPLICATIONS]),
    default="numbers",
    show_default=True,
    help="What sessions stream: the document's numbers, or what a program appends to the store.",
)
@click.option(
    "--stateless",
    type=click.Choice([*STATELESS]),
    default="permutation",
    show_default=True,
    help="What streams without a session send.",
)
@click.option(
    "--pace", type=click.FloatRange(0.0, 1e9, min_open=True), help="Messages per second on one connection, at most."
)
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
@serving_options
def serve(cert: str | None, key: str | None, insecure: bool, **given: Any) -> int:
    """Serve both modes at URL, such as restream+tcp://127.0.0.1:7000; port 0 chooses a free one.

    Ends in order on Ctrl-C: messages that are being sent are sent whole, and clients resume at the next server. There
    is no password: every client that reaches the address may begin sessions, and read each one whose uuid it knows.
    """
    options = Options(link=link_options(cert, key, insecure), **given)
    opened = open_store(options.store, keep=options.expiry)
    return serve_until_signal(
        options, opened, partial(_start, options), lambda served: {"connections": served.connections}
    )


async def _start(options: Options, nursery: trio.Nursery, store: SessionStore[object, object]) -> restream.Served:
    serve = partial(
        restream.serve,
        options.url,
        store,
        application=APPLICATIONS[options.application](),
        stateless=STATELESS[options.stateless](),
        config=restream.ServerConfig(status=options.status),
        limits=Limits(connections=options.connections),
        takeover=options.takeover,
        pace=options.pace,
        **options.link,
    )
    served: restream.Served = await start_task(nursery, options, serve)
    return served
