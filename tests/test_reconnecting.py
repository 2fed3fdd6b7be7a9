"""One session after another: what a loop over `muxkit.reconnecting` sees when the server comes and goes."""

from __future__ import annotations

import logging
import re
from contextlib import suppress

import pytest
import trio
import trio.testing

import muxkit
from muxkit.runtime.pumps.turns import SYSTEM_TASKS

MEM = "bpmux+mem://comes-and-goes"


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def call(session: muxkit.Session, message: bytes) -> bytes:
    async with session.open() as channel:
        await channel.send(message)
        return await channel.receive()


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "relink", "yamux"])
async def test_each_lost_session_is_followed_by_another(protocol: str, autojump_clock: trio.testing.MockClock) -> None:
    url = f"{protocol}+mem://comes-and-goes"
    got: list[bytes] = []
    async with trio.open_nursery() as nursery:

        async def come_and_go() -> None:
            while True:
                with trio.move_on_after(5):
                    async with muxkit.open_server(echo, url, linger=0.1):
                        await trio.sleep_forever()
                await trio.sleep(3)

        nursery.start_soon(come_and_go)
        async with muxkit.reconnecting(url) as sessions:
            async for session in sessions:
                try:
                    while len(got) < 10:
                        got.append(await call(session, b"%d" % len(got)))
                        await trio.sleep(1)
                    break
                except trio.BrokenResourceError:
                    continue
        nursery.cancel_scope.cancel()
    assert got == [b"%d" % number for number in range(10)]


