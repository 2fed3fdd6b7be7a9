"""`muxkit forward`: forward connections to and from a server, and the server for that."""

from __future__ import annotations

import logging
import os
import signal
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import click
import trio

from muxkit import forward as forwards
from muxkit.cli.common import (
    FILE,
    LinkOptions,
    allow_files,
    check_url,
    either_options,
    names_and_secrets,
    notify,
    run,
    serve_until_signal,
    shown_metrics,
)
from muxkit.cli.terminal import CommandFailed, Exit, printable, say
from muxkit.core import counted
from muxkit.runtime import background

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
PATHS: Final = frozenset({"token_file", "cert", "key", "ca", "client_ca", "socks_users"})

ParsedT = TypeVar("ParsedT")


def _pair(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    if any(forwards.without_udp(value)[1] for value in values):
        raise click.BadParameter("UDP works with --local only")
    return [(str(bind), str(target)) for bind, target in _each(forwards.parse_forward, values)]


def _local(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str, bool]]:
    split = [forwards.without_udp(value) for value in values]
    pairs = _pair(context, parameter, tuple(text for text, _ in split))
    for (bind, target), (_, is_udp) in zip(pairs, split, strict=True):
        if is_udp and "/" in bind + target:
            raise click.BadParameter(printable(f"{bind} to {target}: UDP forwards don't support Unix sockets"))
    return [(bind, target, is_udp) for (bind, target), (_, is_udp) in zip(pairs, split, strict=True)]


