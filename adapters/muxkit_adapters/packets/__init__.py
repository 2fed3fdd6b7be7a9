"""What the packet transports, UDP and DTLS, are made of."""
