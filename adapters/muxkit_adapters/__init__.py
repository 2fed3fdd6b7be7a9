"""The transports of muxkit, one module each: `tcp`, `tls`, `unix`, `websocket`, `quic`, `udp`, `dtls`, `memory`."""

from ._errors import HandshakeFailed as HandshakeFailed
from ._errors import PlaintextWarning as PlaintextWarning

__all__ = ["HandshakeFailed", "PlaintextWarning"]
