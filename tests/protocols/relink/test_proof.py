"""A pong proves that what came before its ping arrived, and nothing that was sent after it."""

from __future__ import annotations

import pytest

from muxkit.core.events import Failed
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import deliver, pair, reconnect, taken, transactional
from tests.protocols.relink._numbered import told


@pytest.mark.clause("relink-R02", "relink-K02")
def test_an_end_that_was_told_behind_a_ping_is_told_again_after_a_cut() -> None:
    """The pong shows that the peer has read what was before the ping, and not the `closed` behind it."""
    one, other = pair(transactional())
    for channel in (1, 2, 2):
        one.send(channel, (b"x",))
        one.commit(channel)
    deliver(one, other)
    taken(other, 1)
    taken(other, 2)
    other.committed(1, through=0, now=0.0)
    other.committed(2, through=0, now=0.0)
    one.close(1)
    deliver(one, other)
    before = drain(other)  # two answers, the end of channel 1, and a ping
    one.close(2)
    other.receive_bytes(drain(one), 0.0)
    other.committed(2, through=1, now=0.0)
    drain(other)  # the last answer and the end of channel 2: lost with the connection
    one.receive_bytes(before, 0.0)
    deliver(one, other)  # the pong
    reconnect(one, other)
    deliver(other, one)
    events = list(one.events())
    assert not any(isinstance(event, Failed) for event in events), events
    assert ("Committed", 2, 1, 1) in [told(event) for event in events]
