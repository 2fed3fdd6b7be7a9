"""The output of a command and its exit code.

Output to a pipe has no colours, and no text is printed that a terminal would interpret.

Every command imports this module, and so does `muxkit --version`. It therefore imports rich, msgspec and Trio only in
the functions that need them.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 200  # columns without a terminal: tables in a pipe are not folded


class Exit(IntEnum):
    """The exit codes of `muxkit`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_CONNECTED = 3
    VIOLATION = 4
    TIMED_OUT = 5
    INTERRUPTED = 130


# Of several errors, the one that comes first here is reported; it usually caused the others.
TELLING = (Exit.INTERRUPTED, Exit.VIOLATION, Exit.NOT_CONNECTED, Exit.TIMED_OUT, Exit.USAGE, Exit.FAILED)


class CommandFailed(Exception):
    """A command failed, with a sentence for people and an exit code."""

    def __init__(self, sentence: str, exit: Exit = Exit.FAILED) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.exit = exit


def failure_of(error: BaseException) -> CommandFailed | None:
    """Return the sentence and the exit code for an error, or None if it is unexpected and needs its traceback."""
    from muxkit.runtime import leaves_of

    failures = [_failure(leaf) for leaf in leaves_of(error)]
    known = [failure for failure in failures if failure is not None]
    if len(known) < len(failures):
        return None
    return min(known, key=lambda failure: TELLING.index(failure.exit))


def _failure(error: BaseException) -> CommandFailed | None:
    import trio

    from muxkit import HandshakeFailed, LinkLost, MuxError, Refused, RemoteProtocolError
    from muxkit.runtime import can_heal

    match error:
        case CommandFailed():
            return error
        case KeyboardInterrupt():
            return CommandFailed("interrupted", Exit.INTERRUPTED)
        case RemoteProtocolError():
            return CommandFailed(str(error), Exit.VIOLATION)
        case LinkLost() if isinstance(error.__cause__, RemoteProtocolError):
            return CommandFailed(str(error), Exit.VIOLATION)
        case LinkLost() | HandshakeFailed() | Refused() if not can_heal(error):
            return CommandFailed(in_options(str(error)), Exit.NOT_CONNECTED)
        case trio.TooSlowError() | TimeoutError():
            return CommandFailed(str(error) or "it took too long", Exit.TIMED_OUT)
        case MuxError() | OSError() | trio.BrokenResourceError():
            return CommandFailed(str(error) or type(error).__name__)
        case _:
            return None


# In this order: a longer one comes before one that it holds.
_OPTIONS_OF_KEYWORDS = {
    "tls=muxkit.TLS(cert='cert.pem', key='key.pem')": "give --cert (and --key)",
    "tls=muxkit.TLS(cert=…, key=…)": "--cert and --key",
    "tls=TLS(cert=..., key=...)": "--cert and --key",
    "connect(…, token=…)": "--token-file or $MUXKIT_TOKEN",
    "token=…": "--token-file",
    "proxy=…": "--proxy",
    "balancers=": "--balancer ",
    "proxy=http": "--proxy http",
    "proxy=socks": "--proxy socks",
    "insecure=True and tls=TLS(verify=True) contradict each other: leave insecure= out": (
        "--insecure can't be used with --cert and --ca"
    ),
    "TLS(client_ca=…): is for a server, which needs cert= and key=": "--client-ca requires --cert (and --key)",
    "a key needs its certificate, cert=": "--key requires --cert",
    "pass insecure=True": "give --insecure",
    "insecure=True": "--insecure",
}


def in_options(text: str) -> str:
    """Return the text of an error with the command's options instead of keyword arguments."""
    for keyword, option in _OPTIONS_OF_KEYWORDS.items():
        text = text.replace(keyword, option)
    return text


def why_not(error: OSError) -> str:
    """Return why a connection was refused, in the words of the transports. Trio hides the reason in a group of
    attempts.
    """
    from muxkit.runtime import leaves_of

    advice = {errno.ECONNREFUSED: "nothing listens there", errno.ENOENT: "there is no such socket"}
    causes = [each for each in leaves_of(error.__cause__ or error) if isinstance(each, OSError)]
    texts: dict[str, None] = {}
    for cause in causes or [error]:
        number = cause.errno or 0
        text = os.strerror(number) if number > 0 else cause.strerror or str(cause)
        hint = f" ({advice[number]})" if number in advice else ""
        texts[f"{text[:1].lower()}{text[1:]}{hint}"] = None
    return "; ".join(texts)


def console() -> Console:
    """Return the console for standard output. rich uses colours only on a terminal and without NO_COLOR."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    return Console(width=width, markup=False, emoji=False, highlight=False)


def is_live(out: Console) -> bool:
    """Return True if lines can be redrawn. FORCE_COLOR doesn't turn a pipe into a terminal."""
    return sys.stdout.isatty() and out.is_terminal and not out.is_dumb_terminal


def printable(text: str) -> str:
    """Escape all characters that a terminal would interpret or display as something else.

    These are the characters in the Unicode categories control, format, surrogate, private use and separators other than
    the space: escape sequences, line breaks, and marks that change the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def say(line: str, fields: Mapping[str, object], *, as_json: bool) -> None:
    """Print a line for people, or its fields as JSON. Both escape characters that a terminal would interpret."""
    import msgspec

    safe = {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}
    click.echo(msgspec.json.encode(safe).decode() if as_json else printable(line))


def failure_as_fields(failure: CommandFailed | None) -> dict[str, object] | None:
    """Return the fields of a failure for JSON output."""
    return None if failure is None else {"sentence": printable(failure.sentence), "exit": int(failure.exit)}
