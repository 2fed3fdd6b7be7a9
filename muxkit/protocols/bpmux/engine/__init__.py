"""The bpmux/rel protocol without I/O: received bytes and commands go in, events and bytes to send come out."""
