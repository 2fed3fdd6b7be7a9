"""Cancel conversations of every kind at every step, on both sides, over every protocol with channels.

`tests/rpc/sweeps.py` says what a run checks. The suite takes a few steps of each conversation. This program takes all
of them, so it needs some minutes. It prints how many runs each protocol took, and ends with status 1 at the first
failure.

    call_sweep.py
    call_sweep.py --only relink --only yamux
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

import trio
import trio.testing

from tests.rpc.sweeps import KINDS, PROTOCOLS, TARGETS, sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PROTOCOLS, action="append", help="a protocol; all by default")
    logging.getLogger("muxkit").setLevel(logging.CRITICAL)  # thousands of handlers end by an error, as they should
    for protocol in parser.parse_args().only or PROTOCOLS:
        began, runs = time.monotonic(), 0
        for kind in KINDS:
            for target in TARGETS:
                if target == "server" and protocol == "relink":
                    continue  # a link of Relink waits for its server to come back

                async def sweep_all() -> int:
                    return await sweep(protocol, kind, target, samples=None)  # noqa: B023 - it runs in this turn

                try:
                    runs += trio.run(sweep_all, clock=trio.testing.MockClock(autojump_threshold=0))
                except Exception:
                    traceback.print_exc()
                    sys.exit(1)
        print(f"{protocol}: {runs:,} runs in {time.monotonic() - began:.0f} s, nothing was left", flush=True)


if __name__ == "__main__":
    main()
