"""The errors of a session store that are about one session; those of a store as a whole are in `muxkit.storage`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.storage import StoreError

if TYPE_CHECKING:
    from muxkit.protocols.restream.store.rows import Status


class UnknownSession(StoreError):
    """No session has this uuid; nothing was changed."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} is not known here; begin a new one with params")
        self.uuid = uuid


class SessionExpired(UnknownSession):
    """The client was absent for too long, and its session is deleted."""

    def __init__(self, uuid: str) -> None:
        StoreError.__init__(self, f"session {uuid} has expired; begin a new one with params")
        self.uuid = uuid


class SessionExists(StoreError):
    """`register` was called with the uuid of an existing session, whose `status` this is."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"session {status.uuid} exists already; resume it with state, or choose another uuid")
        self.status = status


class SessionBusy(StoreError):
    """`attach(takeover=False)` while another connection has the session."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} has an open connection; close that one first")
        self.uuid = uuid


class Superseded(StoreError):
    """A newer connection has taken over the session; the old owner must stop and send nothing more."""

    def __init__(self, uuid: str, *, held: int, current: int) -> None:
        super().__init__(f"session {uuid} was taken over by a newer connection (epoch {current}, this one was {held})")
        self.uuid = uuid
        self.held = held
        self.current = current

    @property
    def for_client(self) -> str:
        return f"session {self.uuid} was taken over by a newer connection"


class SessionFinished(StoreError):
    """A message was to be added after the final one."""

    def __init__(self, uuid: str, head: int) -> None:
        super().__init__(f"session {uuid} is finished; nothing follows message {head}")
        self.uuid = uuid
        self.head = head


class UnknownMessage(StoreError):
    """No message of the session has this id: it is 0, or above the last one."""

    def __init__(self, uuid: str, id: int, head: int) -> None:
        known = f"its messages are 1 to {head}" if head else "it has no messages yet"
        super().__init__(f"session {uuid} has no message {id}; {known}")
        self.uuid = uuid
        self.id = id
        self.head = head


class OutOfOrderAck(StoreError):
    """An acknowledgement is below an earlier one."""

    def __init__(self, uuid: str, id: int, acknowledged: int) -> None:
        super().__init__(f"session {uuid}: ack {id} after ack {acknowledged}; acks never go back")
        self.uuid = uuid
        self.id = id
        self.acknowledged = acknowledged


class MessageGone(StoreError):
    """The requested messages were acknowledged, so they may be deleted."""

    def __init__(self, uuid: str, id: int, acknowledged: int) -> None:
        super().__init__(
            f"session {uuid}: messages after {id} were asked for, but all up to {acknowledged} are acknowledged; "
            f"resume with state {acknowledged} or later"
        )
        self.uuid = uuid
        self.id = id
        self.acknowledged = acknowledged


class IdsExhausted(StoreError):
    """The last of the 32-bit ids is used."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} has used all message ids up to 4294967295; go on in a new session")
        self.uuid = uuid


class NotJson(StoreError, ValueError):
    """A state, data or params has no form in JSON, or came back from JSON in another shape."""
