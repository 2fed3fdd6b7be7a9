"""The command `muxkit`; it needs the extra `cli`."""

from __future__ import annotations

import sys

NEEDS = ("click", "rich")
USAGE = 2  # the exit code, as in `outcome`, which cannot be imported here
INTERRUPTED = 130


def main() -> int:
    """Run the command line of this process; return the exit code."""
    try:
        from muxkit.cli.commands import run

        return run()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDS:
            raise
        print(f"muxkit: the command line needs {error.name}; it comes with: pip install 'muxkit[cli]'", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:  # while the modules were being imported
        return INTERRUPTED
