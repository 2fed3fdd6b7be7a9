"""The classes that applications use: `Session`, `Channel`, `TypedChannel` and `IncomingRequest`, with their statistics.

They are abstract, so that a program can be written for all protocols. Most protocols derive their sessions and channels
from `MuxSession` and `MuxChannel`, which implement these classes.

The module also contains `Pings`, which the sessions of all protocols use to match the answers to their pings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar, overload

import attrs
import trio

from muxkit._info import Identity, SessionInfo
from muxkit._limits import Limits
from muxkit._observer import Facts
from muxkit._spans import ChannelSpan
from muxkit.codecs import Codec, InvalidMessage, decoded
from muxkit.core import NO_HEADERS, Headers
from muxkit.runtime._errors import Unsupported
from muxkit.runtime.halves.budget import ErrorMaker
from muxkit.runtime.halves.opening import ChannelOpening, Opening
from muxkit.runtime.listener import ChannelListener
from muxkit.runtime.subscription import OnLag, Subscription, subscribed, subscription_headers

ValueT = TypeVar("ValueT")

INVALID_MESSAGE: Final = 422  # the code of a channel that was aborted for a message, as in HTTP


@attrs.frozen(kw_only=True)
class ChannelStats:
    """Statistics about one channel. Sizes are in bytes, except in Relink, which counts messages."""

    queued: int
    """How much `send` has accepted that hasn't been written yet."""
    unread: int
    """How much has arrived that the application hasn't received."""
    credit_out: int | None
    """How much the peer lets this side send now, or None if the protocol doesn't have this number."""
    credit_in: int | None
    """How much this side lets the peer send now, or None if the protocol doesn't have this number."""
    waiting_since: float | None
    """The time (`trio.current_time`) since which a task has been waiting to send, or None if no task is waiting."""


class Channel(trio.abc.Channel[bytes]):
    """A two-way channel for messages. Many channels share one session.

    A message arrives as a whole or not at all. If `send` is cancelled, the message wasn't sent. If `receive` is
    cancelled, no message is lost.

    Each call of `send` and `receive` checks for cancellation. To be fast, they let other tasks run only if they have to
    wait, or after 64 calls or 128 KiB. `aclose` checks for cancellation too. It lets other tasks run after each 16th
    channel of a session, so that the end of one channel can be sent together with the opening of the next one.
    """

    __slots__ = ()

    _span: ChannelSpan | None = None
    """The span of the channel on this side, if spans are on."""

    @property
    @abstractmethod
    def session(self) -> Session:
        """The session that carries this channel."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the channel, which says what it is for. "" if the side that opened it gave no name."""

    @property
    @abstractmethod
    def opening(self) -> bytes:
        """The payload that was sent with the opening of the channel. It isn't one of the messages."""

    @property
    def headers(self) -> Headers:
        """The headers that were sent with the opening of the channel. They are empty if there were none.

        If the peer has opened the channel, it has chosen the headers. Check them before you act on them, and escape
        them before you show them.
        """
        return NO_HEADERS

    @abstractmethod
    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages with one checkpoint. If this is cancelled, the first ones may have been sent."""

    @abstractmethod
    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        """Wait for at least one message, and return all messages that have arrived, but at most `limit`.

        Raises:
            trio.EndOfChannel: If the peer has finished sending, and all its messages were received.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Announce that this side sends no more messages, and wait until the peer has confirmed that.

        The application can still receive messages.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the channel like `aclose`, but without a checkpoint."""

    @abstractmethod
    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Cancel both directions of the channel without waiting. Some messages may not arrive.

        At the peer, receiving raises `ChannelCancelled` and sending raises `ChannelStopped`. Both have the reason and
        the code, if the protocol can transmit them.
        """

    @abstractmethod
    def as_stream(self) -> trio.abc.HalfCloseableStream:
        """Return the channel as a stream of bytes. Don't use the other methods of the channel afterwards.

        Raises:
            Unsupported: If messages of this channel can get lost.
        """

    @abstractmethod
    def stats(self) -> ChannelStats:
        """Return statistics about the channel."""

    def _cancel_when_stopped(self, scope: trio.CancelScope | None) -> None:
        """Cancel a scope when the peer doesn't want more messages on this channel, or when the connection is lost.

        This is for handlers whose peer ends the channel only when it needs nothing more. In protocols that can't report
        that the peer wants no more messages, the scope is cancelled when the peer has finished sending. None
        forgets the scope that was given before.
        """

    def _observe_span(self, ids: Mapping[str, str]) -> None:
        """Notify the session's observer of the span that this channel belongs to."""

    def _opened_with(self) -> tuple[str, Headers, bytes]:
        """Return the name, the headers and the payload of the opening, parsing the opening only once if possible."""
        return self.name, self.headers, self.opening

    # Optional fast paths for `muxkit.asyncio`, which avoid a trip through Trio's scheduler.

    def _try_send(self, message: bytes) -> bool:
        """Send a message if that is possible without waiting. Otherwise, do nothing and return False."""
        return False

    def _try_send_last(self, message: bytes) -> bool:
        """Send a message and close the channel, with a single write if the protocol supports that.

        If sending would have to wait or would raise, do nothing and return False.
        """
        return False

    def _try_receive(self) -> bytes | None:
        """Return a message that has arrived. Return None if the caller has to call `receive`."""
        return None


