"""The building blocks for channels that all protocols share.

- `Ids` chooses the ids of new channels, `ChannelTable` contains the channels of a connection, and `Census` counts them.
- `Sending` and `Receiving` are the states of the two halves of a channel, and `advance` makes the steps between them.
- `Reason` explains why a channel or a connection has ended.
- `with_name` and `without_name` encode the name, the headers and the payload of a channel's opening as bytes.
- `printable` and the functions after it make texts of a peer safe to show.
"""

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

BYTES_MOST = 512  # maximum number of bytes of an encoded reason
TEXT_MOST = 512  # maximum number of characters of a peer's text that is shown
CODE_MOST = 2**32 - 1  # largest code of a reason

NAME_MOST = 255  # maximum number of bytes of a channel's name

_CODE = re.compile(rb"(\d{1,10}) ")
_CONTROLS = bytes(range(32))
_NAMED = b"\xc0n"  # marks a name; text in UTF-8 never contains the byte C0
_HEADED = b"\xc0h"  # marks a block of headers, which follows the name
_HEADERS_AT = len(_HEADED) + 2  # position of the headers after their mark and the 16-bit length


class Ids:
    """The sequence of ids `first`, `first + step`, … up to `last`, beginning with `start`.

    With `wraps`, the sequence starts again after `last` and skips the ids that are in use. Otherwise it ends there.
    """

    __slots__ = ("_first", "_last", "_next", "_step", "_wraps")

    def __init__(self, first: int, last: int, *, step: int = 1, start: int | None = None, wraps: bool = False) -> None:
        self._first = first
        self._last = last
        self._step = step
        self._next = first if start is None else start
        self._wraps = wraps

    def was_allocated(self, id: int) -> bool:
        """Return True if this id of the sequence was allocated before. Don't use this if the sequence wraps."""
        return self._first <= id < self._next

    def allocate(self, used: Collection[int]) -> int:
        """Return the next id that isn't in `used`. Raises `LocalProtocolError` if there is none."""
        # After one more try than there are used ids, we must have found a free one, unless all ids are used.
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
            f"no free channel id: expected one from {self._first} to {self._last} in steps of {self._step}, "
            f"and {len(used)} are in use"
        )


class Census:
    """Counts the open channels of a connection and checks the limits for them.

    A connection has one `Census`, even if its channels are in several tables.
    """

    __slots__ = ("_limits", "ours", "theirs", "waiting")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.ours: int = 0  # channels that this side has opened
        self.theirs: int = 0  # channels that the peer has opened
        self.waiting: int = 0  # those of `theirs` that the application hasn't taken

    @property
    def places(self) -> int:
        """How many more channels this side may open."""
        return self._limits.channels - self.ours

    @property
    def has_backlog_room(self) -> bool:
        """True if the backlog has room for another channel of the peer. Otherwise the protocol refuses the channel."""
        return self.waiting < self._limits.backlog

    def check_ours(self) -> None:
        """Raise `LocalProtocolError` if this side may not open another channel."""
        if self.places < 1:
            raise LocalProtocolError(
                f"too many channels: expected at most {self._limits.channels}, {self.ours} are open; close one first"
            )

    def check_theirs(self) -> None:
        """Raise `RemoteProtocolError` if the peer may not open another channel."""
        if self.theirs >= self._limits.channels:
            raise RemoteProtocolError(
                f"too many channels: expected at most {self._limits.channels}, the peer opened {self.theirs + 1}",
                limit=self._limits.bound_of_channels,
            )


