"""`python -m muxkit.pipeline` is the proof that `make pipeline` runs."""

from __future__ import annotations

import sys

from muxkit.pipeline._proof import main

sys.exit(main())
