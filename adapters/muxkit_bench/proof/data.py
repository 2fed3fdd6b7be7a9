"""The messages of the proof, which follow from their stream and number, and the verdict on what arrived."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import UUID
from zlib import crc32

import attrs
import msgspec
import pyarrow.dataset as ds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHORTEST: Final = 20  # characters of a body
LONGEST: Final = 200
MOST_NAMED: Final = 5  # examples of faults in a report


def stream_names(count: int) -> list[str]:
    """Make the names of streams, the same in every process."""
    dice = random.Random(count)
    return [str(UUID(int=dice.getrandbits(128), version=4)) for _ in range(count)]


def message(stream: str, number: int) -> dict[str, object]:
    """Make a message: a long body that follows from its number, and its CRC."""
    dice = random.Random(f"{stream}{number}")
    body = f"{number}:{dice.randbytes(dice.randint(SHORTEST, LONGEST) // 2).hex()}"
    return {"n": number, "body": body, "crc": crc32(body.encode())}


@attrs.define
class Verdict:
    """What arrived, and what is wrong with it."""

    rows: int = 0
    expected: int = 0
    missing: int = 0
    repeated: int = 0
    wrong: int = 0
    examples: list[str] = attrs.field(factory=list)

    @property
    def is_right(self) -> bool:
        return self.rows == self.expected and not (self.missing or self.repeated or self.wrong)

    def __str__(self) -> str:
        told = (
            f"{self.rows:,} rows of {self.expected:,}: {self.missing} missing, {self.repeated} repeated, "
            f"{self.wrong} with a wrong CRC or of another stream"
        )
        return f"{told}; {'; '.join(self.examples)}" if self.examples else told

    def note(self, example: str) -> None:
        if len(self.examples) < MOST_NAMED:
            self.examples.append(example)


def judge(files: Iterable[Path], streams: Sequence[str], count: int) -> Verdict:
    """Check that each stream has the messages 1 to `count`, each once and as it was sent."""
    verdict = Verdict(expected=len(streams) * count)
    seen: dict[str, set[int]] = {stream: set() for stream in streams}
    for batch in ds.dataset([str(path) for path in files], format="parquet").to_batches(
        columns=["stream", "id", "value"]
    ):
        for stream, id, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            verdict.rows += 1
            known = seen.setdefault(stream, set())
            if id in known:
                verdict.repeated += 1
                verdict.note(f"stream {stream}: message {id} came twice")
            known.add(id)
            data = msgspec.json.decode(value)
            if data.get("n") != id or crc32(str(data["body"]).encode()) != data["crc"] or data != message(stream, id):
                verdict.wrong += 1
                verdict.note(f"stream {stream}: message {id} is not what was sent")
    for stream in streams:
        missing = set(range(1, count + 1)) - seen[stream]
        verdict.missing += len(missing)
        if missing:
            verdict.note(
                f"stream {stream}: messages {min(missing)} … {max(missing)} are missing, {len(missing)} in all"
            )
    return verdict


def files_of_sink(folder: Path) -> list[Path]:
    """Return what Spark's file sink has committed; other files are left of failed attempts."""
    log = folder / "_spark_metadata"
    entries = sorted(
        (path for path in log.iterdir() if path.name.removesuffix(".compact").isdigit()),
        key=lambda path: int(path.name.removesuffix(".compact")),
    )
    compact = max((index for index, path in enumerate(entries) if path.suffix == ".compact"), default=0)
    files = []
    for path in entries[compact:]:
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            entry = json.loads(line)
            if entry["action"] == "add":
                files.append(folder / Path(entry["path"]).name)
    return files


def files_of_batches(folder: Path) -> list[Path]:
    """Return the files of all batches."""
    return sorted(folder.glob("batch=*/*.parquet"))
