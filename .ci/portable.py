"""Install muxkit into a fresh environment and try each protocol over each transport that this system has.

Run by .ci/run with any Python, on Linux, macOS and Windows. It needs nothing that is installed.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "cli,dtls,quic"


def main() -> None:
    """Raise `CalledProcessError` if something cannot be installed or does not work."""
    with tempfile.TemporaryDirectory(prefix="muxkit-", ignore_cleanup_errors=True) as scratch:
        fresh = Path(scratch, "fresh")
        venv.create(fresh, with_pip=True)
        python = fresh / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")

        def run(*words: str | Path) -> None:
            print("--", *words, flush=True)
            subprocess.run([python, *words], cwd=scratch, check=True)

        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "--constraint", ROOT / ".ci" / "constraints.txt", f"{ROOT}[{EXTRAS}]")
        run("-I", ROOT / ".ci" / "smoke.py")
        run("-I", "-m", "muxkit", "--version")
        run("-I", "-m", "muxkit", "doctor")


if __name__ == "__main__":
    main()
