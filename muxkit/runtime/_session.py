"""What the sessions of all protocols share: the face that applications see, and the pings under way."""

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
    """A two-way channel of values of one type, made by `session.open(codec=...)` and `muxkit.handler`.

    `send` and `receive` take and give values, with the cancellation rules of `Channel`. A message of the peer that
    doesn't fit the type raises `InvalidMessage` in `receive`, and the channel is aborted with the code 422 and the
    problem as the reason. The session isn't affected.
    """

    __slots__ = ("codec", "raw")

    def __init__(self, raw: Channel, codec: Codec[ValueT]) -> None:
        self.raw: Channel = raw
        """The channel of bytes below."""
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
        """The name that the opening side gave; "" if it gave none."""
        return self.raw.name

    @property
    def opening(self) -> bytes:
        """The payload that came, or went, with the opening, in bytes."""
        return self.raw.opening

    @property
    def headers(self) -> Headers:
        """The headers that came, or went, with the opening."""
        return self.raw.headers

    async def send(self, value: ValueT) -> None:
        """Send a value. Cancelled means not sent.

        Raises what the codec raises for a value that it can't encode; then nothing was sent.
        """
        await self.raw.send(self.codec.encode(value))

    async def send_many(self, values: Iterable[ValueT]) -> None:
        """Send several values with one checkpoint; cancelled, a prefix of them was sent."""
        encode = self.codec.encode
        await self.raw.send_many([encode(value) for value in values])

    async def receive(self) -> ValueT:
        """Wait for the next value. Raises `trio.EndOfChannel` at the clean end, `InvalidMessage` for an invalid one."""
        return self._decoded(await self.raw.receive())

    async def receive_many(self, limit: int | None = None) -> list[ValueT]:
        """Wait for at least one value, then return all that have come, at most `limit`. Raises as `receive` does."""
        return [self._decoded(message) for message in await self.raw.receive_many(limit)]

    def _decoded(self, message: bytes) -> ValueT:
        try:
            return decoded(self.codec, message)
        except InvalidMessage as error:
            self.raw.abort(str(error), code=INVALID_MESSAGE)
            raise

    async def finish(self) -> None:
        """Say that no more values follow, and wait until the peer has heard it; receiving goes on."""
        await self.raw.finish()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Give up both directions now, as `Channel.abort` does."""
        self.raw.abort(reason, code=code)

    async def aclose(self) -> None:
        """Close both directions, as `Channel.aclose` does."""
        await self.raw.aclose()

    def stats(self) -> ChannelStats:
        """Return the gauges of the channel."""
        return self.raw.stats()


def typed(opening: Opening[Channel], codec: Codec[ValueT]) -> ChannelOpening[TypedChannel[ValueT]]:
    """Put a codec around a channel that is opened; the caller has announced the codec in the headers."""

    async def open() -> TypedChannel[ValueT]:
        return TypedChannel(await opening, codec)

    return ChannelOpening(open)


class IncomingRequest(ABC):
    """A request of the peer, to be answered with one response.

    Leaving an `async with` block around it declines the request if it has no response by then.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def session(self) -> Session:
        """The session that carries this request."""

    @property
    @abstractmethod
    def payload(self) -> bytes:
        """The bytes that the peer sent with the request."""

    @abstractmethod
    async def respond(self, payload: bytes) -> None:
        """Send the response; returns when the session has accepted it. Cancelled means not sent.

        Raises `ChannelStopped` when the peer needs no response any more, `LocalProtocolError` in a second call.
        """

    @abstractmethod
    async def decline(self, payload: bytes = b"") -> None:
        """End the request without a response, and wait until the peer has confirmed that."""

    @abstractmethod
    async def cancelled(self) -> None:
        """Wait until the peer needs no response any more: it cancelled, has the response, or its connection is lost."""

    @abstractmethod
    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Decline without waiting, if there is no response; the peer reads the reason if it gave credit for it."""

    @abstractmethod
    async def __aenter__(self) -> IncomingRequest: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...


@attrs.frozen(kw_only=True)
class SessionStats:
    """Counters since the session began, and gauges of now."""

    bytes_received: int
    bytes_sent: int
    messages_received: int
    messages_sent: int
    channels: int
    """Live channels, those of both sides."""
    queued: int
    """Bytes accepted by `send` that the transport has not taken yet."""
    round_trip: float | None
    """Seconds, smoothed; None before the first answer to a ping."""


_OF_CHANNELS = frozenset({"send", "send_many", "receive", "receive_many", "send_all", "receive_some", "finish"})


class Session(ABC):
    """One connection that carries many channels; it owns its tasks and ends with its `async with` block."""

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

        Leaving the block normally finishes the channel, leaving it by an error aborts it. The peer reads the arguments
        as `channel.name`, `channel.opening` and `channel.headers`. Headers are pairs of texts, for facts about the
        channel that aren't messages; `Limits.headers` bounds them. Peers of other programs, and of older versions, see
        them as the beginning of the payload.

        With a codec, such as `muxkit.Json(Price)`, the channel is a `TypedChannel`, which sends and receives values.
        The name of the codec travels as the header "codec".
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

        Every update that is published after the block was entered reaches the subscriber, unless it is too slow.

        Args:
            topic: The name under which the peer serves the topic.
            codec: The codec of the updates.
            since: The number of an update, or the `Subscription.position` of an earlier subscription: updates after it
                come first, as far as they are kept. 0 stands for all that are kept.
            on_lag: What happens when this subscriber is too slow; see `OnLag`.
            member: A name by which the other subscribers know this one, for topics with presence.
            headers: Further headers for the peer.

        Raises `ChannelCancelled` if the peer refuses, for example because it has no topic of this name.
        """
        told = subscription_headers(codec, since, on_lag, member, headers)
        return subscribed(self.open(topic, headers=told), codec)

    @abstractmethod
    def incoming(self) -> AsyncIterator[Channel]:
        """Iterate over the channels that the peer opens, until it hangs up in an orderly way.

        Checks for cancellation with each channel, yields at the latest with every 16th, and always when it had to
        wait, or while the peer breaks off what it opens.
        """

    def __aiter__(self) -> AsyncIterator[Channel]:
        return self.incoming()

    def listener(self, name: str = "") -> ChannelListener:
        """Return a listener whose connections are the channels that the peer opens with this name.

        With it, a server that was written for Trio's streams serves on the session: `trio.serve_listeners(handler,
        [session.listener("http")])`. That works on the client's side, too, so a program without a port of its own can
        be served behind NAT. It takes all channels of the session, so use it instead of `incoming`.
        """
        return ChannelListener(self, self.incoming(), name)

    async def request(self, payload: bytes) -> bytes:
        """Send a request and wait for its response. A cancellation cancels the request.

        Raises `ChannelStopped` if the peer declines the request, `LinkLost` if the connection is lost, and
        `Unsupported` if the protocol has no requests: only bpmux has them.
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
        """Decline immediately what the peer opens and no task takes, as this server's handler takes only `kinds`.

        Called by the server before it calls the handler. A kind is one of "channels" and "requests". Does nothing in a
        protocol in which a peer can't open anything else.
        """

    @abstractmethod
    def channels(self) -> Sequence[Channel]:
        """Return the live channels that this application has, those that it opened and those that it took."""

    @abstractmethod
    async def ping(self) -> float:
        """Return the seconds of one round trip through the peer's session."""

    @abstractmethod
    async def shutdown(self, *, grace: float) -> None:
        """Take no new channels, let the live ones end for up to `grace` seconds, then cut them."""

    @property
    def limits(self) -> Limits:
        """The limits of this session."""
        return Limits()

    @property
    @abstractmethod
    def info(self) -> SessionInfo:
        """What carries the session, and who the peer is."""

    @abstractmethod
    def stats(self) -> SessionStats:
        """What the session has sent, received and holds."""


