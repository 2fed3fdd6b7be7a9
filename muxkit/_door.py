"""`muxkit.connect`, and the code that clients and servers share: from a URL and options to a session.

A `Door` is a parsed URL with the plugins of its protocol and transport, and with the options for each of them. A client
uses it to dial, and a server to listen. `client_doors` parses the URLs of a client, and `_lifetime` logs when a session
begins and ends.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, Protocol, Unpack, cast

import attrs
import trio

from muxkit._authorize import Authorize, Gatekeeper, first_line, show_token
from muxkit._errors import MuxError, Refused
from muxkit._handlers import SessionHandler
from muxkit._limits import Limits
from muxkit._observer import Observer, for_connection, tell, telling_of_listener
from muxkit._options import OF_SESSIONS, ConnectOptions, Side, check_link_options, options_of
from muxkit._plugins import PROTOCOLS, STREAMS, PluginError, link_kind, load, load_transport, split_url
from muxkit._racing import FirstDial, LinkAttempt, first_session, session_at
from muxkit.core import printable, without_secrets
from muxkit.runtime import (
    STAGGER,
    Candidate,
    Choosing,
    ExtraNeeded,
    Link,
    Listening,
    ProtocolPlugin,
    ResumingPlugin,
    Session,
    SessionInfo,
    Unsupported,
    check_options,
    first_of,
    may_log,
    peer_of,
    protect_package,
    protected_manager,
    run_handler,
)
from muxkit.trace import traced

_log = logging.getLogger("muxkit")
_numbers = count(1)  # the numbers of this process's sessions in the log

LINGER_SECONDS = 5.0  # default of `linger=`


class Handle(Protocol):
    """A function that serves a connection, such as `Listening.handle`.

    If `refused` isn't None, it refuses the client with this error instead.
    """

    async def __call__(self, link: Any, /, *, refused: Refused | None = None) -> None: ...  # noqa: ANN401 - of any kind


@attrs.frozen
class _Entrance:
    """The object that a transport gets from a server. It calls it with each accepted connection.

    If there is no place for a connection, the transport calls `refuse` instead.
    """

    _handle: Handle

    async def __call__(self, link: Any) -> None:  # noqa: ANN401 - of any kind
        await self._handle(link)

    async def refuse(self, link: Any, refused: Refused, /) -> None:  # noqa: ANN401 - of any kind
        await self._handle(link, refused=refused)


class Door:
    """A parsed URL, with the plugins of its protocol and transport, and the options for each of them.

    Args:
        url: The URL.
        options: The `ConnectOptions` or the `ServeOptions`, possibly with options of third-party plugins.
        side: "client" or "server".
        own: The names of options that the caller handles itself. The error for an unknown option lists them.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any], *, side: Side = "client", own: Collection[str] = ()
    ) -> None:
        self.url = url
        protocol, self._transport_name, self.address = split_url(url)
        self.scheme = f"{protocol}+{self._transport_name}"
        self.protocol_name = protocol
        # The type checker can't know the type of an entry point's object. `load` has checked its attributes.
        self.protocol = cast("ProtocolPlugin", load(PROTOCOLS, protocol))
        without: str | None = getattr(self.protocol, "no_sessions", None)
        if without is not None:  # raise immediately, and not when the first client connects
            raise Unsupported(without)
        links = getattr(self.protocol, "links", STREAMS)
        self.transport = load_transport(self._transport_name, protocol, links)
        given = dict(options)
        tls = given.pop("tls", None)
        token: str | None = None
        authorize: Authorize | None = None
        if side == "client":
            token = given.pop("token", None)
            given.pop("stagger", None)  # only used with several URLs
        else:
            authorize = given.pop("authorize", None)
        self.limits: Limits = given.pop("limits", None) or Limits()
        self._observer: Observer | None = given.pop("observer", None)
        linger: float = given.pop("linger", LINGER_SECONDS)
        ours = self.protocol.options
        self._link_options = {name: value for name, value in given.items() if name not in ours}
        if tls is not None:
            self._link_options["tls"] = tls
        self._session_options = {name: value for name, value in given.items() if name in ours}
        self._session_options |= {"limits": self.limits, "linger": linger}
        # The names that the protocol negotiates with ALPN, if the transport supports that
        offers, theirs = getattr(self.protocol, "tls_offers", None), getattr(self.transport, "options", None)
        can_offer = offers is not None and theirs is not None and "offers" in theirs("client")
        self._offers = {"offers": offers(**self._session_options)} if offers is not None and can_offer else {}
        self._token = token
        self._side = side
        self._of_others: dict[str, Collection[str]] = {protocol: ours, f"every {side}": OF_SESSIONS[side].union(own)}
        self._gatekeeper = None if authorize is None else Gatekeeper(protocol, authorize, self.limits)
        self._endpoint: str | None = None
        self.first_dial: FirstDial | None = FirstDial() if isinstance(self.protocol, ResumingPlugin) else None
        if isinstance(self.protocol, ResumingPlugin):
            self.address, self._endpoint = self.protocol.split(self._transport_name, self.address)
        if token is not None:
            first_line(protocol, token)  # raises if the token is invalid
            if link_kind(self.transport) != "stream":
                raise ValueError(
                    f"token=…: expected a transport for a byte stream, got {self._transport_name}; "
                    "authenticate with a certificate instead: tls=muxkit.TLS(cert=…, key=…)"
                )

    async def check_client(self) -> None:
        """Raise `ValueError` if the transport would refuse to send plaintext to the address."""
        check = getattr(self.transport, "check_client", None)  # optional for third-party transports
        if check is not None:
            await check(self.address, insecure=bool(self._link_options.get("insecure")))

    async def candidates(self) -> Sequence[Sequence[Candidate]]:
        """Return the addresses of this URL, grouped by priority. A URL with SRV records can have several."""
        if not isinstance(self.transport, Choosing):
            return [[Candidate(self.address)]]
        return await self.transport.candidates(self.address, protocol=self.protocol_name, options=self._link_options)

    @protected_manager
    async def dial(self) -> AsyncGenerator[Link, None]:
        """Open a connection to one of the addresses."""
        async with first_of([[LinkAttempt(self, each) for each in group] for group in await self.candidates()]) as won:
            yield won.value

    @protected_manager
    async def dial_at(self, candidate: Candidate) -> AsyncGenerator[Link, None]:
        # With several streams, the link grants the credit, so it needs the limits.
        bounds = {"limits": self.limits} if link_kind(self.transport) == "multistream" else {}
        options = {**self._offers, **candidate.options, **self._link_options}
        async with self.transport.connect(candidate.address, **bounds, **options) as link:
            yield link if self._token is None else await show_token(link, self.protocol_name, self._token)

    @protected_manager
    async def redial(self) -> AsyncGenerator[Link, None]:
        """Dial for a session that outlives its connections, and record if the first attempt fails."""
        is_connected = False
        try:
            async with self.dial() as link:
                is_connected = True
                yield link
        except Exception as error:
            if not is_connected and self.first_dial is not None:
                self.first_dial.fail(error)
            raise

    def url_at(self, address: str) -> str:
        """Return the URL with which a client connects to this address."""
        if isinstance(self.protocol, ResumingPlugin):
            address = self.protocol.join(self._transport_name, address, self._endpoint)
        return f"{self.scheme}://{address}"

    def _check_options(self) -> None:
        """Raise `TypeError` if neither the transport nor the protocol has one of the options."""
        check_link_options(self._transport_name, self.transport, self._side, self._link_options, **self._of_others)

    def drop_options_of_others(self) -> frozenset[str] | None:
        """Remove the options that this transport doesn't have, because they are meant for other URLs of a list.

        Returns:
            The names of all options that the URL has, or None if the transport accepts any.
        """
        theirs = options_of(self.transport, "client")
        if theirs is None:
            return None
        known = theirs | self.protocol.options
        self._link_options = {name: value for name, value in self._link_options.items() if name in known}
        return known

    def takes_tls(self) -> bool:
        """Return True if the transport can encrypt. If it can't, remove the option `tls`."""
        known = options_of(self.transport, "server")
        if known is not None and "tls" not in known:
            self._link_options.pop("tls", None)
            return False
        return True

    @protected_manager
    async def session_to(self) -> AsyncGenerator[Session, None]:
        self._check_options()
        if isinstance(self.protocol, ResumingPlugin):
            observer = self._observer_of(f"client {without_secrets(self.address)}")
            async with self.protocol.link(
                self.redial, endpoint=self._endpoint, observer=observer, **self._session_options
            ) as session:
                with _lifetime(session.info, self._observer, observer):
                    yield session
        else:
            async with session_at(self, await self.candidates()) as session:
                yield session

    @protected_manager
    async def session_on(self, link: Link, role: Side) -> AsyncGenerator[Session, None]:
        with ExitStack() as stack:
            observer = self._observer_of(f"{role} {peer_of(link) or without_secrets(self.address)}")
            async with self._session(link, role, observer) as session:
                stack.enter_context(_lifetime(session.info, self._observer, observer))
                yield session

    def _observer_of(self, name: str) -> Observer | None:
        return traced(for_connection(self._observer, name), name)

    def _session(self, link: Link, role: Side, observer: Observer | None) -> AbstractAsyncContextManager[Session]:
        return self.protocol.session(link, role=role, address=self.address, observer=observer, **self._session_options)

    def listener(self, handler: SessionHandler) -> AbstractAsyncContextManager[Listening] | None:
        """Return the protocol's own listener, which calls `handler` with each session, or None if it has none."""
        if isinstance(self.protocol, ResumingPlugin):

            async def handle(session: Session) -> None:
                with _lifetime(session.info, self._observer):
                    await run_handler(handler, session)

            return self.protocol.listener(
                handle, endpoint=self._endpoint, observer=self._observer, **self._session_options
            )
        return None

    async def serve(self, handle: Handle, *, task_status: trio.TaskStatus[list[str]]) -> None:
        """Accept connections until cancelled, and call `handle` with each."""
        self._check_options()
        with telling_of_listener(self._observer, self.protocol_name, self._transport_name):
            await self.transport.serve(
                _Entrance(handle if self._gatekeeper is None else partial(self._admit, self._gatekeeper, handle)),
                self.address,
                limits=self.limits,
                task_status=task_status,
                **{**self._offers, **self._link_options},
            )

    async def _admit(
        self,
        gatekeeper: Gatekeeper,
        handle: Handle,
        link: Any,  # noqa: ANN401 - of any kind
        /,
        *,
        refused: Refused | None = None,
    ) -> None:
        if refused is not None:  # there is no place, so the client's identity doesn't matter
            await handle(link, refused=refused)
            return
        peer = peer_of(link) or without_secrets(self.address)
        if link_kind(self.transport) == "stream":
            link, refused = await gatekeeper.admit(link)
        else:
            refused = await gatekeeper.judge(link, None)
        if refused is None:
            await handle(link)
            return
        if may_log("clients that were not let in"):
            # The reason may quote what the client sent.
            # log: `authorize` refused the client, or its token is unknown. The client receives the reason.
            _log.info("a client was not let in: %s: %s", peer, printable(str(refused)))
        if link is not None:
            await handle(link, refused=refused)


