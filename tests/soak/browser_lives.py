"""Random lives of channels and requests between one page in Chromium and Python, with the page's memory.

Each life is a session in which both sides open channels to each other, as in tests/web/test_lives.py. Several sessions
live at the same time. The program ends with an error if a message was wrong or missing, or if the page holds more than
`MOST` bytes at the end.

    python -m tests.soak.browser_lives [--lives 200] [--together 5] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import trio

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:  # when the program is started by its path
    sys.path.insert(0, str(ROOT))

from tests.web._pages import living  # noqa: E402

MIB = 1024 * 1024
MOST = 16 * MIB  # bytes that the page may hold after all sessions have ended


async def run(count: int, together: int, seed: int) -> bool:
    """Live the lives; return whether the page has freed what they took."""
    with tempfile.TemporaryDirectory() as folder:
        async with living(Path(folder)) as page:
            began = time.monotonic()
            before = await page.tab.memory()
            for first in range(seed, seed + count, together):
                await page.live(range(first, min(first + together, seed + count)))
                done = first + together - seed
                if done % 50 < together:
                    held, took = (await page.tab.memory() - before) / MIB, time.monotonic() - began
                    print(f"{min(done, count)} lives in {took:.0f} s; the page holds {held:.1f} MiB more", flush=True)
            return await page.tab.memory() - before < MOST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=200)
    parser.add_argument("--together", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(0 if trio.run(run, given.lives, given.together, given.seed) else 1)


if __name__ == "__main__":
    main()
