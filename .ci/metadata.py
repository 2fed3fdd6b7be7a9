"""Build hook: make the README's links absolute, since a package index has no files for relative ones to lead to.

README.md itself keeps relative links, which work in a clone and on a code host. In the metadata of a wheel, links lead
to the same files at the tag of its version, below the address that `Source` in `[project.urls]` gives. Pictures need
the address of the file itself (`raw`) instead of the address of the page that shows it (`blob`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"(?<=!)(?P<text>\[[^\]]*\]\()(?![a-z]+:)(?P<target>[^)\s]+)(?=\))")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<target>[^)\s]+)(?=\))")


class ReadmeHook(MetadataHookInterface):
    """Fills in `readme`, which `pyproject.toml` lists as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` to the text of README.md with absolute links."""
        source, tag = metadata["urls"]["Source"], f"v{metadata['version']}"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, source, tag)}


def absolute(text: str, source: str, tag: str) -> str:
    """Return a page with absolute links to the files of the repository `source` at a tag."""
    text = PICTURE.sub(rf"\g<text>{source}/raw/{tag}/\g<target>", text)
    return LINK.sub(rf"{source}/blob/{tag}/\g<target>", text)
