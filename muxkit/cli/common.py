"""What the commands that connect or serve have in common: options, a session with a URL, a server, and their errors."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

import attrs
import click
import trio

import muxkit
from muxkit._door import Door
from muxkit.cli.terminal import CommandFailed, Exit, in_options, printable, say
from muxkit.core import counted, without_secrets
from muxkit.runtime import ExtraNeeded, can_heal, leaves_of, looks_like
from muxkit.trace import FOLDER

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from muxkit.metrics import Metrics

TOKEN: Final = "MUXKIT_TOKEN"
PROXY: Final = "MUXKIT_PROXY"
FILE: Final = click.Path(exists=True, dir_okay=False)
UNAUTHORISED: Final = muxkit.Refused().code  # some protocols learn of it after they have begun
PROBE_SECONDS: Final = 2.0  # for what answers at a port where no session came about
CONNECT_SECONDS: Final = 10.0
TIMEOUT: Final = "MUXKIT_TIMEOUT"
FIRST_SOCKET: Final = 3  # the descriptor of the first socket that a service manager passes on

FILES: Final = 65_536  # open ones, where the system sets no bound

# Of this process alone: a program that it starts must not have them.
OURS: Final = (TOKEN, PROXY, FOLDER, "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


@attrs.frozen(kw_only=True)
class LinkOptions:
    """How a command connects or serves: certificates, tokens and output format."""

    tls: muxkit.TLS | None
    has_client_ca: bool
    insecure: bool
    tokens: dict[str, str] | None = attrs.field(repr=False)
    """Those of a server's clients by their names, or that of a client; None if there are none."""
    as_json: bool
    proxy: str | None = attrs.field(default=None, repr=False)
    """The URL of the proxy to connect through, or `environment`; None to connect directly."""
    others: tuple[str, ...] = ()
    """Other URLs of the server, which race with the first."""
    metrics: str | None = None
    """Where metrics are shown; None if nowhere."""

    @property
    def link(self) -> dict[str, Any]:
        """The options of the transport."""
        given: dict[str, Any] = {"insecure": True} if self.insecure else {}
        return given if self.proxy is None else given | {"proxy": self.proxy}

    def urls(self, url: str) -> str | list[str]:
        """Return the URL of the command, with the others if there are any."""
        return [url, *self.others] if self.others else url

    def observer(self) -> Metrics | None:
        """Return an observer that counts sessions, if metrics are shown."""
        if self.metrics is None:
            return None
        from muxkit.metrics import Metrics

        return Metrics()

    def token(self) -> str | None:
        """Return the client's token, or None."""
        if self.tokens is not None and len(self.tokens) > 1:
            raise click.UsageError(f"--token-file of a client: expected one token, got {len(self.tokens)}")
        return None if self.tokens is None else next(iter(self.tokens.values()))

    def check_exposure(self, urls: Sequence[str]) -> None:
        """Reject a server that other machines can reach and that would accept every client."""
        if self.insecure or self.has_client_ca or self.tokens:
            return
        if all(is_here(url) for url in urls if "://" in url):  # what is no URL is refused by the library, in its words
            return
        raise click.UsageError("the server would accept every client: use --token-file or --client-ca (or --insecure)")


_TOKEN_OF_CLIENT = click.option("--token-file", type=FILE, help=f"The client's token. [default: ${TOKEN}]")
_TOKENS_OF_SERVER = click.option(
    "--token-file",
    type=FILE,
    help=f"Accept only clients with these tokens: a name and a token per line. [default: ${TOKEN}]",
)
_TOKEN_OF_EITHER = click.option(
    "--token-file",
    type=FILE,
    help=f"The client's token; with --serve, a name and a token per line. [default: ${TOKEN}]",
)
_CERT = (
    click.option("--cert", type=FILE, help="The certificate chain to present, PEM."),
    click.option("--key", type=FILE, help="The private key, if it isn't in the same file."),
)
_CA = click.option("--ca", type=FILE, help="Certificates of the authorities to trust, PEM. [default: the system's]")
proxy_option: CommandDecorator = click.option(
    "--proxy",
    metavar="URL",
    envvar=PROXY,
    help="Connect through this proxy: http://host:port, socks5://host:port, socks5h://host:port, or `environment` for "
    f"HTTPS_PROXY or ALL_PROXY. Put a URL with a password into ${PROXY}.",
)
_OR = click.option(
    "--or",
    "others",
    multiple=True,
    metavar="URL",
    help="Another URL of the server. It starts 250 ms after the one before, and the first that answers is used. Can be "
    "repeated.",
)
_TRACE = click.option(
    "--trace",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help=f"Write a trace of each session to this folder. [default: ${FOLDER}]",
)
_METRICS = click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Serve /metrics for Prometheus, /healthz, and /sessions for `muxkit top` by HTTP here, or at unix:PATH.",
)
timeout_option: CommandDecorator = click.option(
    "--timeout",
    type=click.FloatRange(0.001, 1e9),
    default=CONNECT_SECONDS,
    show_default=True,
    envvar=TIMEOUT,
    help=f"Seconds to wait for the server's answer; also ${TIMEOUT}.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")


