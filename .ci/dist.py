"""Check the files that a release publishes, once they are in dist/: `.ci/dist.py v0.2.0`."""

import re
import sys
import zipfile
from pathlib import Path

DIST = Path(__file__).resolve().parent.parent / "dist"


def main(tag: str) -> None:
    """Exit with a sentence if the tag is not that of the version, or the description has relative links."""
    [wheel], [source] = DIST.glob("*-py3-none-any.whl"), DIST.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    if source.name != f"muxkit-{version}.tar.gz":
        raise SystemExit(f"different versions: {wheel.name} and {source.name}")
    if tag and tag != f"v{version}":
        raise SystemExit(f"wrong tag: expected v{version}, got {tag}; the version is set in muxkit/__init__.py")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"muxkit-{version}.dist-info/METADATA").decode()
    relative = re.findall(r"\]\((?!https?://|#)([^)]+)\)", text)
    if relative:
        raise SystemExit(f"the description has relative links, which lead nowhere on a package index: {relative}")
    print(wheel.name, source.name)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
