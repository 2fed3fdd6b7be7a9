"""`Topic`, a handler of channels that sends the updates of a program to each subscriber.

A topic keeps the newest updates in a ring buffer, in encoded form. For each subscriber, a task runs the handler and has
a position in the ring:

- A subscriber that has received everything is up to date. `publish` itself sends it the next update, if its channel
  accepts the update without waiting. That saves a switch to the subscriber's task.
- Otherwise the task sends the updates that are missing, in batches.
- If the ring has dropped an update that the subscriber still needed, its policy decides (`OnLag`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final, Generic, TypeVar, cast

import attrs
import msgspec
import trio

from muxkit import _spans
from muxkit._errors import Refused
from muxkit.codecs import CODEC_HEADER, Codec, Json
from muxkit.core import printable
from muxkit.runtime import BEGUN, LOST, MEMBER_HEADER, ON_LAG_HEADER, SINCE_HEADER, UPDATE, Channel, OnLag, framed
from muxkit.topics._journal import Journal
from muxkit.topics._presence import PRESENCE_CODEC, Member, Presence, member_of
from muxkit.topics._ring import Ring

ValueT = TypeVar("ValueT")

KEEP: Final = 1024
KEEP_BYTES: Final = 16 * 1024 * 1024
BATCH: Final = 64
"""Maximum number of updates that are sent to a subscriber with one checkpoint."""
REPLAY_BATCH: Final = 1000
"""Maximum number of updates that are read from a journal with one query."""
BAD_REQUEST: Final = 400
NOT_ALLOWED: Final = 403
UNKNOWN_CODEC: Final = 415
OUT_OF_ORDER: Final = "invalid header 'since': expected a number, or a position of an earlier subscription"


class Topic(Generic[ValueT]):
    """Sends each update to all its subscribers. It is a handler of channels, for `muxkit.by_name`.

    Args:
        values: The type of the updates, or a codec. With a type, the updates are JSON.
        keep: How many updates are kept for subscribers that are slow or that reconnect.
        keep_bytes: The maximum of their total size.
        allow_wait: Whether subscribers may use the policy "wait", with which a slow subscriber makes `publish` wait.
        journal: A store of restream that keeps the updates, so that `since=` works after a restart. Pass a store that
            `restream.open_store` has opened, or a URL such as "sqlite:prices.db". With a URL, use the topic in an
            `async with` block, which opens and closes the store. The codec must be JSON.
        name: The name of the topic in the journal.

    Raises:
        ValueError: If there is a journal without a name or with another codec than JSON.
    """

    def __init__(
        self,
        values: type[ValueT] | Codec[ValueT],
        *,
        keep: int = KEEP,
        keep_bytes: int = KEEP_BYTES,
        allow_wait: bool = False,
        journal: Journal | str | None = None,
        name: str = "",
    ) -> None:
        given: object = values
        is_codec = not isinstance(given, type) and hasattr(given, "encode")
        self.codec: Codec[ValueT] = cast("Codec[ValueT]", values) if is_codec else Json(cast("type[ValueT]", values))
        if journal is not None and (not name or self.codec.name != "json"):
            raise ValueError("journal=…: expected a name= for the topic and JSON as its codec")
        self._ring = Ring(keep, keep_bytes)
        self._allow_wait = allow_wait
        self._journal = None if isinstance(journal, str) else journal
        self._place = journal if isinstance(journal, str) else None  # the URL of a journal that the topic opens itself
        self._store = AsyncExitStack()
        self._name = name
        self._served_as = ""  # the name by which the first subscriber found the topic
        self._run = secrets.token_hex(8)
        self._subscribers: set[_Subscriber] = set()
        self._moved = trio.lowlevel.ParkingLot()  # publishers that wait for the slowest subscriber
        self._is_closed = False
        self._presence: Topic[Presence] | None = None
        self._members: dict[_Subscriber, Member] = {}
        self._last_member = 0
        self._turn = trio.Lock()  # with a journal, publishers take turns

    # --- for the program

    async def __aenter__(self) -> Topic[ValueT]:
        """Open the topic. This is necessary only with a journal, to find the number of its last update."""
        if self._place is not None:
            from muxkit.protocols.restream import open_store  # most topics have no journal

            self._journal = await self._store.enter_async_context(open_store(self._place))
        try:
            await self._read_journal()
        except BaseException:
            await self._store.aclose()
            raise
        return self

    async def _read_journal(self) -> None:
        """Continue with the number after the last update in the journal."""
        if self._journal is not None:
            try:
                status = await self._journal.register(self._name, None, attached=False, keep=math.inf)
            except Exception as error:
                if not hasattr(error, "status"):
                    raise
                status = await self._journal.status(self._name)  # it exists
            self._run = status.incarnation
            self._ring.start_after(status.head)

    async def __aexit__(self, *_: object) -> None:
        """End all subscriptions."""
        self.close()
        await self._store.aclose()

    def close(self) -> None:
        """End all subscriptions after the last update. Later subscriptions end immediately."""
        self._is_closed = True
        self._wake_all()
        self._moved.unpark_all()
        if self._presence is not None:
            self._presence.close()

    @property
    def head(self) -> int:
        """The number of the newest update, or 0 before the first one."""
        return self._ring.head

    @property
    def subscribers(self) -> int:
        """The number of subscribers."""
        return len(self._subscribers)

    @property
    def members(self) -> Sequence[Member]:
        """The subscribers that gave a name as `member=`, or that the server has authenticated."""
        return [*self._members.values()]

    @property
    def presence(self) -> Topic[Presence]:
        """A topic about the members of this topic. Its updates are of the type `Presence`.

        A subscriber first receives an update for each member, and then one for each member that joins or leaves. Serve
        it under another name: `muxkit.by_name({"chat": chat, "chat/presence": chat.presence})`.
        """
        if self._presence is None:
            self._presence = _PresenceTopic(self)
        return self._presence

    async def publish(self, value: ValueT) -> int:
        """Send a value to all subscribers, and return its number.

        This doesn't wait for subscribers, except for those with the policy "wait". With a journal, it returns when the
        update was stored. If it is cancelled, nothing was published, unless the journal was just storing the update.

        If the codec can't encode the value, its exception is raised, and nothing was published.

        Raises:
            trio.ClosedResourceError: If the topic was closed.
        """
        if _spans.maker is None:
            return await self._publish(value)
        with _spans.maker.publishing(self._name or self._served_as):
            return await self._publish(value)

    async def _publish(self, value: ValueT) -> int:
        message = self.codec.encode(value)
        await trio.lowlevel.checkpoint()
        if self._journal is None:
            while self._ring.is_full and self._has_waiting_subscriber():
                await self._moved.park()
            self._check_open()
            return self._add(message)
        async with self._turn:
            self._check_open()
            while self._ring.is_full and self._has_waiting_subscriber():
                await self._moved.park()
            with trio.CancelScope(shield=True):  # once the update is stored, the subscribers must receive it
                stored = await self._journal.append(self._name, msgspec.json.decode(message))
            return self._add(message, stored.id)

    def publish_nowait(self, value: ValueT) -> int:
        """Send a value to all subscribers without waiting, and return its number.

        Raises:
            trio.WouldBlock: If the topic has a journal, or must wait for a subscriber with the policy "wait".
        """
        if _spans.maker is None:
            return self._publish_nowait(value)
        with _spans.maker.publishing(self._name or self._served_as):
            return self._publish_nowait(value)

    def _publish_nowait(self, value: ValueT) -> int:
        message = self.codec.encode(value)
        self._check_open()
        if self._journal is not None or (self._ring.is_full and self._has_waiting_subscriber()):
            raise trio.WouldBlock
        return self._add(message)

    async def __call__(self, channel: Channel) -> None:
        """Serve a subscriber."""
        headers = channel.headers
        self._served_as = self._served_as or channel.name
        codec = headers.get(CODEC_HEADER, self.codec.name)
        if codec != self.codec.name:
            said = f"unknown codec {printable(codec, 64)!r}: this topic has {self.codec.name!r}"
            raise Refused(said, code=UNKNOWN_CODEC)
        on_lag = headers.get(ON_LAG_HEADER, "end")
        if on_lag not in ("end", "drop", "latest", "wait"):
            raise Refused(f"invalid header 'on-lag': got {printable(on_lag, 64)!r}", code=BAD_REQUEST)
        if on_lag == "wait" and not self._allow_wait:
            raise Refused("this topic doesn't wait for its subscribers", code=NOT_ALLOWED)
        since = self._since(headers.get(SINCE_HEADER))
        with trio.CancelScope() as scope:
            channel._cancel_when_stopped(scope)
            await channel.send(framed(BEGUN, self._ring.head if since is None else since, self._run.encode()))
            subscriber = _Subscriber(channel, cast("OnLag", on_lag), self._ring.head if since is None else since)
            self._join(subscriber, headers.get(MEMBER_HEADER))
            try:
                await self._greet(subscriber)
                await self._follow(subscriber)
            finally:
                self._leave(subscriber)
        if scope.cancelled_caught:
            channel.abort()

    # --- publishing

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this topic was closed")
        if self._place is not None and self._journal is None:
            raise RuntimeError("this topic has a journal that isn't open: expected 'async with topic:' around its use")

    def _add(self, message: bytes, number: int | None = None) -> int:
        if number is not None and number != self._ring.head + 1:  # another process published as well
            self._ring.start_after(number - 1)
        number = self._ring.head + 1
        update = framed(UPDATE, number, message)
        self._ring.add(update)
        for subscriber in self._subscribers:
            subscriber.offer(number, update)
        return number

    def _wake_all(self) -> None:
        for subscriber in self._subscribers:
            subscriber.wake()

    def _has_waiting_subscriber(self) -> bool:
        """Return True if a subscriber with the policy "wait" needs the oldest update."""
        if self._is_closed or not self._allow_wait:
            return False
        return any(each.on_lag == "wait" and each.position < self._ring.first for each in self._subscribers)

    # --- subscribers

    def _since(self, text: str | None) -> int | None:
        """Return the number after which a subscriber wants to begin, or None to begin with the next update."""
        if text is None:
            return None
        number, at, run = text.partition("@")
        if not (number.isascii() and number.isdigit() and len(number) < 20):
            raise Refused(OUT_OF_ORDER, code=BAD_REQUEST)
        if at and run != self._run:  # a position in an earlier run, whose updates are lost: send all that there are
            return 0
        return min(int(number), self._ring.head)

    async def _greet(self, subscriber: _Subscriber) -> None:
        """Send a new subscriber the messages that it gets before the updates."""

    async def _follow(self, subscriber: _Subscriber) -> None:
        """Send a subscriber all updates after its position, until the topic is closed."""
        ring, channel = self._ring, subscriber.channel
        while True:
            if subscriber.position >= ring.head:
                if self._is_closed:
                    return
                await subscriber.wait()
                continue
            if subscriber.on_lag == "latest":
                subscriber.position = ring.head - 1
            elif subscriber.position + 1 < ring.first:
                if self._journal is not None and await self._replay(subscriber):
                    continue
                lost = ring.first - 1 - subscriber.position
                subscriber.position = ring.first - 1
                await channel.send(framed(LOST, lost))
                if subscriber.on_lag == "end":
                    return
                continue
            last = min(ring.head, subscriber.position + BATCH)
            updates = ring.between(subscriber.position + 1, last)
            if len(updates) == 1:
                await channel.send(updates[0])
            else:
                await channel.send_many(updates)
            subscriber.position = max(subscriber.position, last)
            if self._moved:
                self._moved.unpark_all()

    async def _replay(self, subscriber: _Subscriber) -> bool:
        """Send a subscriber updates from the journal. Return False if the journal doesn't have the next one."""
        assert self._journal is not None  # as the caller has checked
        status = await self._journal.status(self._name)
        if subscriber.position < status.acknowledged:  # they were deleted
            return False
        stored = await self._journal.replay(self._name, subscriber.position, REPLAY_BATCH)
        for update in stored:
            await subscriber.channel.send(framed(UPDATE, update.id, msgspec.json.encode(update.data)))
            subscriber.position = update.id
        return bool(stored)

    # --- presence

    def _join(self, subscriber: _Subscriber, name: str | None) -> None:
        self._subscribers.add(subscriber)
        if name is not None or subscriber.channel.session.info.user is not None:
            self._last_member += 1
            member = self._members[subscriber] = member_of(subscriber.channel, self._last_member, name or "")
            if self._presence is not None and not self._is_closed:
                self._presence.publish_nowait(Presence(member, is_here=True))

    def _leave(self, subscriber: _Subscriber) -> None:
        self._subscribers.discard(subscriber)
        self._moved.unpark_all()
        member = self._members.pop(subscriber, None)
        if member is not None and self._presence is not None and not self._is_closed:
            self._presence.publish_nowait(Presence(member, is_here=False))


