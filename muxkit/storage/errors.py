"""The errors of a store as a whole, each with a sentence that says what to do.

`str(error)` is for the operator of the server; `error.for_client` may be sent to any client.
"""

from __future__ import annotations

from muxkit._errors import MuxError


class StoreError(MuxError):
    """The base of all errors that a store raises on its own account."""

    passes: bool = False
    """True if the same call may succeed later without any change to it, so a caller can wait and try again."""

    @property
    def for_client(self) -> str:
        """The text for a client: no path, no address, nothing about other clients."""
        return str(self)


class StoreFull(StoreError):
    """There is no room: a limit of the store, missing acknowledgements, or the disk. Nothing was stored.

    `passes` is False if waiting cannot help, because the value is too large for the limits of the store.
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
    """The disk or the database failed. The work in progress may or may not have been stored, never half of it."""

    passes: bool = True


class StoreReadOnly(_StoreTrouble):
    """The file, its directory or the database cannot be written to. Nothing was stored."""

    passes: bool = True


class StoreLocked(_StoreTrouble):
    """Another process has the file; `pid` is its number if it could be read."""

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
    """A row that was read is not the one that was written. `aside` is where the file was moved to, if it was."""

    def __init__(self, message: str, *, aside: str | None = None) -> None:
        super().__init__(message)
        self.aside = aside


class StoreVersion(_StoreTrouble):
    """The file or database was written by a newer version, or is no store of this kind; it was left as it is."""


class StoreClosed(_StoreTrouble):
    """The store was closed before or during the call. The server ends, and its clients come to the next one."""

    passes: bool = True


def copy_of(error: StoreError) -> StoreError:
    """Return an equal error for another task: one exception raised in two tasks would mix their tracebacks."""
    if isinstance(error, StoreCorrupt):
        return StoreCorrupt(str(error), aside=error.aside)
    if type(error) is StoreFull:
        return StoreFull(str(error), passes=error.passes)
    if type(error) is StoreFailed:
        return StoreFailed(str(error))
    return error
