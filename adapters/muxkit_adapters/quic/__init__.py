"""QUIC connections: many streams and datagrams over one encrypted connection, verified by default."""

from .endpoints import ConnectionEnded, HandshakeFailed, QuicLink, Tickets, connect, rebind, serve, transport

__all__ = ["ConnectionEnded", "HandshakeFailed", "QuicLink", "Tickets", "connect", "rebind", "serve", "transport"]
