"""The transports of muxkit, a module each: `tcp`, `tls`, `unix`, `websocket`, `quic`, `udp`, `dtls`, `memory`."""
