"""Section 3.6, which is empty: channels that are lost in transit, and what is lost with them."""

from __future__ import annotations

import pytest

from muxkit.core import Reason
from muxkit.protocols.aqueduct import Mode, Role, Ticket
from muxkit.protocols.aqueduct.events import Arrived
from muxkit.protocols.aqueduct.half import Outcome
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender
from muxkit.protocols.aqueduct.transit import Fate, Transit, lose
from tests.protocols.aqueduct._helpers import (
    ScriptedPeer,
    client,
    entry,
    fresh,
    hexed,
    receivers_of,
    senders_of,
    server,
)

clause = pytest.mark.clause


def both(peer: ScriptedPeer, **options: object) -> tuple[EngineSender, EngineReceiver]:
    """Attach two channels of the client to one message: it sends on 8 and receives on 2."""
    sender, one = peer.engine.channel(sends=True)
    receiver, other = peer.engine.channel(sends=False)
    entry(peer).transmit(b"", attachments=[one, other], **options)  # type: ignore[arg-type]  # mode, receipt
    return sender, receiver


@clause("aqueduct-X01")
@pytest.mark.parametrize("how", ["nacked", "closed", "forgotten"])
def test_what_was_attached_to_a_message_that_did_not_arrive_is_lost(how: str) -> None:
    peer = client()
    both(peer, mode=Mode.UNRELIABLE if how == "nacked" else Mode.ORDERED)
    peer.written()
    peer.datagrams()
    if how == "forgotten":
        peer.engine.forget(entry(peer))
        heard = peer.events()
    else:
        heard = peer.send("03 00 09 00 02 00 01" if how == "nacked" else "03 00 0A")
    lost = [("LostInTransit", 8), ("LostInTransit", 2)]
    assert [event for event in heard if event in lost] == lost
    assert [text for text in peer.bytes_written() if text != hexed("03 00 0B")] == [
        hexed("03 08 0B"),
        hexed("03 02 0B"),
    ]
    assert not receivers_of(peer.engine)
    assert set(senders_of(peer.engine)) <= {0}


@clause("aqueduct-X01")
def test_a_loss_takes_with_it_what_was_sent_on_the_lost_channel() -> None:
    peer = client()
    engine = peer.engine
    chain: list[EngineSender] = [entry(peer)]
    for _ in range(4):
        sender, ticket = engine.channel(sends=True)
        chain[-1].transmit(b"", attachments=[ticket], mode=Mode.UNRELIABLE if len(chain) == 1 else Mode.ORDERED)
        chain.append(sender)
    peer.datagrams()
    peer.written()
    peer.send("03 08 08 02 00 01")  # the second message was acked, on a channel that has not arrived
    peer.send("03 10 08 02 00 01")
    assert peer.send("03 00 09 00 02 00 01") == [("LostInTransit", id) for id in (8, 16, 24, 32)]
    assert peer.resets() == [6, 10, 14]
    assert set(senders_of(engine)) == {0}


@clause("aqueduct-X01")
def test_what_has_arrived_on_a_channel_that_has_arrived_is_never_lost() -> None:
    peer = client()
    engine = peer.engine
    outer, one = engine.channel(sends=True)
    inner, other = engine.channel(sends=True)
    entry(peer).transmit(b"", attachments=[one])
    outer.transmit(b"", attachments=[other])
    peer.written()
    peer.send("03 08 08 02 00 01", stream=3)
    peer.send("03 00 08 02 00 01")
    assert peer.send("0A", stream=3) == [("NoReceiver", 8)]
    assert peer.send("03 00 0A") == [("NoReceiver", 0)]
    assert set(senders_of(engine)) == {inner.id}


@clause("aqueduct-X01")
@pytest.mark.parametrize("arrived", [True, False])
def test_the_side_that_is_told_to_forget_loses_what_went_on_a_channel_that_never_arrived(arrived: bool) -> None:
    peer = server()
    if arrived:
        peer.send("03 00 04 00 00 02 08 00 00")
    (message,) = peer.messages("03 08 04 00 00 02 02 00 00")
    sender = message.attachments[0].half
    assert isinstance(sender, EngineSender)
    _, ticket = peer.engine.channel(sends=False)
    sender.transmit(b"", attachments=[ticket])
    peer.written()
    peer.send("03 02 08 02 00 01")
    heard = peer.send("03 02 0B")
    assert heard == ([("Forgotten", 2)] if arrived else [("Forgotten", 2), ("LostInTransit", 1)])
    assert (hexed("03 01 0B") in peer.bytes_written()) is not arrived


