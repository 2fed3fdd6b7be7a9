"""The referee: muxkit with the plain peers in their long form, and a table of what they refused.

    python -m tests.foreign [--short] [PYTEST ARGUMENTS]

The long form cuts at every byte and takes minutes; `--short` runs what the suite runs. The exit code is 1 if a peer
refused anything, or if a test failed in another way.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.foreign import wire

TITLE = ("protocol", "our role", "conversations", "cuts, losses", "refusals")


def table(ledger: Mapping[tuple[str, str], wire.Count]) -> str:
    """Give a line for each protocol and role."""
    lines = [
        TITLE,
        *(
            (*key, f"{count.conversations:,}", f"{count.cuts:,}", f"{len(count.refusals):,}")
            for key, count in sorted(ledger.items())
        ),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(TITLE))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str]) -> int:
    """Run the tests beside this file, print the table, and give the exit code."""
    rest = [each for each in arguments if each != "--short"]
    os.environ["MUXKIT_SOAK"] = "0" if "--short" in arguments else "1"
    failed = (
        pytest.main([str(Path(__file__).parent), "-q", "-m", "not spark", "--timeout=0", *rest]) != pytest.ExitCode.OK
    )
    print(table(wire.LEDGER))
    refusals = [f"{' '.join(key)}: {each}" for key, count in sorted(wire.LEDGER.items()) for each in count.refusals]
    print(*refusals, sep="\n", end="\n" if refusals else "")
    return int(failed or bool(refusals))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
