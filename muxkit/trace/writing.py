"""The observer that writes a trace file for each session: a JSON text sequence (RFC 7464) with a qlog header."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

from muxkit._errors import MuxError, RemoteProtocolError
from muxkit._info import SessionInfo
from muxkit._observer import BaseObserver, Blocked, Counted, Direction, Observer, facts_of, frames_of

FOLDER: Final = "MUXKIT_TRACE_DIR"
"""The environment variable that names a folder, and so turns on traces of every session of a program."""

FLUSH_BYTES: Final = 64 * 1024  # text that is kept in memory, at most
FLUSH_SECONDS: Final = 1.0  # after which the next event also writes what was kept
MOST_BYTES: Final = 1 << 30  # of a file
RETRY_SECONDS: Final = 60.0  # after a failure of the disk in which no new trace begins
RECENT: Final = 50  # events that an error shows
LABELS: Final = 4096  # texts that are kept in their escaped form

_DIRECTIONS: Final = {"in": "received", "out": "sent"}
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.-]+")
_log: Final = logging.getLogger("muxkit")
_numbers: Final = count(1)  # of the files of this process


class _Disk:
    """The state of the disk of one folder of traces. After a failure, no trace begins for a while.

    Otherwise a server with a full disk would create an empty file and log a warning for each session.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tries_at = 0.0
        self._untraced = 0

    def may_begin(self) -> bool:
        """Return True if a trace may begin. Otherwise count the session without a trace."""
        now = time.monotonic()
        if now < self._tries_at:
            self._untraced += 1
            return False
        if self._untraced:
            # log: After a disk failure, no trace begins for a minute. Traces begin again now.
            _log.warning("%d sessions have no trace, since %s could not be written", self._untraced, self._folder)
            self._untraced = 0
        return True

    def failed(self) -> None:
        self._tries_at = time.monotonic() + RETRY_SECONDS


class _File:
    """A file of records that is written in large blocks. After a failure it ignores further records."""

    def __init__(self, path: Path, most: int, disk: _Disk) -> None:
        self.path = path
        self.on = disk.may_begin()
        self._disk = disk
        self.parts: list[str] = []
        self.size = 0
        self.due = 0.0
        self._left = most
        self._descriptor: int | None = None
        self._written = 0
        if not self.on:
            return
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            self._fail(error)

    def put(self, text: str, now: float) -> None:
        if not self.on:
            return
        self.parts.append(text)
        self.size += len(text)
        if self.size >= FLUSH_BYTES or now >= self.due:
            self.flush()
            self.due = now + FLUSH_SECONDS

    def flush(self) -> None:
        data = "".join(self.parts).encode("ascii")
        self.parts.clear()
        self.size = 0
        if not self.on or self._descriptor is None:
            return
        if len(data) > self._left:
            self._fail(f"it reached its limit of {MOST_BYTES} bytes")
            return
        self._left -= len(data)
        try:
            rest = memoryview(data)
            while rest:
                count = os.write(self._descriptor, rest)
                self._written += count
                rest = rest[count:]
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        if self.on:
            self.flush()
        self._release()

    def _fail(self, why: object) -> None:
        """Disable the trace. The session continues without it."""
        self.on = False
        self.parts.clear()
        if isinstance(why, OSError):
            self._disk.failed()
        # log: A trace couldn't be written any more, or is full. The session continues.
        _log.warning(
            "the trace %s ends after %d bytes, and the later events are lost: %s", self.path, self._written, why
        )
        self._release()

    def _release(self) -> None:
        self.on = False
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:
                # log: The last events of a trace may be missing.
                _log.warning("the trace %s was not closed: %s", self.path, error)


def _said(error: BaseException) -> str:
    """Return the text of an error. Texts of other libraries are omitted, because they may contain payload."""
    return str(error) if isinstance(error, (MuxError, OSError)) else ""


