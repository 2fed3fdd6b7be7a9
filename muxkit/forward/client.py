"""The client's side of forwards: listeners on this machine, and listeners on the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import suppress

import trio

from muxkit.forward.addresses import Address, parse_address
from muxkit.forward.line import LONGEST_PAUSE, LOST, PATIENCE, Carrier, Line, request
from muxkit.forward.proxy_header import ProxyHeader, check_version, encode_header
from muxkit.forward.relay import ForwardLimits, ForwardStats, Relay, Tally, log
from muxkit.forward.sockets import Listeners, dial, listening, local_of, peer_of
from muxkit.forward.streams import CarriedStream
from muxkit.forward.wire import (
    PERMANENT,
    Accepted,
    Code,
    Connect,
    Dropped,
    ForwardRefused,
    Listen,
    Request,
    Take,
    ask,
    decode_notice,
    encode,
)
from muxkit.runtime import (
    Backoff,
    Channel,
    Session,
    background,
    home_thread,
    may_log,
    protect_package,
    protected_manager,
)


class Forward(ABC):
    """A running forward. Leaving its block ends it and resets the connections that are still open."""

    def __init__(self, carrier: Carrier, patience: float, limits: ForwardLimits | None) -> None:
        self._thread = home_thread()
        self._carrier = carrier
        self._patience = patience
        self._limits = limits or ForwardLimits()
        self._tally = Tally(self._limits.connections)
        self._scope = trio.CancelScope()  # of what is carried
        self._accepting = trio.CancelScope()

    @property
    @abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """The addresses it listens on, as `host:port` or a path; empty while it doesn't listen."""

    @property
    def address(self) -> str:
        """The first of `addresses`; empty while there is none."""
        return next(iter(self.addresses), "")

    def stats(self) -> ForwardStats:
        """Return gauges and counters."""
        return self._tally.stats()

    async def shutdown(self, *, grace: float) -> None:
        """Stop accepting connections, wait up to `grace` seconds for live ones, then reset them."""
        self._thread.check()
        self._stop_accepting()
        with trio.move_on_after(grace):
            await self._tally.wait_idle()
        self._scope.cancel()

    def _stop_accepting(self) -> None:
        self._accepting.cancel()

    def _refused(self, what: str, error: Exception) -> None:
        self._tally.refused += 1
        if not may_log("connections that failed"):
            return  # whoever reaches the listener can cause these lines
        code = int(getattr(error, "code", 0) or 0)
        # log "ADDRESS: REASON": A forward's connection was refused, here or at the server; `fields.code` says why as in
        # the protocol of forwards.
        log.info("%s: %s", what, error, extra={"event": "refused", "fields": {"code": code}})

    async def _ask(self, wanted: Request) -> Channel:
        channel, _, _ = await request(self._carrier, wanted, patience=self._patience, limits=self._limits)
        return channel

    def _enter(self) -> None:
        """Count a connection on the line too. The tally has counted it when it was accepted."""
        if isinstance(self._carrier, Line):
            self._carrier.enter()

    def _leave(self) -> None:
        self._tally.leave()
        if isinstance(self._carrier, Line):
            self._carrier.leave()


