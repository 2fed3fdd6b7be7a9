"""The errors of a store as a whole, each with a sentence that says what to do.

`str(error)` is for the operator of the server; `error.for_client` may be sent to any client.
"""

from __future__ import annotations

from muxkit._errors import MuxError


class StoreError(MuxError):
    """The base of all errors that a store raises on its own account."""

    @property
    def for_client(self) -> str:
        """The text for a client: no path, no address, nothing about other clients."""
        return str(self)


class StoreFull(StoreError):
    """There is no room: a limit of the store, missing acknowledgements, or the disk. Nothing was stored."""

    @property
    def for_client(self) -> str:
        return "the server has no room for more messages at the moment"


class _StoreTrouble(StoreError):
    @property
    def for_client(self) -> str:
        return "the server cannot use its session store at the moment"


class StoreFailed(_StoreTrouble):
    """The disk or the database failed. The work in progress may or may not have been stored, never half of it."""


class StoreReadOnly(_StoreTrouble):
    """The file, its directory or the database cannot be written to. Nothing was stored."""


class StoreLocked(_StoreTrouble):
    """Another process has the file; `pid` is its number if it could be read."""

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
    """The store was closed before or during the call."""


def copy_of(error: StoreError) -> StoreError:
    """Return an equal error for another task: one exception raised in two tasks would mix their tracebacks."""
    if isinstance(error, StoreCorrupt):
        return StoreCorrupt(str(error), aside=error.aside)
    if type(error) in (StoreFull, StoreFailed):
        return type(error)(str(error))
    return error
