"""A server as a client sees it: both modes, over a byte stream."""

from __future__ import annotations

import json
import zlib

import pytest
import trio

from muxkit.protocols import restream
from muxkit.protocols.restream.applications import next_value
from tests.protocols.restream._server_clients import U1, U2, ack, begin, place, resume, stored_ids

WAIT = 0.5  # s of virtual time, after which nothing more happens


# --- both modes


@pytest.mark.clause("restream-C01")
async def test_one_service_serves_both_modes_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with place(stateless=restream.Doubling()) as there:
        values, messages = await there.ask({"state": "23"}), await there.ask(begin(3))
        assert [await values.hear() for _ in range(3)] == [{"data": "46"}, {"data": "92"}, {"data": "184"}]
        assert await messages.hear_ids(3) == [1, 2, 3]


@pytest.mark.clause("restream-C02")
async def test_nothing_is_said_before_the_client_has_spoken(autojump_clock: trio.testing.MockClock) -> None:
    async with place() as there:
        client = there.connect()
        with trio.move_on_after(WAIT) as waited:
            await client.line()
        assert waited.cancelled_caught
        await client.say({})
        assert list(await client.hear()) == ["data"]


@pytest.mark.clause("restream-F05", "restream-F09")
async def test_a_line_that_is_no_json_gets_one_error_line_and_the_end(autojump_clock: trio.testing.MockClock) -> None:
    async with place() as there:
        client = await there.ask(b"nope\n{}\n")
        assert "not JSON" in await client.error()


