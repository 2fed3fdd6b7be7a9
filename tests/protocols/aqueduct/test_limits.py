"""Floods: everything that a peer can make an engine hold or do is bounded, and the bound has a name."""

from __future__ import annotations

import tracemalloc

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.core import Consumed, Lent, encode_varint
from muxkit.protocols.aqueduct import Arrived, Config, Silent
from tests.protocols.aqueduct._helpers import EMPTY, Talk, client, entry, hexed, receiver_of, server

FEW = Limits(channels=10, resets_per_second=5, resets_burst=20, tombstones=8)


def channel(index: int) -> str:
    """A client-made client-sends channel."""
    id, encoded = index << 3, bytearray()
    while id >= 0x80:
        encoded.append(id & 0x7F | 0x80)
        id >>= 7
    return bytes([*encoded, id]).hex()


def flood(talk: Talk, *texts: str, most: int = 100) -> int:
    """Say it with ever new channels until the engine has enough; how often it took it."""
    for index in range(most):
        for text in texts:
            talk.say(text.replace("{}", channel(index + 1)), fin=True)
        if talk.engine.over:
            return index
    return most


@pytest.mark.requirement("R-01", "R-02")
@pytest.mark.parametrize(
    "text",
    ["03 {} 04 00 00 00 00", "03 {} 05 01", "03 {} 06 05"],
    ids=["messages", "counts", "ends"],
)
def test_channels_that_a_route_makes_are_bounded(text: str) -> None:
    talk = server(limits=FEW)
    assert flood(talk, text) == 9  # beside the entrypoint
    assert len(talk.engine.receivers) <= 10


@pytest.mark.requirement("R-01", "R-02")
def test_channels_that_attachments_or_datagrams_make_are_bounded() -> None:
    talk = server(limits=FEW)
    many = "".join(channel(index) + "00" for index in range(1, 12))
    error = talk.violation(f"03 00 04 00 00 {len(bytes.fromhex(many)):02x} {many} 00")
    assert error.limit == "channels"
    assert "11 channels made beside 1 live" in str(error)
    other = server(limits=FEW)
    for index in range(1, 10):
        other.datagram(f"03 {channel(index)} {EMPTY}")
    assert other.datagram_violation(f"03 {channel(10)} {EMPTY}").limit == "channels"


@pytest.mark.requirement("R-02", "R-10")
def test_channels_whose_close_cannot_be_written_count_until_it_is() -> None:
    talk = server(limits=FEW)
    assert flood(talk, "03 {} 06 00") == 9
    other = server(limits=FEW)
    for index in range(1, 50):
        assert other.say(f"03 {channel(index)} 06 00", fin=True) == [("Finished", index << 3)]
        other.written()
    assert not other.engine.over


@pytest.mark.requirement("R-01")
def test_channels_that_nobody_takes_are_bounded() -> None:
    talk = server(limits=Limits(backlog=3))
    talk.messages("03 00 04 00 00 04 08 00 10 00 00", stream=2)
    talk.engine.accept(receiver_of(talk, 8))
    talk.say("04 01 00 04 18 00 20 00 00", stream=2)
    assert not talk.engine.over
    assert talk.violation("04 02 00 02 28 00 00", stream=2).limit == "backlog"


@pytest.mark.requirement("R-10", "R-12")
@pytest.mark.parametrize(
    "texts",
    [("03 {} 07",), ("03 {} 04 00 00 00 00", "03 {} 0b"), ("03 {}",), ("03 {} 04 00 00 00 00", "03 {} 07")],
    ids=["open and cancel", "open and forget", "streams for nothing", "message and cancel"],
)
def test_churn_is_budgeted(texts: tuple[str, ...]) -> None:
    talk = server(limits=FEW)
    for index in range(1, 100):
        for text in texts:
            talk.engine.receive_stream(100 + 8 * index + len(text), _bytes(text, index), True, 0.0)
        talk.written()
        if talk.engine.over:
            break
    assert index == 21
    assert talk.failure().limit == "resets_per_second"


