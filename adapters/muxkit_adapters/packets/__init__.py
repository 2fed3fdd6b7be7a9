"""The parts that the packet transports, UDP and DTLS, consist of."""
