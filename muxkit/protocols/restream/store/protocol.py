"""What does a server ask of a session store? The document's five methods, and what lies around them.

Every method is a checkpoint. When one returns, its effect is durable (as durable as the store is). A call that is
cancelled may have taken effect or not, but never half of it: ask `status`, or go on with `replay`.

**Owners.** `attach` raises the session's epoch and hands it out. Whoever passes an older `epoch` later gets
`Superseded` and has changed nothing, also when the newcomer is on another server. Without `epoch` nobody checks.

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
Now = Callable[[], float]  # seconds since 1970, as `time.time` gives them; called in any thread

LAST_ID = 2**32 - 1  # ids are unsigned 32-bit integers and never wrap
KEEP = 30.0  # s, "if it fails to re-establish a connection within 30 seconds"
MOST = 256  # messages of one `replay` or `put_many`, unless told


@attrs.define(eq=True)
class Message(Generic[Data]):
    """One message of a session; `time` is seconds since 1970 where the source gave one."""

    id: int
    data: Data
    time: float | None = None


@attrs.frozen
class Status:
    """How far a session is. Ids up to `acknowledged` may be gone; `head` is the last one that exists."""

    uuid: str
    head: int
    acknowledged: int
    final: bool  # nothing will ever follow `head`
    epoch: int  # of the newest owner; 0 when there never was one
    params: object  # what `register` was given
    attached: bool
    expires: float | None  # when it will be gone unless somebody attaches; None while somebody is attached

    @property
    def waiting(self) -> int:
        """How many messages are kept because nobody acknowledged them."""
        return self.head - self.acknowledged


@attrs.frozen
class StoreLimits:
    """What a store may hold. Beyond it `StoreFull` is raised and nothing is changed."""

    sessions: int = 1_000_000  # memory and SQLite
    messages: int = 1_000_000  # unacknowledged ones of one session
    message_bytes: int = 1 << 20  # of one state, data or params, as JSON
    bytes: int = 1 << 40  # memory: of all that is kept; SQLite: of the file


class SessionStore(Protocol[State, Data]):
    """Where sessions live. Several tasks may use one store at once."""

    # ------------------------------------------------------------------------ the document's own

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
        """Make a session. Raises `SessionExists`, with the status of the one that has the uuid.

        Attached means that the caller is its owner, of epoch 1. Otherwise (a fed session whose client will come
        later) its time of absence begins now. `keep` is how many seconds of absence this session survives
        (`math.inf` for ever; the store's own number if None). Ids begin above `head`.
        """

    async def disconnect(self, uuid: str, *, epoch: int | None = None) -> None:
        """The client is gone: its time of absence begins. Harmless from an owner who was taken over."""

    async def put(
        self,
        uuid: str,
        transform: Transform[State, Data],
        *,
        epoch: int | None = None,
        is_final: IsFinal[Data] | None = None,
    ) -> Message[Data]:
        """Make the next message from the state, and store both at once.

        Raises `SessionFinished` behind a final message, `IdsExhausted`, `StoreFull`, and whatever the transformer
        raises; nothing has changed then.
        """

    async def after(self, uuid: str, id: int) -> Message[Data] | None:
        """The stored message behind `id` (0: the first), or None if there is none yet.

        Raises `MessageGone` below what was acknowledged and `UnknownMessage` above the last message.
        """

    async def ack(self, uuid: str, id: int, *, epoch: int | None = None) -> None:
        """The client has everything up to `id`, which is deleted before this returns.

        Raises `OutOfOrderAck` below an earlier one and `UnknownMessage` for 0 and above the last message.
        """

    # ------------------------------------------------------------------------ owners and batches

    async def attach(self, uuid: str, *, takeover: bool = True) -> Status:
        """Become the owner, of the epoch in the answer; the session does not expire meanwhile.

        The last owner is superseded, and whoever waits in `wait` for him wakes. With `takeover=False` an attached
        session raises `SessionBusy` instead.
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
        """From one to `most` messages as one unit; fewer when one is final or the session has no more room."""

    async def replay(
        self, uuid: str, after: int, most: int = MOST, *, most_bytes: int = 1 << 20
    ) -> list[Message[Data]]:
        """The stored messages behind `after`, in order; empty when there are none yet. Raises as `after` does.

        At least one if there is one, then as many as fit into `most` and `most_bytes` of JSON.
        """

    # ------------------------------------------------------------------------ fed sessions

    async def append(self, uuid: str, data: Data, *, time: float | None = None) -> Message[Data]:
        """Store a message that the caller made, and wake who waits for it, in whichever process he is."""

    async def append_many(self, uuid: str, data: Sequence[Data], *, time: float | None = None) -> list[Message[Data]]:
        """All of them as one unit, or none of them."""

    async def finish(self, uuid: str) -> Status:
        """Nothing will follow: later puts and appends raise `SessionFinished`. Harmless when repeated."""

    async def wait(self, uuid: str, after: int, *, epoch: int | None = None) -> Status:
        """Sleep until there is a message behind `after`, or the session is finished.

        Raises `Superseded` as soon as a newer owner than `epoch` attaches, `UnknownSession` when it expires.
        """

    async def wait_room(self, uuid: str, count: int = 1) -> Status:
        """Sleep until `count` more messages may be added; acknowledgements make room."""

    # ------------------------------------------------------------------------ looking and sweeping

    async def status(self, uuid: str) -> Status:
        """How far the session is."""

    async def sessions(self, after: str = "", most: int = MOST) -> list[Status]:
        """One page of those that have not expired, in the order of their uuids, behind the uuid `after`."""

    async def expire(self, now: float | None = None) -> int:
        """Delete the sessions whose time is over; call it every few seconds. How many there were.

        An expired session is refused whether it was deleted already or not. `now` is the store's own clock if None.
        """
