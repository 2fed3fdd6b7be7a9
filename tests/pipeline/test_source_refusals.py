"""The errors of the restream server are interpreted as what they mean."""

from __future__ import annotations

import pytest

from muxkit.pipeline.source.client import Refusal, acknowledged, refusal_of
from muxkit.protocols import restream
from muxkit.protocols.restream.store import MessageGone, SessionBusy, SessionExpired, Superseded, UnknownSession
from muxkit.storage import StoreError, StoreFailed, StoreFull
from tests.pipeline._source_servers import ONE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnknownSession(ONE), Refusal.UNKNOWN),
        (SessionExpired(ONE), Refusal.UNKNOWN),
        (SessionBusy(ONE), Refusal.BUSY),
        (Superseded(ONE, held=1, current=2), Refusal.BUSY),
        (MessageGone(ONE, 3, 17), Refusal.GONE),
        (StoreFull("no room"), Refusal.TROUBLE),
        (StoreFailed("the disk"), Refusal.TROUBLE),
    ],
)
def test_what_stores_tell_clients_is_understood(error: StoreError, expected: Refusal) -> None:
    assert refusal_of(restream.StreamRefused(error.for_client).text) is expected


def judged(state: int, *, acknowledged: int, head: int) -> str:
    """What the server's engine says to a client that wants to go on behind `state`."""
    server, client = restream.ServerEngine(), restream.ClientEngine.stateful(ONE, None, verifier=restream.Unverified())
    client = restream.ClientEngine.restore({**client.snapshot(), "id": state}, verifier=restream.Unverified())
    client.connection_made(0.0)
    server.receive_bytes(b"".join(client.buffers_to_send()), 0.0)
    server.events()
    server.accept(acknowledged=acknowledged, head=head)
    client.receive_bytes(b"".join(server.buffers_to_send()), 0.0)
    (refused,) = (event for event in client.events() if isinstance(event, restream.Refused))
    return refused.text


def test_what_the_engine_says_is_understood_with_its_number() -> None:
    gone = judged(3, acknowledged=17, head=20)
    assert (refusal_of(gone), acknowledged(gone)) == (Refusal.GONE, 17)
    beyond = judged(30, acknowledged=17, head=20)
    assert (refusal_of(beyond), acknowledged(beyond)) == (Refusal.BEYOND, None)
    assert acknowledged(MessageGone(ONE, 3, 17).for_client) == 17


def test_anything_else_is_left_open() -> None:
    assert refusal_of("no thanks") is Refusal.OTHER