@clause("aqueduct-X01")
def test_a_node_that_joined_two_goes_when_one_of_them_is_lost() -> None:
    root = Transit(0, ours=False)
    last, depth = root, 0
    for id in range(8, 808, 8):
        joint, lost, following = Transit(id, ours=False), Transit(id + 1, ours=True), Transit(id + 2, ours=False)
        for node, carrier in ((joint, last), (lost, joint), (following, joint)):
            node.carried_by(carrier)
        joint.ended()
        assert lose([lost]) == [lost]
        last = following
    node = last
    while node.parent is not None:
        node, depth = node.parent, depth + 1
    assert depth <= 101, "only the channels that live, and the root"


@clause("aqueduct-X01")
def test_messages_that_never_left_lose_what_was_attached_to_them_at_once() -> None:
    peer = client()
    both(peer)
    entry(peer).cancel(Reason())
    assert peer.events() == [("LostInTransit", 8), ("LostInTransit", 2)]
    assert set(peer.bytes_written()) == {hexed("03 00 07"), hexed("03 08 0B"), hexed("03 02 0B")}


def test_a_channel_made_by_the_server_is_lost_as_well() -> None:
    peer = fresh(Role.SERVER)
    peer.send("ef505fa6600f408e41515545445543540b302e302e302d4146544552 01 02 00")
    (message,) = peer.messages("03 00 04 00 00 02 02 00 00")
    sender = message.attachments[0].half
    assert isinstance(sender, EngineSender)
    receiver, ticket = peer.engine.channel(sends=False)
    sender.transmit(b"", attachments=[ticket], mode=Mode.UNRELIABLE)
    peer.datagrams()
    assert peer.send("03 02 09 02 02 00 01") == [("LostInTransit", 1)]
    assert receiver.outcome is Outcome.LOST_IN_TRANSIT


def test_a_message_knows_its_tickets() -> None:
    peer = client()
    _, ticket = peer.engine.channel(sends=True, headers=((b"k", b"v"),))
    assert isinstance(ticket, Ticket)
    entry(peer).transmit(b"", attachments=[ticket])
    ((_, data, _),) = peer.written()
    (message,) = server().messages(data)
    assert isinstance(message, Arrived)
    assert message.attachments[0].headers == ((b"k", b"v"),)


# ---------------------------------------------------------------------------- the tree itself


def test_a_tree_of_channels_that_are_gone_keeps_only_what_joins_the_living() -> None:
    root = Transit(0, ours=False)
    chain = [root]
    for id in range(1, 500):
        node = Transit(id, ours=False)
        node.carried_by(chain[-1])
        chain.append(node)
    leaf = Transit(1000, ours=True)
    leaf.carried_by(chain[-1])
    for node in chain[1:]:
        node.ended()
    assert leaf.parent is root
    assert list(root.children) == [leaf]
    assert [node.fate for node in lose([root])] == [Fate.LOST]
    assert leaf.fate is Fate.LOST


def test_a_node_that_joins_two_stays_until_one_of_them_goes() -> None:
    root, joint = Transit(0, ours=False), Transit(8, ours=False)
    joint.carried_by(root)
    leaves = [Transit(16, ours=True), Transit(24, ours=True)]
    for leaf in leaves:
        leaf.carried_by(joint)
    joint.ended()
    assert list(root.children) == [joint]
    leaves[0].ended()
    assert list(root.children) == [leaves[1]]
    leaves[1].ended()
    assert root.children == {}


def test_what_arrives_brings_what_hangs_below_and_is_final() -> None:
    entrypoint = Transit(0, ours=True, fate=Fate.ACCESSIBLE)
    outer, inner = Transit(8, ours=True), Transit(16, ours=True)
    inner.carried_by(outer)
    outer.carried_by(entrypoint)
    assert inner.fate is Fate.ACCESSIBLE
    assert lose([outer, inner]) == []
    late = Transit(24, ours=True)
    lost = Transit(32, ours=True, fate=Fate.LOST)
    assert late.carried_by(lost) == [late]


def test_a_datagram_that_brings_a_channel_back_does_not_bring_back_what_it_carried() -> None:
    peer = server()
    text = "03 08 04 00 00 02 10 00 00"
    assert peer.datagram(text) == []
    assert receivers_of(peer.engine).keys() == {0, 8}
    peer.later(1)
    assert receivers_of(peer.engine).keys() == {0}
    peer.send("03 00 04 00 00 02 08 00 00")
    assert peer.datagram(text) == [("Arrived", 8, 0, b"")]
    assert receivers_of(peer.engine).keys() == {0, 8, 16}
