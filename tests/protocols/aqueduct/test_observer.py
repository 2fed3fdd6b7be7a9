"""What an observer is told, and behaviour that no clause covers."""

from __future__ import annotations

import attrs

from muxkit._limits import Limits
from muxkit.core import Reason
from muxkit.core.events import Failed
from muxkit.protocols.aqueduct import Carrier, Engine, Mode, Role
from muxkit.testing._pair import feed
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    ScriptedPeer,
    V,
    client,
    entry,
    hexed,
    incoming_of,
    receiver_of,
    senders_of,
    server,
    statistics_of,
    summary_of,
    taken,
)


@attrs.define
class Watcher:
    """Records its calls."""

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
    peer = ScriptedPeer(Engine(Role.SERVER, observer=watcher))
    peer.send(V + "01 02 00")
    peer.send("03 08 04 00 00 00 02 68 69")
    peer.later(0.025)
    peer.written()
    peer.send("03 08 07")
    peer.send("ff")
    assert watcher.seen == [
        ("in", "connection", "VERSION", 0),
        ("in", "connection", "ACK_VERSION", 0),
        ("in", "connection", "CONNECTION_HEADERS", 0),
        ("client-made client-sends 1", "open"),
        ("in", "client-made client-sends 1", "MESSAGE", 2),
        ("timer", "flush"),
        ("out", "client-made client-sends 1", "ACK_RELIABLE", 0),
        ("in", "client-made client-sends 1", "CANCEL_SENDER", 0),
        ("out", "client-made client-sends 1", "CLOSE_RECEIVER", 0),
        ("client-made client-sends 1", "cancelled"),
        ("error", "RemoteProtocolError"),
    ]


def test_bytes_behind_the_end_of_a_stream_are_not_heard() -> None:
    peer = server()
    (message,) = peer.messages("03 00" + EMPTY, stream=2)
    peer.send("", stream=2, fin=True)
    assert peer.send("04 01 00 00 00", stream=2) == []
    taken(message)
    assert statistics_of(peer.engine).streams_in == 0


def test_events_of_unknown_streams_are_ignored() -> None:
    engine = server().engine
    engine.receive_reset(2, 0.0)
    engine.receive_stopped(3, 0.0)
    engine.stream_writable(3)
    assert engine.stream_to_send(3, 10) == (b"", False)
    assert not engine.over


def test_a_forget_that_could_not_be_written_is_owed_once() -> None:
    peer = client()
    peer.send("03 02", fin=True)
    peer.now = 5.0
    peer.send("03 02", fin=True)
    assert peer.bytes_written() == [hexed("03 02 0B")]


def test_what_is_gone_is_not_closed_again() -> None:
    peer = server()
    receiver = receiver_of(peer, 0)
    receiver.stop(Reason())
    assert peer.bytes_written() == [hexed("03 00 0A")]
    receiver.stop(Reason())
    assert peer.bytes_written() == []


def test_each_stray_goes_at_its_own_time() -> None:
    peer = server()
    peer.datagram("03 08" + EMPTY)
    peer.later(0.5)
    peer.datagram("03 10" + EMPTY)
    assert peer.later(0.5) == [("Forgotten", 8)]
    assert peer.later(0.5) == [("Forgotten", 16)]


def test_a_stream_that_waits_for_a_loan_asks_for_less_once_its_size_is_known() -> None:
    peer = server(limits=Limits(message=8000, reassembly=10_000))
    peer.send("03 08 04 00 00 00 88 27", stream=2)  # 5000 bytes
    peer.send("03 08 04 01 00 c0 3e", stream=6)  # 8000 bytes of attachments: more than is left
    assert peer.engine.reader.reassembly.waiting == 1
    peer.send("00" * 10, stream=6)
    assert peer.engine.reader.reassembly.waiting == 1
    peer.reset(2)
    assert peer.engine.reader.reassembly.waiting == 0


def test_a_loan_that_came_too_late_is_not_needed() -> None:
    peer = server(limits=Limits(message=8000, reassembly=10_000))
    peer.send("03 08 04 00 00 00 88 27", stream=2)
    peer.send("03 08 04 01 00 00 88 2f" + "61" * 100, stream=6)  # 6024 bytes
    assert peer.engine.reader.reassembly.waiting == 1
    assert len(peer.messages("61" * 5932, stream=6)) == 1  # the window was large enough
    assert peer.engine.reader.reassembly.waiting == 0


def test_a_sender_with_nothing_to_write_is_not_scheduled() -> None:
    peer = client()
    entry(peer).transmit(b"", mode=Mode.UNRELIABLE)
    assert peer.engine.has_output(False)
    peer.datagrams()
    assert not peer.engine.has_output(True)


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
    senders_of(made.engine)[0].transmit(b"x" * 10_000)
    made.buffers_to_send(2**20)
    events = feed(made, [bytes.fromhex("03 01")])
    assert [summary_of(event) for event in events] == [("NoReceiver", 0)]
    assert b"".join(made.buffers_to_send(2**20)).hex() == hexed("02 01" + "01 02 03 03 00 07")


def test_a_stream_may_end_with_an_empty_chunk() -> None:
    made = Carrier(Engine(Role.SERVER))
    text = b"AQUEDUX1".hex() + "01 00 1f" + V + "01 02 00" + "00 01 02 03 00" + "01 01 00" + "01 02 00"
    events = feed(made, [bytes.fromhex(text)])
    assert not any(isinstance(event, Failed) for event in events)
    while made.has_output():
        made.buffers_to_send(2**20)
    assert incoming_of(made) == {}


def test_control_that_is_more_than_the_writer_takes_goes_on_later() -> None:
    made = Carrier(Engine(Role.CLIENT))
    pieces = []
    while made.has_output():
        pieces.append(b"".join(made.buffers_to_send(1)))
    assert len(pieces) > 2
    assert pieces[0] == b"AQUEDUX1"
