"""Listings: from which clients learn which sessions there are, and which have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit._errors import RemoteProtocolError
from muxkit.protocols import restream
from muxkit.protocols.restream.server import listing
from muxkit.protocols.restream.server.listing import SessionIndex
from muxkit.protocols.restream.server.service import told_status
from muxkit.protocols.restream.store import UnknownSession
from muxkit.protocols.restream.wire.messages import ALL_SESSIONS, encode_listing, parse_request, parse_status
from tests.protocols.restream._server_clients import U2, begin, place
from tests.protocols.restream.stores import U1, U3, Numbers, NumberStore, next_number

if TYPE_CHECKING:
    from trio.testing import MockClock

pytest_plugins = ["tests.protocols.restream._postgres", "tests.protocols.restream.stores_fixtures"]


class Follower:
    """Follows an index as a client does."""

    def __init__(self, store: NumberStore, *, reader: str = "") -> None:
        self.index = SessionIndex(store)
        self.next = ""
        self.last = restream.Listing({}, "")
        self._reader = reader

    async def look(self) -> dict[str, int | None]:
        """Return the last message of each session that has changed, or None for one that was removed."""
        self.last = await self.index.since(self.next, lambda status: told_status(status, self._reader))
        self.next = self.last.next
        return {uuid: None if each is None else each.status.head for uuid, each in self.last.sessions.items()}


async def test_the_first_listing_has_all_sessions_and_the_next_ones_what_has_changed(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    await store.register(U2, Numbers(9))
    follower = Follower(store)
    assert await follower.look() == {U1: 0, U2: 0}
    assert follower.last.whole
    assert await follower.look() == {}
    assert not follower.last.whole
    await store.put(U2, next_number)
    await store.register(U3, Numbers(9))
    assert await follower.look() == {U2: 1, U3: 0}
    await store.ack(U2, 1)
    assert await follower.look() == {U2: 1}


async def test_a_removed_session_is_listed_once_and_not_known_any_more(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    await store.put(U1, next_number)
    follower = Follower(store)
    await follower.look()
    await store.remove(U1)
    assert await follower.look() == {U1: None}
    assert await follower.look() == {}
    with pytest.raises(UnknownSession):
        await store.status(U1)
    with pytest.raises(UnknownSession):
        await store.remove(U1)
    await store.register(U1, Numbers(9))
    assert await follower.look() == {U1: 0}


async def test_a_listing_has_the_position_of_the_reader(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    await store.put_many(U1, next_number, 5)
    follower = Follower(store, reader="table")
    await follower.look()
    assert _position(follower) is None
    await store.advance(U1, "table", 3)
    await follower.look()
    assert _position(follower) == 3


def _position(follower: Follower) -> int | None:
    session = follower.last.sessions[U1]
    assert session is not None
    return session.status.position


async def test_a_long_listing_comes_in_parts(store: NumberStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_LISTED", 2)
    for uuid in (U1, U2, U3):
        await store.register(uuid, Numbers(9))
    follower = Follower(store)
    assert await follower.look() == {U1: 0, U2: 0}
    assert follower.last.more
    await store.put(U1, next_number)  # a session that changes meanwhile comes again
    assert (await follower.look()).keys() == {U3, U1}
    assert not follower.last.more
    assert await follower.look() == {}


async def test_who_missed_a_removal_that_was_forgotten_gets_a_whole_listing(
    store: NumberStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_REMOVED", 1)
    for uuid in (U1, U2, U3):
        await store.register(uuid, Numbers(9))
    slow, quick = Follower(store), Follower(store)
    quick.index = slow.index
    await slow.look()
    await quick.look()
    await store.remove(U1)
    assert await quick.look() == {U1: None}
    await store.remove(U2)
    assert await quick.look() == {U2: None}
    assert await slow.look() == {U3: 0}
    assert slow.last.whole


async def test_a_number_of_another_process_gives_a_whole_listing(store: NumberStore) -> None:
    await store.register(U1, Numbers(9))
    one, other = Follower(store), Follower(store)
    await one.look()
    other.next = one.next
    assert await other.look() == {U1: 0}
    assert other.last.whole


async def test_changes_that_a_shared_store_does_not_report_are_found_in_time(
    autojump_clock: MockClock, store: NumberStore
) -> None:
    store.is_shared = True
    follower = Follower(store)
    await follower.look()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muxkit.storage.worker.Watch.add", lambda watch, key: None)
        await store.register(U1, Numbers(9))
    assert await follower.look() == {}
    await trio.sleep(listing.MAX_AGE)
    assert await follower.look() == {U1: 0}
    await trio.sleep(listing.MAX_AGE)
    assert await follower.look() == {}


LINE = (
    b'{"listing":{"sessions":{"bf575c35-c25b-4386-8430-d5e2a93f3b1a":{"name":"orders","head":7,"acknowledged":3,'
    b'"final":false,"epoch":2},"c0000000-0000-4000-8000-000000000002":null},"next":"9f2c-17","whole":true}}\n'
)


def test_a_listing_is_this_line() -> None:
    found = restream.Listing(
        {U1: restream.ListedSession("orders", restream.Status(7, 3, False, 2)), U2: None}, "9f2c-17", whole=True
    )
    assert encode_listing(found) == LINE
    assert parse_status(LINE) == found


@pytest.mark.parametrize("listing", [b"[]", b"{}", b'{"sessions":{}}', b'{"sessions":[],"next":""}'])
def test_a_listing_without_its_fields_is_a_violation(listing: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="expected an object with sessions and next"):
        parse_status(b'{"listing":' + listing + b"}\n")


def test_a_request_for_a_listing_is_this_line() -> None:
    engine = restream.ClientEngine.listing("9f2c-17", config=restream.ClientConfig(reader="table"))
    engine.connection_made(0.0)
    line = b"".join(bytes(each) for each in engine.buffers_to_send())
    assert line == b'{"uuid":"%b","status":true,"since":"9f2c-17","reader":"table"}\n' % ALL_SESSIONS.encode()
    assert parse_request(line, digits=9, status=True) == restream.ListingRequested("9f2c-17", "table")


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_server_lists_sessions_only_if_it_is_told_to(autojump_clock: MockClock, enabled: bool) -> None:
    config = restream.ServerConfig(status=True, listing=enabled)
    async with place(config=config) as there:
        client = await there.ask(begin())
        await client.hear()
        asked = await there.ask({"uuid": ALL_SESSIONS, "status": True, "since": ""})
        answer = await asked.hear()
        if enabled:
            assert answer["listing"]["sessions"][U1]["name"] == U1
            assert answer["listing"]["sessions"][U1]["head"] == 5
        else:
            assert answer == {
                "error": "this server lists no sessions; its operator has to enable that with listing=True"
            }


def test_a_listing_without_status_is_a_wrong_setting() -> None:
    with pytest.raises(ValueError, match="needs status=True"):
        restream.ServerConfig(listing=True)
