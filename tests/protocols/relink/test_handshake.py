"""The handshake: versions, names, sizes, flags, epoch and link id, in the order of the document's table."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core.events import Failed
from muxkit.protocols.relink import Config
from muxkit.protocols.relink.events import Agreed, HandshakeEvent, Refused, Requested
from muxkit.protocols.relink.handshake import (
    ConnectorHandshake,
    ListenerHandshake,
    encode_answer,
    encode_request,
    encode_version,
    epoch_of,
    mismatch,
)
from muxkit.testing._pair import drain, feed

CHATTY = Config(endpoint="chatty", connector_id_size=2, listener_id_size=4)
VERSION = bytes(8)
REQUEST = bytes.fromhex("06 63 68 61 74 74 79 02 04 00" + "00" * 6 + "00" * 16)  # of CHATTY


def request(config: Config = CHATTY, *, epoch: int = 0, link_id: int = 0, require_link: bool = False) -> bytes:
    return encode_request(config, epoch=epoch, link_id=link_id, require_link=require_link)


def asked(data: bytes = b"") -> ListenerHandshake:
    """Return a listener's handshake that has a request to decide about."""
    handshake = ListenerHandshake(now=0.0)
    feed(handshake, [VERSION, data or request()])
    drain(handshake)
    return handshake


def failure(events: list[HandshakeEvent]) -> RemoteProtocolError:
    (event,) = events
    assert isinstance(event, Failed)
    return event.error


# --- the connector


@pytest.mark.clause("relink-A01", "relink-H01", "relink-H02")
def test_the_connector_speaks_first_and_offers_version_zero() -> None:
    assert drain(ConnectorHandshake(CHATTY, now=0.0)).startswith(VERSION)


@pytest.mark.clause("relink-H04", "relink-H08")
def test_the_connector_asks_together_with_the_only_version_that_it_offers() -> None:
    handshake = ConnectorHandshake(CHATTY, now=0.0)
    assert drain(handshake) == VERSION + REQUEST
    handshake.receive_bytes(VERSION, 0.0)
    assert not handshake.has_output()


@pytest.mark.clause("relink-H04", "relink-H08")
def test_the_connector_waits_for_the_version_if_it_offers_several() -> None:
    handshake = ConnectorHandshake(attrs.evolve(CHATTY, versions=(0, 2)), now=0.0)
    assert drain(handshake) == b"\x02" + bytes(7)
    handshake.receive_bytes(VERSION, 0.0)
    assert drain(handshake) == REQUEST


@pytest.mark.clause("relink-H04", "relink-H08")
def test_a_half_duplex_connector_waits_for_the_version_before_it_asks() -> None:
    handshake = ConnectorHandshake(attrs.evolve(CHATTY, half_duplex=True), now=0.0)
    assert drain(handshake) == VERSION
    handshake.receive_bytes(VERSION[:7], 0.0)
    assert not handshake.has_output()
    handshake.receive_bytes(VERSION[7:], 0.0)
    assert drain(handshake) == REQUEST


@pytest.mark.clause("relink-H05")
def test_the_connector_offers_its_highest_version() -> None:
    assert drain(ConnectorHandshake(Config(versions=(0, 2)), now=0.0)) == b"\x02" + bytes(7)


@pytest.mark.clause("relink-H07")
@pytest.mark.parametrize(("ours", "answer"), [((2,), 0), ((0,), 1), ((0, 2), 1), ((0, 2), 255)])
def test_the_connector_leaves_when_it_does_not_understand_the_answered_version(
    ours: tuple[int, ...], answer: int
) -> None:
    handshake = ConnectorHandshake(Config(versions=ours), now=0.0)
    drain(handshake)
    error = failure(feed(handshake, [encode_version(answer)]))
    assert error.rule == "relink-H07"
    assert not handshake.has_output()
    assert handshake.next_deadline() is None


@pytest.mark.clause("relink-H03", "relink-H21", "relink-H20")
def test_a_new_link_is_agreed_on() -> None:
    handshake = ConnectorHandshake(CHATTY, now=0.0)
    assert feed(handshake, [VERSION, encode_answer(7, 9)]) == [Agreed(0, 7, 9, resumed=False)]
    assert handshake.over
    assert encode_answer(7, 9).hex() == "07" + "00" * 7 + "09" + "00" * 7


@pytest.mark.clause("relink-H18", "relink-H19", "relink-H20", "relink-A03")
def test_an_old_link_is_asked_for_with_its_epoch() -> None:
    config = Config(endpoint="abcdef", connector_id_size=1, listener_id_size=1)
    expected = "06 61 62 63 64 65 66 01 01 00" + "00" * 6 + "01" + "00" * 7 + "02" + "00" * 7
    assert encode_request(config, epoch=1, link_id=2) == bytes.fromhex(expected)
    epoch = 0x0102030405060708
    assert encode_request(config, epoch=epoch)[16:24] == bytes.fromhex("0807060504030201")


