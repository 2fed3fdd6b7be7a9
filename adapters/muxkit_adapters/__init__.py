"""The transports of muxkit, one module for each.

`tcp` and `unix` carry byte streams without encryption, `tls` carries them with encryption, and `websocket` carries them
in WebSocket messages. `udp` and `dtls` carry packets, and `quic` carries many streams per connection. `memory` connects
tasks of one process, and `asgi` serves inside a web application.

Every module has `connect` and `serve`, which can be called directly, and a `transport` object, through which
`muxkit.connect` and `muxkit.serve` find the module by the scheme of a URL.
"""

from ._errors import HandshakeFailed as HandshakeFailed
from ._errors import PlaintextWarning as PlaintextWarning

__all__ = ["HandshakeFailed", "PlaintextWarning"]
