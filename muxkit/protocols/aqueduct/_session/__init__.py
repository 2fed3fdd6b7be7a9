"""The Trio side of Aqueduct: connections, the halves of channels, and common channels."""
