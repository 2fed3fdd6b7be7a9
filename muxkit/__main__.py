"""`python -m muxkit` is the command `muxkit`."""

from __future__ import annotations

import sys

from muxkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