class ChannelTable(Generic[ChannelT]):
    """The channels of a connection by id, and the ids of those that have ended recently.

    In some protocols, the two sides use separate ids, so there are two tables, which share a `Census`. In others, there
    is one table, and `ids` is the sequence from which this side takes its ids.

    After a channel has ended, frames for it may still arrive. The table keeps its id as a *tombstone* for some time, so
    that the engine can tell such frames from frames for a channel that never existed.
    """

    __slots__ = ("_ids", "_live", "_theirs", "_tombstone_limit", "_tombstones", "census")

    def __init__(self, limits: Limits, ids: Ids, census: Census | None = None) -> None:
        self.census: Census = Census(limits) if census is None else census
        self._ids = ids
        self._live: dict[int, ChannelT] = {}
        self._theirs: dict[int, bool] = {}  # id of a channel that the peer opened: True until it is taken
        # The time when each tombstone expires, oldest first. An `OrderedDict` finds its first entry quickly. A plain
        # dict would need a step for each entry that was deleted before it.
        self._tombstones: OrderedDict[int, float] = OrderedDict()
        self._tombstone_limit = limits.tombstones

    def __contains__(self, id: int) -> bool:
        """Return True if the channel is open."""
        return id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[ChannelT]:
        """Iterate over a copy of the open channels, oldest first. Channels may be removed during the iteration."""
        return iter(tuple(self._live.values()))

    def get(self, id: int) -> ChannelT | None:
        return self._live.get(id)

    # --- adding

    def allocate(self) -> int:
        """Return an id for a channel that this side opens."""
        return self._ids.allocate(self._live)

    def add_ours(self, id: int, channel: ChannelT) -> None:
        if id in self._live:
            raise LocalProtocolError(f"channel {id} is already open")
        self.census.check_ours()
        self._live[id] = channel
        self.census.ours += 1

    def add_theirs(self, id: int, channel: ChannelT) -> None:
        """Add a channel that the peer has opened. It counts as waiting until `accept` is called."""
        if id in self._live:
            raise RemoteProtocolError(f"the peer opened channel {id}, which is already open")
        self.census.check_theirs()
        self._live[id] = channel
        self._theirs[id] = True
        self.census.theirs += 1
        self.census.waiting += 1

    def accept(self, id: int) -> None:
        """Record that the application has taken a channel. Does nothing if it was taken before, or has ended."""
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
        """Keep a tombstone for `keep` seconds. If there are more than `Limits.tombstones`, remove the oldest ones."""
        self._tombstones.pop(id, None)
        self._tombstones[id] = now + keep
        while (oldest := next(iter(self._tombstones))) != id and (
            self._tombstones[oldest] <= now or len(self._tombstones) > self._tombstone_limit
        ):
            del self._tombstones[oldest]

    def is_buried(self, id: int, now: float) -> bool:
        """Return True if there is a tombstone with this id that hasn't expired."""
        until = self._tombstones.get(id)
        if until is None or now < until:
            return until is not None
        del self._tombstones[id]
        return False


class _Named(Enum):
    """An enum whose members are hashed by identity.

    The hash function of `Enum` is written in Python and therefore slow, and each step of a half needs two hashes.
    """


_Named.__hash__ = object.__hash__  # type: ignore[method-assign]


class Sending(_Named):
    """The states of a sending half."""

    OPEN = "open"
    """The application may send messages."""
    FINISHING = "finishing"
    """This side has finished or cancelled the half, and the peer hasn't confirmed it yet."""
    CLOSED = "closed"
    """The half has ended."""


class Receiving(_Named):
    """The states of a receiving half."""

    OPEN = "open"
    """Messages may arrive."""
    DRAINING = "draining"
    """No more messages can arrive, but the application hasn't received all of them."""
    CLOSED = "closed"
    """The half has ended."""


class Step(_Named):
    """The steps between the states of a half.

    FINISH, CANCEL and STOP are requests of the application. The others are events.
    """

    FINISH = "finish"
    """The application sends no more messages."""
    CANCEL = "cancel"
    """The application gives up sending. The peer has to confirm that, too."""
    CONFIRMED = "confirmed"
    """The peer has confirmed that the half has ended."""
    STOPPED = "stopped"
    """The peer doesn't want more messages."""
    LOST = "lost"
    """The connection was lost."""

    ENDED = "ended"
    """The peer sends no more, or the connection was lost. The application can still receive earlier messages."""
    DRAINED = "drained"
    """The application has received the last message."""
    STOP = "stop"
    """The application doesn't want more messages."""


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
    """Return the state after a step. Raises `LocalProtocolError` for a step that isn't in `SENDING` or `RECEIVING`."""
    after = SENDING.get((state, step)) if isinstance(state, Sending) else RECEIVING.get((state, step))
    if after is None:
        half = type(state).__name__.lower()
        raise LocalProtocolError(f"illegal step of a {half} half that is {state.value}: got {step.value!r}")
    return after


def draw(table: Mapping[tuple[StateT, StepT], StateT]) -> str:
    """Return a table of steps as a Mermaid state diagram, for the documentation.

    All steps between the same two states share an arrow. The table must begin with the initial state, and CLOSED is the
    final state.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, step), after in table.items():
        arrows.setdefault((before.name, after.name), []).append(step.value)
    lines = [f"    {start} --> {end}: {' | '.join(steps)}" for (start, end), steps in arrows.items()]
    first = next(iter(table))[0].name
    return "\n".join(["stateDiagram-v2", f"    [*] --> {first}", *lines, "    CLOSED --> [*]", ""])


# --- the encoding of reasons, names and headers in the bytes that a protocol leaves to applications


def printable(text: str, most: int = TEXT_MOST) -> str:
    """Return a peer's text so that it is safe to show: control characters are escaped, and long texts are truncated."""
    if len(text) <= most and text.isprintable():
        return text
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:most])
    return shown if len(shown) <= most and len(text) <= most else f"{shown[: most - 1]}…"


