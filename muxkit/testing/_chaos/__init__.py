"""Connections that fail by plan: in memory through a dial, and between real sockets through a relay."""
