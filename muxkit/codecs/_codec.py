"""The interface of a codec, and the error for a message that doesn't fit its type."""

from __future__ import annotations

import re
from typing import Final, Protocol, TypeVar

from muxkit._errors import MuxError

ValueT = TypeVar("ValueT")

_PATH = re.compile(r" - at `\$([^`]*)`$")  # at the end of msgspec's errors

MAX_MESSAGE: Final = 4 * 1024 * 1024
"""The default bound on the size of a message that is decoded, in bytes.

A decoded value can take thirty times the memory of its message: `[[],[],…]` has three bytes for each list. So a codec
decodes less than the session receives (`Limits.message`), unless the program allows more.
"""


class Codec(Protocol[ValueT]):
    """Turns values of one type into the bytes of a message and back.

    A codec of your own is any object with these members. It is used by many channels at the same time, so it must not
    keep state between calls.
    """

    @property
    def name(self) -> str:
        """The name by which both ends know the codec, such as "json"."""
        ...

    @property
    def max_size(self) -> int:
        """The largest message that may be decoded, in bytes."""
        ...

    def encode(self, value: ValueT, /) -> bytes:
        """Return the message that carries a value."""
        ...

    def decode(self, message: bytes, /) -> ValueT:
        """Return the value that a message carries. Raises ValueError, or an error made by it, if it doesn't fit."""
        ...


class InvalidMessage(MuxError, ValueError):
    """A message of the peer doesn't fit the type that was expected.

    `problem` says what is wrong, and `path` where in the message, in the form `$.items[0].price`; the path of a
    message that couldn't be parsed at all is "". The channel has been aborted, and the session continues.
    """

    _in_repr = ("path",)

    def __init__(self, problem: str, *, path: str = "") -> None:
        super().__init__(f"invalid message at {path}: {problem}" if path else f"invalid message: {problem}")
        self.problem = problem
        self.path = path


def decoded(codec: Codec[ValueT], message: bytes) -> ValueT:
    """Decode a message of a peer, after a look at its size.

    Raises:
        InvalidMessage: The message is larger than `codec.max_size`, or the codec can't decode it.
    """
    if len(message) > codec.max_size:
        raise InvalidMessage(
            f"the message has {len(message):,} bytes, the codec {codec.name!r} takes {codec.max_size:,}; "
            "raise max_size= of the codec on the receiving side if the peer is right"
        )
    try:
        return codec.decode(message)
    except InvalidMessage:
        raise
    except RecursionError:
        raise InvalidMessage("the message is nested too deeply") from None
    except ValueError as error:
        problem, path = str(error), ""
        while (found := _PATH.search(problem)) is not None:  # a second one is inside a pydantic model
            problem, path = problem[: found.start()], path + found[1]
        raise InvalidMessage(problem, path=path and f"${path}") from error