def without_secrets(url: str) -> str:
    """Return a URL or an address without the parts that may be secret: the user and password, and the query."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    place, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


@attrs.frozen
class Reason:
    """The reason that one side gives for ending a channel or a connection. An empty reason is false."""

    text: str = ""
    """A text for people."""
    code: int = 0
    """A number for programs, such as one of HTTP's status codes. 0 means that there is none."""

    def __attrs_post_init__(self) -> None:
        code: object = self.code  # programs without a type checker may pass any object
        if not (isinstance(code, int) and 0 <= code <= CODE_MOST):
            raise ValueError(f"invalid code={self.code!r}: expected a whole number from 0 to {CODE_MOST:,}")

    def __bool__(self) -> bool:
        return bool(self.text or self.code)

    def __str__(self) -> str:
        code = f"code {self.code}" if self.code else ""
        return f"{self.text} ({code})" if self.text and code else self.text or code

    def encode(self, most: int = BYTES_MOST) -> bytes:
        """Encode the reason as UTF-8, with the code before the text.

        The text is truncated so that the result has at most `most` bytes. An empty reason, or one whose code doesn't
        fit, becomes b"".
        """
        if not self:
            return b""
        # If the text itself begins like a code, we write the code 0, or `decode` would take the text for a code.
        code = f"{self.code} " if self.code or _CODE.match(self.text.encode()) else ""
        if len(code) > most:  # `decode` would take a truncated code for a text
            return b""
        return (code + self.text).encode()[:most].decode(errors="ignore").encode()

    @classmethod
    def decode(cls, payload: bytes) -> Reason:
        """Decode a reason that `encode` or another implementation has written. The text is safe to show."""
        payload = payload[:BYTES_MOST]
        if not payload.strip(_CONTROLS):  # only control characters, with which some protocols mark an abort
            return cls()
        found = _CODE.match(payload)
        code = int(found[1]) if found else 0
        if found is None or code > CODE_MOST:
            code, rest = 0, payload
        else:
            rest = payload[found.end() :]
        return cls(printable(rest.decode(errors="backslashreplace")), code)


class Opened(NamedTuple):
    """The parts of a channel's opening, as `without_name` returns them."""

    name: str
    payload: bytes
    headers: bytes
    """The encoded block of headers; see `muxkit.core._headers`."""


def with_name(name: str, payload: bytes, headers: bytes = b"") -> bytes:
    """Return the opening of a channel as bytes, for protocols whose frames have no fields for names and headers.

    The name comes first, then the encoded headers, then the payload. If the payload itself begins like a name or like
    headers, an empty name or empty headers are inserted before it, so that `without_name` returns every payload
    unchanged.
    """
    return join_opening(encode_name(name) if name else b"", payload, headers)


def join_opening(name: bytes, payload: bytes, headers: bytes = b"") -> bytes:
    """Return the opening of a channel as bytes, like `with_name`, but from a name that is already encoded."""
    if headers or payload.startswith(_HEADED):
        payload = b"%b%b%b%b" % (_HEADED, len(headers).to_bytes(2, "big"), headers, payload)
    if not name and not payload.startswith(_NAMED):
        return payload
    return b"%b%b\0%b" % (_NAMED, name, payload)


def without_name(opening: bytes) -> Opened:
    """Return the name, the payload and the headers of an opening that `with_name` has encoded.

    An opening that another program has written usually has no name and no headers.
    """
    name, payload, headers = split_opening(opening)
    return Opened(decode_name(name) if name else "", payload, headers)


def split_opening(opening: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the name, the payload and the headers of an opening without decoding the name and the headers.

    This is for protocols whose frames have fields for names or headers.
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
    """Encode the name of a channel. Raises ValueError if it is too long or contains a NUL character."""
    encoded = name.encode()
    if len(encoded) > NAME_MOST or b"\0" in encoded:
        raise ValueError(f"invalid channel name {name[:64]!r}: expected at most {NAME_MOST} bytes and no NUL")
    return encoded


def decode_name(name: bytes) -> str:
    """Decode the name of a channel. The result is safe to show."""
    return printable(name[:NAME_MOST].decode(errors="backslashreplace"))


def counted(number: int, noun: str, plural: str = "", *, were: bool = False) -> str:
    """Return a number with its noun, such as "2 channels", or with `were` also a verb, such as "2 channels were"."""
    if number == 1:
        return f"1 {noun} was" if were else f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}{' were' if were else ''}"