class TypedChannel(trio.abc.Channel[ValueT], Generic[ValueT]):
    """A two-way channel for values of one type. `session.open(codec=...)` and `muxkit.handler` make such channels.

    `send` encodes a value and sends it as one message, and `receive` decodes a message. Cancellation works as described
    for `Channel`.

    If the peer sends a message that doesn't fit the type, `receive` raises `InvalidMessage` and aborts the channel. The
    peer gets the code 422 and a description of the problem. The session and its other channels continue.
    """

    __slots__ = ("codec", "raw")

    def __init__(self, raw: Channel, codec: Codec[ValueT]) -> None:
        self.raw: Channel = raw
        """The channel that carries the encoded values."""
        self.codec: Codec[ValueT] = codec
        """The codec of both directions."""

    @property
    def _span(self) -> ChannelSpan | None:
        return self.raw._span

    @property
    def session(self) -> Session:
        """The session that carries this channel."""
        return self.raw.session

    @property
    def name(self) -> str:
        """The name of the channel, or "" if the side that opened it gave no name."""
        return self.raw.name

    @property
    def opening(self) -> bytes:
        """The payload that was sent with the opening of the channel, as bytes. The codec doesn't apply to it."""
        return self.raw.opening

    @property
    def headers(self) -> Headers:
        """The headers that were sent with the opening of the channel. See `Channel.headers`."""
        return self.raw.headers

    async def send(self, value: ValueT) -> None:
        """Send a value. If this is cancelled, the value wasn't sent.

        If the codec can't encode the value, its exception is raised, and nothing was sent.
        """
        await self.raw.send(self.codec.encode(value))

    async def send_many(self, values: Iterable[ValueT]) -> None:
        """Send several values with one checkpoint. If this is cancelled, the first ones may have been sent."""
        encode = self.codec.encode
        await self.raw.send_many([encode(value) for value in values])

    async def receive(self) -> ValueT:
        """Wait for the next value and return it.

        Raises:
            trio.EndOfChannel: If the peer has finished sending, and all its values were received.
            InvalidMessage: If the message isn't a valid value.
        """
        return self._decoded(await self.raw.receive())

    async def receive_many(self, limit: int | None = None) -> list[ValueT]:
        """Wait for at least one value, and return all values that have arrived, but at most `limit`.

        Raises the same exceptions as `receive`.
        """
        return [self._decoded(message) for message in await self.raw.receive_many(limit)]

    def _decoded(self, message: bytes) -> ValueT:
        try:
            return decoded(self.codec, message)
        except InvalidMessage as error:
            self.raw.abort(str(error), code=INVALID_MESSAGE)
            raise

    async def finish(self) -> None:
        """Announce that this side sends no more values, and wait until the peer has confirmed that.

        The application can still receive values.
        """
        await self.raw.finish()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Cancel both directions of the channel without waiting. See `Channel.abort`."""
        self.raw.abort(reason, code=code)

    async def aclose(self) -> None:
        """Close both directions of the channel. See `Channel.aclose`."""
        await self.raw.aclose()

    def stats(self) -> ChannelStats:
        """Return statistics about the channel."""
        return self.raw.stats()


def typed(opening: Opening[Channel], codec: Codec[ValueT]) -> ChannelOpening[TypedChannel[ValueT]]:
    """Return an opening that makes a `TypedChannel`. The caller has put the name of the codec into the headers."""

    async def open() -> TypedChannel[ValueT]:
        return TypedChannel(await opening, codec)

    return ChannelOpening(open)


class IncomingRequest(ABC):
    """A request of the peer, which the application answers with one response.

    Use it in an `async with` block. If the block ends without a response, the request is declined.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def session(self) -> Session:
        """The session that carries this request."""

    @property
    @abstractmethod
    def payload(self) -> bytes:
        """The content of the request."""

    @abstractmethod
    async def respond(self, payload: bytes) -> None:
        """Send the response. Like `Channel.send`, this returns when the session has accepted it.

        If this is cancelled, the response wasn't sent.

        Raises:
            ChannelStopped: If the peer has cancelled the request.
            LocalProtocolError: If the request already has a response.
        """

    @abstractmethod
    async def decline(self, payload: bytes = b"") -> None:
        """End the request without a response, and wait until the peer has confirmed that."""

    @abstractmethod
    async def cancelled(self) -> None:
        """Wait until no response is needed any more.

        That is the case if the peer has cancelled the request or received the response, or if the connection is lost.
        """

    @abstractmethod
    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Decline the request without waiting. Does nothing if it has a response.

        The peer gets the reason only if it has granted credit for one.
        """

    @abstractmethod
    async def __aenter__(self) -> IncomingRequest: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...


@attrs.frozen(kw_only=True)
class SessionStats:
    """Statistics about a session. The counters begin with the session."""

    bytes_received: int
    """How many bytes have arrived from the transport."""
    bytes_sent: int
    """How many bytes the transport has taken."""
    messages_received: int
    """How many messages have arrived on all channels."""
    messages_sent: int
    """How many messages `send` has accepted on all channels."""
    channels: int
    """How many channels are live now, whichever side opened them."""
    queued: int
    """How many bytes `send` has accepted that the transport hasn't taken yet."""
    round_trip: float | None
    """A moving average of the round-trip time in seconds, or None before the first answer to a ping."""