def client_doors(url: str | Sequence[str], options: Mapping[str, Any], *, own: Collection[str] = ()) -> Sequence[Door]:
    """Parse the URL or the URLs of a client. With several URLs, an option applies to each that has it.

    All URLs are checked immediately. If a URL needs an extra that isn't installed, it is skipped, unless it is the only
    one.
    """
    urls = [url] if isinstance(url, (str, bytes)) or not isinstance(url, Sequence) else url
    if not urls:
        raise ValueError("connect: expected a URL or a list of URLs, got an empty list")
    doors: list[Door] = []
    missing: PluginError | None = None
    for each in urls:
        try:
            doors.append(Door(each, options, own=own))
        except PluginError as error:
            if len(urls) == 1 or not isinstance(error.__cause__, ExtraNeeded):
                raise
            # log: A URL of a list is left out, because it needs an extra of muxkit that isn't installed.
            _log.info("skipping %s: %s", without_secrets(each), error)
            missing = error
    if missing is not None and not doors:
        raise missing
    if len(urls) > 1:
        _share_out(doors, options, own)
    return doors


def _share_out(doors: Sequence[Door], options: Mapping[str, Any], own: Collection[str]) -> None:
    """Give each URL of a list the options that it has. Raises an error if none of the URLs has an option."""
    known = {door.scheme: door.drop_options_of_others() for door in doors}
    declared = [names for names in known.values() if names is not None]
    if len(declared) < len(known):
        return  # the transport that declares no options may take any
    everything = frozenset().union(*declared)
    if options.get("tls") is not None and "tls" not in everything:
        raise ValueError("tls=…: none of these URLs has a transport that encrypts; use one such as tls:// or wss://")
    every = OF_SESSIONS["client"]
    check_options("the list", options.keys() - every, everything, **{"every client": every.union(own)})


