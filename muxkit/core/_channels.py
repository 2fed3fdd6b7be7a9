"""Channels: their ids, names and reasons, the table of those that live or ended lately, and the states of a half."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar, overload

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits

ChannelT = TypeVar("ChannelT")

BYTES_MOST = 512  # of an encoded reason
TEXT_MOST = 512  # characters of a reason that is shown
CODE_MOST = 2**32 - 1

NAME_MOST = 255  # bytes of the name of a channel

_CODE = re.compile(rb"(\d{1,10}) ")
_CONTROLS = bytes(range(32))
_NAMED = b"\xc0n"  # in front of a name; no text begins so, as UTF-8 has no byte C0
_HEADED = b"\xc0h"  # in front of a block of headers, which follows the name
_HEADERS_AT = len(_HEADED) + 2  # after the mark and the 16-bit length of the block


class Ids:
    """One sequence of ids: `first`, `first + step`, … up to `last`.

    It begins with `start`. With `wraps` it starts over after `last`, with the ids whose channels are gone; without, it
    ends there.
    """

    __slots__ = ("_first", "_last", "_next", "_step", "_wraps")

    def __init__(self, first: int, last: int, *, step: int = 1, start: int | None = None, wraps: bool = False) -> None:
        self._first = first
        self._last = last
        self._step = step
        self._next = first if start is None else start
        self._wraps = wraps

    def was_allocated(self, id: int) -> bool:
        """Return True if this id, which is one of the sequence, was given out; not for sequences that wrap."""
        return self._first <= id < self._next

    def allocate(self, used: Collection[int]) -> int:
        """Return the next id that is not in use; it comes again only after the sequence started over."""
        # One more try than there are ids in use, or one for each id that exists, must meet a free one.
        for _ in range(min(len(used) + 1, (self._last - self._first) // self._step + 1)):
            if self._next > self._last:
                if not self._wraps:
                    break
                self._next = self._first
            id = self._next
            self._next += self._step
            if id not in used:
                return id
        raise LocalProtocolError(
            f"no id is free from {self._first} to {self._last} in steps of {self._step} ({len(used)} in use)"
        )


class Census:
    """Counts the channels of each side, and those that the application has not taken yet.

    There is one for a connection, for all tables that its channels are spread over.
    """

    __slots__ = ("_limits", "ours", "theirs", "waiting")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.ours: int = 0
        self.theirs: int = 0
        self.waiting: int = 0

    @property
    def places(self) -> int:
        """How many more channels we may open."""
        return self._limits.channels - self.ours

    @property
    def has_backlog_room(self) -> bool:
        """True if the peer may open one more channel; if not, the protocol refuses it in its own way."""
        return self.waiting < self._limits.backlog

    def check_ours(self) -> None:
        if self.places < 1:
            raise LocalProtocolError(f"{self.ours} channels of {self._limits.channels} allowed are open")

    def check_theirs(self) -> None:
        if self.theirs >= self._limits.channels:
            raise RemoteProtocolError(
                f"peer opened channel {self.theirs + 1} of {self._limits.channels} allowed at once",
                limit=self._limits.bound_of_channels,
            )


class ChannelTable(Generic[ChannelT]):
    """The channels of one id space, by id.

    Ids of both sides may share it; then its `ids` are for ours only. Tables of one connection share a `census`.
    """

    __slots__ = ("_ids", "_live", "_theirs", "_tombstone_limit", "_tombstones", "census")

    def __init__(self, limits: Limits, ids: Ids, census: Census | None = None) -> None:
        self.census: Census = Census(limits) if census is None else census
        self._ids = ids
        self._live: dict[int, ChannelT] = {}
        self._theirs: dict[int, bool] = {}  # id of a channel that the peer opened: True until it is taken
        # id: when it is forgotten, the oldest first. In a plain dict finding the first entry costs a step for each
        # one that was deleted before it; here it does not.
        self._tombstones: OrderedDict[int, float] = OrderedDict()
        self._tombstone_limit = limits.tombstones

    def __contains__(self, id: int) -> bool:
        """Return True if the channel is live."""
        return id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[ChannelT]:
        """Iterate over a copy of the live channels, oldest first; some may be removed meanwhile."""
        return iter(tuple(self._live.values()))

    def get(self, id: int) -> ChannelT | None:
        return self._live.get(id)

    # --- adding

    def allocate(self) -> int:
        """Return an id for a new channel of ours."""
        return self._ids.allocate(self._live)

    def add_ours(self, id: int, channel: ChannelT) -> None:
        if id in self._live:
            raise LocalProtocolError(f"channel {id} is open already")
        self.census.check_ours()
        self._live[id] = channel
        self.census.ours += 1

    def add_theirs(self, id: int, channel: ChannelT) -> None:
        """Add a channel that the peer opened; it waits until `accept`."""
        if id in self._live:
            raise RemoteProtocolError(f"peer opened channel {id}, which is open already")
        self.census.check_theirs()
        self._live[id] = channel
        self._theirs[id] = True
        self.census.theirs += 1
        self.census.waiting += 1

    def accept(self, id: int) -> None:
        """The application took the channel; harmless if it did so before, or if the channel is gone."""
        if self._theirs.get(id, False):
            self._theirs[id] = False
            self.census.waiting -= 1

    # --- removing

    def remove(self, id: int) -> ChannelT:
        if id not in self._live:
            raise LocalProtocolError(f"channel {id} is not open")
        if id in self._theirs:
            self.accept(id)
            del self._theirs[id]
            self.census.theirs -= 1
        else:
            self.census.ours -= 1
        return self._live.pop(id)

    def bury(self, id: int, now: float, keep: float) -> None:
        """Remember for `keep` seconds that a channel ended; above `Limits.tombstones` the oldest are forgotten."""
        self._tombstones.pop(id, None)
        self._tombstones[id] = now + keep
        while (oldest := next(iter(self._tombstones))) != id and (
            self._tombstones[oldest] <= now or len(self._tombstones) > self._tombstone_limit
        ):
            del self._tombstones[oldest]

    def is_buried(self, id: int, now: float) -> bool:
        """Return True if the channel ended less than its `keep` ago."""
        until = self._tombstones.get(id)
        if until is None or now < until:
            return until is not None
        del self._tombstones[id]
        return False


class _Named(Enum):
    """An enum hashed as any object: an enum's own hash is a call in Python, and each step of a half needs two."""


