"""What the log says about an error that a handler raised.

The text of an error of the program may quote what a peer sent, and logs are kept and forwarded. So the text is left
out, with two exceptions: Python's development mode, and errors that muxkit raises about how its functions are called.
Their texts name types and attributes, and hold nothing of a message.
"""

from __future__ import annotations

import sys
from typing import Final

WITHHELD: Final = (
    "its text is left out, it may hold payload; run python -X dev, or set the logger 'muxkit' to DEBUG to see it"
)
_MISUSE: Final = (TypeError, AttributeError, RuntimeError)
_PACKAGES: Final = ("muxkit", "muxkit_adapters")


def loggable_text(error: BaseException) -> str:
    """Return the text of an error if the log may show it, otherwise how to see it."""
    return str(error) if sys.flags.dev_mode or _is_about_misuse(error) else WITHHELD


def _is_about_misuse(error: BaseException) -> bool:
    """Return True for an error of these types that a function of muxkit raised itself."""
    trace = error.__traceback__
    if type(error) not in _MISUSE or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module: str = trace.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _PACKAGES
