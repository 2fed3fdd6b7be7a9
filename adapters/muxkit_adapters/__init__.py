"""The transports of muxkit, one module each: `tcp`, `tls`, `unix`, `websocket`, `quic`, `udp`, `dtls`, `memory`."""