_OF_CHANNELS = frozenset({"send", "send_many", "receive", "receive_many", "send_all", "receive_some", "finish"})


class Session(ABC):
    """A connection to a peer, with any number of channels. `muxkit.connect` and `muxkit.open_server` make sessions.

    A session has background tasks that read and write. They end with the session's `async with` block.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            told = f"a {type(self).__name__} has no {name!r}"
            if name in _OF_CHANNELS:
                told += "; channels have it. To handle channels, annotate the handler's parameter as muxkit.Channel"
            raise AttributeError(told, name=name, obj=self)

    @overload
    def open(self, name: str = "", *, payload: bytes = b"", headers: Headers | None = None) -> Opening[Channel]: ...
    @overload
    def open(
        self, name: str = "", *, codec: Codec[ValueT], payload: bytes = b"", headers: Headers | None = None
    ) -> Opening[TypedChannel[ValueT]]: ...
    @abstractmethod
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT] | None = None,
        payload: bytes = b"",
        headers: Headers | None = None,
    ) -> Opening[Channel] | Opening[TypedChannel[ValueT]]:
        """Open a channel to the peer: `async with session.open()` or `channel = await session.open()`.

        With `async with`, leaving the block normally closes the channel after everything was sent. If an exception
        leaves the block, the channel is aborted.

        Args:
            name: What the channel is for. The peer reads it as `channel.name`, and `by_name` chooses a handler by it.
            codec: A codec such as `muxkit.Json(Price)`. The result is then a `TypedChannel`, which sends and receives
                values. The peer gets the name of the codec as the header "codec".
            payload: Bytes that arrive together with the opening. The peer reads them as `channel.opening`.
            headers: Names and values with facts about the channel. The peer reads them as `channel.headers`. Their size
                is limited by `Limits.headers`. A peer that isn't muxkit gets them as the beginning of the payload.
        """

    def subscribe(
        self,
        topic: str,
        *,
        codec: Codec[ValueT],
        since: int | str | None = None,
        on_lag: OnLag = "end",
        member: str | None = None,
        headers: Headers | None = None,
    ) -> ChannelOpening[Subscription[ValueT]]:
        """Subscribe to a topic of the peer.

            async with session.subscribe("prices", codec=muxkit.Json(Price)) as prices:
                async for price in prices: ...

        When the block was entered, the peer knows the subscriber. Every later update reaches it, unless it is too slow.

        Args:
            topic: The name under which the peer serves the topic.
            codec: The codec of the updates.
            since: Receive earlier updates first, as far as the topic keeps them. This is the number of an update, or
                the `Subscription.position` of an earlier subscription, and the next update is the first one. 0 means
                all updates that the topic keeps.
            on_lag: What happens if this subscriber is too slow. See `OnLag`.
            member: The name of this subscriber for topics with presence, which the other subscribers see.
            headers: Additional headers for the peer.

        Raises:
            ChannelCancelled: If the peer refuses, for example because it has no topic of this name.
        """
        told = subscription_headers(codec, since, on_lag, member, headers)
        return subscribed(self.open(topic, headers=told), codec)

    @abstractmethod
    def incoming(self) -> AsyncIterator[Channel]:
        """Iterate over the channels that the peer opens, until the peer closes the session in order.

        Each step checks for cancellation. To be fast, other tasks run only with every 16th channel, if the iterator has
        to wait, and if the peer keeps cancelling the channels that it opens.
        """

    def __aiter__(self) -> AsyncIterator[Channel]:
        return self.incoming()

    def listener(self, name: str = "") -> ChannelListener:
        """Return a Trio listener whose connections are the channels that the peer opens with this name.

        With it, a server that was written for Trio's streams can serve on a session: `trio.serve_listeners(handler,
        [session.listener("http")])`. Clients can do this too, so a program behind NAT can offer a service without a
        port of its own. The listener takes all channels of the session, so use it instead of `incoming`.
        """
        return ChannelListener(self, self.incoming(), name)

    async def request(self, payload: bytes) -> bytes:
        """Send a request and wait for its response. If this is cancelled, the request is cancelled too.

        Raises:
            ChannelStopped: If the peer declines the request.
            LinkLost: If the connection is lost.
            Unsupported: If the protocol has no requests. Only bpmux has them.
        """
        await trio.lowlevel.checkpoint()
        raise self._no_requests()

    def requests(self) -> AsyncIterator[IncomingRequest]:
        """Iterate over the requests of the peer, as `incoming` does over its channels.

        Use `muxkit.each_request` to handle them concurrently. Raises `Unsupported` if the protocol has no requests.
        """
        raise self._no_requests()

    def _no_requests(self) -> Unsupported:
        return Unsupported(f"{self.info.protocol} has no requests; bpmux has")

    def _takes_only(self, kinds: Sequence[str]) -> None:  # noqa: B027 - what most protocols do is nothing
        """Decline everything that the peer opens, except for `kinds`, unless a task of the application takes it.

        A kind is "channels" or "requests". A server calls this before it calls the handler, which takes only these.
        Does nothing in a protocol in which a peer can open only one kind.
        """

    @abstractmethod
    def channels(self) -> Sequence[Channel]:
        """Return the live channels that the application has opened or accepted."""

    @abstractmethod
    async def ping(self) -> float:
        """Send a ping to the peer's session, and return the seconds until its answer arrived."""

    @abstractmethod
    async def shutdown(self, *, grace: float) -> None:
        """Accept no new channels, wait up to `grace` seconds until the live ones have ended, and abort the others."""

    @property
    def limits(self) -> Limits:
        """The limits of this session."""
        return Limits()

    @property
    @abstractmethod
    def info(self) -> SessionInfo:
        """The protocol and transport of the session, and the identity of the peer."""

    @abstractmethod
    def stats(self) -> SessionStats:
        """Return statistics about the session."""


def describe(link: object, protocol: str) -> SessionInfo:
    """Return the description of a session on a link. Each attribute that this reads is optional for a link."""
    peer: str = getattr(link, "peer", "")
    identity: Identity | None = getattr(link, "identity", None)
    if user := getattr(link, "user", None):  # the name that `authorize` returned
        identity = attrs.evolve(identity or Identity(), user=user)
    return SessionInfo(
        protocol=protocol,
        transport=peer.partition(" ")[0],
        peer=peer,
        local=getattr(link, "local", ""),
        identity=identity,
        request=getattr(link, "request", None),
    )


KeyT = TypeVar("KeyT", bound="Hashable")

SMOOTHING = 0.125  # weight of the newest round trip in the moving average, as for TCP (RFC 6298)


@attrs.define(eq=False)
class Ping:
    """A ping. If the engine has sent it to measure the round trip, no task waits for its answer."""

    sent_at: float = attrs.field(factory=trio.current_time)
    """When the ping was sent."""
    took: float | None = None
    """The round trip in seconds, or None if the ping hasn't been answered."""
    is_wanted: bool = True
    """False if the task that waited for the answer was cancelled."""
    _answer: trio.Event | None = None  # set when the ping has ended, if a task waits
    _error: ErrorMaker | None = None  # makes the error for a ping that won't be answered

    async def wait(self) -> float:
        """Wait for the answer, and return the round trip in seconds. Raises an error if the ping won't be answered."""
        if self.took is None and self._error is None:
            self._answer = trio.Event()
            try:
                await self._answer.wait()
            except BaseException:
                self.is_wanted = False
                raise
        else:
            await trio.lowlevel.checkpoint()
        if self.took is None:
            assert self._error is not None  # it ended in one way or the other
            raise self._error()
        return self.took

    def end(self, *, took: float | None = None, error: ErrorMaker | None = None) -> None:
        """Record the result, and wake the task that waits for it."""
        self.took, self._error = took, error
        if self._answer is not None:
            self._answer.set()


class Pings(Generic[KeyT]):
    """The unanswered pings of a session.

    Some protocols have pings for single halves of channels, so each ping has a key, which is such a half, or None for
    the session. The answers to pings with the same key arrive in the order in which the pings were sent.

    To send a ping, a session calls its engine, then `ping = pings.sent(key)`, and then `await ping.wait()`. When the
    engine reports an answer, the session calls `answered`.
    """

    def __init__(self, facts: Facts | None = None) -> None:
        self._facts = facts
        self.round_trip: float | None = None
        """A moving average of the round trips in seconds, or None before the first answer."""
        self._under_way: dict[KeyT, deque[Ping]] = {}

    def __contains__(self, key: KeyT) -> bool:
        return key in self._under_way

    def __len__(self) -> int:
        return sum(map(len, self._under_way.values()))

    def sent(self, key: KeyT) -> Ping:
        """Record a ping. It was sent now, or will be sent by `resend`."""
        ping = Ping()
        self._under_way.setdefault(key, deque()).append(ping)
        return ping

    def answered(self, key: KeyT) -> None:
        """Record an answer to the oldest ping with this key. Does nothing if there is none."""
        waiting = self._under_way.get(key)
        if not waiting:
            return
        ping = waiting.popleft()
        if not waiting:
            del self._under_way[key]
        took = trio.current_time() - ping.sent_at
        known = self.round_trip
        self.round_trip = took if known is None else (1 - SMOOTHING) * known + SMOOTHING * took
        if self._facts is not None:
            self._facts.round_trip(took)
        ping.end(took=took)

    def ended(self, error: ErrorMaker, key: KeyT | None = None) -> None:
        """End the pings with this key with an error, or all pings if `key` is None."""
        keys = [*self._under_way] if key is None else [key]
        for each in keys:
            for ping in self._under_way.pop(each, ()):
                ping.end(error=error)

    def resend(self, send: Callable[[KeyT], None]) -> None:
        """Send all pings again on a new connection, except for those that no task waits for any more."""
        self.forget_unwanted()
        for key, waiting in self._under_way.items():
            for ping in waiting:
                ping.sent_at = trio.current_time()
                send(key)

    def forget_unwanted(self) -> None:
        """Remove the pings whose tasks were cancelled.

        Call this only if none of them can still be answered, or later answers would be matched to the wrong pings.
        """
        kept = {key: deque(ping for ping in waiting if ping.is_wanted) for key, waiting in self._under_way.items()}
        self._under_way = {key: waiting for key, waiting in kept.items() if waiting}
