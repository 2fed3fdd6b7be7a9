"""The common channels over Relink: one id in both directions, and a few marker messages.

A message of one part is the application's. One without parts says that the direction is in use. One of two parts is a
marker: the first part says which, the second is empty. Relink itself can only close a channel; the markers add what
`muxkit.Channel` promises beside that.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import NO_QUEUE, Sending, queue_of
from muxkit.protocols.relink._session.errors import cancelled, refused, stopped
from muxkit.protocols.relink.frames import OVERHEAD, PART_OVERHEAD
from muxkit.runtime import ByteStream, Mailbox, ReceiveHalf, SendHalf
from muxkit.runtime import Channel as CommonChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from muxkit.protocols.relink._session.core import Core, ErrorMaker
    from muxkit.protocols.relink.frames import Parts
    from muxkit.runtime import Reading


BEGIN: Final[Parts] = ()
END: Final[Parts] = (b"end", b"")
"""No more messages follow."""
CANCEL: Final[Parts] = (b"cancel", b"")
"""No more follow, and some are missing."""
STOP: Final[Parts] = (b"stop", b"")
"""No more are wanted in the other direction."""

RESERVE: Final = 3 * (OVERHEAD + PART_OVERHEAD + 48)  # bytes kept free in each window, so that markers can always go


class Channel(CommonChannel):
    """A common channel: our channel n with the peer's channel n. Connectors open even numbers, listeners odd ones."""

    __slots__ = (
        "_core",
        "_done",
        "_forgotten",
        "_has_ended",
        "_is_absorbing",
        "_is_closed",
        "_last",
        "_peer_is_done",
        "_sent_stop",
        "_unread_markers",
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
        self._unread_markers = 0  # behind the oldest message that is unread
        self._peer_is_done = False  # END or CANCEL came, or the peer's direction is closed
        self._sent_stop = False
        self._has_ended = False  # the peer's direction is closed
        self._is_closed = False  # and ours, by us
        self.out_is_over = False  # and the peer has confirmed it
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
        self.sink.is_unannounced = self.is_idle
        self.sink.close()  # first: a peer counts the other order as breaking off
        self.source.close()
        self.close_if_done()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        self.sink.is_unannounced = self.is_idle
        self.sink.abort()
        self.source.close()
        self.close_if_done()

    def as_stream(self) -> ByteStream:
        """Return the channel as a `trio.abc.HalfCloseableStream`; use the stream or the channel, not both."""
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
        self.sink.send_markers()
        self.sink.window_changed()
        self.close_if_done()

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
                    self._unread_markers += 1
                    self._on_marker(parts)
            if not core.in_transactions:  # then there are no gaps, and that was all
                break
        if engine.has_peer_shut_down:
            self.absorb()
        if self._unread_markers:
            self.consume()
            self.close_if_done()

    def ended(self) -> None:
        self._has_ended = True
        if not self._peer_is_done:  # a peer that sends no markers
            self._peer_is_done = True
            self.source.ended(trio.EndOfChannel)
        self.consume()
        self.close_if_done()
        self._check_over()

    def in_lost(self, error: ErrorMaker) -> None:
        self.lost(error)

    def _on_marker(self, parts: Parts) -> None:
        if parts[:1] == END[:1]:
            self._peer_is_done = True
            self.source.ended(trio.EndOfChannel)
        elif parts[:1] == CANCEL[:1]:
            self._peer_is_done = True
            self.source.ended(cancelled)
        elif parts[:1] == STOP[:1]:
            self._stopped(stopped)

    def _stopped(self, error: ErrorMaker) -> None:
        self.sink.is_finished = True
        self.sink.stopped(error)

    def stop(self) -> None:
        """The application wants no more."""
        if not self._peer_is_done and not self._sent_stop:
            self._sent_stop = True
            self.sink.send_marker(STOP)

    def consume(self) -> None:
        """Tell the engine what the application has taken."""
        unread = 0 if self._is_absorbing else self.source.unread
        if not unread:
            self._unread_markers = 0
        through = self._last - unread - self._unread_markers
        if through > self._done:
            core = self._core
            self._done = through
            now = trio.current_time()
            if core.in_transactions:
                core.engine.committed(self.id, through=through, now=now)
            else:
                core.engine.consume(self.id, through=through, now=now)
            core.after_consuming()
            if self.out_is_over:
                self._check_over()

    # --- the end

    @property
    def is_idle(self) -> bool:
        """True if neither side has sent anything on it."""
        return not (self.is_open_there or self.sink.has_sent)

    def announce(self) -> None:
        """Open the channel with BEGIN before our shutdown, after which none can be opened."""
        if not self.sink.has_sent and self.sink.state is Sending.OPEN:
            self.sink.send_marker(BEGIN)

    def refuse_unanswered(self) -> None:
        """Fail the channel if the peer has not used it before its shutdown: it was refused."""
        if not self.is_open_there:
            self._peer_is_done = self._has_ended = True
            self._stopped(refused)
            self.source.ended(refused)
            self.close_if_done()
            self._check_over()

    def absorb(self) -> None:
        """Consume at once what the application has not read, since the peer shuts down and sends no more."""
        if self._peer_is_done:
            self._is_absorbing = True
            self.consume()

    def close_if_done(self) -> None:
        """Close our direction once its end, or the peer's STOP, leaves nothing to send."""
        if self._is_closed or not self.sink.may_close or not (self._peer_is_done or self._sent_stop):
            return
        self._is_closed = True
        if not self.sink.has_sent and self.is_open_there:
            self.sink.send_marker(BEGIN)  # or the peer would wait for an end that never comes
        if self.sink.has_sent and self._core.error is None:
            self._core.engine.close(self.id)
            self._core.after_command()
        else:
            self.out_is_over = True
            self.sink.gone()
        self._check_over()

    def _check_over(self) -> None:
        is_in_over = self._has_ended and self._done >= self._last
        if self.out_is_over and (is_in_over or self.is_idle):
            self._forgotten(self)


TOLD_CALLS: Final = 16  # messages that are taken before the engine is told of them
TOLD_BYTES: Final = 16 * 1024


class Sink(SendHalf):
    """The sending half."""

    __slots__ = (
        "_channel",
        "_core",
        "_end",
        "_engine",
        "_heard",
        "_id",
        "_markers",
        "has_sent",
        "is_finished",
        "is_unannounced",
    )

    def __init__(self, core: Core, channel: Channel) -> None:
        super().__init__(core.room, core.request_write)
        self._core = core
        self._engine = core.engine
        self._channel = channel
        self._id = channel.id
        self._markers: deque[Parts] = NO_QUEUE  # markers for which there was no room yet
        self._end: int | None = None  # number of the message that holds END or CANCEL
        self._heard = -1
        self.has_sent = False
        self.is_unannounced = False  # the peer never heard of the channel, and need not
        self.is_finished = False  # END or CANCEL is queued, or the peer sent STOP

    @property
    def may_close(self) -> bool:
        return self.is_finished and not self._markers

    def admits(self, size: int) -> bool:
        return self._core.engine.admits(self._channel.id, size + RESERVE)

    def watch(self, size: int) -> None:
        self._core.engine.watch(self._channel.id, size + RESERVE)

    def check_size(self, size: int) -> None:
        most = self._core.limits.message
        if size > most:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={most})")

    def _try_push(self, message: bytes) -> bool:
        number = self._engine.try_send(self._id, message, RESERVE)
        if number is None:
            return super()._try_push(message)
        core = self._core
        core.messages_sent += 1
        if core.out_transactions:
            self._engine.commit(self._id, through=number)
        return True

    def _try_push_all(self, messages: list[bytes]) -> bool:
        last = self._engine.try_send_all(self._id, messages, RESERVE)
        if last is None:
            return False
        core = self._core
        core.messages_sent += len(messages)
        if core.out_transactions:
            self._engine.commit(self._id, through=last)
        return True

    def _push(self, message: bytes) -> None:
        core = self._core
        number = core.engine.send(self._channel.id, (message,), overdraw=True)
        core.messages_sent += 1
        self.has_sent = True
        if core.out_transactions:
            core.engine.commit(self._channel.id, through=number)

    def _send_now(self, parts: Parts) -> None:
        core = self._core
        number = core.engine.send(self._channel.id, parts)
        core.messages_sent += 1
        self.has_sent = True
        if core.out_transactions:
            core.engine.commit(self._channel.id, through=number)
        if parts is END or parts is CANCEL:
            self._end = number

    def _finish(self, payload: bytes) -> None:
        self.send_marker(END)

    def _abort(self) -> None:
        self._markers = deque(marker for marker in self._markers if marker is not END)
        if self._end is None:
            self.send_marker(CANCEL)

    def send_marker(self, marker: Parts) -> None:
        """Send a marker behind everything that was sent, as soon as there is room."""
        if marker is END or marker is CANCEL:
            self.is_finished = True
        if not self.is_unannounced:
            self._markers = queue_of(self._markers)
            self._markers.append(marker)
            self.send_markers()

    def send_markers(self) -> None:
        engine, id = self._core.engine, self._channel.id
        while self._markers:
            marker = self._markers[0]
            if not engine.admits(id, 16, len(marker)):
                engine.watch(id, 16, len(marker))
                break
            self._markers.popleft()
            try:
                self._send_now(marker)
            except LocalProtocolError:
                # No channel can be opened any more, so the peer learns from our shutdown that there is none.
                self._markers.clear()
        self._core.request_write()

    def heard(self, through: int) -> None:
        self._heard = max(self._heard, through)
        self._check_heard()

    def _check_heard(self) -> None:
        if self._end is not None and self._heard >= self._end and self.state is Sending.FINISHING:
            self.confirmed()

    def gone(self) -> None:
        """Confirm the end: the channel is closed on both sides of the wire."""
        if self.state is Sending.FINISHING:
            self.confirmed()

    def __repr__(self) -> str:
        return f"<relink.Sink {self._channel.id} {self.state.value}>"


class Source(ReceiveHalf[bytes]):
    """The receiving half."""

    __slots__ = ("_channel", "_core", "_taken_bytes", "_taken_calls")

    _new_storage = Mailbox

    def __init__(self, core: Core, channel: Channel) -> None:
        super().__init__(core.request_write)
        self._core = core
        self._channel = channel
        self._taken_calls = 0  # calls since the engine was told
        self._taken_bytes = 0

    def _taken(self, messages: Sequence[bytes], size: int) -> bool:
        # What is unread comes before anything that the peer could be waiting to send, so the ack can wait for more.
        self._taken_calls += 1
        self._taken_bytes += size
        if self.unread and self._taken_calls < TOLD_CALLS and self._taken_bytes < TOLD_BYTES:
            return False
        self._taken_calls = self._taken_bytes = 0
        self._channel.consume()
        return False  # the channel has rung

    def _stop(self) -> None:
        self._channel.stop()

    def _reading(self) -> Reading | None:
        return None if self._core.pump is None else self._core.pump.reading

    def __repr__(self) -> str:
        return f"<relink.Source {self._channel.id} {self.state.value}, {self.unread} unread>"
