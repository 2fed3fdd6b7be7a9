"""The report of a run: every pass as it was measured, and the machine; all figures are computed from it."""

from __future__ import annotations

import msgspec

FORM = 1  # the version of the file


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of a run."""

    system: str
    processor: str
    cores: int
    pinned: list[int]
    """The cores of the server and of the client; empty if the system chose."""
    awake: bool = False
    """True if the cores were kept from sleeping."""
    python: str
    packages: dict[str, str]
    load_before: list[float]
    load_after: list[float] = []
    wake_up: float = 0.0
    """Seconds of a round trip of one byte between two blocking processes; 0 in older files."""
    copy_rate: float = 0.0
    """Bytes per second that the memory copies; 0 in older files."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A contestant."""

    name: str
    title: str
    baseline: str
    """The raw connection that it is compared with, or its own name."""


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One job of one peer in one round; times in seconds."""

    round: int
    cell: str
    peer: str
    units: float
    seconds: float
    client_cpu: float
    server_cpu: float
    also: dict[str, float] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A contestant failed, and was left out from then on."""

    round: int
    cell: str
    peer: str
    sentence: str


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A cell, as far as readers of the file need it."""

    key: str
    job: str
    title: str
    channels: int
    unit: str
    higher_is_better: bool
    counted: str
    baseline: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    form: int = FORM
    began: str
    seconds: float
    rounds: int
    seed: int
    pass_seconds: float
    quick: bool = False
    """True for a run that only shows that it works; its figures say nothing."""
    muxkit: str
    is_compiled: bool = False
    """True if the muxkit that ran the benchmark, which the plain names stand for, is compiled."""
    machine: Machine
    entries: list[Entry]
    left_out: list[str]
    cells: list[Shape]
    passes: list[Pass]
    failures: list[Failure] = []


def load(text: bytes) -> Report:
    """Read a report; raises `msgspec.MsgspecError` if it is none, ValueError for another version."""
    report = msgspec.json.decode(text, type=Report)
    if report.form != FORM:
        raise ValueError(f"it has the form {report.form}, this version reads {FORM}")
    return report


def dump(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
