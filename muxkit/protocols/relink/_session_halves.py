"""How does a common channel send and receive? Its two halves, which say more with signs than Relink has words for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from muxkit._errors import LocalProtocolError
from muxkit.core import NO_QUEUE, Sending, queue_of
from muxkit.protocols.relink._session_signs import CANCEL, END, RESERVE
from muxkit.runtime import Mailbox, ReceiveHalf, SendHalf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.relink._packets import Parts
    from muxkit.protocols.relink._session_channels import Channel
    from muxkit.protocols.relink._session_core import Core
    from muxkit.runtime import Reading

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
        "_sayings",
        "has_spoken",
        "is_mute",
        "is_settled",
    )

    def __init__(self, core: Core, channel: Channel) -> None:
        super().__init__(core.room, core.ring)
        self._core = core
        self._engine = core.engine
        self._channel = channel
        self._id = channel.id
        self._sayings: deque[Parts] = NO_QUEUE  # signs for which there was no room yet
        self._end: int | None = None  # number of the message that was our last word
        self._heard = -1
        self.has_spoken = False
        self.is_mute = False  # the peer never heard of the channel, and need not
        self.is_settled = False  # our last word is said, or the peer did not want to hear it

    @property
    def may_settle(self) -> bool:
        return self.is_settled and not self._sayings

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
        self.has_spoken = True
        if core.out_transactions:
            core.engine.commit(self._channel.id, through=number)

    def _hand(self, parts: Parts) -> None:
        core = self._core
        number = core.engine.send(self._channel.id, parts)
        core.messages_sent += 1
        self.has_spoken = True
        if core.out_transactions:
            core.engine.commit(self._channel.id, through=number)
        if parts is END or parts is CANCEL:
            self._end = number

    def _finish(self, payload: bytes) -> None:
        self.say(END)

    def _abort(self) -> None:
        self._sayings = deque(sign for sign in self._sayings if sign is not END)
        if self._end is None:
            self.say(CANCEL)

    def say(self, sign: Parts) -> None:
        """Send a sign as soon as there is room, behind everything that was sent."""
        if sign is END or sign is CANCEL:
            self.is_settled = True
        if not self.is_mute:
            self._sayings = queue_of(self._sayings)
            self._sayings.append(sign)
            self.say_more()

    def say_more(self) -> None:
        engine, id = self._core.engine, self._channel.id
        while self._sayings:
            sign = self._sayings[0]
            if not engine.admits(id, 16, len(sign)):
                engine.watch(id, 16, len(sign))
                break
            self._sayings.popleft()
            try:
                self._hand(sign)
            except LocalProtocolError:
                # No channel can be opened any more, so the peer learns from our shutdown that there is none.
                self._sayings.clear()
        self._core.ring()

    def heard(self, through: int) -> None:
        self._heard = max(self._heard, through)
        self._check_heard()

    def _check_heard(self) -> None:
        if self._end is not None and self._heard >= self._end and self.state is Sending.FINISHING:
            self.confirmed()

    def gone(self) -> None:
        """The channel is over on the wire: whatever it was, the peer has it."""
        if self.state is Sending.FINISHING:
            self.confirmed()

    def __repr__(self) -> str:
        return f"<relink.Sink {self._channel.id} {self.state.value}>"


class Source(ReceiveHalf[bytes]):
    """The receiving half."""

    __slots__ = ("_channel", "_core", "_taken_bytes", "_taken_calls")

    _new_storage = Mailbox

    def __init__(self, core: Core, channel: Channel) -> None:
        super().__init__(core.ring)
        self._core = core
        self._channel = channel
        self._taken_calls = 0  # calls since the engine was told
        self._taken_bytes = 0

    def _taken(self, messages: Sequence[bytes], size: int) -> bool:
        # What is unread comes before anything that the peer could be waiting to send, so he can be told a bit later.
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
