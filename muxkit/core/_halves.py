"""What may happen to this half? The life of each direction of a channel, as two small tables."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar, overload

from muxkit._errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Named(Enum):
    """Hashed as any object: an enum's own way is a call in Python, and each step of a half looks up two."""

    __hash__ = object.__hash__


class Sending(_Named):
    """The half that we write."""

    OPEN = "open"
    FINISHING = "finishing"
    """We said that we are done; the peer has not confirmed it yet."""
    CLOSED = "closed"


class Receiving(_Named):
    """The half that we read."""

    OPEN = "open"
    DRAINING = "draining"
    """The peer said that it is done; the application has not read everything yet."""
    CLOSED = "closed"


class Step(_Named):
    """What can happen to a half: verbs are what the application asks for, participles have happened."""

    FINISH = "finish"
    CONFIRMED = "confirmed"
    CANCEL = "cancel"
    STOPPED = "stopped"

    ENDED = "ended"
    DRAINED = "drained"
    STOP = "stop"
    CANCELLED = "cancelled"

    LOST = "lost"


SENDING: Final[Mapping[tuple[Sending, Step], Sending]] = {
    (Sending.OPEN, Step.FINISH): Sending.FINISHING,
    (Sending.OPEN, Step.CANCEL): Sending.CLOSED,
    (Sending.OPEN, Step.STOPPED): Sending.CLOSED,
    (Sending.OPEN, Step.LOST): Sending.CLOSED,
    (Sending.FINISHING, Step.CONFIRMED): Sending.CLOSED,
    (Sending.FINISHING, Step.CANCEL): Sending.CLOSED,
    (Sending.FINISHING, Step.STOPPED): Sending.CLOSED,
    (Sending.FINISHING, Step.LOST): Sending.CLOSED,
}

RECEIVING: Final[Mapping[tuple[Receiving, Step], Receiving]] = {
    (Receiving.OPEN, Step.ENDED): Receiving.DRAINING,
    (Receiving.OPEN, Step.STOP): Receiving.CLOSED,
    (Receiving.OPEN, Step.CANCELLED): Receiving.CLOSED,
    (Receiving.OPEN, Step.LOST): Receiving.CLOSED,
    (Receiving.DRAINING, Step.DRAINED): Receiving.CLOSED,
    (Receiving.DRAINING, Step.STOP): Receiving.CLOSED,
    (Receiving.DRAINING, Step.CANCELLED): Receiving.CLOSED,
    (Receiving.DRAINING, Step.LOST): Receiving.CLOSED,
}

StateT = TypeVar("StateT", bound=Enum)


@overload
def advance(state: Sending, step: Step) -> Sending: ...
@overload
def advance(state: Receiving, step: Step) -> Receiving: ...
def advance(state: Sending | Receiving, step: Step) -> Sending | Receiving:
    """The state after `step`; a step that the tables do not have is a `LocalProtocolError`."""
    after = SENDING.get((state, step)) if isinstance(state, Sending) else RECEIVING.get((state, step))
    if after is None:
        half = type(state).__name__.lower()
        raise LocalProtocolError(f"{half} half is {state.value}: no step {step.value!r} from there")
    return after


def draw(table: Mapping[tuple[StateT, Step], StateT]) -> str:
    """A table as a Mermaid state diagram, one arrow for all steps between the same two states."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, step), after in table.items():
        arrows.setdefault((before.name, after.name), []).append(step.value)
    lines = [f"    {start} --> {end}: {' | '.join(steps)}" for (start, end), steps in arrows.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> OPEN", *lines, "    CLOSED --> [*]", ""])