def _bind(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return [str(each) for each in _each(partial(forwards.parse_address, any_port=True), values)]


def rules(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> forwards.AllowList:
    _each(lambda text: forwards.AllowList([text]), values)
    return forwards.AllowList(values)


def _each(parse: Any, values: Sequence[str]) -> list[Any]:  # noqa: ANN401 - any parser
    try:
        return [parse(value) for value in values]
    except ValueError as error:
        raise click.BadParameter(printable(str(error))) from None


def _config(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Read a file for the options that aren't on the command line."""
    if value is None:
        return
    try:
        read = tomllib.loads(Path(value).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{printable(value)}: {printable(str(error))}") from None
    known = {
        option.removeprefix("--"): each
        for each in context.command.params
        for option in (each.opts if each.param_type_name == "option" else [each.name or ""])
        if option.startswith("--") or each.param_type_name == "argument"
    }
    defaults: dict[str, object] = {}
    for key, given in read.items():
        found = known.get(key)
        if found is None or found is parameter or found.name is None:
            raise click.BadParameter(
                f"{printable(value)}: unknown option {printable(key)!r}: expected one of {', '.join(known)}"
            )
        several = given if found.multiple and isinstance(given, list) else [given]
        if any(isinstance(each, (list, dict)) for each in several):
            what = "one value or a list" if found.multiple else "one value"
            raise click.BadParameter(f"{printable(value)}: {printable(key)}: expected {what}")
        # Else as if it stood on the command line, where click takes everything but a flag as text.
        texts = [each if isinstance(each, bool) else str(each) for each in several]
        if found.name in PATHS:
            texts = [os.path.join(os.path.dirname(value), str(each)) for each in texts]
        defaults[found.name] = texts if found.multiple else texts[0]
    context.default_map = defaults


@attrs.frozen(kw_only=True)
class _Options:
    """How a client connects and shuts down."""

    url: str
    link: LinkOptions
    grace: float
    limits: forwards.ForwardLimits

    @property
    def as_json(self) -> bool:
        return self.link.as_json


@click.command()
@click.argument("url", required=False)
@click.option(
    "--local",
    "-L",
    multiple=True,
    callback=_local,
    metavar="BIND:TARGET[/udp]",
    help="Listen on this machine; the server connects to TARGET.",
)
@click.option(
    "--remote",
    "-R",
    multiple=True,
    callback=_pair,
    metavar="BIND:TARGET",
    help="Listen on the server; this machine connects to TARGET.",
)
@click.option(
    "--socks",
    "-D",
    multiple=True,
    callback=_bind,
    metavar="BIND",
    help="Listen on this machine as a SOCKS5 proxy; the server connects.",
)
@click.option("--socks-users", type=FILE, help="Users of the proxy: a name and a password per line.")
@click.option("--serve", is_flag=True, help="Run the server at URL.")
@click.option(
    "--allow",
    multiple=True,
    callback=rules,
    metavar="RULE",
    help="Allowed targets, such as db.internal@10.0.0.0/8:5432. Without --serve, restricts the SOCKS proxy.",
)
@click.option(
    "--allow-listen",
    multiple=True,
    callback=rules,
    metavar="RULE",
    help="With --serve: addresses on which clients may listen.",
)
@click.option(
    "--patience",
    type=click.FloatRange(0.0, 1e6),
    default=forwards.PATIENCE,
    show_default=True,
    help="Seconds that a new connection waits for a session.",
)
@click.option(
    "--proxy-header",
    type=click.Choice(["1", "2"]),
    help="Send a header of this version of the PROXY protocol to the targets of -L and -R, with the client's address.",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 10**6),
    default=4096,
    show_default=True,
    help="Maximum number of concurrent connections of one forward or one client.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0.0, 1e6),
    default=10.0,
    show_default=True,
    help="Seconds that connections get to finish after Ctrl-C.",
)
@click.option(
    "--config",
    type=FILE,
    is_eager=True,
    expose_value=False,
    callback=_config,
    metavar="FILE.toml",
    help="Read options from this file. The command line overrides it.",
)
@either_options
def forward(
    link: LinkOptions,
    url: str | None,
    local: list[tuple[str, str, bool]],
    remote: list[tuple[str, str]],
    socks: list[str],
    socks_users: str | None,
    serve: bool,
    allow: forwards.AllowList,
    allow_listen: forwards.AllowList,
    patience: float,
    proxy_header: str | None,
    connections: int,
    grace: float,
) -> int:
    """Forward connections over a session with the server at URL, such as bpmux+wss://example.com/forward.

    BIND and TARGET are host:port, [IPv6]:port, a port of this machine's loopback, or the path of a Unix socket. A lost
    session is reopened. The listeners of this machine stay open, and those on the server are requested again. Over
    relink, forwarded connections survive. The first Ctrl-C lets connections finish, and the second resets them.

    A server connects and listens only where its rules allow it.
    """
    if url is None:
        raise click.UsageError("Missing argument 'URL'.")
    mine = {
        "--local": local,
        "--remote": remote,
        "--socks": socks,
        "--socks-users": socks_users,
        "--proxy-header": proxy_header,
    }
    if serve and (wrong := [name for name, given in mine.items() if given]):
        raise click.UsageError(f"{wrong[0]} is for clients and can't be used with --serve")
    if not serve and (
        wrong := [
            name for name, given in {"--allow-listen": allow_listen, "--client-ca": link.has_client_ca}.items() if given
        ]
    ):
        raise click.UsageError(f"{wrong[0]} requires --serve")
    if not serve and allow and not socks:
        raise click.UsageError("--allow requires --serve or --socks")
    if serve and not allow and not allow_listen:
        raise click.UsageError("--serve requires --allow or --allow-listen")
    if not serve and not (local or remote or socks):
        raise click.UsageError("nothing to forward: use --local, --remote or --socks")
    if proxy_header and not remote and all(is_udp for *_, is_udp in local):
        raise click.UsageError("--proxy-header requires --local or --remote for TCP: SOCKS and UDP have no header")
    allow_files()
    if serve:
        return serve_forwards(link, [url], allow, allow_listen, connections=connections, grace=grace)
    check_url(url, link)
    options = _Options(url=url, link=link, grace=grace, limits=forwards.ForwardLimits(connections=connections))
    users = None if socks_users is None else names_and_secrets(socks_users)
    wanted = _Wanted(
        local=local,
        remote=remote,
        socks=socks,
        users=users,
        allow=allow or None,
        patience=patience,
        proxy_header=None if proxy_header is None else 1 if proxy_header == "1" else 2,
    )
    with _Lines(link.as_json):
        number = run(_forward, options, wanted, link.token())
    if number == signal.SIGINT:
        raise CommandFailed("interrupted", Exit.INTERRUPTED)
    return Exit.OK


class _Lines(logging.Handler):
    """Prints log records of the library as output lines of the command while its block runs."""

    def __init__(self, as_json: bool) -> None:
        super().__init__(logging.INFO)
        self._as_json = as_json
        self.addFilter(_is_told)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            fields = {"event": getattr(record, "event", "log"), **getattr(record, "fields", {})}
            say(text, {**fields, "level": record.levelname.lower(), "text": text}, as_json=self._as_json)
        except Exception:
            self.handleError(record)

    def __enter__(self) -> None:
        logging.getLogger("muxkit").setLevel(logging.INFO)
        logging.getLogger("muxkit").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("muxkit").removeHandler(self)


def _is_told(record: logging.LogRecord) -> bool:
    """Return True for warnings, for records of forwards, and for events of the library."""
    return record.levelno >= logging.WARNING or record.name == "muxkit.forward" or hasattr(record, "event")


# ---------------------------------------------------------------------------- the client


@attrs.frozen(kw_only=True)
class _Wanted:
    """The forwards of a client."""

    local: list[tuple[str, str, bool]]
    """What to listen on, what to reach, and whether by UDP."""
    remote: list[tuple[str, str]]
    socks: list[str]
    users: Mapping[str, str] | None
    allow: forwards.AllowList | None
    patience: float
    proxy_header: forwards.ProxyHeader | None


async def _forward(options: _Options, wanted: _Wanted, token: str | None) -> int:
    """Forward until a signal arrives, and return its number."""
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async with AsyncExitStack() as stack:
            metrics = options.link.observer()
            await stack.enter_async_context(shown_metrics(options.link, metrics))
            line = await stack.enter_async_context(
                forwards.line(
                    options.link.urls(options.url),
                    tls=options.link.tls,
                    token=token,
                    observer=metrics,
                    linger=1.0,
                    **options.link.link,
                )
            )
            opened = await _open(stack, options, wanted, line)
            notify("READY=1")
            number = await anext(signals)
            notify("STOPPING=1")
            live = sum(each.stats().connections for each in opened.values())
            text = f"shutting down; waiting up to {options.grace:g} s for {counted(live, 'connection')}"
            say(text, {"event": "ending", "connections": live}, as_json=options.as_json)
            async with background() as nursery:
                nursery.start_soon(_cancel_at_the_next, signals, nursery.cancel_scope)
                async with trio.open_nursery() as ending:
                    for each in opened.values():
                        ending.start_soon(partial(each.shutdown, grace=options.grace))
            for what, each in opened.items():
                _say_total(what, each.stats(), options)
    return number


async def _open(
    stack: AsyncExitStack, options: _Options, wanted: _Wanted, line: forwards.Line
) -> dict[str, forwards.Forward]:
    """Open all forwards. Return them by a description for people."""
    how: dict[str, Any] = {"patience": wanted.patience, "limits": options.limits}
    opened: dict[str, forwards.Forward] = {}
    for bind, target, is_udp in wanted.local:
        if is_udp:
            kind, opener = "udp", forwards.open_datagrams(line, bind, target, **how)
        else:
            kind, opener = "local", forwards.open_local(line, bind, target, **how, proxy_header=wanted.proxy_header)
        each = await stack.enter_async_context(opener)
        shown = f"{target}/udp" if is_udp else target
        opened[f"{each.address} to {shown}"] = each
        _say_listening(kind, each, shown, options)
    for bind in wanted.socks:
        proxy = forwards.socks(line, bind, allow=wanted.allow, users=wanted.users, **how)
        each = await stack.enter_async_context(proxy)
        opened[f"{each.address} by SOCKS5"] = each
        _say_listening("socks", each, "SOCKS5", options)
    for number, (bind, target) in enumerate(wanted.remote, 1):
        remote = await stack.enter_async_context(
            forwards.open_remote(line, bind, target, **how, proxy_header=wanted.proxy_header)
        )
        opened[f"{bind} at the server to {target} ({number})"] = remote
    return opened


def _say_listening(kind: str, opened: forwards.Forward, target: str, options: _Options) -> None:
    for address in opened.addresses:
        fields = {"event": "listening", "kind": kind, "address": address, "target": target}
        say(f"listening on {address} for {target}", fields, as_json=options.as_json)


def _say_total(what: str, stats: forwards.ForwardStats, options: _Options) -> None:
    text = (
        f"{what}: {counted(stats.total, 'connection')}, {stats.refused:,} refused; "
        f"{counted(stats.bytes_in, 'byte')} received, {stats.bytes_out:,} sent"
    )
    say(text, {"event": "total", "forward": what, **attrs.asdict(stats)}, as_json=options.as_json)


async def _cancel_at_the_next(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()


# ---------------------------------------------------------------------------- the server


def serve_forwards(
    link: LinkOptions,
    urls: Sequence[str],
    allow: forwards.AllowList,
    allow_listen: forwards.AllowList,
    *,
    connections: int,
    grace: float,
    **more: Any,
) -> int:
    """Run a server of forwards as this process. `more` are options of the transport."""
    handler = forwards.handler(allow, listen=allow_listen, limits=forwards.ForwardLimits(connections=connections))
    return serve_until_signal(handler, urls, link, grace=grace, logged=_Lines(link.as_json), **more)
