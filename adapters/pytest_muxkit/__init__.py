"""Fixtures for pytest: programs on a simulated network, on virtual time."""
