"""The position of a client's application: acknowledged, saved, restored and rewound."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.protocols.restream import (
    ClientConfig,
    ClientEngine,
    Finished,
    Received,
    ReceivedValue,
    Refused,
    StreamState,
)
from tests.protocols.restream._helpers import UUID, broken, example, hear, is_silent, joined, reader, said

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.restream import Json, JsonObject

OPENED = {"uuid": UUID, "params": {"count": 5}}


def numbers(events: Sequence[object]) -> list[tuple[int, Json]]:
    return [(event.id, event.data) for event in events if isinstance(event, Received)]


def take_all(client: ClientEngine, events: Sequence[object]) -> None:
    for event in events:
        if isinstance(event, (Received, ReceivedValue)):
            client.taken(event)


# --- acknowledging


@pytest.mark.clause("restream-S30")
def test_what_is_taken_is_acknowledged_now_and_then() -> None:
    client = reader(config=ClientConfig(ack_every=2))
    events = hear(client, *example()[:4])
    assert not client.has_output()
    take_all(client, events[:1])
    assert not client.has_output()
    take_all(client, events[1:3])
    assert client.snapshot()["acknowledged"] == 0
    assert said(client) == [{"uuid": UUID, "ack": 2}]
    assert client.acknowledged == client.snapshot()["acknowledged"] == 2
    take_all(client, events[3:])
    assert said(client) == [{"uuid": UUID, "ack": 4}]


def test_acks_that_wait_are_one() -> None:
    client = reader(config=ClientConfig(ack_every=1))
    take_all(client, hear(client, *example()[:4]))
    assert said(client) == [{"uuid": UUID, "ack": 4}]


def test_the_final_message_is_acknowledged_at_once() -> None:
    client = reader()
    take_all(client, hear(client, *example()))
    assert said(client) == [{"uuid": UUID, "ack": 5}]
    assert client.snapshot()["finished"] is True


@pytest.mark.clause("restream-S37", "restream-S39", "restream-S16")
def test_an_ack_below_the_state_of_a_connection_is_never_written_on_it() -> None:
    """The original server counts a state as an ack of the same id, and refuses a lower one after it."""
    client = reader(config=ClientConfig(ack_every=3))
    events = hear(client, *example()[:4])
    take_all(client, events[:3])
    client.connection_lost(0.0)
    assert not client.has_output()
    assert joined(client) == [{"uuid": UUID, "state": 4}]
    assert not client.has_output()
    take_all(client, events[3:])
    assert said(client) == [{"uuid": UUID, "ack": 4}]


@pytest.mark.clause("restream-S37", "restream-S38")
def test_an_ack_that_was_lost_or_not_written_is_owed_again_once_everything_is_taken() -> None:
    for is_written in (False, True):
        client = reader(config=ClientConfig(ack_every=3))
        take_all(client, hear(client, *example()[:4]))
        if is_written:
            assert said(client) == [{"uuid": UUID, "ack": 3}]
        client.connection_lost(0.0)
        assert joined(client) == [{"uuid": UUID, "state": 4}, {"uuid": UUID, "ack": 4}]


@pytest.mark.clause("restream-S37")
def test_an_ack_by_hand_below_the_state_waits_for_a_higher_one() -> None:
    client = reader(config=ClientConfig(ack_every=None))
    events = hear(client, *example()[:4])
    take_all(client, events[:2])
    client.acknowledge(2)
    client.connection_lost(0.0)
    assert joined(client) == [{"uuid": UUID, "state": 4}]
    take_all(client, events[2:3])
    client.acknowledge(3)
    assert not client.has_output()
    take_all(client, events[3:])
    assert not client.has_output()
    client.acknowledge(4)
    assert said(client) == [{"uuid": UUID, "ack": 4}]


@pytest.mark.clause("restream-S37")
def test_an_ack_that_is_decided_before_the_first_line_is_written_keeps_the_order_too() -> None:
    client = reader(config=ClientConfig(ack_every=2))
    events = hear(client, *example()[:4])
    client.connection_lost(0.0)
    client.connection_made(1.0)
    take_all(client, events[:3])
    assert said(client) == [{"uuid": UUID, "state": 4}]
    take_all(client, events[3:])
    assert said(client) == [{"uuid": UUID, "ack": 4}]


@pytest.mark.requirement("R-71")
@pytest.mark.clause("restream-S30")
def test_without_a_connection_there_is_nothing_to_write() -> None:
    """The end of a stream is not acknowledged after its connection is lost, and no other follows."""
    client = reader()
    events = hear(client, *example())
    client.connection_lost(0.0)
    take_all(client, events)
    assert not client.has_output()
    assert client.buffers_to_send() == []


@pytest.mark.clause("restream-F10")
def test_after_an_error_not_even_the_first_line_is_written() -> None:
    client = ClientEngine.stateful(UUID, {"count": 5})
    client.connection_made(0.0)
    assert hear(client, {"error": "too many connections"}) == [Refused("too many connections")]
    is_silent(client)


@pytest.mark.clause("restream-S26", "restream-S37")
def test_a_rewound_client_acknowledges_from_where_it_went_back_to() -> None:
    client = reader(config=ClientConfig(ack_every=2))
    take_all(client, hear(client, *example()[:4])[:2])
    client.connection_lost(0.0)
    client.rewind()
    assert joined(client) == [{"uuid": UUID, "state": 2}, {"uuid": UUID, "ack": 2}]


def test_acknowledging_by_hand_covers_what_was_taken() -> None:
    client = reader(config=ClientConfig(ack_every=None))
    take_all(client, hear(client, *example()[:4])[:3])
    assert not client.has_output()
    client.acknowledge(2)
    with pytest.raises(LocalProtocolError, match="ascend"):
        client.acknowledge(1)
    for id in (0, 4):
        with pytest.raises(LocalProtocolError, match="3 is the last one taken"):
            client.acknowledge(id)
    assert said(client) == [{"uuid": UUID, "ack": 2}]
    client.acknowledge(2)
    assert not client.has_output()
    with pytest.raises(LocalProtocolError):
        ClientEngine.stateless().acknowledge(1)


def test_nothing_can_be_taken_that_was_not_received() -> None:
    client = reader()
    events = hear(client, *example()[:2])
    with pytest.raises(LocalProtocolError, match="2"):
        client.taken(Received(3, {}, None, False, None))
    take_all(client, events)
    take_all(client, events[:1])  # a later message was taken, which covers this one
    assert client.snapshot()["id"] == 2


# --- saved and restored


def saved(client: ClientEngine) -> JsonObject:
    snapshot: JsonObject = json.loads(json.dumps(client.snapshot()))
    return snapshot


@pytest.mark.clause("restream-L08", "restream-C08")
def test_a_restored_stateless_stream_goes_on_after_what_was_taken() -> None:
    client = ClientEngine.stateless()
    joined(client)
    assert joined(ClientEngine.restore(saved(client))) == [{}]
    take_all(client, hear(client, {"data": "7"}, {"data": "8"})[:1])
    assert joined(ClientEngine.restore(saved(client))) == [{"state": "7"}]


@pytest.mark.parametrize("taken", range(6))
def test_a_restored_session_goes_on_after_what_was_taken(taken: int) -> None:
    client = reader(config=ClientConfig(ack_every=2))
    take_all(client, hear(client, *example())[:taken])
    said(client)
    other = ClientEngine.restore(saved(client), config=ClientConfig(ack_every=2))
    assert saved(other) == saved(client)
    if taken == 5:
        assert other.state is StreamState.FINISHED
        is_silent(other)
        return
    first: list[object] = [{"uuid": UUID, "state": taken} if taken else OPENED]
    # An ack that was written may be lost: it is written again.
    assert joined(other) == first + [{"uuid": UUID, "ack": taken}] * (client.acknowledged > 0)
    events = hear(other, *example()[taken:])
    assert events[-1] == Finished()
    take_all(other, events)
    assert said(other) == [{"uuid": UUID, "ack": 5}]


def test_a_restored_session_still_finds_damage() -> None:
    client = reader()
    take_all(client, hear(client, *example()[:3]))
    other = ClientEngine.restore(saved(client))
    joined(other)
    broken(other, [{"id": 4, "data": {"value": 5}}, example()[4]], "S15")


GOOD: dict[str, Json] = {
    "version": 1, "mode": "stateful", "uuid": UUID, "params": None, "id": 3, "check": [3, 5],
    "acknowledged": 2, "finished": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"version": None}, {"mode": "x"}, {"mode": "status"}, {"uuid": 5}, {"uuid": "x"}, {"params": 5},
     {"id": -1}, {"id": 2**32}, {"id": True}, {"id": "3"}, {"acknowledged": 4}, {"finished": 1},
     {"mode": "stateless", "value": 5}, {"mode": "stateless", "value": "x"}],
    ids=repr,
)  # fmt: skip
def test_what_was_never_saved_is_not_restored(change: dict[str, Json]) -> None:
    assert joined(ClientEngine.restore(GOOD))[0] == {"uuid": UUID, "state": 3}
    with pytest.raises(LocalProtocolError):
        ClientEngine.restore({**GOOD, **change})


@pytest.mark.parametrize(
    "check", [None, 5, "ab", [1], [1, 2, 3], [-1, 0], [0, 2**32], [True, 0], {"a": 1, "b": 2}], ids=repr
)
def test_a_check_that_was_never_saved_is_not_followed(check: Json) -> None:
    with pytest.raises(LocalProtocolError, match="saved state"):
        ClientEngine.restore({**GOOD, "check": check})
