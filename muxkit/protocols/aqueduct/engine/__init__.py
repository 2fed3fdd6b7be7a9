"""The rules of Aqueduct without any I/O: the engine, its events and the two halves of a channel."""
