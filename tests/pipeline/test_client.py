"""Requests of the pipeline to servers, on a bad network and with servers that misbehave."""

from __future__ import annotations

import os
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trustme

from muxkit.pipeline import DataLoss, OptionError, StreamBroken, StreamUnavailable
from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source.client import Client, NoStatus
from muxkit.pipeline.source.offsets import Span
from muxkit.protocols import restream
from muxkit.testing import ChaosPlan, Way, chaos_relay
from tests.pipeline._source_place import ids, lines, place, scripted
from tests.pipeline._source_servers import KEEP, ONE, feed

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

    from muxkit.protocols.restream.wire import Block

Requests = list[dict[str, Any]]


def client_of(server: str, **options: str) -> Client:
    return Client(SourceOptions.parse({"servers": server, "streams": ONE} | options))


def told(answer: restream.Status | NoStatus) -> tuple[int, int, bool, int | None]:
    """What a status says of the messages and owners."""
    assert isinstance(answer, restream.Status)
    return answer.head, answer.acknowledged, answer.final, answer.epoch


# ---------------------------------------------------------------------------- how a stream stands


async def test_a_status_has_all_that_planning_needs(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 7)
        await there.store.finish(ONE)
        assert told(await there.client().status(there.url, ONE)) == (7, 0, True, 0)


async def test_a_session_that_is_not_there_is_unknown_and_so_is_an_expired_one(autojump_clock: MockClock) -> None:
    async with place() as there:
        assert await there.client().status(there.url, ONE) is NoStatus.UNKNOWN
        await there.store.register(ONE, {}, params={}, attached=False, keep=5.0)
        await trio.sleep(6)
        assert await there.client().status(there.url, ONE) is NoStatus.UNKNOWN


async def test_a_server_without_the_extension_is_plain(autojump_clock: MockClock) -> None:
    async with place(status=False) as there:
        await there.feed(ONE, 7)
        assert await there.client().status(there.url, ONE) is NoStatus.PLAIN


async def test_a_server_whose_store_is_away_is_asked_again_until_the_time_is_up(autojump_clock: MockClock) -> None:
    async def act(requests: Requests, stream: trio.abc.Stream) -> None:
        if len(requests) < 3:
            await stream.send_all(lines({"error": "no disk", "code": "unavailable"}))
        else:
            await stream.send_all(lines({"status": {"head": 1, "acknowledged": 0, "final": False, "epoch": 0}}))

    async with scripted("away", act) as server:
        assert told(await client_of(server).status(server, ONE)) == (1, 0, False, 0)
        assert trio.current_time() >= 10  # at least five seconds behind each failure


async def test_a_server_that_is_gone_is_an_error_with_the_option_and_the_reason(autojump_clock: MockClock) -> None:
    with pytest.raises(StreamUnavailable, match=rf"stream {ONE}: .* option statusTimeout=30 s: .*no listener"):
        await client_of("restream+mem://nobody", statusTimeout="30s").status("restream+mem://nobody", ONE)
    assert 25 <= trio.current_time() <= 31


async def test_a_server_that_comes_back_in_time_is_as_good_as_one_that_was_there(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(20)
            async with place("back") as there:
                await there.feed(ONE, 3)
                await trio.sleep_forever()

        nursery.start_soon(later)
        client = client_of("restream+mem://back")
        assert isinstance(await client.status("restream+mem://back", ONE), restream.Status)
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------------------- ranges


async def test_a_range_is_what_lies_between_its_ends(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 1000)
        client = there.client()
        assert await ids(client, Span(ONE, there.url, 0, 1000)) == list(range(1, 1001))
        assert await ids(client, Span(ONE, there.url, 10, 13)) == [11, 12, 13]
        assert await ids(client, Span(ONE, there.url, 7, 7)) == []


async def test_reading_acknowledges_nothing_so_a_range_may_be_read_again(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 100)
        for _ in range(3):
            assert await ids(there.client(), Span(ONE, there.url, 50, 100)) == list(range(51, 101))
        assert await there.acknowledged(ONE) == 0


async def test_a_range_survives_cuts_and_each_message_comes_once() -> None:
    plan = ChaosPlan(cut_after=(500, 6_000), cut_ways=(Way.BACK,), reset=0.3)
    async with restream.open_store("memory:", keep=KEEP) as store, trio.open_nursery() as nursery:
        await feed(store, ONE, [{"n": n} for n in range(3000)])
        served: restream.Served = await nursery.start(
            partial(restream.serve, "restream+tcp://127.0.0.1:0", store, application=restream.Fed())
        )
        async with chaos_relay(served.url.removeprefix("restream+"), plan, seed=5) as relay:
            server = f"restream+tcp://{relay.address}"
            assert await ids(client_of(server), Span(ONE, server, 100, 2900)) == list(range(101, 2901))
            assert relay.cuts > 5
        nursery.cancel_scope.cancel()


async def test_a_zombie_and_its_successor_both_get_the_whole_range(autojump_clock: MockClock) -> None:
    async with place(status=False) as there:
        await there.feed(ONE, 5000)
        got: list[list[int]] = []
        span = Span(ONE, there.url, 0, 5000)

        async def slow(pause: float) -> None:
            mine: list[int] = []

            async def take(block: Block) -> None:
                mine.extend(range(block.first, block.last + 1))
                await trio.sleep(pause)

            await there.client().fetch(span, take)
            got.append(mine)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow, 1.0)
            await trio.sleep(0.5)
            nursery.start_soon(slow, 0.1)
        assert got == [list(range(1, 5001))] * 2
        assert (await there.store.status(ONE)).epoch > 2


