"""How is a client's stream kept going? The pauses between connections, what may wait, and what a server can refuse."""

from __future__ import annotations

from typing import Final

import attrs
import trio

from muxkit._errors import MuxError
from muxkit.runtime import Backoff

LEAST_PAUSE: Final = 5.0  # s, "it should wait at least 5 seconds before retrying"
IDLE_SILENCE: Final = 300.0  # s, for streams that may have nothing to say
MOST_TEXT: Final = 1000  # characters of an error that a server says


def _backoff() -> Backoff:
    return Backoff(first=1.0, least=LEAST_PAUSE, most=30.0)


@attrs.frozen(kw_only=True)
class ClientPolicy:
    """How a stream is read over one connection after another; times in seconds."""

    backoff: Backoff = attrs.field(factory=_backoff)
    """The pauses after failed attempts to connect. After a drop there is none."""
    ahead: int = 64
    """Reading pauses while so many messages wait for the application."""
    ack_after: float | None = 1.0
    """What was taken is acknowledged after this time at the latest; None: only as `ClientConfig(ack_every=)` says."""
    silence: float | None = 20.0
    """A connection that brings nothing for so long is given up and dialled again; None: never. A session whose client
    is away expires after 30 s, so this should be less."""
    linger: float = 5.0
    """For the last acknowledgement and for taking leave."""

    def __attrs_post_init__(self) -> None:
        if self.backoff.least < LEAST_PAUSE:
            raise ValueError(
                f"ClientPolicy(backoff=Backoff(least={self.backoff.least:g})): restream asks for at least "
                f"{LEAST_PAUSE:g} s after a failed attempt to connect"
            )
        if self.ahead < 1:
            raise ValueError(f"ClientPolicy(ahead={self.ahead}): must be at least 1")
        for name in ("ack_after", "silence", "linger"):
            seconds: float | None = getattr(self, name)
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ValueError(f"ClientPolicy({name}={seconds!r}): must be finite and above 0")


class StreamRefused(MuxError, trio.BrokenResourceError):
    """The server said an error: the stream is over, and must not be resumed.

    `text` is what it said, at most 1,000 characters of it, with everything escaped that a terminal would obey.
    """

    def __init__(self, text: str) -> None:
        self.text = escaped(text)
        super().__init__(f"the server refused: {self.text}")


def escaped(text: str) -> str:
    """A peer's text for people: bounded, and nothing in it commands a terminal or looks like something else."""
    told = text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + "…"
    if told.isprintable():
        return told
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in told)
