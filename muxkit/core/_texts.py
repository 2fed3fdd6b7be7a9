"""Texts in the bytes that a protocol leaves to applications: the reason of an end, and the name of a channel."""

from __future__ import annotations

import re

import attrs

BYTES_MOST = 512  # of an encoded reason
TEXT_MOST = 512  # characters of a reason that is shown
CODE_MOST = 2**32 - 1

NAME_MOST = 255  # bytes of the name of a channel

_CODE = re.compile(rb"(\d{1,10}) ")
_CONTROLS = bytes(range(32))
_NAMED = b"\xc0n"  # in front of a name; no text begins so, as UTF-8 has no byte C0


def printable(text: str, most: int = TEXT_MOST) -> str:
    """Return text of a peer as it may be shown: without control characters, and not longer than `most` characters."""
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:most])
    return shown if len(shown) <= most and len(text) <= most else f"{shown[: most - 1]}…"


@attrs.frozen
class Reason:
    """Why one side ended a channel or a connection, in its own words."""

    text: str = ""
    code: int = attrs.field(
        default=0, validator=[attrs.validators.instance_of(int), attrs.validators.in_(range(CODE_MOST + 1))]
    )
    """A number for programs; 0 if none was given."""

    def __bool__(self) -> bool:
        return bool(self.text or self.code)

    def __str__(self) -> str:
        code = f"code {self.code}" if self.code else ""
        return f"{self.text} ({code})" if self.text and code else self.text or code

    def encode(self, most: int = BYTES_MOST) -> bytes:
        """Write the reason in at most `most` bytes: UTF-8, the code in front of the text. No reason is no bytes."""
        if not self:
            return b""
        # A text that begins like a code would be read as one.
        code = f"{self.code} " if self.code or _CODE.match(self.text.encode()) else ""
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


def with_name(name: str, payload: bytes) -> bytes:
    """Return the payload that opens a channel of this name, for protocols without a place for names."""
    if not name and not payload.startswith(_NAMED):
        return payload
    return b"%b%b\0%b" % (_NAMED, encode_name(name), payload)


def without_name(opening: bytes) -> tuple[str, bytes]:
    """Return the name and the payload that `with_name` put together; a payload of other programs has no name."""
    if not opening.startswith(_NAMED):
        return "", opening
    name, end, payload = opening[len(_NAMED) :].partition(b"\0")
    return (decode_name(name), payload) if end else ("", opening)


def encode_name(name: str) -> bytes:
    encoded = name.encode()
    if len(encoded) > NAME_MOST or b"\0" in encoded:
        raise ValueError(f"the name of a channel has at most {NAME_MOST} bytes and no NUL: {name[:64]!r}")
    return encoded


def decode_name(name: bytes) -> str:
    """Return the name that a peer gave, as it may be shown."""
    return printable(name[:NAME_MOST].decode(errors="backslashreplace"))
