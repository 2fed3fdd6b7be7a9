"""What can a store refuse, and what can befall it? One class for each, and sentences that say what to do.

`str(error)` is for whoever runs the server; `error.for_client` is what may be told to a stranger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import MuxError

if TYPE_CHECKING:
    from muxkit.protocols.restream.store.protocol import Status


class StoreError(MuxError):
    """Everything that a session store raises on its own account."""

    @property
    def for_client(self) -> str:
        """The sentence for the error line: no path, no address, nothing of other sessions."""
        return str(self)


# ---------------------------------------------------------------------------- about one session


class UnknownSession(StoreError):
    """No session has this uuid; nothing was changed."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} is not known here; begin a new one with params")
        self.uuid = uuid


class SessionExpired(UnknownSession):
    """The client stayed away for too long and its session is gone."""

    def __init__(self, uuid: str) -> None:
        StoreError.__init__(self, f"session {uuid} has expired; begin a new one with params")
        self.uuid = uuid


class SessionExists(StoreError):
    """`register` for a uuid that has a session already; `status` is what is known about it."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"session {status.uuid} exists already; resume it with state, or choose another uuid")
        self.status = status


class SessionBusy(StoreError):
    """`attach(takeover=False)` while another connection has the session."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} has an open connection; close that one first")
        self.uuid = uuid


class Superseded(StoreError):
    """A newer connection has taken the session over; the old owner must stop and send nothing more."""

    def __init__(self, uuid: str, *, held: int, current: int) -> None:
        super().__init__(f"session {uuid} was taken over by a newer connection (epoch {current}, this one was {held})")
        self.uuid = uuid
        self.held = held
        self.current = current

    @property
    def for_client(self) -> str:
        return f"session {self.uuid} was taken over by a newer connection"


class SessionFinished(StoreError):
    """Something was to be added behind the final message."""

    def __init__(self, uuid: str, head: int) -> None:
        super().__init__(f"session {uuid} is finished; nothing follows message {head}")
        self.uuid = uuid
        self.head = head


class UnknownMessage(StoreError):
    """An id that names no message of the session: 0, or above the last one."""

    def __init__(self, uuid: str, id: int, head: int) -> None:
        known = f"its messages are 1 to {head}" if head else "it has no messages yet"
        super().__init__(f"session {uuid} has no message {id}; {known}")
        self.uuid = uuid
        self.id = id
        self.head = head


class OutOfOrderAck(StoreError):
    """An ack below an earlier one."""

    def __init__(self, uuid: str, id: int, acknowledged: int) -> None:
        super().__init__(f"session {uuid}: ack {id} after ack {acknowledged}; acks never go back")
        self.uuid = uuid
        self.id = id
        self.acknowledged = acknowledged


class MessageGone(StoreError):
    """Messages were asked for that had been acknowledged, and so may be gone."""

    def __init__(self, uuid: str, id: int, acknowledged: int) -> None:
        super().__init__(
            f"session {uuid}: messages after {id} were asked for, but all up to {acknowledged} are acknowledged; "
            f"resume with state {acknowledged} or later"
        )
        self.uuid = uuid
        self.id = id
        self.acknowledged = acknowledged


class IdsExhausted(StoreError):
    """The last of the 32-bit ids is taken."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} has used all message ids up to 4294967295; go on in a new session")
        self.uuid = uuid


class NotJson(StoreError, ValueError):
    """A state, data or params that JSON cannot hold, or that came back from JSON in another shape."""


# ---------------------------------------------------------------------------- about the store


class StoreFull(StoreError):
    """No room: a limit of the store, a session that is not acknowledged, or the disk. Nothing was stored."""

    @property
    def for_client(self) -> str:
        return "the server has no room for more messages at the moment"


class _StoreTrouble(StoreError):
    @property
    def for_client(self) -> str:
        return "the server cannot use its session store at the moment"


class StoreFailed(_StoreTrouble):
    """The disk or the database failed. What was under way may or may not have been stored, never half of it."""


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
    """What was read is not what was written. `aside` is where the file was moved to, if it was."""

    def __init__(self, message: str, *, aside: str | None = None) -> None:
        super().__init__(message)
        self.aside = aside


class StoreVersion(_StoreTrouble):
    """The file or database was written by a newer version, or belongs to something else; it was left alone."""


class StoreClosed(_StoreTrouble):
    """The store was closed while, or before, this was asked of it."""
