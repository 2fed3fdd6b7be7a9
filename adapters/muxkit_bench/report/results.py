"""What does a run leave behind? Every pass as it was measured, and where; all other figures follow from that."""

from __future__ import annotations

import msgspec

FORM = 1  # of the file


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured."""

    system: str
    processor: str
    cores: int
    pinned: list[int]
    """The cores of the server and of the client; empty if the system chose."""
    awake: bool = False
    """Were the cores kept from sleeping?"""
    python: str
    packages: dict[str, str]
    load_before: list[float]
    load_after: list[float] = []


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who took part."""

    name: str
    title: str
    baseline: str
    """The raw connection that it is compared with; itself for that one."""


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
    """Somebody did not do what he was asked; he was left out from then on."""

    round: int
    cell: str
    peer: str
    sentence: str


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A cell, as far as whoever reads the file must know it."""

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
    """Was it only to show that it works? Then its figures say nothing."""
    muxkit: str
    machine: Machine
    entries: list[Entry]
    left_out: list[str]
    cells: list[Shape]
    passes: list[Pass]
    failures: list[Failure] = []


def load(text: bytes) -> Report:
    """Raises `msgspec.MsgspecError` for what is no report, ValueError for one of another form."""
    report = msgspec.json.decode(text, type=Report)
    if report.form != FORM:
        raise ValueError(f"it has the form {report.form}, this version reads {FORM}")
    return report


def dump(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