@pytest.mark.requirement("R-10", "R-12")
def test_streams_that_are_opened_and_reset_are_budgeted_and_the_budget_comes_back() -> None:
    talk = server(limits=FEW)
    for index in range(20):
        talk.say("03 08 04", stream=100 + 4 * index)
        talk.reset(100 + 4 * index)
    assert not talk.engine.over
    talk.now = 1.0
    for index in range(5):
        talk.say("03 08 04", stream=300 + 4 * index)
        talk.reset(300 + 4 * index)
    assert not talk.engine.over
    talk.say("03 08 04", stream=500)
    talk.engine.receive_reset(500, talk.now)
    assert talk.failure().limit == "resets_per_second"


def _bytes(text: str, index: int) -> bytes:
    return bytes.fromhex(text.replace("{}", channel(index)))


@pytest.mark.requirement("R-06", "R-12")
def test_routes_to_channels_of_ours_that_never_were_are_answered_once_and_budgeted() -> None:
    talk = client(limits=FEW)
    for _ in range(50):
        talk.say("03 02" + EMPTY, fin=True)
    assert talk.bytes_written() == [hexed("03 02 0B")]
    talk.say("03 02" + EMPTY, fin=True)
    assert talk.written() == []
    for index in range(1, 21):
        talk.engine.receive_stream(300 + 4 * index, b"\x03" + encode_varint(index << 3 | 2), True, 0.0)
        talk.written()
    assert talk.failure().limit == "resets_per_second"
    other = client(limits=FEW)
    for index in range(8):
        other.say(f"03 {index << 3 | 2:02x}", fin=True)
    assert other.violation("03 7a", fin=True).limit == "tombstones"


@pytest.mark.requirement("R-06")
def test_what_is_remembered_of_channels_that_ended_unseen_is_bounded() -> None:
    talk = server(limits=Limits(tombstones=8))
    for index in range(1, 100):
        talk.say(f"03 {channel(index)} 0b", fin=True)
    assert talk.engine.statistics().ended_unattached == 8


@pytest.mark.requirement("R-13")
def test_streams_are_bounded() -> None:
    talk = server(limits=FEW, config=Config(streams=5))
    for index in range(25):
        talk.say("03", stream=100 + 4 * index)
    assert not talk.engine.over
    assert "26 streams at once against 25" in str(talk.violation("03", stream=500))


@pytest.mark.requirement("R-04", "R-18")
def test_a_frame_that_never_ends_is_cut_at_its_announcement() -> None:
    talk = server(limits=Limits(message=1000))
    talk.say("03 00 04 00 00", stream=2)
    error = talk.violation("ff ff 03", stream=2)
    assert error.limit == "message"
    assert "65535 bytes against 1000" in str(error)


