"""The cost of resuming a link with many channels: bytes and CPU time, for each side.

python tests/bench/relink_resume.py [CHANNELS] [MESSAGES IN EACH]
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from muxkit.protocols.relink import Config, Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

SLICE = 64 * 1024  # bytes at once, as a pump would have it


def main(arguments: Sequence[str]) -> None:
    channels, messages = (int(argument) for argument in (*arguments, "10000", "2")[:2])
    config = Config(connector_id_size=4, listener_id_size=4, keepalive=None)
    one, other = Engine(config, is_connector=True), Engine(config, is_connector=False)
    for engine in (one, other):
        engine.connection_made(0.0, epoch=7, link_id=5)
    for channel in range(channels):
        for _ in range(messages):
            one.sender(channel).send_parts((bytes(64),))
    data = b"".join(iter(lambda: b"".join(one.buffers_to_send(SLICE)), b""))
    other.receive_bytes(data[: len(data) // 2 + 5], 0.0)  # half of it arrives, the last one in part
    for engine in (one, other):
        engine.events()
        engine.connection_lost(0.0)
    began = time.process_time()
    for engine in (one, other):
        engine.connection_made(1.0, epoch=7, link_id=5)
    made = time.process_time() - began
    burst, told, heard = move(other, one)
    again, resent, taken = move(one, other)
    missing = channels - len(other.state.theirs.live)
    if missing:
        raise SystemExit(f"{missing} channels are missing")
    total = made + told + heard + resent + taken
    print(f"{channels} channels, {messages} messages of 64 bytes in each, half of them under way")
    print(f"  resumption       {burst:>10,} bytes   written in {told:.3f} s, read in {heard:.3f} s")
    print(f"  sent once more   {again:>10,} bytes   written in {resent:.3f} s, read in {taken:.3f} s")
    print(f"  CPU of both sides {total:.3f} s, {total / channels * 1e6:.1f} µs a channel")


def move(sender: Engine, receiver: Engine) -> tuple[int, float, float]:
    """Everything that one has to write: its bytes, and the CPU seconds of writing and of reading."""
    size, writing, reading = 0, 0.0, 0.0
    while sender.has_output():
        began = time.process_time()
        data = b"".join(sender.buffers_to_send(SLICE))
        middle = time.process_time()
        receiver.receive_bytes(data, 1.0)
        receiver.events()
        reading += time.process_time() - middle
        writing += middle - began
        size += len(data)
    return size, writing, reading


if __name__ == "__main__":
    main(sys.argv[1:])
