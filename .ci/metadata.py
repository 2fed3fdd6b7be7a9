"""Build hook: make the README's links absolute, since a package index has no files for relative ones to lead to.

README.md itself keeps relative links, which work in a clone and on a code host. In the metadata of a wheel they lead to
the same files at the tag of its version, below the address that `Source` in `[project.urls]` gives.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<target>[^)\s]+)(?=\))")


class ReadmeHook(MetadataHookInterface):
    """Fills in `readme`, which `pyproject.toml` lists as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` to the text of README.md with absolute links."""
        base = f"{metadata['urls']['Source']}/blob/v{metadata['version']}/"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(rf"{base}\g<target>", text)}
