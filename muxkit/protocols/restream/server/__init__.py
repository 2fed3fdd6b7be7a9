"""Serving restream: sessions in a store, connections, and listeners."""

from muxkit.protocols.restream.server.service import Served as Served
from muxkit.protocols.restream.server.service import Service as Service
from muxkit.protocols.restream.server.service import serve as serve
from muxkit.protocols.restream.server.sessions import Sessions as Sessions

__all__ = ["Served", "Service", "Sessions", "serve"]
