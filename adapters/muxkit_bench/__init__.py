"""The benchmark `muxkit bench`, the simulations of `muxkit fleet`, and the proof that `make pipeline` runs.

It stands beside the library, which does not need it: commands and simulations are found by entry points. Each process
that is measured loads `bench_work` only, so this file imports nothing.
"""
