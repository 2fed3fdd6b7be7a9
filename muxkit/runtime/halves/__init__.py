"""Halves: the sending and the receiving side of a channel, and what opens channels."""
