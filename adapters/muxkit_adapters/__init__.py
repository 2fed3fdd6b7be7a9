"""The transports that come with muxkit, one module each: `tcp`, `tls`, `unix`, `websocket`, `quic`, `udp`, `dtls`, `memory`."""