class ListeningForward(Forward):
    """A forward that listens on this machine."""

    def __init__(self, opened: Listeners, carrier: Carrier, patience: float, limits: ForwardLimits | None) -> None:
        super().__init__(carrier, patience, limits)
        self._opened = opened

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._opened.addresses

    async def _run(self) -> None:
        """Accept connections and carry them, until it is shut down."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                with self._accepting:
                    await self._opened.accept_for_ever(self._tally, self._accepted, nursery)

    def _stop_accepting(self) -> None:
        super()._stop_accepting()
        self._opened.close()

    async def _accepted(self, stream: CarriedStream) -> None:
        self._enter()
        try:
            await self.carry(stream)
        finally:
            stream.reset()  # harmless once it was closed
            self._leave()

    @abstractmethod
    async def carry(self, stream: CarriedStream) -> None:
        """Forward an accepted connection."""


class _LocalForward(ListeningForward):
    """A listener whose connections all go to one target."""

    def __init__(
        self,
        target: Address,
        opened: Listeners,
        carrier: Carrier,
        patience: float,
        limits: ForwardLimits | None,
        proxy_header: ProxyHeader | None,
    ) -> None:
        super().__init__(opened, carrier, patience, limits)
        self._target = target
        self._proxy_header = proxy_header

    async def carry(self, stream: CarriedStream) -> None:
        version = self._proxy_header
        head = b"" if version is None else encode_header(version, peer_of(stream), local_of(stream))
        try:
            channel = await self._ask(Connect(str(self._target)))
        except (ForwardRefused, *LOST) as error:
            self._refused(f"{self.address}: failed to forward a connection", error)
        else:
            await Relay(stream, channel, self._tally).run(head)

    def __repr__(self) -> str:
        return f"<forward {self.address} to {self._target}: {self._tally.live} connections>"


@protected_manager
async def open_local(
    carrier: Carrier,
    bind: str | Address,
    target: str | Address,
    *,
    patience: float = PATIENCE,
    limits: ForwardLimits | None = None,
    proxy_header: ProxyHeader | None = None,
) -> AsyncGenerator[Forward, None]:
    """Listen at `bind` on this machine, and forward each connection to `target` through the server, like `ssh -L`.

    Args:
        carrier: A session, or a `Line`. Over a line, the listener stays open while there is no session.
        bind: `host:port`, `[::1]:80`, a port of 127.0.0.1, or the path of a Unix socket. For port 0 the kernel picks a
            port, and `forward.address` contains it.
        target: Where the server connects to, in the same form.
        patience: How many seconds a new connection waits for a session of the line before it is reset.
        limits: Limits of this forward.
        proxy_header: 1 or 2 sends a header of this version of the PROXY protocol to the target first, with the address
            of the client that connected to `bind`.

    Raises:
        ValueError: If an address is invalid.
        OSError: If this machine can't listen on `bind`.

    If the server refuses a connection, the refusal is logged and the connection is reset.
    """
    check_version(proxy_header)
    at, to = _address(bind, any_port=True), _address(target)
    async with listening(at) as opened, background() as nursery:
        forward = _LocalForward(to, opened, carrier, patience, limits, proxy_header)
        nursery.start_soon(forward._run)
        yield forward


def _address(given: str | Address, *, any_port: bool = False) -> Address:
    return given if isinstance(given, Address) else parse_address(given, any_port=any_port)


# ---------------------------------------------------------------------------- listeners at the server


class RemoteForward(Forward):
    """A listener on the server whose connections go to one target of this machine."""

    def __init__(
        self,
        bind: Address,
        target: Address,
        carrier: Carrier,
        patience: float,
        limits: ForwardLimits | None,
        proxy_header: ProxyHeader | None,
    ) -> None:
        super().__init__(carrier, patience, limits)
        self._bind = bind
        self._target = target
        self._proxy_header = proxy_header
        self._address = ""
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self._address,) if self._address else ()

    async def listening(self) -> str:
        """Wait until the server listens, and return the address."""
        self._thread.check()
        while not self._address:
            await self._changed.park()
        return self._address

    async def _begin(self) -> tuple[Channel, Session, int]:
        """Request the listener. Raises `ForwardRefused`."""
        wanted = Listen(str(self._bind))
        channel, done, session = await request(self._carrier, wanted, patience=self._patience, limits=self._limits)
        self._address = done.address
        self._changed.unpark_all()
        fields = {"address": done.address, "target": str(self._target)}
        # log: The server listens for a remote forward. Logged again after each lost session.
        log.info(
            "the server listens on %s for %s", *fields.values(), extra={"event": "listening_there", "fields": fields}
        )
        return channel, session, done.listener

    async def _run(self, begun: tuple[Channel, Session, int] | None = None) -> None:
        """Carry connections until it is shut down; over a line, ask for the listener again after each loss.

        Over a single session its loss is raised.
        """
        policy, failures = Backoff(most=LONGEST_PAUSE), 0
        with self._scope:
            async with trio.open_nursery() as nursery:
                with self._accepting:
                    while True:
                        try:
                            begun = begun or await self._begin()
                            failures = 0
                            await self._serve(*begun, nursery)
                        except (ForwardRefused, *LOST) as error:
                            if self._must_raise(error):
                                raise
                            if isinstance(error, ForwardRefused) and not failures:
                                self._refused(f"the server does not listen on {self._bind}", error)
                        begun = None
                        failures += 1
                        await trio.sleep(policy.wait(failures))

    def _must_raise(self, error: Exception) -> bool:
        is_final = isinstance(error, ForwardRefused) and error.code in PERMANENT
        return is_final or not isinstance(self._carrier, Line)

    async def _serve(self, control: Channel, session: Session, listener: int, nursery: trio.Nursery) -> None:
        """Take connections until the listener has ended."""
        try:
            async for message in control:
                accepted = decode_notice(message, Accepted)
                if self._tally.is_full:
                    await self._drop(control, accepted, f"{self._tally.most} connections are open")
                    continue
                self._tally.enter()
                nursery.start_soon(self._take, control, session, listener, accepted)
        finally:
            self._address = ""
            control.abort()  # the server closes the listener at once
        if not isinstance(self._carrier, Line):
            raise ForwardRefused(f"the server no longer listens on {self._bind}", Code.GONE)

    async def _take(self, control: Channel, session: Session, listener: int, accepted: Accepted) -> None:
        self._enter()
        try:
            at = self._address  # the connection was accepted here
            stream = await dial(self._target, None, seconds=self._limits.connect)
            try:
                if self._proxy_header is not None:
                    await stream.send_rest(encode_header(self._proxy_header, accepted.peer, at))
                channel, _ = await ask(session, Take(listener, accepted.connection))
                await Relay(stream, channel, self._tally).run()
            finally:
                stream.reset()  # harmless once it was closed
        except (ForwardRefused, *LOST) as error:
            self._refused(f"{self._bind} there: failed to forward a connection", error)
            await self._drop(control, accepted, str(error))  # harmless once it was taken
        finally:
            self._leave()

    async def _drop(self, control: Channel, accepted: Accepted, reason: str) -> None:
        with suppress(*LOST, trio.BrokenResourceError):
            await control.send(encode(Dropped(accepted.connection, reason)))

    def __repr__(self) -> str:
        return f"<forward {self._bind} there to {self._target}: {self._tally.live} connections>"


@protected_manager
async def open_remote(
    carrier: Carrier,
    bind: str | Address,
    target: str | Address,
    *,
    patience: float = PATIENCE,
    limits: ForwardLimits | None = None,
    proxy_header: ProxyHeader | None = None,
) -> AsyncGenerator[RemoteForward, None]:
    """Make the server listen at `bind`, and forward each connection to `target`, to which this machine connects, like
    `ssh -R`.

    Over a session, entering waits for the server's answer and raises `ForwardRefused`. If the session is lost, the
    block is cancelled and raises that error.

    Over a `Line`, entering doesn't wait. The forward requests the listener now and after each lost session, and
    `forward.listening()` waits for it. Only a refusal that another request can't change is raised. The server closes
    the listener when the block or the session ends.

    With `proxy_header=1` or `2`, the target first gets a header of this version of the PROXY protocol, with the address
    of the client that connected to the listener.
    """
    check_version(proxy_header)
    forward = RemoteForward(_address(bind, any_port=True), _address(target), carrier, patience, limits, proxy_header)
    async with background() as nursery:
        begun = await forward._begin() if isinstance(carrier, Session) else None
        nursery.start_soon(forward._run, begun)
        yield forward


protect_package(__name__)
