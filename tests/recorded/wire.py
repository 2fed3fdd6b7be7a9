"""Record every byte that two sides put on a simulated network, step by step, and find where two recordings differ.

A conversation is an async function that names its steps: `await wire.step("half-close")`. Each byte is filed under the
step in which it was sent, the connection it was sent on, and the side that sent it. On a byte stream the bytes of one
side in one step are joined, because the sizes of writes aren't part of a protocol. Packets are kept apart, because
theirs are.

`record` runs a conversation on virtual time, with seeded randomness and Trio's tasks in the order of their age, so the
same code always gives the same bytes.
"""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final, cast
from unittest.mock import patch

import attrs
import trio
from trio.testing import MockClock

from muxkit.runtime import LinkKind
from muxkit.testing import SimNetwork, SimPackets, SimRoute, SimStream, SimWeather, determined
from muxkit.testing._sim import SimLink

FOLDER: Final = Path(__file__).resolve().parent.parent / "data" / "recorded"
HASHES: Final = FOLDER / "hashes.json"
SEED: Final = 40
BEGAN: Final = 1_750_000_000.0  # s since 1970, for code that asks for the time of day
# No two of these times have a common multiple, and packets don't arrive together. Otherwise timers and arrivals would
# often be due at the same moment, and the order of tasks would decide which comes first.
DELAY: Final = 0.010037  # s to the server
DELAY_BACK: Final = 0.013711  # s to the client
END_DELAY: Final = 0.001193  # s
RATE: Final = 1_000_003.0  # bytes per second
SETTLE: Final = 2.02717  # s after which nothing of a step is under way any more; many round trips
MAX_TIME: Final = 7200.0  # virtual s, after which a conversation hangs
SHOWN: Final = 32  # bytes that a difference shows from each recording


@attrs.define
class Step:
    """The bytes of one step, as hexadecimal digits: one string for each packet, or for everything on a stream."""

    name: str
    sent: dict[str, list[str]] = attrs.field(factory=dict)
    """The key names the connection and the side: `0 client`."""


