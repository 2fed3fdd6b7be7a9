"""The e3x protocol without I/O: received packets and commands go in, events and packets to send come out."""