def _client_ca(when: str) -> Callable[..., Any]:
    return click.option(
        "--client-ca", type=FILE, help=f"{when}Accept only clients with certificates from these authorities, PEM."
    )


def _insecure(help: str) -> Callable[..., Any]:
    return click.option("--insecure", is_flag=True, help=help)


CommandDecorator: TypeAlias = Callable[[Callable[..., int]], Callable[..., int]]


def _with_options(*options: Callable[..., Any]) -> CommandDecorator:
    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def with_options(
            token_file: str | None,
            cert: str | None,
            key: str | None,
            insecure: bool,
            as_json: bool,
            ca: str | None = None,
            client_ca: str | None = None,
            proxy: str | None = None,
            others: tuple[str, ...] = (),
            trace: str | None = None,
            metrics: str | None = None,
            **given: Any,
        ) -> int:
            if trace is not None:
                os.environ[FOLDER] = trace
            if client_ca is not None and given.get("serve") is False:
                raise click.UsageError("--client-ca requires --serve")
            if others and given.get("serve"):
                raise click.UsageError("--or is for clients and can't be used with --serve")
            if given.get("serve"):
                proxy = None  # a server doesn't connect anywhere
            try:
                given_any = (cert, key, ca, client_ca) != (None,) * 4
                tls = muxkit.TLS(cert=cert, key=key, ca=ca, client_ca=client_ca) if given_any else None
            except ValueError as error:
                raise click.UsageError(printable(in_options(str(error)))) from None
            link = LinkOptions(
                tls=tls,
                has_client_ca=client_ca is not None,
                insecure=insecure,
                tokens=_tokens(token_file),
                as_json=as_json,
                proxy=proxy,
                others=others,
                metrics=metrics,
            )
            return command(link, **given)

        decorated: Callable[..., int] = with_options
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


_CLIENT = (
    _TOKEN_OF_CLIENT,
    *_CERT,
    _CA,
    proxy_option,
    _insecure("Allow plaintext beyond this machine, and servers with any certificate."),
    _TRACE,
    _JSON,
)

one_url_options: CommandDecorator = _with_options(*_CLIENT)
"""Give a command the options of a client that looks at a single URL."""

client_options: CommandDecorator = _with_options(_OR, *_CLIENT)
"""Give a command the options of a client; its function gets `LinkOptions` as the first argument."""

server_options: CommandDecorator = _with_options(
    _TOKENS_OF_SERVER,
    *_CERT,
    _client_ca(""),
    _insecure("Allow plaintext beyond this machine, and accept every client."),
    _TRACE,
    _METRICS,
    _JSON,
)
"""Give a command the options of a server; its function gets `LinkOptions` as the first argument."""

either_options: CommandDecorator = _with_options(
    _TOKEN_OF_EITHER,
    _OR,
    *_CERT,
    _CA,
    proxy_option,
    _client_ca("With --serve: "),
    _insecure("Allow plaintext beyond this machine, and a server that accepts every client."),
    _TRACE,
    _METRICS,
    _JSON,
)
"""Give a command the options of both sides, of which `--serve` says which one it is."""


def _tokens(file: str | None) -> dict[str, str] | None:
    if file is not None:
        return names_and_secrets(file)
    return {"client": os.environ[TOKEN]} if os.environ.get(TOKEN) else None


def names_and_secrets(file: str) -> dict[str, str]:
    """Read a file of names and secrets. A secret without a name gets the name `client` and the number of its line."""
    found: dict[str, str] = {}
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise click.UsageError(f"{printable(file)}, line {number}: expected a name and a secret")
        name = words[0] if len(words) == 2 else f"client {number}"
        if name in found:
            raise click.UsageError(f"{printable(file)}, line {number}: duplicate name {printable(name)}")
        found[name] = words[-1]
    if not found:
        raise click.UsageError(f"{printable(file)}: the file is empty")
    return found


