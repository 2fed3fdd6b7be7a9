"""yamux: streams of bytes over one ordered byte stream, as Consul, Nomad and libp2p use it.

The specification is `spec.md` in the repository `hashicorp/yamux`. If the specification leaves a question open, muxkit
does what the other implementations do: `hashicorp/yamux` in Go, `libp2p/rust-yamux` in Rust, and
`ChainSafe/js-libp2p-yamux` in JavaScript.

The protocol has only four types of frames: data, window updates, pings and go-aways. Its streams carry bytes.
`session.open_stream()` and `session.streams()` return such streams as `trio.abc.HalfCloseableStream`, and the peer can
be any other implementation. `session.open()` and `session.incoming()` return muxkit's channels. A channel sends its
messages on a stream, in the format that `muxkit.core.messages` describes, so its peer has to be muxkit as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.protocols.yamux.config import Config as Config
from muxkit.protocols.yamux.engine import Engine as Engine
from muxkit.protocols.yamux.frames import Code as Code

if TYPE_CHECKING:
    from muxkit.protocols.yamux._channels import Channel as Channel
    from muxkit.protocols.yamux._channels import YamuxStream as YamuxStream
    from muxkit.protocols.yamux._session import ConnectOptions as ConnectOptions
    from muxkit.protocols.yamux._session import ReconnectOptions as ReconnectOptions
    from muxkit.protocols.yamux._session import ServeOptions as ServeOptions
    from muxkit.protocols.yamux._session import Session as Session
    from muxkit.protocols.yamux._session import connect as connect
    from muxkit.protocols.yamux._session import open_server as open_server
    from muxkit.protocols.yamux._session import protocol as protocol
    from muxkit.protocols.yamux._session import reconnecting as reconnecting
    from muxkit.protocols.yamux._session import session as session

__all__ = [
    "Channel",
    "Code",
    "Config",
    "ConnectOptions",
    "Engine",
    "ReconnectOptions",
    "ServeOptions",
    "Session",
    "YamuxStream",
    "connect",
    "open_server",
    "protocol",
    "reconnecting",
    "session",
]

# The engine works without Trio, so the names that need Trio are imported when they are first used.
_LAZY = {
    "ConnectOptions ReconnectOptions ServeOptions": "_session",
    "Channel": "_channels",
    "Session": "_session",
    "YamuxStream": "_channels",
    "connect open_server protocol reconnecting session": "_session",
}

if not TYPE_CHECKING:  # with a module-level `__getattr__`, type checkers would accept any name
    __getattr__, __dir__ = lazily(globals(), _LAZY)
