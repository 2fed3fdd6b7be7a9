"""The transports that come with muxkit, one module each: `tcp`, `tls`, `unix`, `websocket`, `memory`."""