@pytest.mark.requirement("R-04")
def test_a_message_in_single_bytes_costs_little_more_than_itself() -> None:
    talk = server()
    talk.say("03 00 04 00 00 00 80 80 04", stream=2)  # 64 KiB
    tracemalloc.start()
    for _ in range(65_535):
        talk.engine.receive_stream(2, b"x", False, 0.0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held <= 2 * 65_536
    talk.engine.receive_stream(2, b"x", False, 0.0)
    (message,) = talk.engine.events()
    assert isinstance(message, Arrived)
    assert len(message.payload) == 65_536


# ---------------------------------------------------------------------------- credit and loans


def controls(talk: Talk) -> list[tuple[str, int, int]]:
    return [
        (type(control).__name__, control.stream, control.amount)
        for control in talk.engine.control_to_run()
        if isinstance(control, Consumed | Lent)
    ]


@pytest.mark.requirement("R-09", "R-22")
def test_a_stream_is_renewed_as_its_messages_are_consumed() -> None:
    talk = server()
    one, other = talk.messages("03 00" + EMPTY + "04 01 00 00 02 68 69", stream=2)
    assert controls(talk) == [("Consumed", 2, 2)]
    talk.engine.consumed(other)
    assert controls(talk) == [("Consumed", 2, 7)]
    talk.engine.consumed(other)
    talk.engine.consumed(one)
    assert controls(talk) == [("Consumed", 2, 5)]
    talk.say("05 00", stream=2)
    assert controls(talk) == [("Consumed", 2, 2)]


@pytest.mark.requirement("R-22")
def test_a_message_larger_than_a_window_borrows_its_rest_and_repays_it() -> None:
    talk = server()
    left = talk.engine._incoming.reassembly.left
    talk.say("03 00 04 00 00 00 90 4e" + "61" * 1000, stream=2)  # 10,000 bytes
    assert controls(talk) == [("Lent", 2, 9000), ("Consumed", 2, 2)]
    assert talk.engine._incoming.reassembly.left == left - 9000
    (message,) = talk.messages("61" * 9000, stream=2)
    assert controls(talk) == []
    talk.engine.consumed(message)
    assert controls(talk) == [("Consumed", 2, 10_006)]
    assert talk.engine._incoming.reassembly.left == left


@pytest.mark.requirement("R-03")
def test_loans_are_given_whole_and_in_turn() -> None:
    talk = server(limits=Limits(message=6000, reassembly=10_000))
    for stream in (2, 6, 10):
        talk.say("03 08 04" + f"{stream:02x}" + "00 00 88 27", stream=stream)  # 5000 bytes each
    assert [control for control in controls(talk) if control[0] == "Lent"] == [("Lent", 2, 5000), ("Lent", 6, 5000)]
    talk.reset(2)
    assert [control for control in controls(talk) if control[0] == "Lent"] == [("Lent", 10, 5000)]
    (message,) = talk.messages("61" * 5000, stream=6)
    assert len(talk.messages("61" * 5000, stream=10)) == 1
    talk.engine.consumed(message)
    assert talk.engine._incoming.reassembly.left == 5000


@pytest.mark.requirement("R-03")
def test_a_head_that_comes_in_parts_reserves_for_the_largest_message() -> None:
    talk = server(limits=Limits(message=6000, reassembly=10_000))
    talk.say("03 00 04 00 88 27" + "00" * 100, stream=2)  # 5000 bytes of headers
    assert controls(talk) == [("Lent", 2, 4900), ("Consumed", 2, 2)]
    assert talk.engine._incoming.reassembly.left < 4100
    talk.say("00" * 4900 + "00 80 01", stream=2)  # no attachments, a payload of 128 bytes
    assert [control for control in controls(talk) if control[0] == "Lent"] == [("Lent", 2, 131)]
    assert talk.engine._incoming.reassembly.left == 10_000 - 4900 - 131


@pytest.mark.requirement("R-03")
def test_what_was_reserved_and_not_needed_comes_back_when_the_frame_is_complete() -> None:
    talk = server(limits=Limits(message=6000, reassembly=10_000), config=Config(header_pairs=5000))
    talk.say("03 00 04 00 88 27" + "00" * 100, stream=2)  # 5000 bytes of headers
    assert talk.engine._incoming.reassembly.left < 4100
    (message,) = talk.messages("00" * 4900 + "00 00", stream=2)
    assert talk.engine._incoming.reassembly.left == 10_000 - 4900
    talk.engine.consumed(message)
    assert talk.engine._incoming.reassembly.left == 10_000


@pytest.mark.requirement("R-22")
def test_what_comes_for_a_channel_that_is_gone_is_renewed_at_once() -> None:
    talk = server()
    talk.say("03 08 04 00 00 00 88 27" + "61" * 100, stream=2)
    assert talk.engine.receivers.keys() == {0}  # of a message that is not complete nobody knows
    talk.say("03 08 07")
    controls(talk)
    talk.say("61" * 4900, stream=2)
    assert sum(amount for name, _, amount in controls(talk) if name == "Consumed") == 5006
    assert talk.engine._incoming.reassembly.left == talk.engine._incoming.reassembly.total


# ---------------------------------------------------------------------------- our own side


def test_our_own_channels_and_messages_are_bounded() -> None:
    talk = client(limits=Limits(channels=3, message=1000), config=Config(headers=100, attachments=5))
    tickets = [talk.engine.channel(sends=True)[1] for _ in range(3)]
    with pytest.raises(LocalProtocolError, match="3 channels attached where 2 more"):
        talk.engine.send(entry(talk), b"", attachments=tickets)
    talk.engine.send(entry(talk), b"", attachments=tickets[:2])
    with pytest.raises(LocalProtocolError, match="1001 bytes"):
        talk.engine.send(entry(talk), b"x" * 1000)
    with pytest.raises(LocalProtocolError, match="headers"):
        talk.engine.send(entry(talk), b"", headers=[(b"k", b"v" * 100)])
    with pytest.raises(LocalProtocolError, match="headers"):
        talk.engine.channel(sends=True, headers=[(b"k", b"v" * 100)])


@pytest.mark.parametrize("setting", ["flush_delay", "tombstone", "in_flight", "receipt_deadline", "datagram"])
def test_a_setting_must_be_above_zero(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        Config(**{setting: 0})  # type: ignore[arg-type]  # no two settings have one type


@pytest.mark.requirement("R-29")
def test_a_message_that_has_begun_must_go_on_arriving() -> None:
    talk = server(limits=Limits(stall=10.0, stall_bytes=100))
    talk.say("03 00 04 00 00 00 50" + "61" * 10)
    talk.say("61", stream=talk.last)
    talk.later(9.9)
    assert not talk.engine.over
    talk.engine.handle_deadline(10.0)
    error = talk.failure()
    assert error.limit == "stall"
    assert "1 bytes in 10.0 s while a frame is unfinished, 100 are asked" in str(error)


@pytest.mark.requirement("R-29")
def test_a_slow_peer_that_is_fast_enough_goes_on() -> None:
    talk = server(limits=Limits(stall=10.0, stall_bytes=100))
    talk.say("03 00 04 00 00 00 80 10")  # 2048 bytes are to come
    stream = talk.last
    for _ in range(20):
        talk.say("61" * 102, stream=stream)
        talk.later(9.0)
    assert not talk.engine.over
    assert len(talk.messages("61" * 8, stream=stream)) == 1
    talk.later(100)
    assert not talk.engine.over


@pytest.mark.requirement("R-29")
def test_a_peer_that_may_lack_credit_is_not_stalled() -> None:
    talk = server(limits=Limits(stall=10.0, stall_bytes=100, channel_floor=100, channel_bytes=1000))
    messages = talk.messages("03 00 04 00 00 00 01 61", stream=50)  # which nobody reads
    talk.say("04 01 00 00 10 61", stream=50)  # and the next one stops
    talk.later(100)
    assert not talk.engine.over
    for message in messages:
        talk.engine.consumed(message)
    talk.say("61", stream=50)
    talk.say("61", stream=50)
    talk.engine.handle_deadline(talk.now + 10)
    assert talk.failure().limit == "stall"


@pytest.mark.requirement("R-29")
def test_a_peer_is_not_stalled_while_others_of_its_streams_have_used_what_all_may_have() -> None:
    talk = server(limits=Limits(stall=10.0, connection_bytes=1000))
    messages = talk.messages("03 00 04 00 00 00 d8 04" + "61" * 600)
    talk.say("03 08 04 00 00 00 10 61", stream=54)
    talk.later(100)
    assert not talk.engine.over
    talk.engine.consumed(messages[0])
    talk.say("61", stream=54)
    talk.engine.handle_deadline(talk.now + 10)
    assert talk.failure().limit == "stall"


@pytest.mark.requirement("R-29")
def test_a_line_that_dies_inside_a_frame_is_silence_and_no_broken_rule() -> None:
    talk = server(limits=Limits(stall=10.0))
    talk.say("03 00 04 00 00 00 50" + "61" * 10)
    talk.engine.handle_deadline(10.0)
    *_, last = talk.engine.events()
    assert last == Silent(10.0)
    assert talk.engine.over
    assert talk.engine.next_deadline() is None