@protected_manager
async def connect(url: str | Sequence[str], **options: Unpack[ConnectOptions]) -> AsyncGenerator[Session, None]:
    """Connect to the server at `url`, and keep the session while the block runs.

        async with muxkit.connect("bpmux+tcp://127.0.0.1:7000") as session:
            async with session.open("greetings") as channel:
                await channel.send(b"hello")

    Leaving the block normally finishes all channels and waits up to `linger` seconds until the peer has confirmed
    everything. If an error or a cancellation leaves the block, the connection is closed and the channels are lost.

    `connect` has no timeout of its own: use `trio.fail_after`. Use `reconnecting` for a client that connects again.
    With Relink, an absent server isn't an error: the session keeps trying, and its calls raise `LinkLost` if the server
    rejects the client.

    With a list of URLs, `connect` races them as RFC 8305 does: it tries the first, starts the next attempt after
    `stagger` seconds or when the attempt before it has failed, and keeps the first session on which the server answers.
    The other attempts are cancelled. The winner is tried first for the next ten minutes.

        async with muxkit.connect(["aqueduct+quic://example.com:7000", "bpmux+wss://example.com/mux"]) as session:
            ...

    Args:
        url: `protocol+transport://address`, such as `bpmux+tls://example.com:7000`, or a list of such URLs, the
            preferred one first.
        **options: The options of `ConnectOptions`, such as `tls`, `token` and `limits`. With
            several URLs, each option applies to those that have it.

    Returns:
        A context manager whose value is the `Session`.

    Raises:
        TypeError: If there is no option of that name. The error suggests the nearest name.
        ValueError: If the URL or an option is invalid, or the transport would send plaintext beyond loopback.
        PluginError: If the protocol or the transport isn't installed.
        OSError: If no address of the server answers. `HandshakeFailed`, a subclass, has the reason of a failed
            handshake. `AllAttemptsFailed`, another subclass, has the reason for each URL of a list.
        Refused: If the server doesn't accept this client.
        LinkLost: When leaving the block, if the peer hasn't confirmed everything.
    """
    async with session_with(url, options) as session:
        yield session


