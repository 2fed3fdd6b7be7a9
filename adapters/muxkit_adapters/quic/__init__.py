"""QUIC connections: many streams and datagrams over one encrypted connection. Certificates are verified by default.

`endpoints` has `connect` and `serve`, and `server` the listener. `link` runs one connection on Trio. `connection`
extends aioquic's connection with limits, which `credit` computes.
"""

from .endpoints import ConnectionEnded, HandshakeFailed, QuicLink, Tickets, connect, rebind, serve, transport

__all__ = ["ConnectionEnded", "HandshakeFailed", "QuicLink", "Tickets", "connect", "rebind", "serve", "transport"]
