"""One self-contained page about one or two traces. It loads nothing, and text from a peer is never markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from muxkit.trace.reading import Event, Recording, blocked, summary

PAGE: Final = Path(__file__).parent / "page"
KINDS: Final = {
    "frame_sent": 0,
    "frame_received": 1,
    "credit_granted": 2,
    "credit_received": 3,
    "state": 4,
    "timer": 5,
    "error": 6,
    "bytes_sent": 7,
    "bytes_received": 8,
    "session_opened": 9,
    "session_closed": 10,
    "span": 11,
}
OTHER: Final = 12  # kinds that this version does not know


class _Texts:
    """Assigns numbers to texts, so that the page contains each text once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.all)
            self.all.append(visible(text))
        return found


def visible(text: str) -> str:
    """Escape invisible characters, and those that change the direction of writing."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def page(recordings: Sequence[Recording]) -> str:
    """Return the HTML page about one trace, or about both ends of one session on a common time axis."""
    style, script = ((PAGE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    start = min(recording.began for recording in recordings)
    data = json.dumps([_packed(recording, recording.began - start) for recording in recordings], separators=(",", ":"))
    # Inside a script element, `<` could begin its end or a comment; JSON can say it in another way.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    sources = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    title = html.escape(" and ".join(visible(recording.title) or "trace" for recording in recordings))
    parts = {"policy": policy, "title": title, "style": style, "script": script, "data": data}
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    # In one pass: what was filled in is not searched for names again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _packed(recording: Recording, shift: float) -> dict[str, Any]:
    """Return a trace as columns: microseconds since the previous event, numbers of texts, sizes."""
    texts = _Texts()
    columns: dict[str, list[int]] = {"t": [], "k": [], "c": [], "n": [], "s": []}
    ends: list[tuple[str, int]] = []  # errors and how the session was closed, with the numbers of their events
    losses: list[tuple[int, int]] = []  # of connections: number of the event, time
    last = 0
    for number, event in enumerate(recording.events):
        at = max(last, round((event.time + shift) * 1000))
        if event.name == "error":
            ends.append((visible(_label(event)), number))
            losses.append((number, at))
        elif event.name == "session_closed":
            ends.append((visible(f"closed {_label(event)}"), number))
        columns["t"].append(at - last)
        last = at
        columns["k"].append(KINDS.get(event.name, OTHER))
        columns["c"].append(texts.number(str(event.data.get("channel", ""))))
        columns["n"].append(texts.number(_label(event)))
        size = event.data.get("size", event.data.get("amount", 0))
        columns["s"].append(size if isinstance(size, int) and abs(size) < 2**53 else 0)
    waits = [
        [texts.number(channel), round((begin + shift) * 1000), round((end + shift) * 1000)]
        for channel, begin, end in blocked(recording.events)
    ]
    found = summary(recording)
    channels = {visible(name): attrs.asdict(one) for name, one in found.channels.items()}
    return {
        "title": visible(recording.title),
        "broken": recording.broken,
        "texts": texts.all,
        "blocked": waits,
        "channels": channels,
        "errors": ends,
        "losses": losses,
        "sent": found.transport_sent,
        "received": found.transport_received,
        **columns,
    }


def _label(event: Event) -> str:
    data = event.data
    match event.name:
        case "frame_sent" | "frame_received":
            return str(data.get("frame", ""))
        case "state":
            return str(data.get("state", ""))
        case "timer":
            return str(data.get("timer", ""))
        case "span":
            return f"span {data.get('span_id', '')} of trace {data.get('trace_id', '')}"
        case "error" | "session_closed":
            error = data.get("error")
            closed = event.name == "session_closed"
            return "in order" if error is None else f"{'by ' if closed else ''}{error}: {data.get('text', '')}"
        case "session_opened":
            peer = data.get("peer", "")
            return f"{data.get('protocol', '')} with {peer}" if peer else str(data.get("protocol", ""))
        case "credit_granted" | "credit_received":
            return "credit"
        case "bytes_sent" | "bytes_received":
            return "bytes"
        case _:
            return event.name
