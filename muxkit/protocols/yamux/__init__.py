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

from muxkit._lazy import lazily

# Engines work without Trio, which sessions import. So each name is imported when a program first uses it.
with lazily(globals()):
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
    from muxkit.protocols.yamux.config import Config as Config
    from muxkit.protocols.yamux.engine import Engine as Engine
    from muxkit.protocols.yamux.frames import Code as Code
