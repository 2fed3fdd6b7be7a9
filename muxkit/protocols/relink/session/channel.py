"""How does Relink carry the common channels? One id in both directions, and a few messages of our own.

A message of one part is the application's. One without parts says that the direction is in use. One of two parts is a
sign: the first part says which, the second is empty. Relink itself can only close a channel; the signs add what
`muxkit.Channel` promises beside that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from muxkit.core import Sending
from muxkit.protocols.relink._session_errors import cancelled, refused, stopped
from muxkit.protocols.relink._session_halves import Sink, Source
from muxkit.protocols.relink._session_signs import BEGIN, CANCEL, END, STOP
from muxkit.runtime import ByteStream
from muxkit.runtime import Channel as CommonChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from muxkit.protocols.relink._packets import Parts
    from muxkit.protocols.relink._session_core import Core
    from muxkit.protocols.relink._session_roles import ErrorMaker


class Channel(CommonChannel):
    """Channel n of ours and channel n of the peer as one; who connected opens even numbers, who listened odd ones."""

    __slots__ = (
        "_core",
        "_done",
        "_forgotten",
        "_has_ended",
        "_is_absorbing",
        "_is_closed",
        "_last",
        "_peer_is_done",
        "_said_stop",
        "_signs",
        "id",
        "is_open_there",
        "out_is_over",
        "sink",
        "source",
    )

    def __init__(self, core: Core, id: int, forgotten: Callable[[Channel], None], *, is_ours: bool) -> None:
        self.id = id
        self._core = core
        self._forgotten = forgotten
        self.sink = Sink(core, self)
        self.source = Source(core, self)
        self.is_open_there = not is_ours  # the peer's direction is in use
        self._last = -1  # the last message that the engine gave
        self._done = -1  # the last that was consumed
        self._signs = 0  # behind the oldest message that is unread
        self._peer_is_done = False  # he has said his last word
        self._said_stop = False
        self._has_ended = False  # his direction is closed
        self._is_closed = False  # and ours, by us
        self.out_is_over = False  # and he has confirmed it
        self._is_absorbing = False
        core.outs[id] = self
        core.ins[id] = self

    # --- for the application; these give the half's own coroutine, since they are called for each message

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sink.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sink.send_many(messages)

    def receive(self) -> Coroutine[object, object, bytes]:
        return self.source.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        return self.source.receive_many(limit)

    async def finish(self) -> None:
        await self.sink.finish()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.sink.is_mute = self.is_idle
        self.sink.close()  # first: a peer counts the other order as breaking off
        self.source.close()
        self.settle()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        self.sink.is_mute = self.is_idle
        self.sink.abort()
        self.source.close()
        self.settle()

    def as_stream(self) -> ByteStream:
        """The same channel as a `trio.abc.HalfCloseableStream`; use one face or the other."""
        return ByteStream(self.sink, self.source)

    def __repr__(self) -> str:
        return f"<relink.Channel {self.sink!r} {self.source!r}>"

    # --- for the link: what we send

    def heard(self, through: int) -> None:
        self.sink.heard(through)

    def consumed(self, through: int) -> None:
        self.sink.heard(through)

    def answered(self, through: int, *, committed: bool) -> None:
        self.sink.heard(through)

    def window_changed(self) -> None:
        self.sink.say_more()
        self.sink.window_changed()
        self.settle()

    def closed(self) -> None:
        self.out_is_over = True
        self.sink.gone()
        self._check_over()

    def lost(self, error: ErrorMaker) -> None:
        self.sink.lost(error)
        self.source.ended(error)
        self._forgotten(self)

    # --- for the link: what we receive

    def opened(self) -> bool:
        was_open, self.is_open_there = self.is_open_there, True
        return not was_open

    def arrived(self) -> None:
        core, deliver = self._core, self.source.deliver
        engine = core.engine
        while True:
            first, batch = engine.receive(self.id)
            if not batch:
                break
            self._last = first - 1  # a half that is closed consumes at once what it is given
            for parts in batch:
                self._last += 1
                if len(parts) == 1:
                    core.messages_received += 1
                    deliver(parts[0])
                else:
                    self._signs += 1
                    self._hear(parts)
            if not core.in_transactions:  # then there are no gaps, and that was all
                break
        if engine.has_peer_shut_down:
            self.absorb()
        if self._signs:
            self.consume()
            self.settle()

    def ended(self) -> None:
        self._has_ended = True
        if not self._peer_is_done:  # he knows nothing of our signs
            self._peer_is_done = True
            self.source.ended(trio.EndOfChannel)
        self.consume()
        self.settle()
        self._check_over()

    def in_lost(self, error: ErrorMaker) -> None:
        self.lost(error)

    def _hear(self, parts: Parts) -> None:
        if parts[:1] == END[:1]:
            self._peer_is_done = True
            self.source.ended(trio.EndOfChannel)
        elif parts[:1] == CANCEL[:1]:
            self._peer_is_done = True
            self.source.ended(cancelled)
        elif parts[:1] == STOP[:1]:
            self._stopped(stopped)

    def _stopped(self, error: ErrorMaker) -> None:
        self.sink.is_settled = True
        self.sink.stopped(error)

    def stop(self) -> None:
        """The application wants no more."""
        if not self._peer_is_done and not self._said_stop:
            self._said_stop = True
            self.sink.say(STOP)

    def consume(self) -> None:
        """Tell the engine what the application has taken."""
        unread = 0 if self._is_absorbing else self.source.unread
        if not unread:
            self._signs = 0
        through = self._last - unread - self._signs
        if through > self._done:
            core = self._core
            self._done = through
            now = trio.current_time()
            if core.in_transactions:
                core.engine.committed(self.id, through=through, now=now)
            else:
                core.engine.consume(self.id, through=through, now=now)
            core.did_consume()
            if self.out_is_over:
                self._check_over()

    # --- the end

    @property
    def is_idle(self) -> bool:
        """Has neither side ever said anything on it?"""
        return not (self.is_open_there or self.sink.has_spoken)

    def announce(self) -> None:
        """Our side opens nothing more: what is live must be open by then."""
        if not self.sink.has_spoken and self.sink.state is Sending.OPEN:
            self.sink.say(BEGIN)

    def unanswerable(self) -> None:
        """The peer opens nothing more: a channel that he has not answered by now he has not taken."""
        if not self.is_open_there:
            self._peer_is_done = self._has_ended = True
            self._stopped(refused)
            self.source.ended(refused)
            self.settle()
            self._check_over()

    def absorb(self) -> None:
        """The peer opens nothing more, so what he has finished may stay with us without a window."""
        if self._peer_is_done:
            self._is_absorbing = True
            self.consume()

    def settle(self) -> None:
        """Close our direction when nothing is left to be said in it."""
        if self._is_closed or not self.sink.may_settle or not (self._peer_is_done or self._said_stop):
            return
        self._is_closed = True
        if not self.sink.has_spoken and self.is_open_there:
            self.sink.say(BEGIN)  # or the peer would wait for an end that never comes
        if self.sink.has_spoken and self._core.error is None:
            self._core.engine.close(self.id)
            self._core.did()
        else:
            self.out_is_over = True
            self.sink.gone()
        self._check_over()

    def _check_over(self) -> None:
        is_in_over = self._has_ended and self._done >= self._last
        if self.out_is_over and (is_in_over or self.is_idle):
            self._forgotten(self)
