"""What may stand in a server's log? Nothing that a terminal would obey, no payload, no whole uuid."""

from __future__ import annotations

import re
import traceback
from typing import Final

_UUID: Final = re.compile(r"([0-9a-fA-F]{8})(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def shown(text: str) -> str:
    """One line. Of a session's uuid, which opens it, there remains what tells it from others."""
    masked = _UUID.sub(r"\1-…", text)
    return masked if masked.isprintable() else masked.encode("unicode_escape").decode("ascii")


def where(error: BaseException) -> str:
    """An error's type and the way to it, but not its text, which may quote a payload."""
    way = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return f"{type(error).__name__} (its text is left out, it may hold payload)\n{way}"
