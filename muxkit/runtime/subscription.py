"""The subscriber's side of topics: a channel on which a server sends what is published.

A subscription is a channel with the name of the topic. Its headers say which codec the messages have, where the
subscriber wants to begin (`since`) and what happens when it is too slow (`on-lag`). On it, each message of the server
begins with a byte for its kind and a 64-bit number:

    0  an update: the number of the update in the topic, then its bytes
    1  updates were lost: how many, or 0 if nobody knows
    2  the subscription has begun: the number of the newest update, then the name of the run of the topic

The subscriber sends nothing.
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
"""What happens to a subscriber that is too slow:

- "end": the subscription ends with `Lagged`.
- "drop": it goes on with the oldest update that is left; `Subscription.lost` counts the lost ones.
- "latest": it gets the newest update only, whenever it is ready for one.
- "wait": publishers wait for it. A topic has to allow that.
"""

UPDATE: Final = 0
LOST: Final = 1
BEGUN: Final = 2
HEAD_SIZE: Final = 9  # bytes in front of an update: the kind and the number

SINCE_HEADER: Final = "since"
ON_LAG_HEADER: Final = "on-lag"
MEMBER_HEADER: Final = "member"


def framed(kind: int, number: int, rest: bytes = b"") -> bytes:
    """Return a message of a subscription."""
    return b"%c%b%b" % (kind, number.to_bytes(8, "big"), rest)


class Lagged(MuxError):
    """A subscriber was too slow, or came too late, and `lost` updates were lost; 0 means that nobody knows how many.

    Subscribe again to go on with what comes from now on.
    """

    def __init__(self, lost: int) -> None:
        how_many = f"{lost:,} updates were" if lost > 1 else "1 update was" if lost else "some updates were"
        super().__init__(f"{how_many} lost, because this subscriber was too slow or came too late")
        self.lost = lost


class Carrier(Protocol):
    """The channel of a subscription, as far as it is used here."""

    _span: ChannelSpan | None

    @property
    def headers(self) -> Headers: ...
    async def receive(self) -> bytes: ...
    async def aclose(self) -> None: ...
    def abort(self, reason: str = "", *, code: int = 0) -> None: ...


class Subscription(AsyncIterator[ValueT], Generic[ValueT]):
    """The updates of a topic, made by `session.subscribe`."""

    def __init__(self, channel: Carrier, codec: Codec[ValueT]) -> None:
        self._channel = channel
        self._codec = codec
        self._run = ""
        self._number = 0
        self._ends_by_lag = channel.headers.get(ON_LAG_HEADER, "end") == "end"
        self.lost: int = 0
        """How many updates were lost so far, because this subscriber was too slow."""

    @property
    def _span(self) -> ChannelSpan | None:
        return self._channel._span

    @property
    def position(self) -> str:
        """Where the subscriber is: give it as `since=` to a later subscription, to go on after the last update."""
        return f"{self._number}@{self._run}"

    async def _begin(self) -> None:
        """Wait until the server has registered the subscriber: every later update reaches it."""
        kind, number, rest = _parts(await self._channel.receive())
        if kind != BEGUN:
            raise self._invalid("the subscription began with a message of another kind")
        self._run, self._number = rest.decode(errors="replace"), number

    async def __anext__(self) -> ValueT:
        """Wait for the next update. Raises `Lagged` if the policy is to end with it."""
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
                raise self._invalid("a message of an unknown kind came")
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
    """Make a subscription of the channel that is opened."""

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