@pytest.mark.clause("relink-H30", "relink-H26", "relink-H34")
@pytest.mark.parametrize(
    ("epoch", "link_id", "resumed"), [(7, 5, True), (7, 6, False), (8, 5, False), (8, 6, False), (0, 5, False)]
)
def test_a_link_goes_on_only_with_its_epoch_and_its_id(epoch: int, link_id: int, resumed: bool) -> None:
    handshake = ConnectorHandshake(CHATTY, now=0.0, epoch=7, link_id=5)
    assert feed(handshake, [VERSION, encode_answer(epoch, link_id)]) == [Agreed(0, epoch, link_id, resumed)]


@pytest.mark.clause("relink-H26")
def test_epoch_zero_names_no_instance_that_a_link_could_outlive() -> None:
    handshake = ConnectorHandshake(CHATTY, now=0.0, epoch=0, link_id=5)
    assert feed(handshake, [VERSION, encode_answer(0, 5)]) == [Agreed(0, 0, 5, resumed=False)]


@pytest.mark.clause("relink-H33")
def test_link_id_zero_means_that_the_required_link_is_gone() -> None:
    config = Config(require_link=True)
    handshake = ConnectorHandshake(config, now=0.0, epoch=7, link_id=5)
    assert feed(handshake, [VERSION, encode_answer(8, 0)]) == [Refused(8)]


@pytest.mark.clause("relink-H33")
def test_link_id_zero_is_a_fault_when_no_link_was_required() -> None:
    handshake = ConnectorHandshake(Config(require_link=True), now=0.0)
    assert failure(feed(handshake, [VERSION, encode_answer(8, 0)])).rule == "relink-H33"


@pytest.mark.clause("relink-H27")
def test_a_link_id_of_64_bits_is_a_fault() -> None:
    handshake = ConnectorHandshake(CHATTY, now=0.0)
    error = failure(feed(handshake, [VERSION, encode_answer(7, 2**63)]))
    assert (error.rule, error.offset) == ("relink-H27", 8)


@pytest.mark.clause("relink-H15")
def test_a_link_is_only_required_if_there_is_one() -> None:
    for link_id, flags in ((0, 0), (5, 4)):
        handshake = ConnectorHandshake(Config(require_link=True), now=0.0, epoch=7, link_id=link_id)
        assert drain(handshake)[8 + 3] == flags


@pytest.mark.clause("relink-H36")
@pytest.mark.parametrize("size", [0, 8, 100_000])
def test_what_follows_the_handshake_is_handed_on_whatever_its_size(size: int) -> None:
    packets = bytes(range(256)) * (size // 256) + bytes(size % 256)
    handshake = ConnectorHandshake(CHATTY, now=0.0)
    assert len(feed(handshake, [VERSION + encode_answer(7, 9) + packets])) == 1
    handshake.receive_bytes(b"more", 0.0)
    assert handshake.rest() == packets + b"more"
    assert handshake.rest() == b""


# --- the listener


@pytest.mark.clause("relink-H03", "relink-H06")
@pytest.mark.parametrize(
    ("ours", "offer", "answer"), [((0,), 0, 0), ((0,), 2, 0), ((0, 5), 2, 0), ((0, 5), 5, 5), ((0, 5), 255, 5)]
)
def test_the_listener_answers_the_highest_version_that_both_understand(
    ours: tuple[int, ...], offer: int, answer: int
) -> None:
    handshake = ListenerHandshake(now=0.0, versions=ours)
    assert feed(handshake, [encode_version(offer)]) == []
    assert drain(handshake) == encode_version(answer)


@pytest.mark.clause("relink-H07")
def test_the_listener_leaves_without_an_answer_when_it_is_too_new() -> None:
    handshake = ListenerHandshake(now=0.0, versions=(3,))
    assert failure(feed(handshake, [encode_version(2)])).rule == "relink-H07"
    assert drain(handshake) == b""


@pytest.mark.clause("relink-H04", "relink-H08", "relink-H10")
def test_the_listener_hears_everything_before_it_answers() -> None:
    config = Config(endpoint="café", connector_id_size=3, listener_transactions=True)
    handshake = ListenerHandshake(now=0.0)
    feed(handshake, [VERSION])
    assert drain(handshake) == VERSION
    data = request(config, epoch=7, link_id=5, require_link=True)
    assert data[:6] == bytes.fromhex("05 63 61 66 c3 a9")
    assert feed(handshake, [data[:-1]]) == []
    (told,) = feed(handshake, [data[-1:]])
    assert told == Requested(0, "café", 3, 2, False, True, True, 7, 5)
    assert not handshake.has_output()
    handshake.resume()
    assert handshake.events() == [Agreed(0, 7, 5, resumed=True)]
    assert drain(handshake) == encode_answer(7, 5)


@pytest.mark.clause("relink-H17")
@pytest.mark.parametrize(("name", "padding"), [("", 4), ("abcd", 0), ("abcde", 7), ("abcdef", 6), ("abc", 1)])
def test_the_epoch_stands_on_an_eight_byte_boundary(name: str, padding: int) -> None:
    data = request(Config(endpoint=name), epoch=2**64 - 1)
    assert data == data[: 4 + len(name)] + bytes(padding) + b"\xff" * 8 + bytes(8)


@pytest.mark.clause("relink-H09")
def test_a_name_has_at_most_255_bytes() -> None:
    assert request(Config(endpoint="x" * 255))[:2] == b"\xffx"
    with pytest.raises(ValueError, match="256 bytes; at most 255"):
        Config(endpoint="é" * 128)


@pytest.mark.clause("relink-H16", "relink-A05")
def test_unused_flags_and_padding_are_ignored() -> None:
    data = bytearray(request(Config(endpoint="abc")))
    data[6] = 0xF8
    data[7] = 0xFF
    (told,) = feed(ListenerHandshake(now=0.0), [b"\x00" + b"\xff" * 7, bytes(data)])
    assert isinstance(told, Requested)
    assert told == Requested(0, "abc", 2, 2, False, False, False, 0, 0)


def test_a_new_link_is_given_to_who_has_none_or_an_unknown_one() -> None:
    handshake = asked(request(epoch=6, link_id=5))
    handshake.accept(7, 11)
    assert handshake.events() == [Agreed(0, 7, 11, resumed=False)]
    assert drain(handshake) == encode_answer(7, 11)


@pytest.mark.clause("relink-H31", "relink-H32")
def test_who_requires_an_unknown_link_gets_zero() -> None:
    handshake = asked(request(epoch=6, link_id=99, require_link=True))
    handshake.refuse(7)
    assert handshake.events() == [Refused(7)]
    assert drain(handshake) == encode_answer(7, 0)
    assert handshake.over


@pytest.mark.clause("relink-H22")
def test_who_asks_for_an_unknown_endpoint_hears_nothing_more() -> None:
    handshake = asked()
    handshake.terminate(RemoteProtocolError("no endpoint 'chatty'", rule="relink-H22"))
    assert failure([*handshake.events()]).rule == "relink-H22"
    assert drain(handshake) == b""


@pytest.mark.clause("relink-H23", "relink-H24")
@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (Config(connector_id_size=2, listener_id_size=4), None),
        (Config(connector_id_size=2, listener_id_size=2), "relink-H24"),
        (Config(connector_id_size=4, listener_id_size=4), "relink-H24"),
        (Config(listener_id_size=4, connector_transactions=True), "relink-H23"),
        (Config(listener_id_size=4, listener_transactions=True), "relink-H23"),
    ],
)
def test_both_sides_must_agree_about_sizes_and_transactions(config: Config, rule: str | None) -> None:
    (told,) = feed(ListenerHandshake(now=0.0), [VERSION + request()])
    assert isinstance(told, Requested)
    error = mismatch(told, config)
    assert (error and error.rule) == rule


