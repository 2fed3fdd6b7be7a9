"""What carries work over the loss of a connection: sessions that outlive it, dialling again, and first handshakes."""
