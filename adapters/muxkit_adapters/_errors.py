"""Errors and warnings of the transports."""

from __future__ import annotations

import errno
import os

from muxkit import HandshakeFailed as HandshakeFailed
from muxkit import PlaintextWarning as PlaintextWarning

WHAT_TO_DO = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.EADDRINUSE: "something else listens there",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


def failed(where: str, error: OSError, *, what_to_do: dict[int, str] = WHAT_TO_DO) -> OSError:
    """Return an error of the same type and number whose text names the address and says what to do."""
    # Trio's text for a failed connection repeats the address, so we use the system's text.
    number = error.errno or 0
    is_trios = number > 0 and (error.strerror or "").startswith("Error connecting")
    text = os.strerror(number) if is_trios else error.strerror or str(error)
    advice = what_to_do.get(number)
    made = type(error)(f"{where}: {text[:1].lower()}{text[1:]}{f' ({advice})' if advice else ''}")
    made.errno = error.errno
    return made
