"""The two life tables, state by state and step by step."""

from __future__ import annotations

from itertools import product

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.core._channels import RECEIVING, SENDING, Receiving, Sending, Step, advance, draw

# The drawings of the architecture, written out once more by hand.
SENDING_WAYS = """
    open finish finishing
    open cancel finishing
    open stopped closed
    open lost closed
    finishing confirmed closed
    finishing stopped closed
    finishing lost closed
"""
RECEIVING_WAYS = """
    open ended draining
    open stop closed
    draining drained closed
    draining stop closed
"""


def ways(drawing: str) -> dict[tuple[str, str], str]:
    return {(before, step): after for before, step, after in map(str.split, drawing.split("\n")[1:-1])}


@pytest.mark.parametrize(("state", "step"), list(product(Sending, Step)))
def test_each_step_takes_a_sending_half_where_the_drawing_says(state: Sending, step: Step) -> None:
    after = ways(SENDING_WAYS).get((state.value, step.value))
    if after is not None:
        assert advance(state, step) is Sending(after)
    else:
        with pytest.raises(LocalProtocolError, match=f"sending half that is {state.value}: got '{step.value}'"):
            advance(state, step)


@pytest.mark.parametrize(("state", "step"), list(product(Receiving, Step)))
def test_each_step_takes_a_receiving_half_where_the_drawing_says(state: Receiving, step: Step) -> None:
    after = ways(RECEIVING_WAYS).get((state.value, step.value))
    if after is not None:
        assert advance(state, step) is Receiving(after)
    else:
        with pytest.raises(LocalProtocolError, match=f"receiving half that is {state.value}: got '{step.value}'"):
            advance(state, step)


def test_every_step_belongs_to_a_table() -> None:
    assert {step for _, step in [*SENDING, *RECEIVING]} == set(Step)


def test_a_closed_half_is_at_the_end_of_all_ways() -> None:
    assert Sending.CLOSED not in {state for state, _ in SENDING}
    assert Receiving.CLOSED not in {state for state, _ in RECEIVING}


def test_the_sending_table_is_drawn_with_one_arrow_between_two_states() -> None:
    assert draw(SENDING).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> OPEN",
        "    OPEN --> FINISHING: finish | cancel",
        "    OPEN --> CLOSED: stopped | lost",
        "    FINISHING --> CLOSED: confirmed | stopped | lost",
        "    CLOSED --> [*]",
    ]


def test_the_receiving_table_is_drawn_with_one_arrow_between_two_states() -> None:
    assert draw(RECEIVING).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> OPEN",
        "    OPEN --> DRAINING: ended",
        "    OPEN --> CLOSED: stop",
        "    DRAINING --> CLOSED: drained | stop",
        "    CLOSED --> [*]",
    ]
