"""The interface of a session store: the specification's five methods, owners, batches and fed sessions.

Every method is a checkpoint. When one returns, its effect is durable (as durable as the store is). A call that is
cancelled may have taken effect or not, but never half of it: ask `status`, or go on with `replay`.

**Owners.** `attach` increments the session's epoch and returns it. A later call with an older `epoch` raises
`Superseded` and changes nothing, also when the new owner is on another server. Without `epoch` there is no check.

**Transformers** are called in another thread while the store works, perhaps several times: they must be pure and short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import attrs

State = TypeVar("State")
Data = TypeVar("Data")

Transform = Callable[[State], tuple[Data, State]]
IsFinal = Callable[[Data], bool]
Now = Callable[[], float]  # seconds since 1970, like `time.time`; called in any thread

LAST_ID = 2**32 - 1  # ids are unsigned 32-bit integers and never wrap
KEEP = 30.0  # s, "if it fails to re-establish a connection within 30 seconds"
MOST = 256  # messages of one `replay` or `put_many` by default


@attrs.define(eq=True)
class Message(Generic[Data]):
    """One message of a session; `time` is in seconds since 1970, if the source gave one."""

    id: int
    data: Data
    time: float | None = None


@attrs.frozen
class Status:
    """The progress of a session. Messages up to `acknowledged` may be deleted; `head` is the last id that exists."""

    uuid: str
    head: int
    acknowledged: int
    final: bool  # no message will follow `head`
    epoch: int  # of the newest owner; 0 before the first
    params: object  # as given to `register`
    attached: bool
    expires: float | None  # when it expires; None while it is attached

    @property
    def waiting(self) -> int:
        """How many messages are kept because they are not acknowledged."""
        return self.head - self.acknowledged


@attrs.frozen
class StoreLimits:
    """The limits of a store. Beyond one of them `StoreFull` is raised and nothing is changed."""

    sessions: int = 1_000_000  # memory and SQLite
    messages: int = 1_000_000  # unacknowledged ones of one session
    message_bytes: int = 1 << 20  # of one state, data or params, as JSON
    bytes: int = 1 << 40  # memory: of all that is kept; SQLite: of the file


class SessionStore(Protocol[State, Data]):
    """A store of sessions. Several tasks may use one at once."""

    # ------------------------------------------------------------------------ the specification's own

    async def register(
        self,
        uuid: str,
        state: State,
        *,
        params: object = None,
        attached: bool = True,
        keep: float | None = None,
        head: int = 0,
    ) -> Status:
        """Make a session. Raises `SessionExists`, with the status of the session that has the uuid.

        `attached`: the caller is its owner, of epoch 1. Otherwise (a fed session whose client will connect later) its
        absence begins now. `keep` is how many seconds of absence it survives: `math.inf` for no limit, the store's own
        number if None. Ids begin above `head`.
        """

    async def disconnect(self, uuid: str, *, epoch: int | None = None) -> None:
        """Begin the absence of the client. Harmless from an owner that was superseded."""

    async def put(
        self,
        uuid: str,
        transform: Transform[State, Data],
        *,
        epoch: int | None = None,
        is_final: IsFinal[Data] | None = None,
    ) -> Message[Data]:
        """Make the next message from the state, and store both at once.

        Raises `SessionFinished` after a final message, `IdsExhausted`, `StoreFull`, and any error of the transformer;
        nothing has changed then.
        """

    async def after(self, uuid: str, id: int) -> Message[Data] | None:
        """Return the stored message after `id` (0: the first), or None if there is none yet.

        Raises `MessageGone` below what was acknowledged and `UnknownMessage` above the last message.
        """

    async def ack(self, uuid: str, id: int, *, epoch: int | None = None) -> None:
        """Delete the messages up to `id`, which the client has.

        Raises `OutOfOrderAck` below an earlier one and `UnknownMessage` for 0 and above the last message.
        """

    # ------------------------------------------------------------------------ owners and batches

    async def attach(self, uuid: str, *, takeover: bool = True) -> Status:
        """Become the owner, with the epoch in the answer; an attached session does not expire.

        The last owner is superseded, and its tasks in `wait` wake. With `takeover=False` an attached session raises
        `SessionBusy` instead.
        """

    async def put_many(
        self,
        uuid: str,
        transform: Transform[State, Data],
        most: int = MOST,
        *,
        epoch: int | None = None,
        is_final: IsFinal[Data] | None = None,
    ) -> list[Message[Data]]:
        """Make from one to `most` messages as one unit; fewer if one is final or the session has no more room."""

    async def replay(
        self, uuid: str, after: int, most: int = MOST, *, most_bytes: int = 1 << 20
    ) -> list[Message[Data]]:
        """Return the stored messages after `after`, in order; empty if there are none yet. Raises like `after`.

        It returns at least one if there is one, then as many as fit into `most` and `most_bytes` of JSON.
        """

    # ------------------------------------------------------------------------ fed sessions

    async def append(self, uuid: str, data: Data, *, time: float | None = None) -> Message[Data]:
        """Store a message that the caller made, and wake the tasks that wait for it, in any process."""

    async def append_many(self, uuid: str, data: Sequence[Data], *, time: float | None = None) -> list[Message[Data]]:
        """Store all of these messages as one unit, or none."""

    async def finish(self, uuid: str) -> Status:
        """Add no more messages: later puts and appends raise `SessionFinished`. Harmless when repeated."""

    async def wait(self, uuid: str, after: int, *, epoch: int | None = None) -> Status:
        """Sleep until there is a message after `after`, or the session is finished.

        Raises `Superseded` as soon as a newer owner than `epoch` attaches, `UnknownSession` when it expires.
        """

    async def wait_room(self, uuid: str, count: int = 1) -> Status:
        """Sleep until `count` more messages may be added; acknowledgements make room."""

    # ------------------------------------------------------------------------ status and expiry

    async def status(self, uuid: str) -> Status:
        """Return the progress of the session."""

    async def sessions(self, after: str = "", most: int = MOST) -> list[Status]:
        """Return one page of the sessions that have not expired, ordered by uuid, after the uuid `after`."""

    async def expire(self, now: float | None = None) -> int:
        """Delete the expired sessions and return how many there were; call it every few seconds.

        An expired session is refused even before it is deleted. `now` is the store's own clock if None.
        """