async def test_an_outage_is_told_at_its_begin_and_at_each_doubling(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: `muxkit.connect` without a server hung without a word."""
    async with trio.open_nursery() as nursery:

        async def come_late() -> None:
            await trio.sleep(100)
            async with muxkit.open_server(echo, MEM):
                await trio.sleep_forever()

        nursery.start_soon(come_late)
        async with muxkit.reconnecting(MEM, backoff=muxkit.Backoff(most=2.0)) as sessions:
            async for session in sessions:
                assert await call(session, b"x") == b"x"
                break
        nursery.cancel_scope.cancel()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert 5 <= len(warnings) <= 9
    when = r"(reconnecting now|trying again in 0\.\d s) \(no time limit\)"
    assert re.fullmatch(rf"{re.escape(MEM)}: .*; {when}", warnings[0])
    assert re.match(rf"{re.escape(MEM)}: no connection for \d+ s: ", warnings[-1])


async def test_patience_ends(autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    with pytest.raises(OSError, match="comes-and-goes"):  # noqa: PT012 - where in the block it is raised is not fixed
        async with muxkit.reconnecting(MEM, patience=60) as sessions:
            async for _ in sessions:
                raise AssertionError("there is no server")
    assert 20 < trio.current_time() - began <= 60


async def test_patience_ends_for_a_protocol_that_dials_by_itself(autojump_clock: trio.testing.MockClock) -> None:
    """Was: `reconnecting("relink+…", patience=…)` gave a link without a connection, and waited for ever."""
    url = "relink+mem://comes-and-goes"
    began = trio.current_time()
    with pytest.raises(muxkit.LinkLost, match="no connection for 60 s"), trio.fail_after(1000):  # noqa: PT012
        async with muxkit.reconnecting(url, patience=60) as sessions:
            async for _ in sessions:
                raise AssertionError("there is no server")
    assert trio.current_time() - began == pytest.approx(60)


async def test_patience_ends_also_after_a_link_that_was_lost(autojump_clock: trio.testing.MockClock) -> None:
    url = "relink+mem://comes-and-goes"
    got = 0
    async with trio.open_nursery() as nursery:

        async def serve_a_while() -> None:
            with trio.move_on_after(5):
                async with muxkit.open_server(echo, url, linger=0.1):
                    await trio.sleep_forever()

        nursery.start_soon(serve_a_while)
        with pytest.raises(muxkit.LinkLost, match="no connection for 60 s"), trio.fail_after(1000):  # noqa: PT012
            async with muxkit.reconnecting(url, patience=60) as sessions:
                async for session in sessions:
                    got += 1
                    with pytest.raises(muxkit.LinkLost):  # noqa: PT012 - any of the calls
                        while True:
                            assert await call(session, b"x") == b"x"
                            await trio.sleep(1)
    assert got == 1


async def test_what_no_later_attempt_can_mend_comes_out_at_once() -> None:
    async with muxkit.reconnecting("bpmux") as sessions:
        with pytest.raises(ValueError, match="invalid URL"):
            await anext(sessions)


async def _wait(session: muxkit.Session) -> None:
    """Do what a program does that has nothing to say: wait for channels, whatever becomes of the session."""
    with suppress(muxkit.LinkLost):
        with suppress(muxkit.Unsupported):
            await session.ping()
        async for _ in session.incoming():
            pass


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "relink", "yamux"])
async def test_a_loop_whose_token_is_missing_ends_with_the_reason(
    protocol: str, autojump_clock: trio.testing.MockClock
) -> None:
    """Was: bpmux and e3x dialled for ever, and left each session as though it had ended in order."""
    only = muxkit.tokens({"a": "a-token-that-is-long"})
    async with muxkit.open_server(echo, f"{protocol}+mem://wants-a-token", authorize=only) as server:
        with pytest.raises(muxkit.LinkLost) as caught, trio.fail_after(60):  # noqa: PT012
            async with muxkit.reconnecting(server.url) as sessions:
                async for session in sessions:
                    await _wait(session)
    assert (caught.value.code, caught.value.peer_reason) == (401, "this server wants a token: connect(…, token=…)")


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "relink", "yamux"])
async def test_a_session_that_was_refused_is_not_left_in_order(
    protocol: str, autojump_clock: trio.testing.MockClock
) -> None:
    only = muxkit.tokens({"a": "a-token-that-is-long"})
    async with muxkit.open_server(echo, f"{protocol}+mem://wants-a-token", authorize=only) as server:
        with pytest.raises(muxkit.LinkLost, match="wants a token"):
            async with muxkit.connect(server.url) as session:
                await _wait(session)


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "relink", "yamux"])
async def test_a_loop_to_a_path_that_is_not_there_ends_with_the_answer(protocol: str) -> None:
    """Was: the upgrade was tried again for ever."""
    async with muxkit.open_server(echo, f"{protocol}+ws://127.0.0.1:0/here") as server:
        with pytest.raises((OSError, muxkit.LinkLost), match="HTTP 404"), trio.fail_after(60):  # noqa: PT012
            async with muxkit.reconnecting(server.url.replace("/here", "/there")) as sessions:
                async for session in sessions:
                    await _wait(session)


@pytest.mark.parametrize(("ours", "theirs"), [("aqueduct", "bpmux"), ("bpmux", "aqueduct"), ("relink", "bpmux")])
async def test_a_loop_to_a_server_of_another_protocol_ends_with_its_name(
    ours: str, theirs: str, autojump_clock: trio.testing.MockClock
) -> None:
    """Was: each of them dialled again for ever, though the text of the failure named the other protocol."""
    async with muxkit.open_server(echo, f"{theirs}+mem://another-protocol") as server:
        with pytest.raises(muxkit.LinkLost, match=f"(?i)look like {theirs}"), trio.fail_after(60):  # noqa: PT012
            async with muxkit.reconnecting(server.url.replace(theirs, ours, 1)) as sessions:
                async for session in sessions:
                    await _wait(session)


async def test_a_server_that_asks_for_another_attempt_gets_one(autojump_clock: trio.testing.MockClock) -> None:
    attempts = 0

    def not_now(info: muxkit.SessionInfo, token: str | None) -> str:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise muxkit.Refused("too many clients", code=429)
        return "a"

    async with muxkit.open_server(echo, MEM, authorize=not_now) as server:
        async with muxkit.reconnecting(server.url, token="a-token") as sessions:
            async for session in sessions:
                assert await call(session, b"x") == b"x"
                break
    assert attempts == 3


async def test_what_the_body_raises_ends_the_loop_and_the_session() -> None:
    async with muxkit.open_server(echo, MEM) as server:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - where in the block it is raised is not fixed
            async with muxkit.reconnecting(server.url) as sessions:
                async for session in sessions:
                    assert await call(session, b"x") == b"x"
                    raise ZeroDivisionError
        await trio.testing.wait_all_tasks_blocked()
        assert server.sessions() == []


async def test_a_loop_that_is_left_closes_its_session() -> None:
    async with muxkit.open_server(echo, MEM) as server:
        async with muxkit.reconnecting(server.url) as sessions:
            async for session in sessions:
                await session.ping()
                break
        await trio.testing.wait_all_tasks_blocked()
        assert server.sessions() == []


async def test_a_cancelled_loop_closes_its_session(autojump_clock: trio.testing.MockClock) -> None:
    async with muxkit.open_server(echo, MEM) as server:
        with trio.move_on_after(5) as scope:
            async with muxkit.reconnecting(server.url) as sessions:
                async for session in sessions:
                    await session.ping()
                    await trio.sleep_forever()
        assert scope.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()
        assert server.sessions() == []


def system_tasks() -> int:
    """Return how many tasks no nursery of the program owns, except those that muxkit starts once in each run."""
    root = trio.lowlevel.current_root_task()
    assert root is not None  # while Trio runs
    tasks = [task for nursery in root.child_nurseries for task in nursery.child_tasks]
    return len([task for task in tasks if task.name not in SYSTEM_TASKS])


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_the_sessions_of_a_block_run_in_it_and_not_in_system_tasks(protocol: str) -> None:
    async with muxkit.open_server(echo, f"{protocol}+mem://block") as server:
        before = system_tasks()
        async with muxkit.reconnecting(server.url) as sessions:
            async for session in sessions:
                assert await call(session, b"x") == b"x"
                assert system_tasks() <= before
                break
        await trio.testing.wait_all_tasks_blocked()
        assert server.sessions() == [] or protocol == "relink"  # which waits for its client


async def test_leaving_the_block_closes_the_session_in_order(autojump_clock: trio.testing.MockClock) -> None:
    got: list[bytes] = []

    async def keep(channel: muxkit.Channel) -> None:
        async for message in channel:
            await trio.sleep(1)
            got.append(message)

    async with muxkit.open_server(keep, MEM) as server:
        async with muxkit.reconnecting(server.url) as sessions:
            async for session in sessions:
                async with session.open() as channel:
                    for number in range(3):
                        await channel.send(b"%d" % number)
                break
        await trio.sleep(10)  # the handler goes on with what the peer has
        assert got == [b"0", b"1", b"2"]


@pytest.mark.parametrize("seconds", [0, 2])
async def test_leaving_the_block_by_an_error_or_a_cancellation_cuts_the_session(
    seconds: float, autojump_clock: trio.testing.MockClock
) -> None:
    async with muxkit.open_server(echo, MEM) as server:
        with trio.move_on_after(3), suppress(ZeroDivisionError):
            async with muxkit.reconnecting(server.url) as sessions:
                async for session in sessions:
                    assert await call(session, b"x") == b"x"
                    await trio.sleep(2 * seconds)
                    raise ZeroDivisionError
        await trio.testing.wait_all_tasks_blocked()
        assert server.sessions() == []


async def test_the_sessions_end_with_their_block() -> None:
    async with muxkit.open_server(echo, MEM) as server:
        async with muxkit.reconnecting(server.url) as sessions:
            await anext(sessions)
        with pytest.raises(trio.ClosedResourceError, match="the block of these sessions was left"):
            await anext(sessions)


async def test_patience_begins_with_the_loop_and_not_with_the_block(autojump_clock: trio.testing.MockClock) -> None:
    async with muxkit.reconnecting(MEM, patience=60) as sessions:
        await trio.sleep(1000)
        began = trio.current_time()
        with pytest.raises(OSError, match="comes-and-goes"):
            await anext(sessions)
        assert trio.current_time() - began > 20


async def test_a_step_of_the_loop_may_have_a_time_limit(autojump_clock: trio.testing.MockClock) -> None:
    async with muxkit.reconnecting(MEM) as sessions:
        with trio.move_on_after(5) as waited:
            await anext(sessions)
        assert waited.cancelled_caught
        async with muxkit.open_server(echo, MEM):
            with trio.fail_after(60):
                session = await anext(sessions)
            assert await call(session, b"x") == b"x"


async def test_a_server_that_hangs_up_on_everybody_is_not_dialled_without_a_pause(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dials = 0

    async def hang_up(session: muxkit.Session) -> None:
        nonlocal dials
        dials += 1

    async with muxkit.open_server(hang_up, MEM) as server:
        with trio.move_on_after(60):
            async with muxkit.reconnecting(server.url) as sessions:
                async for session in sessions:
                    with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):  # noqa: PT012 - where in the block it is raised is not fixed
                        while True:
                            await session.ping()
    assert 3 < dials < 40
