"""The rules of a link, without Trio, clocks or sockets."""

from muxkit.protocols.relink.engine.engine import LinkEngine as LinkEngine
