"""The paths of the files of the JavaScript client."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
"""The folder of this package."""
MODULE: Final = FOLDER / "muxkit.js"
"""The JavaScript client, an ES module."""
TYPES: Final = FOLDER / "muxkit.d.ts"
"""The TypeScript declarations of the JavaScript client."""
