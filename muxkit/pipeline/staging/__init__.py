"""The staging server, its client and its messages."""