_Named.__hash__ = object.__hash__  # type: ignore[method-assign]


class Sending(_Named):
    """The states of the half that we write."""

    OPEN = "open"
    FINISHING = "finishing"
    """We said that we are done, or gave up; the peer has not confirmed it yet."""
    CLOSED = "closed"


class Receiving(_Named):
    """The states of the half that we read."""

    OPEN = "open"
    DRAINING = "draining"
    """Nothing more comes; the application has not read everything yet."""
    CLOSED = "closed"


class Step(_Named):
    """What can happen to a half: verbs are what the application asks for, participles have happened."""

    FINISH = "finish"
    CANCEL = "cancel"
    """We give up, and wait for the peer to confirm that as well."""
    CONFIRMED = "confirmed"
    STOPPED = "stopped"
    LOST = "lost"

    ENDED = "ended"
    """The peer ended its half or gave it up, or the connection is lost: what came before can still be read."""
    DRAINED = "drained"
    STOP = "stop"


SENDING: Final[Mapping[tuple[Sending, Step], Sending]] = {
    (Sending.OPEN, Step.FINISH): Sending.FINISHING,
    (Sending.OPEN, Step.CANCEL): Sending.FINISHING,
    (Sending.OPEN, Step.STOPPED): Sending.CLOSED,
    (Sending.OPEN, Step.LOST): Sending.CLOSED,
    (Sending.FINISHING, Step.CONFIRMED): Sending.CLOSED,
    (Sending.FINISHING, Step.STOPPED): Sending.CLOSED,
    (Sending.FINISHING, Step.LOST): Sending.CLOSED,
}

RECEIVING: Final[Mapping[tuple[Receiving, Step], Receiving]] = {
    (Receiving.OPEN, Step.ENDED): Receiving.DRAINING,
    (Receiving.OPEN, Step.STOP): Receiving.CLOSED,
    (Receiving.DRAINING, Step.DRAINED): Receiving.CLOSED,
    (Receiving.DRAINING, Step.STOP): Receiving.CLOSED,
}

StateT = TypeVar("StateT", bound=Enum)
StepT = TypeVar("StepT", bound=Enum)


@overload
def advance(state: Sending, step: Step) -> Sending: ...
@overload
def advance(state: Receiving, step: Step) -> Receiving: ...
def advance(state: Sending | Receiving, step: Step) -> Sending | Receiving:
    """Return the state after `step`; a step that the tables do not have is a `LocalProtocolError`."""
    after = SENDING.get((state, step)) if isinstance(state, Sending) else RECEIVING.get((state, step))
    if after is None:
        half = type(state).__name__.lower()
        raise LocalProtocolError(f"{half} half is {state.value}: no step {step.value!r} from there")
    return after


def draw(table: Mapping[tuple[StateT, StepT], StateT]) -> str:
    """Draw a table as a Mermaid state diagram, with one arrow for all steps between the same two states.

    The first state of the table is where it begins, and the state CLOSED is its end.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, step), after in table.items():
        arrows.setdefault((before.name, after.name), []).append(step.value)
    lines = [f"    {start} --> {end}: {' | '.join(steps)}" for (start, end), steps in arrows.items()]
    first = next(iter(table))[0].name
    return "\n".join(["stateDiagram-v2", f"    [*] --> {first}", *lines, "    CLOSED --> [*]", ""])


# --- texts in the bytes that a protocol leaves to applications: the reason of an end, and the name of a channel


def printable(text: str, most: int = TEXT_MOST) -> str:
    """Return text of a peer as it may be shown: without control characters, and not longer than `most` characters."""
    if len(text) <= most and text.isprintable():
        return text
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:most])
    return shown if len(shown) <= most and len(text) <= most else f"{shown[: most - 1]}…"


def without_secrets(url: str) -> str:
    """Return a URL, or an address, as it may be shown: without a password, and without the query, which may be one."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    place, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


