"""Reasons that a peer gives for an end: a text with an optional code, written where a protocol has room for bytes."""

from __future__ import annotations

import re

import attrs

BYTES_MOST = 512  # of an encoded reason
TEXT_MOST = 512  # characters of a reason that is shown
CODE_MOST = 2**32 - 1

_CODE = re.compile(rb"(\d{1,10}) ")


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
        found = _CODE.match(payload)
        code = int(found[1]) if found else 0
        if found is None or code > CODE_MOST:
            code, rest = 0, payload
        else:
            rest = payload[found.end() :]
        return cls(printable(rest.decode(errors="backslashreplace")), code)
