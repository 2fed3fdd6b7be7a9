"""The subscriber's side of topics.

A subscription is a channel with the name of the topic. Its headers contain the codec, the update after which the
subscriber wants to begin (`since`), and what happens if it is too slow (`on-lag`). The subscriber sends no messages.
Each message of the server begins with a byte for its kind and a 64-bit number:

    kind  meaning                       number                       rest of the message
    0     an update                     its number in the topic      the encoded update
    1     updates were lost             how many, or 0 if unknown
    2     the subscription has begun    that of the newest update    the name of the topic's run

A *run* of a topic begins when it is created. Its name is part of a position, because without a journal, the numbers
begin with 1 again in the next run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import trio

from muxkit._errors import MuxError
from muxkit._spans import ChannelSpan
from muxkit.codecs import Codec, InvalidMessage, announced, decoded
from muxkit.core import Headers
from muxkit.runtime.halves.opening import ChannelOpening

ValueT = TypeVar("ValueT")

OnLag = Literal["end", "drop", "latest", "wait"]
"""What happens if a subscriber is so slow that the topic has dropped an update which it hasn't received:

- "end": The subscription ends with `Lagged`.
- "drop": The subscription continues with the oldest update that is left. `Subscription.lost` counts the lost ones.
- "latest": The subscriber receives only the newest update, each time that it is ready for one.
- "wait": `publish` waits for the subscriber. The topic has to allow that with `allow_wait`.
"""

UPDATE: Final = 0
LOST: Final = 1
BEGUN: Final = 2
HEAD_SIZE: Final = 9  # size of the kind and the number in bytes

SINCE_HEADER: Final = "since"
ON_LAG_HEADER: Final = "on-lag"
MEMBER_HEADER: Final = "member"


def framed(kind: int, number: int, rest: bytes = b"") -> bytes:
    """Encode a message of a subscription."""
    return b"%c%b%b" % (kind, number.to_bytes(8, "big"), rest)


class Lagged(MuxError):
    """Updates were lost, because a subscriber was too slow or subscribed too late.

    To receive later updates, subscribe again.

    Attributes:
        lost: How many updates were lost, or 0 if that isn't known.
    """

    def __init__(self, lost: int) -> None:
        how_many = f"{lost:,} updates were" if lost > 1 else "1 update was" if lost else "some updates were"
        super().__init__(f"{how_many} lost, because this subscriber was too slow or came too late")
        self.lost = lost


class Carrier(Protocol):
    """The methods of a channel that a subscription uses."""

    _span: ChannelSpan | None

    @property
    def headers(self) -> Headers: ...
    async def receive(self) -> bytes: ...
    async def aclose(self) -> None: ...
    def abort(self, reason: str = "", *, code: int = 0) -> None: ...


class Subscription(AsyncIterator[ValueT], Generic[ValueT]):
    """The updates of a topic. `session.subscribe` returns it, and a program iterates over it with `async for`."""

    def __init__(self, channel: Carrier, codec: Codec[ValueT]) -> None:
        self._channel = channel
        self._codec = codec
        self._run = ""
        self._number = 0
        self._ends_by_lag = channel.headers.get(ON_LAG_HEADER, "end") == "end"
        self.lost: int = 0
        """How many updates were lost until now, because this subscriber was too slow."""

    @property
    def _span(self) -> ChannelSpan | None:
        return self._channel._span

    @property
    def position(self) -> str:
        """The position after the last received update. Pass it as `since=` to a later subscription to continue
        there."""
        return f"{self._number}@{self._run}"

    async def _begin(self) -> None:
        """Wait until the server has registered the subscriber, so that it gets every later update."""
        kind, number, rest = _parts(await self._channel.receive())
        if kind != BEGUN:
            raise self._invalid(f"invalid begin of a subscription: expected a message of kind {BEGUN}, got {kind}")
        self._run, self._number = rest.decode(errors="replace"), number

    async def __anext__(self) -> ValueT:
        """Wait for the next update. Raises `Lagged` if updates were lost and `on_lag` is "end"."""
        while True:
            try:
                message = await self._channel.receive()
            except trio.EndOfChannel:
                raise StopAsyncIteration from None
            kind, number, rest = _parts(message)
            if kind == UPDATE:
                self._number = number
                try:
                    return decoded(self._codec, rest)
                except InvalidMessage as error:
                    raise self._invalid(str(error), path=error.path) from error
            if kind != LOST:
                raise self._invalid(f"invalid message of a subscription: expected kind {UPDATE} or {LOST}, got {kind}")
            self.lost += number
            if self._ends_by_lag:
                raise Lagged(number)

    def _invalid(self, problem: str, *, path: str = "") -> InvalidMessage:
        self._channel.abort(problem, code=422)
        return InvalidMessage(problem, path=path)

    async def aclose(self) -> None:
        """End the subscription."""
        await self._channel.aclose()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """End the subscription without waiting."""
        self._channel.abort(reason, code=code)


def subscription_headers(
    codec: Codec[Any], since: int | str | None, on_lag: OnLag, member: str | None, headers: Headers | None
) -> Headers:
    """Return the headers of the channel of a subscription."""
    told = {**announced(headers, codec), ON_LAG_HEADER: on_lag}
    if since is not None:
        told[SINCE_HEADER] = str(since)
    if member is not None:
        told[MEMBER_HEADER] = member
    return told


def subscribed(opening: Awaitable[Carrier], codec: Codec[ValueT]) -> ChannelOpening[Subscription[ValueT]]:
    """Return an opening that makes a `Subscription` of a channel."""

    async def open() -> Subscription[ValueT]:
        subscription = Subscription(await opening, codec)
        try:
            await subscription._begin()
        except BaseException:
            subscription.abort()
            raise
        return subscription

    return ChannelOpening(open)


def _parts(message: bytes) -> tuple[int, int, bytes]:
    if len(message) < HEAD_SIZE:
        return -1, 0, b""
    return message[0], int.from_bytes(message[1:HEAD_SIZE], "big"), message[HEAD_SIZE:]