@attrs.frozen
class Reason:
    """Why one side ended a channel or a connection, in its own words."""

    text: str = ""
    code: int = 0
    """A number for programs; 0 if none was given."""

    def __attrs_post_init__(self) -> None:
        code: object = self.code  # by programs that no type checker has seen
        if not (isinstance(code, int) and 0 <= code <= CODE_MOST):
            raise ValueError(f"code={self.code!r}: must be a whole number from 0 to {CODE_MOST:,}")

    def __bool__(self) -> bool:
        return bool(self.text or self.code)

    def __str__(self) -> str:
        code = f"code {self.code}" if self.code else ""
        return f"{self.text} ({code})" if self.text and code else self.text or code

    def encode(self, most: int = BYTES_MOST) -> bytes:
        """Write the reason in at most `most` bytes: UTF-8, the code in front of the text.

        No reason is no bytes. Neither is one whose code does not fit.
        """
        if not self:
            return b""
        # A text that begins like a code would be read as one.
        code = f"{self.code} " if self.code or _CODE.match(self.text.encode()) else ""
        if len(code) > most:  # digits that are cut would be read as the text
            return b""
        return (code + self.text).encode()[:most].decode(errors="ignore").encode()

    @classmethod
    def decode(cls, payload: bytes) -> Reason:
        """Read what `encode` wrote, or whatever else a peer gave; the text can be shown as it is."""
        payload = payload[:BYTES_MOST]
        if not payload.strip(_CONTROLS):  # a mark that there is no reason
            return cls()
        found = _CODE.match(payload)
        code = int(found[1]) if found else 0
        if found is None or code > CODE_MOST:
            code, rest = 0, payload
        else:
            rest = payload[found.end() :]
        return cls(printable(rest.decode(errors="backslashreplace")), code)


class Opened(NamedTuple):
    """The parts of the payload that opened a channel, as `without_name` found them."""

    name: str
    payload: bytes
    headers: bytes
    """The encoded block of headers; see `muxkit.core._headers`."""


def with_name(name: str, payload: bytes, headers: bytes = b"") -> bytes:
    """Return the payload that opens a channel of this name, for protocols without a place for names.

    The name comes first, then the encoded headers, then the payload. A peer that knows no headers finds the name, and
    takes the headers as the beginning of the payload. A payload that begins like a name or like headers gets an empty
    one in front of it, so that every payload arrives as it was.
    """
    return join_opening(encode_name(name) if name else b"", payload, headers)


def join_opening(name: bytes, payload: bytes, headers: bytes = b"") -> bytes:
    """Put the encoded parts of an opening together, as `with_name` does."""
    if headers or payload.startswith(_HEADED):
        payload = b"%b%b%b%b" % (_HEADED, len(headers).to_bytes(2, "big"), headers, payload)
    if not name and not payload.startswith(_NAMED):
        return payload
    return b"%b%b\0%b" % (_NAMED, name, payload)


def without_name(opening: bytes) -> Opened:
    """Return the name, the payload and the headers that `with_name` put together.

    A payload of other programs has no name and no headers.
    """
    name, payload, headers = split_opening(opening)
    return Opened(decode_name(name) if name else "", payload, headers)


def split_opening(opening: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the name, the payload and the headers of an opening, encoded as they are.

    This is for protocols that have a place of their own for names or headers.
    """
    name, payload = b"", opening
    if opening.startswith(_NAMED):
        name, end, payload = opening[len(_NAMED) :].partition(b"\0")
        if not end:
            return b"", opening, b""
    headers = b""
    if payload.startswith(_HEADED):
        end_of_headers = _HEADERS_AT + int.from_bytes(payload[len(_HEADED) : _HEADERS_AT], "big")
        if len(payload) >= end_of_headers:
            headers, payload = payload[_HEADERS_AT:end_of_headers], payload[end_of_headers:]
    return name, payload, headers


def encode_name(name: str) -> bytes:
    encoded = name.encode()
    if len(encoded) > NAME_MOST or b"\0" in encoded:
        raise ValueError(f"the name of a channel has at most {NAME_MOST} bytes and no NUL: {name[:64]!r}")
    return encoded


def decode_name(name: bytes) -> str:
    """Return the name that a peer gave, as it may be shown."""
    return printable(name[:NAME_MOST].decode(errors="backslashreplace"))


def counted(number: int, noun: str, plural: str = "", *, were: bool = False) -> str:
    """Return a number with its noun, and with its verb: "1 channel was", "2 channels were"."""
    if number == 1:
        return f"1 {noun} was" if were else f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}{' were' if were else ''}"
