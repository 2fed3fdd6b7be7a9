"""Record the wire traffic of every protocol, and compare it with the recordings that are stored.

    python -m tests.recorded                         compare all conversations with tests/data/recorded
    python -m tests.recorded relink relink-cuts      compare only these
    python -m tests.recorded --compare FILE NAME     compare one conversation with a recording in another place
    python -m tests.recorded --write [NAMES]         store what the present code sends
    python -m tests.recorded --show NAME             print the bytes, step by step

Two programs that exchange the same bytes can't be told apart by any peer. So a change that should leave a protocol as
it is must leave these recordings as they are. Write them again only for a change that is meant, and say in the commit
why the bytes differ. Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.recorded.conversations import CONVERSATIONS
from tests.recorded.wire import FOLDER, Recording, first_difference, load, path_of, record, save

SHOWN = 64  # bytes a line


def show(recording: Recording) -> None:
    for step in recording.steps:
        print(f"== {step.name}")
        for key, sent in step.sent.items():
            for data in sent:
                print(f"{key} > {len(data) // 2} bytes")
                for place in range(0, len(data), 2 * SHOWN):
                    print(f"    {data[place : place + 2 * SHOWN]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CONVERSATIONS)}; default: all")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a recording to compare one conversation with")
    parser.add_argument("--write", action="store_true", help="store the recordings instead of comparing")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="FOLDER", help="where --write stores them")
    parser.add_argument("--show", action="store_true", help="print the bytes that the present code sends")
    asked = parser.parse_args()
    names: list[str] = asked.names or [*CONVERSATIONS]
    if unknown := [name for name in names if name not in CONVERSATIONS]:
        parser.error(f"unknown conversation {unknown[0]!r}: expected one of {', '.join(CONVERSATIONS)}")
    if asked.compare is not None and len(names) != 1:
        parser.error(f"--compare takes one conversation, got {len(names)}: name it after the file")
    differing = 0
    for name in names:
        recording = record(CONVERSATIONS[name])
        if asked.show:
            show(recording)
        elif asked.write:
            save(name, recording, asked.to)
            print(f"{name}: {recording.size()} bytes in {len(recording.steps)} steps")
        else:
            difference = first_difference(load(asked.compare or path_of(name)), recording)
            differing += bool(difference)
            print(f"{name}: {difference or 'the same'}")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