class _PresenceTopic(Topic[Presence]):
    """The topic about the members of another topic."""

    def __init__(self, topic: Topic[ValueT]) -> None:
        super().__init__(PRESENCE_CODEC)
        self._topic = topic

    async def _greet(self, subscriber: _Subscriber) -> None:
        here = [self.codec.encode(Presence(member, is_here=True)) for member in self._topic.members]
        for each in here:
            await subscriber.channel.send(framed(UPDATE, subscriber.position, each))


@attrs.define(eq=False)
class _Subscriber:
    """A subscriber."""

    channel: Channel
    on_lag: OnLag
    position: int
    """The number of the last update that was sent to it."""
    _waiting: trio.lowlevel.Task | None = None  # its task, while it waits for an update

    async def wait(self) -> None:
        """Wait until the task is needed, because there is an update that `offer` couldn't send."""
        self._waiting = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._waiting = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def offer(self, number: int, update: bytes) -> None:
        """Send an update immediately, if that is possible. Otherwise, wake the subscriber's task."""
        if self._waiting is None:
            return
        try:
            is_sent = self.position == number - 1 and self.channel._try_send(update)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            is_sent = False  # the task gets the same error
        if is_sent:
            self.position = number
        else:
            self.wake()

    def wake(self) -> None:
        """Wake the subscriber's task, if it waits."""
        task, self._waiting = self._waiting, None
        if task is not None:
            trio.lowlevel.reschedule(task)