async def test_where_a_newer_connection_gets_the_error_it_tries_again_until_the_session_is_free(
    autojump_clock: MockClock,
) -> None:
    async with place(takeover=False, status=False) as there:
        await there.feed(ONE, 10)
        config = restream.ClientConfig(ack_every=None)
        async with restream.stream(there.url, uuid=ONE, config=config) as other:
            await other.receive()
            async with trio.open_nursery() as nursery:
                got: list[list[int]] = []

                async def fetch() -> None:
                    got.append(await ids(there.client(), Span(ONE, there.url, 0, 10)))

                nursery.start_soon(fetch)
                await trio.sleep(12)
                assert got == []
                await other.aclose()
        assert got == [list(range(1, 11))]


async def test_what_was_acknowledged_meanwhile_is_a_loss_with_the_ids(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.store.ack(ONE, 5)
        with pytest.raises(DataLoss, match=rf"stream {ONE}: messages after 3 .*before message 5, .*failOnDataLoss"):
            await ids(there.client(), Span(ONE, there.url, 3, 10))


async def test_if_it_may_be_lost_it_goes_on_with_what_is_left(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.store.ack(ONE, 5)
        client = there.client(failOnDataLoss="false")
        assert await ids(client, Span(ONE, there.url, 3, 9)) == [6, 7, 8, 9]
        assert await ids(client, Span(ONE, there.url, 0, 5)) == []
        assert await ids(client, Span(ONE, there.url, 20, 30)) == []
        assert f"stream {ONE}: messages after 3 are lost" in caplog.text


async def test_a_session_that_is_gone_is_a_loss(autojump_clock: MockClock) -> None:
    async with place() as there:
        with pytest.raises(DataLoss, match="is not known here"):
            await ids(there.client(), Span(ONE, there.url, 3, 10))


async def test_a_server_that_has_gone_back_is_a_loss(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        with pytest.raises(DataLoss, match="state 20 is beyond the last message, 10"):
            await ids(there.client(), Span(ONE, there.url, 20, 30))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([{"id": 1, "data": 0}, {"id": 3, "data": 0}], "message 3 after message 1: 1 are missing"),
        ([{"id": 1, "data": 0}, {"id": 1, "data": 0}], "message 1 after message 1: ids have to ascend"),
        ([{"id": 1}], "message 1 has no data"),
    ],
)
async def test_a_gap_and_a_repeat_end_the_read_with_the_ids(
    autojump_clock: MockClock, said: list[object], told: str
) -> None:
    async def act(requests: Requests, stream: trio.abc.Stream) -> None:
        await stream.send_all(lines(*said))
        await trio.sleep_forever()

    async with scripted("liar", act) as server:
        with pytest.raises(StreamBroken, match=rf"stream {ONE}: the server broke a rule: {told}"):
            await ids(client_of(server), Span(ONE, server, 0, 5))


async def test_a_message_that_is_too_long_names_the_option_to_raise(autojump_clock: MockClock) -> None:
    async with place() as there:
        await feed(there.store, ONE, ["x" * 5000])
        with pytest.raises(OptionError, match="option maxMessageBytes"):
            await ids(there.client(maxMessageBytes="4k"), Span(ONE, there.url, 0, 1))


async def test_a_server_that_says_nothing_is_dialled_again_and_given_up_in_the_end(autojump_clock: MockClock) -> None:
    asked: list[int] = []

    async def act(requests: Requests, stream: trio.abc.Stream) -> None:
        asked.append(len(requests))
        await trio.sleep_forever()

    async with scripted("mute", act) as server:
        with pytest.raises(StreamUnavailable, match=r"option readTimeout=120 s: .*nothing came for 20 s"):
            await ids(client_of(server), Span(ONE, server, 0, 5))
    assert len(asked) > 3


async def test_the_time_that_rows_take_to_go_on_is_not_the_servers_silence(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 2000)
        got = 0

        async def take(block: Block) -> None:
            nonlocal got
            got += len(block)
            await trio.sleep(500)

        await there.client(readTimeout="10s").fetch(Span(ONE, there.url, 0, 2000), take)
        assert got == 2000


async def test_numbers_that_end_within_a_range_are_verified(autojump_clock: MockClock) -> None:
    async def act(requests: Requests, stream: trio.abc.Stream) -> None:
        await stream.send_all(lines({"id": 1, "data": {"value": 7}}, {"id": 2, "data": {"value": 9, "crc": 1}}))
        await trio.sleep_forever()

    async with scripted("numbers", act) as server:
        with pytest.raises(StreamBroken, match="the numbers have the CRC"):
            await ids(client_of(server, verify="numbers"), Span(ONE, server, 0, 2))
        assert await ids(client_of(server), Span(ONE, server, 0, 2)) == [1, 2]


# ---------------------------------------------------------------------------- counting ahead


async def test_counting_stops_where_it_is_quiet(autojump_clock: MockClock) -> None:
    async with place(status=False) as there:
        await there.feed(ONE, 25)
        assert await there.client().count(there.url, ONE, 5, most=1000) == 25
        assert await there.client().count(there.url, ONE, 25, most=1000) == 25


async def test_counting_stops_at_a_number_or_a_size(autojump_clock: MockClock) -> None:
    async with place(status=False) as there:
        await feed(there.store, ONE, ["x" * 98] * 50)
        assert await there.client().count(there.url, ONE, 0, most=10) == 10
        assert await there.client().count(there.url, ONE, 0, most=1000, most_bytes=2001) == 21


# ---------------------------------------------------------------------------- acknowledging


async def test_what_is_acknowledged_is_forgotten_by_the_server_before_this_returns(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.client().acknowledge(there.url, ONE, 7)
        assert await there.acknowledged(ONE) == 7


async def test_an_acknowledgement_may_be_repeated_and_may_come_late(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        for id in (7, 7, 3):
            await there.client().acknowledge(there.url, ONE, id)
        assert await there.acknowledged(ONE) == 7


async def test_the_last_message_of_a_finished_stream_is_acknowledged_as_well(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 10)
        await there.store.finish(ONE)
        await there.client().acknowledge(there.url, ONE, 10)
        assert await there.acknowledged(ONE) == 10


# ---------------------------------------------------------------------------- transports


@pytest.mark.parametrize("transport", ["tls", "wss"])
async def test_it_works_over_tls_and_trusts_whom_it_was_told_to_trust(transport: str, tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    async with restream.open_store("memory:", keep=KEEP) as store, trio.open_nursery() as nursery:
        await feed(store, ONE, [1, 2, 3])
        served: restream.Served = await nursery.start(
            partial(
                restream.serve,
                f"restream+{transport}://127.0.0.1:0",
                store,
                application=restream.Fed(),
                config=restream.ServerConfig(status=True),
                ssl_context=context,
            )
        )
        client = client_of(served.url, tlsCaFile=str(tmp_path / "ca.pem"))
        assert told(await client.status(served.url, ONE)) == (3, 0, False, 0)
        assert await ids(client, Span(ONE, served.url, 0, 3)) == [1, 2, 3]
        await client.acknowledge(served.url, ONE, 3)
        with trio.fail_after(60):
            while (await store.status(ONE)).acknowledged != 3:  # noqa: ASYNC110 - over wss no event says when
                await trio.sleep(0.01)
        stranger = client_of(served.url, tlsCaFile=str(tmp_path / "other.pem"))
        with pytest.raises(StreamUnavailable, match=r"there can be no connection: .*certificate"):
            await stranger.status(served.url, ONE)
        # A file that was renewed is read again, by the same client.
        os.utime(tmp_path / "other.pem", (1, 1))
        authority.cert_pem.write_to_path(str(tmp_path / "other.pem"))
        assert told(await stranger.status(served.url, ONE)) == (3, 3, False, 1)
        nursery.cancel_scope.cancel()


async def test_files_that_are_not_there_are_errors_of_their_options() -> None:
    server = "restream+tls://127.0.0.1:1"
    with pytest.raises(OptionError, match=r"option tlsCaFile: nowhere\.pem"):
        await client_of(server, tlsCaFile="nowhere.pem").status(server, ONE)
    with pytest.raises(OptionError, match=r"option tlsCertFile: nowhere\.pem"):
        await client_of(server, tlsCertFile="nowhere.pem").status(server, ONE)


async def test_an_unknown_transport_is_an_error_before_anybody_is_dialled() -> None:
    server = "restream+pigeon://roof"
    with pytest.raises(OptionError, match=r"option servers: restream\+pigeon://roof: .*pigeon"):
        await client_of(server).status(server, ONE)
