"""Applications, which make the messages of sessions, and verifiers, which check them at the client.

Both are pure functions over a state; the specification's own application, `Numbers`, is one of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar, cast

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream.wire import Json, JsonObject
from muxkit.protocols.restream.wire.messages import U32_MAX, shown

StateT = TypeVar("StateT")
DataT = TypeVar("DataT")

MAX_COUNT: Final = 0xFFFF  # numbers of one stream


class Application(Protocol[StateT, DataT]):
    """Makes the messages of a server's sessions. State and data are any values that survive a round trip through JSON.

    Its methods are pure: they may be called any number of times for one message, and change no argument.
    """

    @property
    def generates(self) -> bool:
        """True if `step` makes the messages; otherwise they are appended to the store, and a stream waits for them."""

    def initial(self, params: JsonObject, random32: int) -> StateT:
        """Return the state of a new session; raises `RemoteProtocolError` for invalid params.

        `random32` is a random unsigned number of 32 bits.
        """

    def step(self, state: StateT) -> tuple[DataT, StateT]:
        """Return the next data, and the state after it."""

    def is_over(self, state: StateT) -> bool:
        """Return True after the final message: there is no next step."""

    def is_final(self, data: DataT) -> bool:
        """Return True for the data of the final message."""


class StatelessApplication(Protocol):
    """Makes the values of stateless streams."""

    def first(self, random32: int) -> int:
        """Return the first value of a new stream."""

    def next(self, value: int) -> int:
        """Return the value after `value`, which may be any integer that a client sends."""


# ---------------------------------------------------------------------------- the specification's own

NumbersState: TypeAlias = Mapping[str, int]
Number: TypeAlias = Mapping[str, int]


class Numbers:
    """A stream of `count` pseudorandom numbers, each the first output of a Mersenne twister seeded with the one before.

    The state is `{"count": left to send, "value": the last one, "crc": of all so far}`; the final message holds the
    `crc`.
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
    """Return how many numbers a client of the specification's application requests."""
    count = params.get("count")
    if type(count) is not int:
        raise RemoteProtocolError("params.count has to be an integer", rule="restream-S04")
    if not 1 <= count <= MAX_COUNT:
        told = str(count) if abs(count) <= U32_MAX else f"of {count.bit_length()} bits"
        raise RemoteProtocolError(f"params.count {told} is not within 1 and {MAX_COUNT}", rule="restream-S03")
    return count


