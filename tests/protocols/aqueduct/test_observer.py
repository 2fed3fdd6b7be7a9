"""Who watches, and the corners that no clause speaks of."""

from __future__ import annotations

import attrs
import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.aqueduct import Carrier, Engine, Failed, Mode, Role
from muxkit.testing._pair import feed
from tests.protocols.aqueduct._helpers import EMPTY, Talk, V, client, entry, hexed, receiver_of, server, told


@attrs.define
class Watcher:
    """Writes down what it is told."""

    seen: list[tuple[object, ...]] = attrs.Factory(list)

    def frame(self, direction: str, channel: str, name: str, size: int) -> None:
        self.seen.append((direction, channel, name, size))

    def credit(self, direction: str, channel: str, amount: int) -> None: ...

    def state(self, channel: str, state: str) -> None:
        self.seen.append((channel, state))

    def timer(self, name: str) -> None:
        self.seen.append(("timer", name))

    def error(self, error: BaseException) -> None:
        self.seen.append(("error", type(error).__name__))

    def transport(self, direction: str, data: bytes | memoryview) -> None: ...


def test_an_observer_sees_frames_states_timers_and_the_error() -> None:
    watcher = Watcher()
    talk = Talk(Engine(Role.SERVER, observer=watcher))
    talk.say(V + "01 02 00")
    talk.say("03 08 04 00 00 00 02 68 69")
    talk.later(0.025)
    talk.written()
    talk.say("03 08 07")
    talk.say("ff")
    assert watcher.seen == [
        ("in", "connection", "Version", 0),
        ("in", "connection", "AckVersion", 0),
        ("in", "connection", "ConnectionHeaders", 0),
        ("client-made client-sends 1", "open"),
        ("in", "client-made client-sends 1", "MESSAGE", 2),
        ("timer", "flush"),
        ("out", "client-made client-sends 1", "ACK_RELIABLE", 0),
        ("in", "client-made client-sends 1", "CancelSender", 0),
        ("out", "client-made client-sends 1", "CLOSE_RECEIVER", 0),
        ("client-made client-sends 1", "cancelled"),
        ("error", "RemoteProtocolError"),
    ]


def test_bytes_behind_the_end_of_a_stream_are_not_heard() -> None:
    talk = server()
    (message,) = talk.messages("03 00" + EMPTY, stream=2)
    talk.say("", stream=2, fin=True)
    assert talk.say("04 01 00 00 00", stream=2) == []
    talk.engine.consumed(message)
    assert talk.engine.statistics().streams_in == 0


def test_streams_that_are_not_known_are_nobodys_business() -> None:
    engine = server().engine
    engine.receive_reset(2, 0.0)
    engine.receive_stopped(3, 0.0)
    engine.stream_writable(3)
    assert engine.stream_to_send(3, 10) == (b"", False)
    assert not engine.over


def test_a_forget_that_could_not_be_written_is_owed_once() -> None:
    talk = client()
    talk.say("03 02", fin=True)
    talk.now = 5.0
    talk.say("03 02", fin=True)
    assert talk.bytes_written() == [hexed("03 02 0B")]


def test_what_is_gone_is_not_closed_again() -> None:
    talk = server()
    receiver = receiver_of(talk, 0)
    talk.engine.close(receiver, 0.0)
    with pytest.raises(LocalProtocolError, match="gone"):
        talk.engine.close(receiver, 0.0)


def test_each_stray_goes_at_its_own_time() -> None:
    talk = server()
    talk.datagram("03 08" + EMPTY)
    talk.later(0.5)
    talk.datagram("03 10" + EMPTY)
    assert talk.later(0.5) == [("Forgotten", 8)]
    assert talk.later(0.5) == [("Forgotten", 16)]


def test_one_who_waits_for_a_loan_asks_for_less_when_he_knows_more() -> None:
    talk = server(limits=Limits(message=8000, reassembly=10_000))
    talk.say("03 08 04 00 00 00 88 27", stream=2)  # 5000 bytes
    talk.say("03 08 04 01 00 c0 3e", stream=6)  # 8000 bytes of attachments: more than is left
    assert talk.engine._incoming.reassembly.waiting == 1
    talk.say("00" * 10, stream=6)
    assert talk.engine._incoming.reassembly.waiting == 1
    talk.reset(2)
    assert talk.engine._incoming.reassembly.waiting == 0


def test_a_loan_that_came_too_late_is_not_needed() -> None:
    talk = server(limits=Limits(message=8000, reassembly=10_000))
    talk.say("03 08 04 00 00 00 88 27", stream=2)
    talk.say("03 08 04 01 00 00 88 2f" + "61" * 100, stream=6)  # 6024 bytes
    assert talk.engine._incoming.reassembly.waiting == 1
    assert len(talk.messages("61" * 5932, stream=6)) == 1  # the window was large enough
    assert talk.engine._incoming.reassembly.waiting == 0


def test_a_sender_with_nothing_to_say_is_not_in_line() -> None:
    talk = client()
    talk.engine.send(entry(talk), b"", mode=Mode.UNRELIABLE)
    assert talk.engine.has_output(False)
    talk.datagrams()
    assert not talk.engine.has_output(True)


# ---------------------------------------------------------------------------- the carrier


def test_a_sequence_that_is_ignored_is_stopped_over_the_carrier() -> None:
    made = Carrier(Engine(Role.CLIENT))
    feed(made, [bytes.fromhex(b"AQUEDUX1".hex() + "01 00 1f" + V + "01 02 00")])
    made.buffers_to_send(2**20)
    feed(made, [bytes.fromhex("00 01 04 03 02 04 00")])
    text = b"".join(made.buffers_to_send(2**20)).hex()
    assert text.startswith(hexed("03 01"))
    assert text.endswith(hexed("01 01 03 03 02 0B"))
    feed(made, [bytes.fromhex("02 01")])
    assert not made.engine.over


def test_a_stop_over_the_carrier_is_answered_with_a_reset() -> None:
    made = Carrier(Engine(Role.CLIENT))
    feed(made, [bytes.fromhex(b"AQUEDUX1".hex() + "01 00 1f" + V + "01 02 00")])
    made.engine.send(made.engine.senders[0], b"x" * 10_000)
    made.buffers_to_send(2**20)
    events = feed(made, [bytes.fromhex("03 01")])
    assert [told(event) for event in events] == [("NoReceiver", 0)]
    assert b"".join(made.buffers_to_send(2**20)).hex() == hexed("02 01" + "01 02 03 03 00 07")


def test_a_stream_may_end_with_an_empty_chunk() -> None:
    made = Carrier(Engine(Role.SERVER))
    text = b"AQUEDUX1".hex() + "01 00 1f" + V + "01 02 00" + "00 01 02 03 00" + "01 01 00" + "01 02 00"
    events = feed(made, [bytes.fromhex(text)])
    assert not any(isinstance(event, Failed) for event in events)
    while made.has_output():
        made.buffers_to_send(2**20)
    assert made._incoming == {}


def test_control_that_is_more_than_the_writer_takes_goes_on_later() -> None:
    made = Carrier(Engine(Role.CLIENT))
    pieces = []
    while made.has_output():
        pieces.append(b"".join(made.buffers_to_send(1)))
    assert len(pieces) > 2
    assert pieces[0] == b"AQUEDUX1"