def is_here(url: str) -> bool:
    """Return True for an address that only this machine reaches."""
    transport = url.partition("://")[0].partition("+")[2]
    if transport in ("unix", "mem"):
        return True
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if host == "localhost":
        return True
    from muxkit.forward import Address  # needed by servers only

    address = Address(host).ip
    return address is not None and address.is_loopback


# ---------------------------------------------------------------------------- clients


def run(work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - what the function returns
    """Run an async function. Errors about options name the command's options instead of keyword arguments."""
    try:
        return trio.run(work, *arguments)
    except BaseException as error:
        raise_in_options(error)
        raise


def raise_in_options(error: BaseException) -> None:
    """Raise the error of a command for errors that the user can fix with an option."""
    leaves = [*leaves_of(error)]
    first = leaves[0]
    if len(leaves) > 1:
        return
    if type(first) in (ValueError, TypeError) or isinstance(first, (muxkit.Unsupported, muxkit.PluginError)):
        raise click.UsageError(printable(in_options(str(first)))) from error
    if isinstance(first, muxkit.Refused):
        raise CommandFailed(in_options(str(first)), Exit.NOT_CONNECTED) from error


def check_url(url: str, options: LinkOptions) -> None:
    """Raise the error of a command for an unusable URL, its own or an `--or`, before anything listens or connects."""
    for each in (url, *options.others):
        _check_one(each, options)


def _check_one(url: str, options: LinkOptions) -> None:
    try:
        door = Door(url, {"tls": options.tls, "token": options.token()})
        read: Callable[[str], object] | None = getattr(door.transport, "client", None)
        if read is not None:
            read(door.address)
    except (ValueError, muxkit.Unsupported, muxkit.PluginError) as error:
        text = in_options(str(error)).replace(repr(without_secrets(url)), repr(_as_typed(url)))
        raise click.UsageError(printable(text)) from error


def _as_typed(url: str) -> str:
    """Return a URL as the user typed it, without password and query."""
    shown = without_secrets(url)
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    user, at, _ = rest.partition("?")[0].partition("/")[0].rpartition("@")
    name, colon, _ = user.partition(":")
    return shown.replace(f"{scheme}{separator}", f"{scheme}{separator}{name}{colon}{'…' * bool(colon)}{at}", 1)


class NotConnected(CommandFailed):
    """No session could be opened. `may_heal` says whether another attempt could succeed."""

    def __init__(self, sentence: str, *, may_heal: bool = True) -> None:
        super().__init__(in_options(sentence), Exit.NOT_CONNECTED)
        self.may_heal = may_heal


@asynccontextmanager
async def session_with(
    url: str, options: LinkOptions, *, within: float = CONNECT_SECONDS, linger: float = 5.0
) -> AsyncIterator[muxkit.Session]:
    """Open a session and wait for the server's answer. Raises `NotConnected` if none arrives in `within` seconds."""
    check_url(url, options)
    stands = False
    try:
        with trio.CancelScope(deadline=trio.current_time() + within) as scope:
            async with muxkit.connect(
                options.urls(url), tls=options.tls, token=options.token(), linger=linger, **options.link
            ) as session:
                with suppress(muxkit.Unsupported):
                    await session.ping()  # some protocols begin before they have a connection
                scope.deadline = math.inf
                stands = True
                yield session
    except (OSError, muxkit.LinkLost) as error:
        may_heal = can_heal(error)
        if (stands and may_heal) or isinstance(error.__cause__, muxkit.RemoteProtocolError):
            raise
        raise NotConnected(str(error), may_heal=may_heal) from error
    if scope.cancelled_caught:
        found = await _found_at(url)
        hint = "" if found is None else f"; what answers there looks like {found}"
        raise NotConnected(f"{url}: no answer within {within:g} s{hint}")


async def _found_at(url: str) -> str | None:
    """Return which protocol a TCP port speaks at which no session could be opened, if it can be detected.

    Most servers of other protocols wait for a request before they send anything, so this sends an HTTP request.
    """
    scheme, _, address = url.partition("://")
    if scheme.partition("+")[2] != "tcp":
        return None
    try:
        parts = urlsplit(f"//{address.partition(',')[0]}")
        with trio.move_on_after(PROBE_SECONDS):
            async with await trio.open_tcp_stream(parts.hostname or "", parts.port or 0) as stream:
                await stream.send_all(b"GET / HTTP/1.0\r\n\r\n")
                return looks_like(bytes(await stream.receive_some(64)))
    except (OSError, ValueError, trio.BrokenResourceError):
        pass
    return None


# ---------------------------------------------------------------------------- servers


def serve_until_signal(
    handler: Callable[..., Any],
    urls: Sequence[str],
    options: LinkOptions,
    *,
    grace: float,
    logged: AbstractContextManager[object] | None = None,
    **more: Any,
) -> int:
    """Run a server as this process: the first signal drains it, and the second aborts it. Notifies a service manager of
    both.

    `logged` prints log records of the library instead of warnings on standard error.
    """
    options.check_exposure(urls)
    metrics = options.observer()

    def started(server: muxkit.Server) -> None:
        for url in server.urls:
            say(f"listening on {url}", {"event": "listening", "url": url}, as_json=options.as_json)
            if more.get("pages") is not None:
                page = _page_of(url)
                say(f"pages on {page}", {"event": "pages", "url": page}, as_json=options.as_json)
        notify("READY=1")

    def ending(server: muxkit.Server) -> None:
        notify("STOPPING=1")
        count = len(server.sessions())
        text = f"shutting down; waiting up to {grace:g} s for {counted(count, 'session')}"
        say(text, {"event": "ending", "sessions": count}, as_json=options.as_json)

    try:
        with logged or _Logged():
            return muxkit.run_server(
                handler,
                urls,
                grace=grace,
                on_started=started,
                on_ending=ending,
                beside=None if metrics is None else lambda server: shown_metrics(options, metrics, server),
                observer=metrics,
                tls=options.tls,
                authorize=None if options.tokens is None else muxkit.tokens(options.tokens),
                listeners=passed_sockets(),
                linger=1.0,
                **options.link,
                **more,
            )
    except BaseException as error:
        raise_in_options(error)
        raise


def _page_of(url: str) -> str:
    """Return the URL at which a browser finds the pages of a server with this URL."""
    scheme, _, address = url.partition("://")
    return f"{'https' if scheme.endswith('+wss') else 'http'}://{address.partition('/')[0]}/"


@asynccontextmanager
async def shown_metrics(
    options: LinkOptions, metrics: Metrics | None, server: muxkit.Server | None = None
) -> AsyncIterator[None]:
    """Serve metrics at the address of `--metrics` while the block runs. Without that option, do nothing."""
    if options.metrics is None:
        yield
        return
    from muxkit.metrics import endpoint

    try:
        async with endpoint(server, options.metrics, metrics=metrics, insecure=True) as running:
            for url in running.urls:
                say(f"metrics on {url}", {"event": "metrics", "url": url}, as_json=options.as_json)
            yield
    except ExtraNeeded as error:
        raise CommandFailed(str(error)) from error


class _Logged(logging.Handler):
    """Prints warnings of the library to standard error while its block runs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, _, trace = record.getMessage().partition("\n")
            click.echo(f"muxkit: {printable(text)}", err=True)
            for line in trace.splitlines():
                click.echo(f"  {printable(line)}", err=True)
        except Exception:
            self.handleError(record)

    def __enter__(self) -> None:
        logging.getLogger("muxkit").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("muxkit").removeHandler(self)


def notify(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Notify the service manager, if this process has one (systemd, `Type=notify`)."""
    path = environment.get("NOTIFY_SOCKET")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            sock.send(state.encode())
    except OSError as error:  # a server that works must not end because of it
        click.echo(printable(f"muxkit: NOTIFY_SOCKET: {error}"), err=True)


def passed_sockets(environment: Mapping[str, str] = os.environ) -> list[socket.socket]:
    """Return the listening sockets that a service manager passes to this process (systemd socket activation)."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return []
    try:
        count = int(environment.get("LISTEN_FDS", ""))
        if count < 1:
            raise ValueError
        return [socket.socket(fileno=FIRST_SOCKET + number) for number in range(count)]
    except ValueError:
        raise click.UsageError("invalid LISTEN_FDS: expected a number of sockets") from None
    except OSError as error:
        raise click.UsageError(f"LISTEN_FDS names sockets that aren't open: {error}") from None


def allow_files() -> None:
    """Raise this process's limit of open files to the maximum. The default, 1,024, exists for programs that use
    `select()`.
    """
    if sys.platform == "win32":
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if most == resource.RLIM_INFINITY else most
    with suppress(ValueError, OSError):  # the kernel may have a limit that it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def plain_environment() -> dict[str, str]:
    """Return the environment for programs that this server starts, without its own variables such as the token."""
    return {name: value for name, value in os.environ.items() if name not in OURS}
