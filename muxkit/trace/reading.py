"""Read traces: records, a summary of what happened, and the differences between two traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeGuard

import attrs

from muxkit._errors import MuxError

SEPARATOR: Final = "\x1e"
PREFIX: Final = "muxkit:"
AGAIN: Final = " again"
"""How the name ends of a frame that is sent once more."""
MOST_TIME: Final = 1e15  # ms, which is some 30,000 years
MOST_RECORD: Final = 64 * 1024 * 1024  # bytes of one record


class TraceError(MuxError):
    """The file isn't a trace."""


@attrs.frozen
class Event:
    """One event of a trace. `time` is in milliseconds since its beginning."""

    time: float
    name: str
    data: dict[str, Any]


@attrs.frozen
class Recording:
    """A trace: its header and its events. `broken` counts unreadable records."""

    header: dict[str, Any]
    events: list[Event]
    broken: int = 0

    @property
    def title(self) -> str:
        """The name of the session."""
        return str(self.header.get("title", ""))

    @property
    def began(self) -> float:
        """When the trace began, in milliseconds since 1970."""
        fields = _dict(_dict(self.header.get("trace")).get("common_fields"))
        found = fields.get("reference_time")
        return float(found) if _is_time(found) else 0.0


def _is_time(value: object) -> TypeGuard[float]:
    """Return True for a valid number of milliseconds. Python's JSON also accepts NaN and infinity."""
    return isinstance(value, (int, float)) and abs(value) <= MOST_TIME


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def parse_record(text: str) -> Event | dict[str, Any] | None:
    """Return the event or the header in a record, or None if it is neither, for example because it was cut off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # the second for too many brackets inside one another
        return None
    if not isinstance(value, dict):
        return None
    if "qlog_version" in value:
        return value
    time, name, data = value.get("time"), value.get("name"), value.get("data")
    if not _is_time(time) or not isinstance(name, str) or not isinstance(data, dict):
        return None
    return Event(float(time), name.removeprefix(PREFIX), data)


def read(path: str | Path) -> Recording:
    """Read a trace. An incomplete last record, as of a program that was killed, is skipped and counted."""
    try:
        text = Path(path).read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    header: dict[str, Any] | None = None
    events: list[Event] = []
    broken = 0
    for record in text.split(SEPARATOR)[1:]:
        found = parse_record(record)
        if found is None:
            broken += 1
        elif isinstance(found, Event):
            events.append(found)
        elif header is None:
            header = found
    if header is None:
        raise TraceError(f"{path}: this is no trace: it has no qlog header")
    return Recording(header, events, broken)


class Follower:
    """Reads a file that is being written. Each call of `more` returns the events added since the previous one."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._offset = 0
        self._rest = b""

    def more(self) -> list[Event]:
        """Return the complete events that weren't returned yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError as error:
            raise TraceError(f"{self._path}: {error.strerror or error}") from error
        if not self._offset and new and not new.startswith(SEPARATOR.encode("ascii")):
            raise TraceError(f"{self._path}: this is no trace: it has no qlog header")
        self._offset += len(new)
        *records, self._rest = (self._rest + new).split(b"\n")
        if len(self._rest) > MOST_RECORD:
            raise TraceError(f"{self._path}: a record has more than {MOST_RECORD} bytes")
        found = (parse_record(record.decode("utf-8", "replace").lstrip(SEPARATOR)) for record in records)
        return [event for event in found if isinstance(event, Event)]


@attrs.define
class ChannelSummary:
    """What one channel did."""

    frames_sent: int = 0
    frames_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    credit_granted: int = 0
    credit_received: int = 0
    resends: int = 0
    """Frames that were retransmitted, after a loss or on the next connection."""
    blocked_ms: float = 0.0
    """Milliseconds in which the credit was less than the next payload needed."""
    state: str = ""
    trace_id: str = ""
    """The OpenTelemetry trace of the channel, if spans were on."""
    span_id: str = ""


@attrs.define
class Summary:
    """What a session did, as counts."""

    title: str
    events: int
    broken: int
    milliseconds: float
    transport_sent: int = 0
    transport_received: int = 0
    frames: dict[str, int] = attrs.field(factory=dict)
    """Frames by direction and name."""
    timers: dict[str, int] = attrs.field(factory=dict)
    errors: list[str] = attrs.field(factory=list)
    channels: dict[str, ChannelSummary] = attrs.field(factory=dict)

    def as_fields(self) -> dict[str, Any]:
        """Return all values for JSON output."""
        return attrs.asdict(self)


def _size(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def summary(recording: Recording) -> Summary:
    """Count what happened in a trace."""
    events = recording.events
    found = Summary(recording.title, len(events), recording.broken, events[-1].time - events[0].time if events else 0.0)
    frames: Counter[str] = Counter()
    timers: Counter[str] = Counter()
    for event in events:
        data = event.data
        channel = data.get("channel")
        one = found.channels.setdefault(channel, ChannelSummary()) if isinstance(channel, str) else ChannelSummary()
        match event.name:
            case "frame_sent":
                one.frames_sent += 1
                one.bytes_sent += _size(data.get("size"))
                one.resends += str(data.get("frame")).endswith(AGAIN)
                frames[f"sent {data.get('frame')}"] += 1
            case "frame_received":
                one.frames_received += 1
                one.bytes_received += _size(data.get("size"))
                frames[f"received {data.get('frame')}"] += 1
            case "credit_granted":
                one.credit_granted += _size(data.get("amount"))
            case "credit_received":
                one.credit_received += _size(data.get("amount"))
            case "state":
                one.state = str(data.get("state"))
            case "span":
                one.trace_id, one.span_id = str(data.get("trace_id")), str(data.get("span_id"))
            case "timer":
                timers[str(data.get("timer"))] += 1
            case "error":
                found.errors.append(f"{data.get('error')}: {data.get('text')}")
            case "session_closed" if data.get("error") is not None:
                found.errors.append(f"closed by {data.get('error')}: {data.get('text', '')}")
            case "bytes_sent":
                found.transport_sent += _size(data.get("size"))
            case "bytes_received":
                found.transport_received += _size(data.get("size"))
    found.frames, found.timers = dict(sorted(frames.items())), dict(sorted(timers.items()))
    for channel, begin, end in blocked(events):
        found.channels[channel].blocked_ms += end - begin
    return found


def blocked(events: Iterable[Event]) -> Iterator[tuple[str, float, float]]:
    """Yield the channel, begin and end of each period in which its credit was less than its next payload needed."""
    balance: Counter[str] = Counter()
    before: dict[str, tuple[float, int]] = {}  # the last payload, and the credit after it
    came: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        channel = event.data.get("channel")
        if not isinstance(channel, str):
            continue
        if event.name == "credit_received":
            balance[channel] += _size(event.data.get("amount"))
            came.setdefault(channel, []).append((event.time, balance[channel]))
        elif event.name == "frame_sent" and (size := _size(event.data.get("size"))):
            if channel in before and before[channel][1] < size:
                enough = next((time for time, credit in came.get(channel, ()) if credit >= size), None)
                if enough is not None:
                    yield channel, before[channel][0], enough
            balance[channel] -= size
            before[channel] = (event.time, balance[channel])
            came[channel] = []


def differences(first: Summary, second: Summary) -> list[tuple[str, object, object]]:
    """Return what two sessions did differently: a name, and its value in each."""
    ones, others = _flat(first), _flat(second)
    found: list[tuple[str, object, object]] = []
    for name in sorted({*ones, *others}):
        missing = "" if isinstance(ones.get(name, others.get(name)), str) else 0
        one, other = ones.get(name, missing), others.get(name, missing)
        if one != other:
            found.append((name, one, other))
    return found


def _flat(found: Summary) -> dict[str, object]:
    values: dict[str, object] = {
        "events": found.events,
        "milliseconds": round(found.milliseconds, 1),
        "transport sent": found.transport_sent,
        "transport received": found.transport_received,
        "errors": len(found.errors),
    }
    values |= {f"frames {name}": number for name, number in found.frames.items()}
    values |= {f"timer {name}": number for name, number in found.timers.items()}
    for channel, one in found.channels.items():
        for name, value in attrs.asdict(one).items():
            values[f"{channel}: {name}"] = round(value, 1) if isinstance(value, float) else value
    return values
