"""Creates links: dialling, listening, the handshake over a stream, and URLs."""
