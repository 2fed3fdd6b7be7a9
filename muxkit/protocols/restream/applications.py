"""What is streamed? Pure functions from a state to the next data; the document's application is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream.crc import roll
from muxkit.protocols.restream.twister import U32_MAX, next_value

if TYPE_CHECKING:
    from muxkit.protocols.restream.wire.json import Json, JsonObject

StateT = TypeVar("StateT")
DataT = TypeVar("DataT")

MOST_COUNT: Final = 0xFFFF


class Application(Protocol[StateT, DataT]):
    """What the sessions of a server stream. State and data are anything that survives a round trip through JSON.

    All of it is pure: it may be called any number of times for one message, and it changes nothing it is given.
    """

    @property
    def generates(self) -> bool:
        """Does `step` make the messages? Otherwise they are appended from outside, and a stream waits for them."""

    def initial(self, params: JsonObject, random32: int) -> StateT:
        """The state of a new session; raises `RemoteProtocolError` for params that it cannot use.

        `random32` is a random unsigned number of 32 bits.
        """

    def step(self, state: StateT) -> tuple[DataT, StateT]:
        """The next data, and the state after it."""

    def is_over(self, state: StateT) -> bool:
        """Was the final message made? Then there is no next step."""

    def is_final(self, data: DataT) -> bool:
        """Is this the data of the final message?"""


class StatelessApplication(Protocol):
    """What a server's stateless streams are: a value, and the one after it."""

    def first(self, random32: int) -> int:
        """Where a new stream begins."""

    def next(self, value: int) -> int:
        """The value after any other, whatever a client may send; with no other knowledge than that."""


# ---------------------------------------------------------------------------- the document's own

NumbersState: TypeAlias = Mapping[str, int]
Number: TypeAlias = Mapping[str, int]


class Numbers:
    """`count` pseudorandom numbers, each the first output of a Mersenne twister seeded with the one before.

    The state is `{"count": left to send, "value": the last one, "crc": of all so far}`; the final number has the
    `crc` with it.
    """

    @property
    def generates(self) -> bool:
        return True

    def initial(self, params: JsonObject, random32: int) -> NumbersState:
        return {"count": read_count(params), "value": random32 & U32_MAX, "crc": 0}

    def step(self, state: NumbersState) -> tuple[Number, NumbersState]:
        count = state["count"]
        if count < 1:
            raise LocalProtocolError(f"the final number was made, and {count} are left")
        value = next_value(state["value"])
        crc = roll(state["crc"], value)
        data = {"value": value, "crc": crc} if count == 1 else {"value": value}
        return data, {"count": count - 1, "value": value, "crc": crc}

    def is_over(self, state: NumbersState) -> bool:
        return state["count"] < 1

    def is_final(self, data: Number) -> bool:
        return "crc" in data


def read_count(params: JsonObject) -> int:
    """How many numbers a client of the document's application asks for."""
    count = params.get("count")
    if type(count) is not int:
        raise RemoteProtocolError("params.count has to be an integer", rule="restream-S04")
    if not 1 <= count <= MOST_COUNT:
        told = str(count) if abs(count) <= U32_MAX else f"of {count.bit_length()} bits"
        raise RemoteProtocolError(f"params.count {told} is not within 1 and {MOST_COUNT}", rule="restream-S03")
    return count


class Permutation:
    """The default of stateless streams: a walk through all numbers of 64 bits that comes back after the last one."""

    def first(self, random32: int) -> int:
        return self.next(random32)

    def next(self, value: int) -> int:
        # A linear congruential generator of full period (Knuth): no number is met twice before all were.
        return (value * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF


class Doubling:
    """The example of the document: twice the last value, without end. It outgrows any limit after a while."""

    def first(self, random32: int) -> int:
        return random32 % 0xFF + 1

    def next(self, value: int) -> int:
        return 2 * value


# ---------------------------------------------------------------------------- fed from outside


class Fed:
    """Sessions whose messages somebody appends: `step` makes nothing, an idle stream waits. The data is anything.

    `final_key`: data that is an object and has this key is the final one; None for streams without an end. The state
    is the `params` of the client.
    """

    def __init__(self, final_key: str | None = None) -> None:
        self._final_key = final_key

    @property
    def generates(self) -> bool:
        return False

    def initial(self, params: JsonObject, random32: int) -> JsonObject:
        return params

    def step(self, state: JsonObject) -> tuple[Json, JsonObject]:
        raise LocalProtocolError("the messages of this session are appended, none is generated")

    def is_over(self, state: JsonObject) -> bool:
        return False

    def is_final(self, data: Json) -> bool:
        return self._final_key is not None and isinstance(data, Mapping) and self._final_key in data