@pytest.mark.requirement("R-71")
@pytest.mark.clause("restream-S36")
@pytest.mark.parametrize("id", [1, 7])
async def test_an_illegal_ack_right_behind_the_request_gets_its_error_line_at_once(
    id: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Was: An illegal ack right behind a request got no error line, and the connection stayed for the whole linger."""
    async with place() as there:
        client = there.connect()
        began = trio.current_time()
        await client.stream.send_all(json.dumps(begin(5)).encode() + b"\n" + json.dumps(ack(id)).encode() + b"\n")
        assert str(id) in await client.error()
        assert trio.current_time() == began


async def test_a_request_for_a_session_has_a_length_and_a_resume_of_integers_a_longer_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with place(stateless=restream.Doubling()) as there:
        client = await there.ask({"uuid": U1, "params": {"count": 1, "more": "x" * 9000}})
        assert "against 8192 allowed" in await client.error()
        assert await (await there.ask({"state": "1" * 9000})).hear()


# --- stateless


@pytest.mark.clause("restream-L05", "restream-L06", "restream-L12")
async def test_a_stateless_stream_goes_on_for_as_long_as_it_is_read(autojump_clock: trio.testing.MockClock) -> None:
    class Counting:
        def first(self, random32: int) -> int:
            return 1

        def next(self, value: int) -> int:
            return value + 1

    async with place(stateless=Counting()) as there:
        client = await there.ask({})
        assert [(await client.hear())["data"] for _ in range(20_000)] == [str(n) for n in range(1, 20_001)]
        again = await there.ask({"state": "9"})
        assert await again.hear() == {"data": "10"}


@pytest.mark.clause("restream-L04")
@pytest.mark.requirement("R-25")
async def test_values_as_long_as_allowed_are_streamed_and_longer_ones_end_the_stream() -> None:
    async with place(stateless=restream.Doubling()) as there:
        client = await there.ask({"state": "1" + "0" * 99_998})  # 99,999 digits, doubled in threads
        values = [restream.parse_integer((await client.hear())["data"]) for _ in range(6)]
        assert values == [2**n * 10**99_998 for n in range(1, 7)]
        assert "more than 100000 digits" in await client.error()


@pytest.mark.clause("restream-L07")
async def test_a_client_that_has_enough_leaves_and_nothing_is_left_of_it(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with place() as there:
        client = await there.ask({})
        await client.hear()
        await client.hang_up()
        await there.all_left()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


# --- sessions


@pytest.mark.clause("restream-S06", "restream-S08", "restream-S10", "restream-S22", "restream-N03")
async def test_a_session_is_count_messages_with_the_checksum_in_the_last(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with place(random32=lambda: 99) as there:
        got = await (await there.ask(begin(500))).rest()
    assert [message["id"] for message in got] == list(range(1, 501))
    value, crc = 99, 0
    for message in got:
        value = next_value(value)
        crc = zlib.crc32(value.to_bytes(4, "big"), crc)
        assert message["data"]["value"] == value
        assert ("crc" in message["data"]) == (message["id"] == 500)
    assert got[-1]["data"]["crc"] == crc


@pytest.mark.clause("restream-S19", "restream-S20", "restream-T01")
async def test_a_resumed_session_repeats_the_same_bytes_and_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    async with place() as there:
        first = await there.ask(begin(400))
        lines = [await first.line() for _ in range(3)]
        await first.hang_up()
        again = await there.ask(resume(1))
        assert [await again.line() for _ in range(2)] == lines[1:]
        assert [message["id"] for message in await again.rest()] == list(range(4, 401))


@pytest.mark.clause("restream-S23")
async def test_a_session_that_was_read_to_its_end_is_closed_without_a_word(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with place() as there:
        await (await there.ask(begin(5))).rest()
        assert await (await there.ask(resume(5))).rest() == []


@pytest.mark.clause("restream-S24", "restream-S26", "restream-S27")
async def test_a_session_cannot_be_resumed_where_it_is_not(autojump_clock: trio.testing.MockClock) -> None:
    async with place() as there:
        assert "is not known" in await (await there.ask(resume(3))).error()
        await (await there.ask(begin(5))).rest()
        assert "beyond the last message" in await (await there.ask(resume(6))).error()
        client = await there.ask(resume(4))
        await client.hear_ids(1)
        await client.say(ack(4))
        await client.rest()
        await there.all_left()
        assert "before message 4, which was acknowledged" in await (await there.ask(resume(3))).error()
        assert await (await there.ask(resume(4))).hear_ids(1) == [5]


@pytest.mark.clause("restream-G01")
async def test_every_place_behind_the_acknowledged_one_can_be_resumed_from(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with place() as there:
        client = await there.ask(begin(10))
        await client.hear_ids(10)
        await client.say(ack(4))
        await client.rest()
        await there.all_left()
        for state in range(4, 10):
            assert (await (await there.ask(resume(state))).rest())[0]["id"] == state + 1


@pytest.mark.clause("restream-S29")
async def test_params_for_a_known_session_replay_it_if_they_are_the_same_and_nothing_is_acknowledged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with place() as there:
        first = await (await there.ask(begin(5))).rest()
        assert await (await there.ask(begin(5))).rest() == first
        assert "with other params" in await (await there.ask(begin(6))).error()
        client = await there.ask(resume(0))
        await client.hear_ids(5)
        await client.say(ack(1))
        await client.rest()
        await there.all_left()
        assert "were acknowledged" in await (await there.ask(begin(5))).error()


@pytest.mark.clause("restream-S31", "restream-S33", "restream-S34", "restream-S38", "restream-G02", "restream-G08")
async def test_an_ack_deletes_and_changes_nothing_of_what_is_sent(autojump_clock: trio.testing.MockClock) -> None:
    async with place(pace=10.0) as there:
        client = await there.ask(begin(6))
        assert await client.hear_ids(3) == [1, 2, 3]
        assert (await stored_ids(there.store))[:3] == [1, 2, 3]
        await client.say(ack(2), ack(2))
        await trio.sleep(0.05)
        assert (await stored_ids(there.store))[0] == 3
        assert await client.hear_ids(3) == [4, 5, 6]


@pytest.mark.clause("restream-S36", "restream-S37", "restream-S39", "restream-S40")
@pytest.mark.parametrize(
    ("said", "error"),
    [([ack(4)], "was not sent"), ([ack(2), ack(1)], "have to ascend"), ([ack(1, U2)], "another session")],
)
async def test_a_wrong_ack_ends_the_connection(
    said: list[object], error: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with place(pace=10.0) as there:
        client = await there.ask(begin(9))
        await client.hear_ids(3)
        await client.say(*said)
        *_, last = await client.rest()
        assert error in last["error"]


@pytest.mark.requirement("R-41")
async def test_acks_that_follow_the_final_message_are_taken(autojump_clock: trio.testing.MockClock) -> None:
    async with place() as there:
        client = await there.ask(begin(3))
        await client.hear_ids(3)
        await client.say(ack(3))
        await client.hang_up()
        await there.all_left()
        assert (await there.store.status(U1)).acknowledged == 3


@pytest.mark.clause("restream-S03", "restream-S04")
@pytest.mark.parametrize("count", [0, 65_536, "5", 1.5, True, None])
async def test_a_count_that_cannot_be_begins_no_session(count: object, autojump_clock: trio.testing.MockClock) -> None:
    async with place() as there:
        assert "count" in await (await there.ask({"uuid": U1, "params": {"count": count}})).error()
        assert await there.store.sessions() == []


# --- additions


async def test_a_status_request_is_answered_where_that_is_switched_on(autojump_clock: trio.testing.MockClock) -> None:
    async with place(config=restream.ServerConfig(status=True)) as there:
        await (await there.ask(begin(3))).rest()
        (answer,) = await (await there.ask({"uuid": U1, "status": True})).rest()
        more = {"incarnation": (await there.store.status(U1)).incarnation, "written": answer["status"]["written"]}
        assert answer == {"status": {"head": 3, "acknowledged": 0, "final": True, "epoch": 1} | more}
        assert more["written"] > 3 * len('{"value":1}')
        assert "is not known" in await (await there.ask({"uuid": U2, "status": True})).error()
    async with place() as plain:
        assert "cannot hold this" in await (await plain.ask({"uuid": U1, "status": True})).error()


async def test_a_pace_is_kept_and_a_pause_is_not_made_up_for(autojump_clock: trio.testing.MockClock) -> None:
    async with place(pace=10.0) as there:
        client = await there.ask(begin(100))
        times = []
        for _ in range(11):
            await client.hear()
            times.append(trio.current_time())
        assert times[-1] - times[0] == pytest.approx(1.0)
    async with place(pace=1000.0) as fast:
        client, began = await fast.ask({}), trio.current_time()
        for _ in range(2000):
            await client.hear()
        assert 1.9 < trio.current_time() - began < 2.1


async def test_another_application_streams_what_it_likes(autojump_clock: trio.testing.MockClock) -> None:
    class Letters:
        generates = True

        def initial(self, params: object, random32: int) -> str:
            assert isinstance(params, dict)
            return str(params["word"])

        def step(self, state: str) -> tuple[dict[str, str], str]:
            return {"letter": state[0]}, state[1:]

        def is_over(self, state: str) -> bool:
            return not state

        def is_final(self, data: object) -> bool:
            return False

    async with place(application=Letters()) as there:
        got = await (await there.ask({"uuid": U1, "params": {"word": "grün"}})).rest()
    assert got == [{"id": id, "data": {"letter": letter}} for id, letter in enumerate("grün", 1)]
    assert json.dumps(got)
