"""A pytest plugin with fixtures that run programs on a simulated network and on a virtual clock.

This module imports nothing. pytest loads plugins before it starts to measure coverage, so a plugin that imported muxkit
and Trio would hide their module-level code from the measurement.
"""
