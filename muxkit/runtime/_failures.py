"""Log what handlers raise, without quoting what a peer sent.

The text of an error of the program may quote what a peer sent, and logs are kept and forwarded. So the text is left
out, with two exceptions: Python's development mode, and errors that muxkit raises about how its functions are called.
Their texts name types and attributes, and hold nothing of a message.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from typing import Final

from muxkit.runtime._log_pace import may_log, may_trace
from muxkit.runtime._scope import leaves_of

WITHHELD: Final = (
    "its text is left out, it may hold payload; run python -X dev, or set the logger 'muxkit' to DEBUG to see it"
)
_MISUSE: Final = (TypeError, AttributeError, RuntimeError)
_PACKAGES: Final = ("muxkit", "muxkit_adapters")

_log = logging.getLogger("muxkit")


def log_failure(what: str, error: Exception, fields: Mapping[str, object]) -> None:
    """Log what a handler raised: its type and traceback, but not its text, which may quote what a peer sent.

    A peer may be able to make a handler fail again and again. So the traceback is logged once per minute for each
    place, other failures there take one line each, and no more lines are written than `may_log` allows.
    """
    place = _place(error)
    if may_trace(f"{what} {place}"):
        _log.error("%s: %s", what, _where(error), extra=fields)
    elif may_log(what):
        # log: A handler failed at a line where one failed less than a minute ago. The line before it with the same
        # error has the traceback. Peers can make a faulty handler fail again and again, so the traceback is written
        # once per minute.
        _log.error("%s: %s again; its traceback was logged before", what, place, extra=fields)
    _log.debug("in full", exc_info=error, extra=fields)


def loggable_text(error: BaseException) -> str:
    """Return the text of an error if the log may show it, otherwise how to see it."""
    return str(error) if sys.flags.dev_mode or _is_about_misuse(error) else WITHHELD


def _place(error: BaseException) -> str:
    """Name the type of an error, or of the first one in a group, and the line that raised it."""
    first = next(leaves_of(error), error)
    frames = traceback.extract_tb(first.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(first).__name__}{where}"


def _where(error: BaseException) -> str:
    way = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    inner = [_where(member) for member in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return "\n".join([f"{type(error).__name__} ({loggable_text(error)})", way, *inner])


def _is_about_misuse(error: BaseException) -> bool:
    """Return True for an error of these types that a function of muxkit raised itself."""
    trace = error.__traceback__
    if type(error) not in _MISUSE or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module: str = trace.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _PACKAGES
