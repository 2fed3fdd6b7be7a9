"""`python -m muxkit.pipeline.fleet NAME SEED`: the command that a failing seed of a fleet is replayed with."""

from __future__ import annotations

import sys

from muxkit.pipeline._fleet import main

if __name__ == "__main__":
    sys.exit(main())
