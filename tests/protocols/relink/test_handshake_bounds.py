"""An unknown peer's cost before the handshake is done is bounded, in time and in bytes, whatever bytes it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._limits import Limits
from muxkit.core.events import Failed, HungUp
from muxkit.protocols.relink import Config
from muxkit.protocols.relink.events import HandshakeEvent, Requested
from muxkit.protocols.relink.handshake import ConnectorHandshake, ListenerHandshake, encode_answer, encode_request
from muxkit.testing._pair import EngineCase, check_every_split, check_stream_engine, feed

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError

CHATTY = Config(endpoint="chatty", connector_id_size=2, listener_id_size=4)
VERSION = bytes(8)


def request(config: Config = CHATTY, *, epoch: int = 0, link_id: int = 0, require_link: bool = False) -> bytes:
    return encode_request(config, epoch=epoch, link_id=link_id, require_link=require_link)


def failure(events: list[HandshakeEvent]) -> RemoteProtocolError:
    (event,) = events
    assert isinstance(event, Failed)
    return event.error


@pytest.mark.clause("relink-H04")
@pytest.mark.requirement("R-13")
@pytest.mark.parametrize("step", [1, 100, 2000])
def test_who_does_not_wait_for_the_answer_may_send_1_kib_and_no_more(step: int) -> None:
    handshake = ListenerHandshake(now=0.0)
    data = VERSION + request() + bytes(1024 - 8 - len(request()))
    events = feed(handshake, [data[at : at + step] for at in range(0, 1024, step)])
    assert [type(event) for event in events] == [Requested]
    error = failure(feed(handshake, [b"\x00"]))
    assert error.rule == "relink-H04"


@pytest.mark.clause("relink-H36")
def test_packets_that_came_too_early_are_handed_on_if_they_are_few() -> None:
    handshake = ListenerHandshake(now=0.0)
    feed(handshake, [VERSION + request() + b"packets!"])
    handshake.accept(7, 5)
    handshake.receive_bytes(bytes(5000), 0.0)
    assert handshake.rest() == b"packets!" + bytes(5000)


@pytest.mark.requirement("R-13")
@pytest.mark.parametrize("is_listener", [True, False])
def test_a_handshake_that_dribbles_is_over_after_its_time(is_listener: bool) -> None:
    limits = Limits(handshake=10.0)
    handshake = ListenerHandshake(now=5.0, limits=limits) if is_listener else ConnectorHandshake(CHATTY, now=5.0)
    for second in range(6, 15):
        handshake.receive_bytes(b"\x00" if second < 12 else b"", float(second))
        handshake.handle_deadline(float(second))
    assert handshake.events() == []
    assert handshake.next_deadline() == 15.0
    handshake.handle_deadline(15.0)
    error = failure([*handshake.events()])
    assert "10.0 s; 6 bytes" in error.message
    assert error.limit == "handshake"


def test_an_end_of_file_within_the_handshake_is_told_once() -> None:
    for handshake in (ListenerHandshake(now=0.0), ConnectorHandshake(CHATTY, now=0.0)):
        handshake.receive_eof(0.0)
        handshake.receive_eof(0.0)
        assert [event.is_clean for event in handshake.events() if isinstance(event, HungUp)] == [False]
        assert not handshake.has_output()


# --- any input


@pytest.mark.clause("relink-A02")
@given(st.text(max_size=20), st.integers(0, 8), st.integers(0, 8), st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1))
def test_a_request_is_heard_as_it_was_asked_however_it_is_cut(
    name: str, first: int, second: int, epoch: int, link_id: int
) -> None:
    config = Config(endpoint=name, connector_id_size=first, listener_id_size=second)
    data = VERSION + request(config, epoch=epoch, link_id=link_id)
    events = check_every_split(lambda: ListenerHandshake(now=0.0), data)
    assert events == [repr(Requested(0, name, first, second, False, False, False, epoch, link_id))]


@pytest.mark.requirement("R-21")
def test_the_handshakes_keep_the_promises_of_every_engine() -> None:
    for make in (lambda: ListenerHandshake(now=0.0), lambda: ConnectorHandshake(CHATTY, now=0.0, epoch=7, link_id=5)):
        case: EngineCase[HandshakeEvent] = EngineCase(
            make=make,
            is_failure=lambda event: isinstance(event, Failed),
            transcripts=[
                VERSION + request(),
                VERSION + encode_answer(7, 5),
                VERSION + encode_answer(7, 2**63) + bytes(9),
            ],
        )
        check_stream_engine(case)
