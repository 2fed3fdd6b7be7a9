"""Fixtures for pytest: programs on a simulated network, on virtual time.

Nothing is imported here: pytest loads plugins before it measures coverage, and a plugin that imported muxkit and Trio
would hide their import from it.
"""
