"""The objects that applications use on a session: `YamuxStream` for streams of bytes, and `Channel` for messages.

`Channel` is `MuxChannel` without any change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muxkit.runtime import Session
from muxkit.runtime.channel import MuxChannel as Channel
from muxkit.runtime.halves.bytestream import ByteStream
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

if TYPE_CHECKING:
    from muxkit.runtime.connection import MuxConnection

__all__ = ["Channel", "YamuxStream"]


class YamuxStream(ByteStream):
    """One yamux stream of bytes. It is a `trio.abc.HalfCloseableStream`.

    The peer can use any implementation of yamux.
    """

    def __init__(
        self, connection: MuxConnection[Any, Any], sending: SendHalf, receiving: ReceiveHalf[bytes], id: int
    ) -> None:
        super().__init__(sending, receiving)
        self._connection = connection
        self.id: int = id
        """The id of the stream in frames. It is odd if the client opened the stream, and even if the server did."""
        self.sending: SendHalf = sending
        self.receiving: ReceiveHalf[bytes] = receiving

    @property
    def session(self) -> Session:
        """The session that carries this stream."""
        return self._connection.session

    def abort(self) -> None:
        """Reset the stream. Both directions end immediately, and data that is under way may be lost."""
        self.sending.abort()
        self.receiving.close()

    def __repr__(self) -> str:
        return f"<yamux stream {self.id}: {self.sending.state_text()}, {self.receiving.state.value}>"
