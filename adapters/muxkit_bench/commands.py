"""The commands that this package adds to `muxkit`. Each is imported when it is run."""

from __future__ import annotations

from muxkit.cli.commands import Later

bench = Later("muxkit_bench.command:bench", "Measure muxkit beside raw connections and other multiplexers.")
demo = Later("muxkit_bench.demo.command:demo", "See 100 echo channels and a bulk channel share a connection.")
fleet = Later("muxkit_bench.fleet_command:fleet", "Run seeded simulations of the protocols.")
