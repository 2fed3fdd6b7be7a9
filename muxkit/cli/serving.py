"""The commands that serve: their common options, how they start, and how a signal ends them."""

from __future__ import annotations

import signal
import ssl
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import attrs
import click
import msgspec
import trio

from muxkit.cli.outcome import CommandFailed, Exit
from muxkit.cli.terminal import printable
from muxkit.runtime import background

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
STORES: Final = "memory:, sqlite:PATH or postgresql://…"

CommandT = TypeVar("CommandT", bound="Callable[..., Any]")
StoreT = TypeVar("StoreT")
StartedT = TypeVar("StartedT")


class Served(Protocol):
    """A server that runs: `muxkit.Served`, or that of restream."""

    @property
    def url(self) -> str: ...
    @property
    def urls(self) -> Sequence[str]: ...
    async def shutdown(self, *, grace: float) -> None: ...


ServedT = TypeVar("ServedT", bound=Served)


@attrs.frozen(kw_only=True)
class ServingOptions:
    """The options that all servers have."""

    url: str
    connections: int
    grace: float
    link: dict[str, Any]
    """Options of the transport."""
    as_json: bool


_OPTIONS: Final = (
    click.option(
        "--connections", type=click.IntRange(1, 10**6), default=1024, show_default=True, help="At once, at most."
    ),
    click.option(
        "--grace",
        type=click.FloatRange(0.0, 3600.0),
        default=5.0,
        show_default=True,
        help="Seconds that clients have to close their connections when the server ends.",
    ),
    click.option(
        "--cert", type=click.Path(exists=True, dir_okay=False), help="For tls and wss: the certificates, PEM."
    ),
    click.option("--key", type=click.Path(exists=True, dir_okay=False), help="The key, if it is not in the same file."),
    click.option("--insecure", is_flag=True, help="Allow plaintext beyond this machine."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line."),
)


def serving_options(command: CommandT) -> CommandT:
    """Give a command the options of `ServingOptions`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_store(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Accept the address of a store."""
    kind, colon, rest = value.partition(":")
    if colon and (not rest if kind == "memory" else bool(rest) and kind in ("sqlite", "postgresql", "postgres")):
        return value
    raise click.BadParameter(f"{printable(value)!r}: expected {STORES}")


def link_options(cert: str | None, key: str | None, insecure: bool) -> dict[str, Any]:
    """Make options of the transport from those of the command."""
    link: dict[str, Any] = {"insecure": True} if insecure else {}
    if cert is not None:
        link["ssl_context"] = context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
    return link


def serve_until_signal(
    options: ServingOptions,
    opened: AbstractAsyncContextManager[StoreT],
    start: Callable[[trio.Nursery, StoreT], Awaitable[ServedT]],
    live: Callable[[ServedT], dict[str, object]],
) -> int:
    """Run a server over a store until SIGINT or SIGTERM, then end it in order, or at once at the next signal.

    `live` gives what the line at the end says of clients that are still connected. Returns the exit code.
    """
    try:
        number = trio.run(_serve, options, opened, start, live)
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise CommandFailed("PostgreSQL needs psycopg; it comes with: pip install 'muxkit[postgres]'") from error
    if number == signal.SIGINT:
        raise CommandFailed("interrupted", Exit.INTERRUPTED)
    return Exit.OK


async def _serve(
    options: ServingOptions,
    opened: AbstractAsyncContextManager[StoreT],
    start: Callable[[trio.Nursery, StoreT], Awaitable[ServedT]],
    live: Callable[[ServedT], dict[str, object]],
) -> int:
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async with opened as store, background() as nursery:
            served = await start(nursery, store)
            say(options, f"listening on {served.url}", {"event": "listening", "urls": served.urls})
            number = await anext(signals)
            say(options, "ending", {"event": "ending", **live(served)})
            nursery.start_soon(_cancel_at_the_next, signals, nursery.cancel_scope)
            await served.shutdown(grace=options.grace)
            nursery.cancel_scope.cancel()
    return number


async def _cancel_at_the_next(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()


async def start_task(nursery: trio.Nursery, options: ServingOptions, start: Callable[..., Awaitable[object]]) -> Any:  # noqa: ANN401 - the value that the task starts with
    """Start a task of the server; addresses and options that it refuses become usage errors."""
    try:
        return await nursery.start(start)
    except ValueError as error:
        raise click.UsageError(printable(str(error))) from None
    except TypeError as error:
        if not options.link:
            raise
        names = ", ".join(options.link)
        raise click.UsageError(f"{printable(options.url)}: this transport does not take {names}") from error


def say(options: ServingOptions, line: str, fields: dict[str, object]) -> None:
    """Print a line for people, or its fields as JSON."""
    click.echo(msgspec.json.encode(fields).decode() if options.as_json else printable(line))