@protected_manager
async def session_with(
    url: str | Sequence[str], options: Mapping[str, Any], *, own: Collection[str] = ()
) -> AsyncGenerator[Session, None]:
    """Connect with these `ConnectOptions`. `own` are the names of options that the caller handles itself."""
    doors = client_doors(url, options, own=own)
    stagger: float = options.get("stagger", STAGGER)
    for door in doors if len(doors) > 1 else ():
        await door.check_client()  # otherwise, a mistake in the last URL would appear only if all others fail
    async with doors[0].session_to() if len(doors) == 1 else first_session(doors, stagger=stagger) as session:
        yield session


@contextmanager
def _lifetime(info: SessionInfo, observer: Observer | None, own: Observer | None = None) -> Iterator[None]:
    """Log that a session begins and how it ends, and notify the observers."""
    observers = (observer,) if own is None or own is observer else (observer, own)
    fields = {"connection": next(_numbers), "peer": info.peer}
    began = trio.current_time()
    who = f"{info.protocol} session {fields['connection']} with {info.peer or 'a peer'}"
    # log: A session began. The line has its protocol, its number in this process, and its peer.
    _log.info("%s opened", who, extra=fields)
    for each in observers:
        tell(each, "session_opened", info)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        how = "" if error is None else f", {_why(error)}"
        # log: A session ended. If it didn't end cleanly, the end of the line says how. `connection` is that of the line
        # before.
        _log.info("%s closed after %.1f s%s", who, trio.current_time() - began, how, extra=fields)
        for each in observers:
            tell(each, "session_closed", info, error)
        del error  # its traceback and this frame would form a reference cycle


def _why(error: BaseException) -> str:
    """Describe how a session ended. Texts of errors that aren't muxkit's are left out, as they may contain payload."""
    if isinstance(error, MuxError):
        return printable(str(error))
    return f"by {type(error).__name__}" if isinstance(error, Exception) else "by a cancellation"


protect_package(__name__)
