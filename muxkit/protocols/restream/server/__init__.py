"""Serving restream: sessions in a store, connections, and listeners."""

from muxkit.protocols.restream.server.backend import Sessions as Sessions
from muxkit.protocols.restream.server.server import Served as Served
from muxkit.protocols.restream.server.server import Service as Service
from muxkit.protocols.restream.server.server import serve as serve