class Permutation:
    """The default of stateless streams: all numbers of 64 bits in a pseudorandom order, over and over."""

    def first(self, random32: int) -> int:
        return self.next(random32)

    def next(self, value: int) -> int:
        # A linear congruential generator of full period (Knuth).
        return (value * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF


class Doubling:
    """The example of the specification: each value is twice the last one. It exceeds any limit after a while."""

    def first(self, random32: int) -> int:
        return random32 % 0xFF + 1

    def next(self, value: int) -> int:
        return 2 * value


# ---------------------------------------------------------------------------- fed from outside


class Fed:
    """Sessions whose messages are appended to the store: `step` makes nothing, and an idle stream waits.

    The data is any JSON. With `final_key`, an object with this key is the final data; without it streams have no end.
    The state is the `params` of the client.
    """

    def __init__(self, final_key: str | None = None) -> None:
        self._final_key = final_key

    @property
    def generates(self) -> bool:
        return False

    @property
    def has_final_data(self) -> bool:
        """True if a stream may end with a message that says so, which a server then has to look for."""
        return self._final_key is not None

    def initial(self, params: JsonObject, random32: int) -> JsonObject:
        return params

    def step(self, state: JsonObject) -> tuple[Json, JsonObject]:
        raise LocalProtocolError("the messages of this session are appended, none is generated")

    def is_over(self, state: JsonObject) -> bool:
        return False

    def is_final(self, data: Json) -> bool:
        return self._final_key is not None and isinstance(data, Mapping) and self._final_key in data


# ---------------------------------------------------------------------------- verifiers


class Verifier(Protocol):
    """Checks what a client receives. The check is any JSON value and is saved with the client's state."""

    def begin(self) -> Json:
        """Return the check before the first message."""

    def resume(self, saved: Json) -> Json:
        """Return a check that was saved; raises `LocalProtocolError` for a value that is no check."""

    def follow(self, check: Json, data: Json) -> Json:
        """Return the check after one more message; raises `RemoteProtocolError` if the message is wrong."""

    def is_final(self, data: Json) -> bool:
        """Return True for the data of the final message."""


class NumbersVerifier:
    """The verifier of `Numbers`: it checks each number, and at the end their CRC and count."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count

    def begin(self) -> Json:
        return (0, 0)

    def resume(self, saved: Json) -> Json:
        if isinstance(saved, Sequence) and len(saved) == 2:
            so_far, rolled = saved
            if type(so_far) is int and type(rolled) is int and so_far > 0 and 0 <= rolled <= U32_MAX:
                return so_far, rolled
        raise LocalProtocolError("the saved state of this stream holds no count and CRC")

    def follow(self, check: Json, data: Json) -> Json:
        so_far, rolled = cast("tuple[int, int]", check)  # one of the methods here made it
        if type(data) is not dict:
            raise RemoteProtocolError("data has to be an object", rule="restream-S07")
        value = _u32(data.get("value"), "data.value", "restream-S07")
        so_far, rolled = so_far + 1, roll(rolled, value)
        if "crc" in data:
            crc = _u32(data["crc"], "data.crc", "restream-S12")
            if crc != rolled:
                raise RemoteProtocolError(
                    f"the numbers have the CRC {rolled}, the server says {crc}", rule="restream-S15"
                )
            if self._count is not None and so_far != self._count:
                raise RemoteProtocolError(
                    f"the stream ended after {so_far} numbers, {self._count} were asked for", rule="restream-S14"
                )
        elif self._count is not None and so_far >= self._count:
            raise RemoteProtocolError(
                f"{so_far} numbers without an end, {self._count} were asked for", rule="restream-S06"
            )
        return so_far, rolled

    def is_final(self, data: Json) -> bool:
        return isinstance(data, Mapping) and "crc" in data


class Unverified:
    """Accepts any data. `final_key` is the key that the final data has, None if there is no final message."""

    def __init__(self, final_key: str | None = None) -> None:
        self._final_key = final_key

    def begin(self) -> Json:
        return None

    def resume(self, saved: Json) -> Json:
        return None

    def follow(self, check: Json, data: Json) -> Json:
        return None

    def is_final(self, data: Json) -> bool:
        return self._final_key is not None and isinstance(data, Mapping) and self._final_key in data


def _u32(value: Json, name: str, rule: str) -> int:
    if type(value) is not int:
        raise RemoteProtocolError(f"{name} has to be an integer", rule=rule)
    if not 0 <= value <= U32_MAX:
        raise RemoteProtocolError(f"{name} {shown(value)} is not within 0 and {U32_MAX}", rule=rule)
    return value


# ---------------------------------------------------------------------------- arithmetic of the specification's numbers

_STEPS: Final = range(2, 398)


def next_value(value: int) -> int:
    """Return the first 32 bits of MT19937, seeded with `value` as `init_genrand` does.

    That output needs only the words 0, 1 and 397 of the twister's 624, so the seeding stops there.
    """
    first = word = value
    second = word = (1812433253 * (word ^ word >> 30) + 1) & U32_MAX
    for step in _STEPS:
        word = (1812433253 * (word ^ word >> 30) + step) & U32_MAX
    mixed = (first & 0x80000000) | (second & 0x7FFFFFFF)
    word ^= mixed >> 1
    if mixed & 1:
        word ^= 0x9908B0DF
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ word >> 18


def roll(crc: int, value: int) -> int:
    """Return the CRC-32 after one more number, as four bytes in big-endian order; the first `crc` is 0."""
    return zlib.crc32(value.to_bytes(4, "big"), crc)
