"""The handshake of an Aqueduct connection.

Each side sends three frames: VERSION, ACK_VERSION and CONNECTION_HEADERS. Streams and datagrams may arrive in any
order, so each side begins every stream and every datagram with VERSION, until the peer has sent ACK_VERSION and its
connection headers. Frames of channels that arrive before the peer's connection headers wait in the `reader`.
"""

from __future__ import annotations

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.events import Connected
from muxkit.protocols.aqueduct.state import State, Timer
from muxkit.protocols.aqueduct.streams import OutStream


class Handshake:
    """The state of the handshake, and the frames that this side sends for it."""

    def __init__(self, state: State, headers: bytes) -> None:
        self.is_connected: bool = False
        """True once the peer's connection headers have arrived."""
        self.sent_ack_version: bool = False
        self._state = state
        self._headers = headers
        self._version_acked = False
        self._stream: OutStream | None = None
        if state.role is frames.Role.CLIENT:
            self._send(headers)

    def apply(self, frame: object, *, on_stream: bool) -> None:
        """Apply a frame that isn't about a channel."""
        state = self._state
        if state.observer is not None:
            state.observer.frame("in", "connection", frames.name_of(frame), 0)
        match frame:
            case frames.Version():
                if not self.sent_ack_version:
                    self.sent_ack_version = True
                    self._send(frames.encode_frame(frames.AckVersion()))
            case frames.AckVersion():
                self._version_acked = True
            case frames.ConnectionHeaders(headers):
                if not on_stream:
                    raise RemoteProtocolError("CONNECTION_HEADERS in a datagram", rule="aqueduct-H07")
                if self.is_connected:
                    raise RemoteProtocolError("CONNECTION_HEADERS a second time", rule="aqueduct-H06")
                self.is_connected = True
                state.deadlines.stop(Timer.HANDSHAKE)
                if state.role is frames.Role.SERVER:
                    # A peer that processes the frames of a stream in order must find our headers before ACK_VERSION.
                    self._send(self._headers, first=True)
                state.events.append(Connected(headers))
        if self._version_acked and self.is_connected:
            state.streams.prefix = b""

    def _send(self, frame: bytes, *, first: bool = False) -> None:
        """Queue a frame. With `first`, it comes before the frames that aren't written yet, otherwise after them."""
        stream = self._stream
        if stream is not None and stream.id is None and not stream.ended:
            stream.pending.insert(0 if first else len(stream.pending), frame)
            return
        self._stream = OutStream([frame], urgent=True)
        self._state.streams.add(self._stream)