@pytest.mark.clause("relink-H10", "relink-H12", "relink-H27")
@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ("02 ff fe 02 02 00 00 00" + "00" * 16, "relink-H10"),
        ("00 09 02 00 00 00 00 00" + "00" * 16, "relink-H12"),
        ("00 02 ff 00 00 00 00 00" + "00" * 16, "relink-H12"),
        ("00 02 02 00 00 00 00 00" + "00" * 15 + "80", "relink-H27"),
    ],
)
def test_a_request_that_no_endpoint_could_grant_ends_the_connection(data: str, rule: str) -> None:
    handshake = ListenerHandshake(now=0.0)
    error = failure(feed(handshake, [VERSION, bytes.fromhex(data)]))
    assert (error.rule, error.offset) == (rule, 8)
    assert not handshake.has_output()


@pytest.mark.clause("relink-H25")
def test_the_epoch_counts_microseconds_since_1970() -> None:
    assert epoch_of(1.5) == 1_500_000


@pytest.mark.parametrize(
    "settings",
    [
        {"connector_id_size": 9},
        {"listener_id_size": -1},
        {"window": 0},
        {"targets": 2**32},
        {"parts": 0},
        {"versions": ()},
        {"versions": (256,)},
        {"first_sequence": 2**32},
        {"ack_delay": 0.0},
        {"keepalive": -1.0},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"Config\({next(iter(settings))}="):
        Config(**settings)


# --- what is refused here


def test_a_decision_needs_a_request_and_is_made_once() -> None:
    with pytest.raises(LocalProtocolError, match="no request"):
        ListenerHandshake(now=0.0).accept(7, 5)
    handshake = asked()
    handshake.accept(7, 5)
    with pytest.raises(LocalProtocolError):
        handshake.accept(7, 6)
    with pytest.raises(LocalProtocolError):
        handshake.resume()
    with pytest.raises(LocalProtocolError):
        handshake.refuse(7)
    assert drain(handshake) == encode_answer(7, 5)


@pytest.mark.clause("relink-H26", "relink-H27", "relink-H30")
def test_a_listener_answers_no_number_that_names_nothing() -> None:
    handshake = asked()
    for epoch, link_id in ((0, 5), (7, 0), (7, 2**63), (2**64, 5)):
        with pytest.raises(LocalProtocolError):
            handshake.accept(epoch, link_id)
    with pytest.raises(LocalProtocolError, match="name no link"):
        handshake.resume()
    with pytest.raises(LocalProtocolError, match="epoch 0"):
        handshake.refuse(0)
    assert not handshake.over
