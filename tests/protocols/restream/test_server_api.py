"""The calls of a server to an object with the specification's five methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit.protocols import restream
from muxkit.protocols.restream.server import sessions as server_sessions
from muxkit.protocols.restream.store import Message
from tests.protocols.restream._server_clients import U1, ack, begin, place, resume

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from tests.protocols.restream._server_clients import Place


class Recorder:
    """The five methods and nothing else, with a record of the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.state: Any = None
        self.messages: list[Message[Any]] = []
        self.gate = trio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.failing = ""

    async def _note(self, *call: object) -> None:
        self.calls.append(call)
        await trio.lowlevel.checkpoint()
        if self.failing == call[0]:
            raise RuntimeError("boom")

    async def register(self, uuid: str, state: Any) -> None:  # noqa: ANN401
        await self._note("register", uuid, dict(state))
        self.state = state

    async def disconnect(self, uuid: str) -> None:
        await self._note("disconnect", uuid)

    async def put(self, uuid: str, transform: Callable[[Any], tuple[Any, Any]]) -> Message[Any]:
        await self._note("put", uuid)
        transform(self.state)  # it is pure: a store may repeat it
        data, self.state = transform(self.state)
        message = Message(len(self.messages) + 1, data)
        await self.gate.wait()
        self.messages.append(message)
        return message

    async def after(self, uuid: str, id: int) -> Message[Any] | None:
        await self._note("after", uuid, id)
        return self.messages[id] if id < len(self.messages) else None

    async def ack(self, uuid: str, id: int) -> None:
        await self._note("ack", uuid, id)


@pytest.mark.clause("restream-I01", "restream-I12", "restream-I17", "restream-I18", "restream-N01", "restream-I05")
async def test_a_stream_is_register_then_after_and_put_in_turn_and_disconnect_at_the_end(
    autojump_clock: MockClock,
) -> None:
    sessions = Recorder()
    async with place(sessions, random32=lambda: 99) as there:
        got = await (await there.ask(begin(2))).rest()
        await there.all_left()
    assert sessions.calls == [
        ("register", U1, {"count": 2, "value": 99, "crc": 0}),
        ("after", U1, 0),
        ("put", U1),
        ("after", U1, 1),
        ("put", U1),
        ("disconnect", U1),
    ]
    assert [message["id"] for message in got] == [1, 2]
    assert sessions.state["count"] == 0


@pytest.mark.clause("restream-I16", "restream-I19", "restream-I20", "restream-N05")
async def test_a_resumed_stream_asks_for_what_is_stored_and_an_ack_is_handed_on(autojump_clock: MockClock) -> None:
    sessions = Recorder()
    async with place(sessions) as there:
        await (await there.ask(begin(3))).rest()
        await there.all_left()
        sessions.calls.clear()
        client = await there.ask(resume(1))
        assert await client.hear_ids(2) == [2, 3]
        await client.say(ack(2))
        await client.rest()
        await there.all_left()
        assert sessions.calls == [("after", U1, 1), ("after", U1, 2), ("ack", U1, 2), ("disconnect", U1)]
        assert await (await there.ask(resume(3))).rest() == []


@pytest.mark.clause("restream-N02")
async def test_each_session_begins_with_a_random_number_of_32_bits(autojump_clock: MockClock) -> None:
    sessions = Recorder()
    uuids = [restream.new_uuid() for _ in range(200)]
    async with place(sessions) as there:
        for uuid in uuids:
            await (await there.ask({**begin(1), "uuid": uuid})).hear()
    seeds = [call[2]["value"] for call in sessions.calls if call[0] == "register" and isinstance(call[2], dict)]
    assert len(seeds) == len(uuids)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len(set(seeds)) > 190
    assert max(seeds) > 2**31


@pytest.mark.clause("restream-G04", "restream-I06", "restream-I15")
@pytest.mark.requirement("R-53")
async def test_nothing_of_a_message_is_sent_before_put_is_done_and_others_are_served_meanwhile(
    autojump_clock: MockClock,
) -> None:
    sessions = Recorder()
    sessions.gate = trio.Event()
    async with place(sessions) as there:
        client = await there.ask(begin(1))
        with trio.move_on_after(100.0) as waited:
            await client.stream.receive_some(1)
        assert waited.cancelled_caught
        assert list(await (await there.ask({})).hear()) == ["data"]
        sessions.gate.set()
        assert await client.hear_ids(1) == [1]


@pytest.mark.clause("restream-I07", "restream-F06", "restream-F08")
@pytest.mark.parametrize("method", ["register", "put", "after"])
async def test_what_a_method_raises_is_relayed_as_an_error_line(method: str, autojump_clock: MockClock) -> None:
    sessions = Recorder()
    sessions.failing = method
    async with place(sessions) as there:
        assert await (await there.ask(begin(1))).error() == "boom"
        sessions.failing = ""
        assert len(await (await there.ask(begin(1))).rest()) == 1


