"""Applications as pure functions, and their verifiers."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream import Doubling, Fed, Numbers, NumbersVerifier, Permutation, Unverified
from muxkit.protocols.restream.applications import next_value, roll
from tests.protocols.restream._helpers import EXAMPLE, EXAMPLE_CRC

if TYPE_CHECKING:
    from muxkit.protocols.restream import Json, JsonObject

U32 = st.integers(0, 2**32 - 1)


def stream(count: int, random32: int) -> list[Mapping[str, int]]:
    numbers, found = Numbers(), list[Mapping[str, int]]()
    state = numbers.initial({"count": count}, random32)
    while not numbers.is_over(state):
        data, state = numbers.step(state)
        found.append(data)
    return found


@pytest.mark.clause("restream-N06")
@pytest.mark.parametrize(("seed", "value"), [(0, 2357136044), (1, 1791095845), (5489, 3499211612)])
def test_the_next_value_is_the_first_of_a_twister(seed: int, value: int) -> None:
    assert next_value(seed) == value


@pytest.mark.clause("restream-N06")
@given(U32)
def test_the_next_value_is_that_of_the_whole_twister(seed: int) -> None:
    """Compared with Python's own generator, seeded word by word as in the specification's library."""
    words = [seed]
    for step in range(1, 624):
        words.append((1812433253 * (words[-1] ^ words[-1] >> 30) + step) & 0xFFFFFFFF)
    twister = random.Random()
    twister.setstate((3, (*words, 624), None))
    assert next_value(seed) == twister.getrandbits(32)


@pytest.mark.clause("restream-N07")
def test_the_numbers_of_the_document_are_no_chain() -> None:
    assert next_value(EXAMPLE[0]) == 455704243
    assert next_value(EXAMPLE[0]) != EXAMPLE[1]


@pytest.mark.clause("restream-S12")
def test_the_checksum_rolls_as_in_the_document() -> None:
    crc, rolled = 0, []
    for value in EXAMPLE:
        crc = roll(crc, value)
        rolled.append(crc)
    assert rolled == [1305363920, 1683931614, 499135914, 2607596651, EXAMPLE_CRC]


@pytest.mark.clause("restream-S13", "restream-N08")
@given(st.lists(U32))
def test_the_rolled_checksum_is_that_of_all_words_together(values: list[int]) -> None:
    crc = 0
    for value in values:
        crc = roll(crc, value)
    assert crc == zlib.crc32(b"".join(value.to_bytes(4, "big") for value in values))
    assert 0 <= crc < 2**32


@pytest.mark.clause("restream-N01")
def test_a_session_begins_with_its_count_the_random_number_and_no_checksum() -> None:
    assert Numbers().initial({"count": 7, "other": None}, 99) == {"count": 7, "value": 99, "crc": 0}


@pytest.mark.clause("restream-N03", "restream-A01", "restream-A02", "restream-A03")
def test_a_step_is_that_of_the_document() -> None:
    data, state = Numbers().step({"count": 2, "value": 0, "crc": 0})
    assert data == {"value": 2357136044}
    assert state == {"count": 1, "value": 2357136044, "crc": 4243193531}


@pytest.mark.clause("restream-N04", "restream-S10")
def test_the_last_step_has_the_checksum() -> None:
    data, state = Numbers().step({"count": 1, "value": 0, "crc": 0})
    assert data == {"value": 2357136044, "crc": 4243193531}
    assert state["count"] == 0
    assert Numbers().is_final(data)


@pytest.mark.clause("restream-N05")
def test_after_the_last_step_there_is_none() -> None:
    state = {"count": 0, "value": 1, "crc": 1}
    assert Numbers().is_over(state)
    with pytest.raises(LocalProtocolError):
        Numbers().step(state)


@pytest.mark.clause("restream-I05", "restream-I14", "restream-A07")
@given(st.integers(1, 9), U32)
def test_a_step_changes_nothing_and_gives_the_same_each_time(count: int, value: int) -> None:
    state = MappingProxyType({"count": count, "value": value, "crc": 5})
    assert Numbers().step(state) == Numbers().step(dict(state))
    assert state == {"count": count, "value": value, "crc": 5}


@pytest.mark.clause("restream-S06", "restream-S07", "restream-S10")
def test_a_stream_has_as_many_numbers_as_were_asked_for() -> None:
    data = stream(1000, 42)
    assert len(data) == 1000
    assert all(type(each["value"]) is int and 0 <= each["value"] < 2**32 for each in data)
    assert ["crc" in each for each in data] == [False] * 999 + [True]


@pytest.mark.clause("restream-S03")
@pytest.mark.parametrize("count", [1, 65535])
def test_counts_of_sixteen_bits_are_taken(count: int) -> None:
    assert Numbers().initial({"count": count}, 0)["count"] == count


@pytest.mark.clause("restream-S03")
@pytest.mark.parametrize("count", [0, -1, 65536, 10**30])
def test_other_counts_are_refused(count: int) -> None:
    with pytest.raises(RemoteProtocolError, match="65535"):
        Numbers().initial({"count": count}, 0)


@pytest.mark.clause("restream-S04")
@pytest.mark.parametrize("params", [{}, *({"count": it} for it in ("5", 1.5, 5.0, True, None, [5]))], ids=repr)
def test_a_count_that_is_no_integer_is_refused(params: JsonObject) -> None:
    with pytest.raises(RemoteProtocolError, match="integer"):
        Numbers().initial(params, 0)


# --- stateless


@pytest.mark.clause("restream-L13")
def test_doubling_doubles() -> None:
    assert [Doubling().next(23), Doubling().next(46), Doubling().next(-3)] == [46, 92, -6]
    assert {Doubling().first(random32) for random32 in range(1000)} == set(range(1, 256))


@given(st.integers())
def test_the_default_stateless_stream_stays_within_64_bits(value: int) -> None:
    assert 0 <= Permutation().next(value) < 2**64


def test_the_default_stateless_stream_does_not_come_back_soon() -> None:
    value, seen = Permutation().first(7), set[int]()
    for _ in range(10_000):
        seen.add(value)
        value = Permutation().next(value)
    assert len(seen) == 10_000


@given(st.integers(0, 2**64 - 1))
def test_the_default_stateless_stream_is_a_permutation(value: int) -> None:
    """The step can be inverted, so no two values have the same next value."""
    undone = (Permutation().next(value) - 1442695040888963407) * pow(6364136223846793005, -1, 2**64) % 2**64
    assert undone == value


# --- fed from outside


def test_a_fed_session_has_no_step_of_its_own_and_does_not_end() -> None:
    fed = Fed()
    state = fed.initial({"topic": "x"}, 5)
    assert not fed.generates
    assert Numbers().generates
    assert state == {"topic": "x"}
    assert not fed.is_over(state)
    assert not fed.is_final({"end": 1})
    with pytest.raises(LocalProtocolError):
        fed.step(state)


@pytest.mark.parametrize(("data", "final"), [({"end": None}, True), ({"x": 1}, False), ("end", False), (None, False)])
def test_fed_data_may_say_that_it_is_the_last(data: Json, final: bool) -> None:
    assert Fed("end").is_final(data) is final
    assert Unverified("end").is_final(data) is final
    assert not Unverified().is_final(data)


# --- what a client verifies


@pytest.mark.clause("restream-S15")
@given(st.integers(1, 30), U32)
def test_a_client_finds_every_stream_of_the_application_right(count: int, random32: int) -> None:
    verifier = NumbersVerifier(count)
    check = verifier.begin()
    finals = []
    for data in stream(count, random32):
        check = verifier.follow(check, data)
        finals.append(verifier.is_final(data))
    assert finals == [False] * (count - 1) + [True]


DAMAGED: dict[str, tuple[Json, str]] = {
    "no object": ([1], "S07"),
    "no value": ({}, "S07"),
    "a float": ({"value": 1.0}, "S07"),
    "a truth": ({"value": True}, "S07"),
    "text": ({"value": "1"}, "S07"),
    "a value below 0": ({"value": -1}, "S07"),
    "a value of 33 bits": ({"value": 2**32}, "S07"),
    "a huge value": ({"value": 10**3000}, "S07"),
    "a wrong checksum": ({"value": 5, "crc": 1}, "S15"),
    "a checksum of null": ({"value": 5, "crc": None}, "S12"),
    "a negative checksum": ({"value": 5, "crc": -5}, "S12"),
    "an end too early": ({"value": 5, "crc": roll(0, 5)}, "S14"),
}


@pytest.mark.clause("restream-S07", "restream-S12", "restream-S14", "restream-S15")
@pytest.mark.parametrize(("data", "rule"), DAMAGED.values(), ids=DAMAGED)
def test_a_client_refuses_data_that_cannot_be_right(data: Json, rule: str) -> None:
    verifier = NumbersVerifier(2)
    with pytest.raises(RemoteProtocolError) as caught:
        verifier.follow(verifier.begin(), data)
    assert caught.value.rule == f"restream-{rule}"


@pytest.mark.clause("restream-S06")
def test_a_client_misses_the_end_that_does_not_come() -> None:
    verifier = NumbersVerifier(1)
    with pytest.raises(RemoteProtocolError, match="without an end"):
        verifier.follow(verifier.begin(), {"value": 5})
