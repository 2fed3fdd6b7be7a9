"""The JavaScript client as files of this package, for servers that deliver it to browsers.

`FOLDER` holds `muxkit.js`, an ES module without dependencies, and its types, `muxkit.d.ts`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "MODULE"]

FOLDER: Final = Path(__file__).parent
MODULE: Final = FOLDER / "muxkit.js"
