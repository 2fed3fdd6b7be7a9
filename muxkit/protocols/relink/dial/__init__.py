"""How links begin: dialling, listening, the handshake over a stream, URLs."""
