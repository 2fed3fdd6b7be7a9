"""What does a server mean by its error line? The protocol has only its text, so this is the one place that reads it."""

from __future__ import annotations

import re
from enum import Enum
from typing import Final


class Refusal(Enum):
    """What a client can do about it is in these words."""

    GONE = "what was asked for was acknowledged, and may be deleted"
    BEYOND = "what was asked for does not exist there"
    UNKNOWN = "there is no such session, or not any more"
    BUSY = "another connection has the session; later it may be free"
    TROUBLE = "the server has trouble of its own; later it may have none"
    OTHER = "whatever else; a server that does not know the question among them"


_MEANINGS: Final = (
    (Refusal.GONE, re.compile(r"is before message \d+, which was acknowledged|all up to \d+ are acknowledged")),
    (Refusal.BEYOND, re.compile(r"is beyond the last message")),
    (Refusal.UNKNOWN, re.compile(r"is not known here|has expired|session expired|unknown session", re.IGNORECASE)),
    (Refusal.BUSY, re.compile(r"taken over by a newer connection|has an open connection")),
    (
        Refusal.TROUBLE,
        re.compile(r"cannot use its session store|no room for more messages|the server failed|did not come in time"),
    ),
)
_ACKNOWLEDGED: Final = re.compile(r"before message (\d{1,10}), which was acknowledged|all up to (\d{1,10}) are ack")


def meaning(text: str) -> Refusal:
    """Of the text of an error line."""
    for refusal, pattern in _MEANINGS:
        if pattern.search(text):
            return refusal
    return Refusal.OTHER


def acknowledged(text: str) -> int | None:
    """Up to where messages are gone, if the text says so."""
    found = _ACKNOWLEDGED.search(text)
    return None if found is None else int(found[1] or found[2])