class SessionTrace(BaseObserver):
    """The observer of one session. It writes the file `path` and keeps the last events in memory.

    The file is complete after `close`, which the end of a session calls. It contains sizes, and the transported bytes
    only with `payloads`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str = "",
        payloads: bool = False,
        most: int = MOST_BYTES,
        clock: Callable[[], float] = time.perf_counter,
        _disk: _Disk | None = None,
    ) -> None:
        self.path: Path = Path(path)
        self._clock = clock
        self._payloads = payloads
        self._recent: deque[tuple[float, str, str, str, int]] = deque(maxlen=RECENT)
        self._labels: dict[str, str] = {}
        self._began = clock()
        self._file = file = _File(self.path, most, _disk or _Disk(self.path.parent))
        side = name.partition(" ")[0]
        header = {
            "file_schema": "urn:ietf:params:qlog:file:sequential",
            "serialization_format": "application/qlog+json-seq",
            "qlog_version": "0.3",
            "qlog_format": "JSON-SEQ",
            "title": name,
            "trace": {
                "title": name,
                "vantage_point": {"name": "muxkit", "type": side if side in ("client", "server") else "unknown"},
                "common_fields": {
                    "time_format": "relative",
                    "reference_time": time.time() * 1000,
                    "process": os.getpid(),
                },
                "event_schemas": ["urn:muxkit:trace:1"],
            },
        }
        file.put(f"\x1e{json.dumps(header)}\n", self._began)
        # Also runs at the exit of the program, for a session that nothing closed.
        self._finalizer = weakref.finalize(self, file.close)

    @property
    def recent(self) -> tuple[str, ...]:
        """The last events as lines of text, oldest first."""
        return tuple(
            f"{at * 1000:.3f} ms {kind} {channel} {name} {size}".rstrip()
            for at, kind, channel, name, size in self._recent
        )

    def close(self) -> None:
        """Write the remaining records and close the file."""
        self._finalizer()

    # --- what happens

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        kind = "frame_sent" if direction == "out" else "frame_received"
        now = self._note(kind, channel, name, size)
        data = f'"channel":{self._text(channel)},"frame":{self._text(name)},"size":{size}'
        self._write(now, kind, data)

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        kind = "credit_granted" if direction == "out" else "credit_received"
        now = self._note(kind, channel, "", amount)
        self._write(now, kind, f'"channel":{self._text(channel)},"amount":{amount}')

    def state(self, channel: str, state: str) -> None:
        now = self._note("state", channel, state, 0)
        self._write(now, "state", f'"channel":{self._text(channel)},"state":{self._text(state)}')

    def span(self, channel: str, trace_id: str, span_id: str) -> None:
        now = self._note("span", channel, trace_id, 0)
        ids = f'"trace_id":{json.dumps(trace_id)},"span_id":{json.dumps(span_id)}'
        self._write(now, "span", f'"channel":{self._text(channel)},{ids}')

    def timer(self, name: str) -> None:
        now = self._note("timer", "", name, 0)
        self._write(now, "timer", f'"timer":{self._text(name)}')

    def error(self, error: BaseException) -> None:
        recent = self.recent
        name = type(error).__name__
        now = self._note("error", "", name, 0)
        self._write(now, "error", f'"error":{self._text(name)},"text":{json.dumps(_said(error))}')
        self._file.flush()
        if isinstance(error, RemoteProtocolError) and not error.recent:
            error.recent = recent
            if recent:
                error.add_note("the last events of this session:\n" + "\n".join(f"  {line}" for line in recent))

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        kind = "bytes_sent" if direction == "out" else "bytes_received"
        now = self._clock() - self._began  # not among the recent events: frames say more
        fields = f'"size":{len(data)}'
        if self._payloads:
            fields += f',"payload":"{base64.b64encode(data).decode("ascii")}"'
        self._write(now, kind, fields)

    def session_opened(self, info: SessionInfo) -> None:
        now = self._note("session_opened", "", info.protocol, 0)
        fields = {"protocol": info.protocol, "transport": info.transport, "peer": info.peer, "local": info.local}
        self._write(now, "session_opened", json.dumps(fields)[1:-1])

    def session_closed(self, info: SessionInfo, error: BaseException | None) -> None:
        now = self._note("session_closed", "", info.protocol, 0)
        fields = {"error": None if error is None else type(error).__name__}
        if error is not None:
            fields["text"] = _said(error)
        self._write(now, "session_closed", json.dumps(fields)[1:-1])
        self.close()

    # --- writing

    def _note(self, kind: str, channel: str, name: str, size: int) -> float:
        now = self._clock() - self._began
        self._recent.append((now, kind, channel, name, size))
        return now

    def _text(self, text: str) -> str:
        """Return the text as JSON. There are few different texts, and escaping costs more than a cache lookup."""
        found = self._labels.get(text)
        if found is None:
            if len(self._labels) >= LABELS:  # a peer may open any number of channels
                self._labels.clear()
            found = self._labels[text] = json.dumps(text)
        return found

    def _write(self, now: float, kind: str, data: str) -> None:
        if self._file.on:
            record = f'\x1e{{"time":{now * 1000:.4f},"name":"muxkit:{kind}","data":{{{data}}}}}\n'
            self._file.put(record, now + self._began)


class Trace:
    """Writes a file for each session into a folder: `muxkit.connect(url, observer=muxkit.trace.Trace("traces"))`.

    One `Trace` can observe many sessions, such as those of a server. `payloads` adds the transported bytes.
    """

    def __init__(self, folder: str | Path, *, payloads: bool = False, most: int = MOST_BYTES) -> None:
        self.folder: Path = Path(folder)
        self.payloads: bool = payloads
        self.most: int = most
        self._own: SessionTrace | None = None
        self._was_logged = False
        self._disk = _Disk(self.folder)

    def connection(self, name: str = "") -> SessionTrace:
        """Create the observer of a session that begins. `name` starts with `client` or `server`."""
        if not self._was_logged:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self._was_logged = True
                # log: The folder of traces couldn't be created. Sessions continue without traces.
                _log.warning("no traces in %s: %s", self.folder, error)
        plain = _UNSAFE.sub("-", name).strip("-.")[:60] or "session"
        stamp = time.strftime("%Y%m%dT%H%M%S")
        file = f"{stamp}-{os.getpid()}-{next(_numbers)}-{plain}.sqlog"
        path = self.folder / file
        return SessionTrace(path, name=name, payloads=self.payloads, most=self.most, _disk=self._disk)

    # --- as the observer of a single connection, which is not asked for one of its own

    @property
    def _single(self) -> SessionTrace:
        if self._own is None:
            self._own = self.connection()
        return self._own

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        self._single.frame(direction, channel, name, size)

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        self._single.credit(direction, channel, amount)

    def state(self, channel: str, state: str) -> None:
        self._single.state(channel, state)

    def timer(self, name: str) -> None:
        self._single.timer(name)

    def error(self, error: BaseException) -> None:
        self._single.error(error)

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        self._single.transport(direction, data)


class _Both(BaseObserver):
    """Notifies two observers: the program's, then the trace."""

    def __init__(self, first: Observer, trace: SessionTrace) -> None:
        self._observers: tuple[Observer, ...] = (trace,) if frames_of(first) is None else (first, trace)
        self._trace = trace
        self._facts = facts_of(first)

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        for observer in self._observers:
            observer.frame(direction, channel, name, size)

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        for observer in self._observers:
            observer.credit(direction, channel, amount)

    def state(self, channel: str, state: str) -> None:
        for observer in self._observers:
            observer.state(channel, state)

    def timer(self, name: str) -> None:
        for observer in self._observers:
            observer.timer(name)

    def error(self, error: BaseException) -> None:
        for observer in self._observers:
            observer.error(error)

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        for observer in self._observers:
            observer.transport(direction, data)

    def session_began(self, session: Counted) -> None:
        if self._facts is not None:
            self._facts.session_began(session)

    def session_ended(self, session: Counted, error: BaseException | None) -> None:
        if self._facts is not None:
            self._facts.session_ended(session, error)

    def wait_began(self, on: Blocked) -> None:
        if self._facts is not None:
            self._facts.wait_began(on)

    def wait_ended(self, on: Blocked, seconds: float) -> None:
        if self._facts is not None:
            self._facts.wait_ended(on, seconds)

    def round_trip(self, seconds: float) -> None:
        if self._facts is not None:
            self._facts.round_trip(seconds)

    def limit(self, name: str) -> None:
        if self._facts is not None:
            self._facts.limit(name)

    def broken(self) -> None:
        if self._facts is not None:
            self._facts.broken()

    def outage(self) -> None:
        if self._facts is not None:
            self._facts.outage()

    def resumed(self, seconds: float) -> None:
        if self._facts is not None:
            self._facts.resumed(seconds)

    # The door tells the observer of the program by itself.
    def session_opened(self, info: SessionInfo) -> None:
        self._trace.session_opened(info)

    def session_closed(self, info: SessionInfo, error: BaseException | None) -> None:
        self._trace.session_closed(info, error)


def traced(observer: Observer | None, name: str) -> Observer | None:
    """Return the observer of a session that begins, with a trace if the environment requests one.

    An observer that already traces is returned unchanged.
    """
    folder = os.environ.get(FOLDER)
    if not folder or isinstance(observer, (_Both, SessionTrace, Trace)):
        return observer
    trace = Trace(folder).connection(name)
    return trace if observer is None else _Both(observer, trace)