def describe(link: object, protocol: str) -> SessionInfo:
    """Say what carries a session, from what its link tells; a link may have all of these attributes, some or none."""
    peer: str = getattr(link, "peer", "")
    identity: Identity | None = getattr(link, "identity", None)
    if user := getattr(link, "user", None):  # what `authorize` returned
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

SMOOTHING = 0.125  # weight of the newest round trip


@attrs.define(eq=False)
class Ping:
    """One ping under way; a ping that the engine sends by itself is waited for by no task."""

    sent_at: float = attrs.field(factory=trio.current_time)
    took: float | None = None
    """Seconds, once it was answered."""
    is_wanted: bool = True
    """False once the task that waited for it was cancelled."""
    _answer: trio.Event | None = None
    _error: ErrorMaker | None = None

    async def wait(self) -> float:
        """Wait for the answer, and return the round trip in seconds; raises what ended the ping instead."""
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
        """Wake the task that waits."""
        self.took, self._error = took, error
        if self._answer is not None:
            self._answer.set()


class Pings(Generic[KeyT]):
    """Pings under way by what they are about, each answered in the order in which they were sent.

    `ping = pings.sent(key)` after the engine was told, then `await ping.wait()`; the session calls `answered` and
    `ended`. `round_trip` is smoothed over all answers.
    """

    def __init__(self, facts: Facts | None = None) -> None:
        self._facts = facts
        self.round_trip: float | None = None
        """Seconds, smoothed; None before the first answer."""
        self._under_way: dict[KeyT, deque[Ping]] = {}

    def __contains__(self, key: KeyT) -> bool:
        return key in self._under_way

    def __len__(self) -> int:
        return sum(map(len, self._under_way.values()))

    def sent(self, key: KeyT) -> Ping:
        """Note that a ping was sent now, or will be by `resend`."""
        ping = Ping()
        self._under_way.setdefault(key, deque()).append(ping)
        return ping

    def answered(self, key: KeyT) -> None:
        """The oldest ping about this was answered; harmless if there is none."""
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
        """No answer comes any more: to the pings about `key`, or to all."""
        keys = [*self._under_way] if key is None else [key]
        for each in keys:
            for ping in self._under_way.pop(each, ()):
                ping.end(error=error)

    def resend(self, send: Callable[[KeyT], None]) -> None:
        """Send every ping that a task still waits for again, on a new connection."""
        self.forget_unwanted()
        for key, waiting in self._under_way.items():
            for ping in waiting:
                ping.sent_at = trio.current_time()
                send(key)

    def forget_unwanted(self) -> None:
        """Drop the pings whose tasks were cancelled; only for those that were not sent, or whose connection is gone."""
        kept = {key: deque(ping for ping in waiting if ping.is_wanted) for key, waiting in self._under_way.items()}
        self._under_way = {key: waiting for key, waiting in kept.items() if waiting}