@pytest.mark.clause("restream-I07")
async def test_an_ack_that_fails_ends_the_stream_with_its_error(autojump_clock: MockClock) -> None:
    sessions = Recorder()
    sessions.failing = "ack"
    async with place(sessions, pace=10.0) as there:
        client = await there.ask(begin(9))
        await client.hear_ids(1)
        await client.say(ack(1))
        assert (await client.rest())[-1] == {"error": "boom"}


@pytest.mark.clause("restream-I10")
async def test_disconnect_is_called_once_for_each_session_and_never_for_a_stateless_stream(
    autojump_clock: MockClock,
) -> None:
    sessions = Recorder()
    async with place(sessions) as there:
        lost = await there.ask(begin(60_000))
        await lost.hear()
        await lost.hang_up()
        await there.all_left()
        assert [call for call in sessions.calls if call[0] == "disconnect"] == [("disconnect", U1)]
        stateless = await there.ask({})
        await stateless.hear()
        await stateless.hang_up()
        await there.all_left()
        assert sum(call[0] == "disconnect" for call in sessions.calls) == 1


@pytest.mark.clause("restream-T02")
async def test_a_takeover_does_not_look_like_a_client_that_is_gone(autojump_clock: MockClock) -> None:
    sessions = Recorder()
    async with place(sessions, pace=10.0) as there:
        old = await there.ask(begin(20))
        await old.hear_ids(2)
        new = await there.ask(resume(2))
        await new.hear_ids(2)
        assert "taken over" in (await old.rest())[-1]["error"]
        assert ("disconnect", U1) not in sessions.calls
        await new.hang_up()
        await there.all_left()
        assert sessions.calls[-1] == ("disconnect", U1)
    async with place(sessions, takeover=False, pace=10.0) as strict:
        await (await strict.ask(resume(4))).hear_ids(1)
        assert "has an open connection" in await (await strict.ask(resume(4))).error()


@pytest.mark.requirement("R-71")
@pytest.mark.clause("restream-S26", "restream-S29", "restream-S37", "restream-S39")
async def test_what_was_acknowledged_counts_on_later_connections_whatever_the_object_does_with_it(
    autojump_clock: MockClock,
) -> None:
    """Was: A restream server over an object with the document's five methods knew on a later connection nothing of what
    had been acknowledged: a lower state or ack, or `params` again, went through.
    """
    sessions = Recorder()
    async with place(sessions, pace=100.0) as there:
        await _read_acknowledge_and_leave(there, U1, 6, 3)
        assert "state 2 is before message 3, which was acknowledged" in await (await there.ask(resume(2))).error()
        assert "up to 3 were acknowledged" in await (await there.ask(begin(60_000))).error()
        client = await there.ask(resume(3))
        assert await client.hear_ids(1) == [4]
        await client.say(ack(2))
        assert "ack 2 after ack 3" in (await client.rest())[-1]["error"]
        # Messages of an earlier connection may be acknowledged on a later one.
        client = await there.ask(resume(4), ack(6))
        assert await client.hear_ids(1) == [5]
        newer = await there.ask(resume(5))
        assert "state 5 is before message 6" in await newer.error()
        await client.hang_up()


@pytest.mark.clause("restream-S39")
async def test_an_object_alone_knows_how_long_its_sessions_live(autojump_clock: MockClock) -> None:
    """The server remembers an absent session no longer than a client may be absent."""
    sessions = Recorder()
    async with place(sessions, pace=100.0) as there:
        await _read_acknowledge_and_leave(there, U1, 6, 3)
        await trio.sleep(31)
        assert await (await there.ask(resume(2))).hear_ids(1) == [3]


async def test_absent_sessions_of_such_an_object_are_remembered_up_to_a_number(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_sessions, "MAX_ABSENT", 1)
    other = restream.new_uuid()
    async with place(Recorder(), pace=100.0) as there:
        for uuid in (U1, other):
            await _read_acknowledge_and_leave(there, uuid, 3, 2)
        assert "before message 2" in await (await there.ask(resume(1, other))).error()
        assert await (await there.ask(resume(1))).hear_ids(1) == [2]


async def _read_acknowledge_and_leave(there: Place, uuid: str, count: int, acknowledged: int) -> None:
    client = await there.ask(begin(60_000, uuid))
    await client.hear_ids(count)
    await client.say(ack(acknowledged, uuid))
    await client.hear_ids(1)
    await client.hang_up()
    await there.all_left()


async def test_such_an_object_knows_no_status(autojump_clock: MockClock) -> None:
    async with place(Recorder(), config=restream.ServerConfig(status=True)) as there:
        assert "knows no status" in await (await there.ask({"uuid": U1, "status": True})).error()