@attrs.frozen
class Recording:
    """The bytes of one conversation."""

    steps: tuple[Step, ...]

    def to_json(self) -> str:
        """Return the text that is stored and hashed."""
        return json.dumps([attrs.asdict(step) for step in self.steps], indent=0)

    @classmethod
    def from_json(cls, text: str) -> Recording:
        return cls(tuple(Step(**step) for step in json.loads(text)))

    def digest(self) -> str:
        return sha256(self.to_json().encode()).hexdigest()

    def size(self) -> int:
        """Return the number of bytes on the wire."""
        return sum(len(data) // 2 for step in self.steps for sent in step.sent.values() for data in sent)


class Wire(SimNetwork):
    """A simulated network that records. `step` names what follows."""

    def __init__(self) -> None:
        super().__init__(SEED, weather=SimWeather(delay=DELAY, rate=RATE, splits=False))
        self.set_weather(SimWeather(delay=DELAY_BACK, rate=RATE, splits=False), "server", "client")
        self.steps: list[Step] = [Step("connect")]
        self._closed: set[SimLink] = set()

    async def step(self, name: str) -> None:
        """Wait until everything of the step before is over, then begin the next one."""
        await trio.sleep(SETTLE)
        self.steps.append(Step(name))

    def recording(self) -> Recording:
        return Recording(tuple(step for step in self.steps if step.sent))

    def _connect(self, source: str, target: str, there: SimRoute, back: SimRoute, kind: LinkKind) -> object:  # type: ignore[override]
        made = super()._connect(source, target, there, back, kind)
        for end, peer, side in zip(made.ends, made.ends[::-1], ("client", "server"), strict=True):
            key = f"{made.number} {side}"
            if isinstance(end, SimStream):
                self._record_stream(end, peer, key)
            else:
                self._record_packets(end, key)
        return made

    def _record_stream(self, end: SimStream, peer: SimLink, key: str) -> None:
        """Record every call of `send_all` in full, also one that is cancelled or fails on its way.

        The end of a stream leaves a little later than the bytes before it. If both arrived together, the order of tasks
        would decide whether those bytes are still answered. Bytes that are sent after the peer has closed its end
        aren't recorded, because nobody reads them.
        """
        send_all, send_eof, aclose = end.send_all, end.send_eof, end.aclose

        async def recorded(data: bytes | bytearray | memoryview) -> None:
            if peer not in self._closed:
                sent = self.steps[-1].sent.setdefault(key, [""])
                sent[0] += bytes(data).hex()
            await send_all(data)

        async def end_later() -> None:
            await trio.sleep(END_DELAY)
            await send_eof()

        async def close_later() -> None:
            if end not in self._closed:
                self._closed.add(end)
                with trio.CancelScope(shield=True):
                    await trio.sleep(END_DELAY)
            await aclose()

        vars(end).update(send_all=recorded, send_eof=end_later, aclose=close_later)

    def _record_packets(self, end: SimPackets, key: str) -> None:
        send = end.send

        async def recorded(packet: bytes) -> None:
            self.steps[-1].sent.setdefault(key, []).append(bytes(packet).hex())
            await send(packet)

        vars(end).update(send=recorded)


Conversation = Callable[[Wire], Awaitable[None]]


def record(conversation: Conversation, *, shuffled: bool = False) -> Recording:
    """Run a conversation and return its bytes.

    Tasks that become ready together run in the order of their age, or if `shuffled` in an order that the seed decides.
    """

    async def main() -> Recording:
        with Wire() as wire, trio.move_on_after(MAX_TIME) as scope:
            await conversation(wire)
        assert not scope.cancelled_caught, f"hangs in the step {wire.steps[-1].name!r}"
        return wire.recording()

    # The epoch of a Relink listener is the time at which it began.
    with determined(SEED, shuffled=shuffled), patch.object(time, "time", lambda: BEGAN):
        return trio.run(main, clock=MockClock(autojump_threshold=0))


# ---------------------------------------------------------------------------- differences


def first_difference(expected: Recording, got: Recording) -> str:
    """Describe where two recordings part, or return "" if they are equal."""
    for mine, other in zip(expected.steps, got.steps, strict=False):
        if mine.name != other.name:
            return f"expected the step {mine.name!r} next, got {other.name!r}"
        for key in sorted(mine.sent.keys() | other.sent.keys()):
            if told := _parted(mine.sent.get(key, []), other.sent.get(key, [])):
                return f"in the step {mine.name!r}, connection {key}: {told}"
    if len(expected.steps) != len(got.steps):
        longer = max(expected.steps, got.steps, key=len)
        more = longer[min(len(expected.steps), len(got.steps))].name
        return f"expected {len(expected.steps)} steps with bytes, got {len(got.steps)}; only one has {more!r}"
    return ""


def _parted(expected: list[str], got: list[str]) -> str:
    for number, (mine, other) in enumerate(zip(expected, got, strict=False)):
        if mine != other:
            place = next(_differing(mine, other)) // 2
            begins = max(0, place - 8)  # a few bytes that are still equal show which frame it is in
            shown = [_shown(data, begins) for data in (mine, other)]
            where = f"piece {number}, " if len(expected) > 1 else ""
            return f"{where}byte {place}, from byte {begins} on expected\n  {shown[0]}\ngot\n  {shown[1]}"
    if len(expected) != len(got):
        return f"expected {len(expected)} pieces, got {len(got)}"
    return ""


def _differing(mine: str, other: str) -> Iterator[int]:
    yield from (place for place, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
    yield min(len(mine), len(other))


def _shown(data: str, begins: int) -> str:
    part = bytes.fromhex(data[2 * begins :])[:SHOWN]
    return f"{part.hex(' ')}  {part!r}" if part else "nothing more"


# ---------------------------------------------------------------------------- files


def path_of(name: str, folder: Path = FOLDER) -> Path:
    return folder / f"{name}.json.xz"


def save(name: str, recording: Recording, folder: Path = FOLDER) -> None:
    """Store a recording, and its hash beside the others."""
    folder.mkdir(parents=True, exist_ok=True)
    path_of(name, folder).write_bytes(lzma.compress(recording.to_json().encode(), preset=9))
    hashes = folder / HASHES.name
    known = cast("Mapping[str, str]", json.loads(hashes.read_text())) if hashes.exists() else {}
    hashes.write_text(json.dumps({**known, name: recording.digest()}, indent=2, sort_keys=True) + "\n")


def load(path: Path) -> Recording:
    return Recording.from_json(lzma.decompress(path.read_bytes()).decode())
