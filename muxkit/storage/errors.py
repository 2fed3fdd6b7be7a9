"""Errors that concern a store as a whole, such as a full disk, a damaged file or a lost database.

Every error carries two texts. `str(error)` is for the operator: it names the file or the database and says what to do.
`error.for_client` is safe to send to any client, because it names no path, no address and no other client.
"""

from __future__ import annotations

from muxkit._errors import MuxError


class StoreError(MuxError):
    """Base class of the errors that a store raises."""

    passes: bool = False
    """True if the same call may succeed later without any change to it, so the caller can wait and retry."""

    @property
    def for_client(self) -> str:
        """The text that may be sent to a client. It contains no path, no address and nothing about other clients."""
        return str(self)


class StoreFull(StoreError):
    """Raised when a value doesn't fit into the store, its limits or the free space on the disk. Nothing was stored.

    `passes` is False if waiting can't help because the value exceeds the limits of the store. Otherwise space becomes
    available when messages are acknowledged or when the operator frees some on the disk.
    """

    def __init__(self, message: str, *, passes: bool = True) -> None:
        super().__init__(message)
        self.passes = passes

    @property
    def for_client(self) -> str:
        if self.passes:
            return "the server has no room for more messages at the moment"
        return "the server's store has no room for a value of this size"


class _StoreTrouble(StoreError):
    @property
    def for_client(self) -> str:
        return "the server cannot use its session store" + (" at the moment" if self.passes else "")


class StoreFailed(_StoreTrouble):
    """Raised when the disk or the database failed. The transaction was either stored completely or not at all."""

    passes: bool = True


class StoreReadOnly(_StoreTrouble):
    """Raised when the file, its directory or the database isn't writable. Nothing was stored."""

    passes: bool = True


class StoreLocked(_StoreTrouble):
    """Raised when another process has locked the file. `pid` is that process, or None if it couldn't be determined."""

    passes: bool = True

    def __init__(self, path: str, pid: int | None) -> None:
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"{path} is in use by {holder}; stop that one, or choose another file "
            "(several servers share a store through postgresql://)"
        )
        self.path = path
        self.pid = pid


class StoreCorrupt(_StoreTrouble):
    """Raised when stored data is damaged. `aside` is the path that the file was moved to, or None if it is in place."""

    def __init__(self, message: str, *, aside: str | None = None) -> None:
        super().__init__(message)
        self.aside = aside


class StoreVersion(_StoreTrouble):
    """Raised when the tables come from a newer version of muxkit or belong to another program. Nothing was changed."""


class StoreClosed(_StoreTrouble):
    """Raised when the store was closed before or during the call."""

    passes: bool = True


def copy_of(error: StoreError) -> StoreError:
    """Return an error with the same content for another task.

    Raising one exception object in two tasks would mix their tracebacks. `StoreCorrupt`, `StoreFull` and `StoreFailed`
    are copied, because they are the errors with which a whole group of jobs fails. Any other error is returned
    unchanged.
    """
    if isinstance(error, StoreCorrupt):
        return StoreCorrupt(str(error), aside=error.aside)
    if type(error) is StoreFull:
        return StoreFull(str(error), passes=error.passes)
    if type(error) is StoreFailed:
        return StoreFailed(str(error))
    return error
