"""The life of a session in the log and at an observer: when it opened, with whom, and how it ended."""

from __future__ import annotations

import logging

import pytest
import trio

import muxkit

PATIENCE = 60.0  # s


class Sessions(muxkit.BaseObserver):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, BaseException | None]] = []

    def session_opened(self, info: muxkit.SessionInfo) -> None:
        self.seen.append(("opened", info.protocol, None))

    def session_closed(self, info: muxkit.SessionInfo, error: BaseException | None) -> None:
        self.seen.append(("closed", info.protocol, error))


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@pytest.mark.parametrize("url", [f"{name}+mem://life" for name in ("bpmux", "relink", "aqueduct", "e3x", "yamux")])
async def test_a_session_is_told_when_it_opens_and_closes(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Was: the log of a normal life had not one line, at any level."""
    caplog.set_level(logging.INFO, "muxkit")
    client, served = Sessions(), Sessions()
    with trio.fail_after(PATIENCE):
        async with (
            muxkit.open_server(echo, url, observer=served) as server,
            muxkit.connect(server.url, observer=client) as session,
            session.open() as channel,
        ):
            await channel.send(b"x")
            assert await channel.receive() == b"x"
    protocol = url.partition("+")[0]
    assert client.seen == [("opened", protocol, None), ("closed", protocol, None)]
    assert [event for event, *_ in served.seen] == ["opened", "closed"]
    lines = [record for record in caplog.records if "session" in record.message]
    assert len(lines) == 4
    for record in lines:
        assert record.levelno == logging.INFO
        assert {"connection", "peer"} <= vars(record).keys()
    numbers = [vars(record)["connection"] for record in lines]
    assert sorted(numbers) == sorted([*{*numbers}] * 2)  # two lines a session


async def test_a_session_that_ends_by_an_error_says_which(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muxkit")
    observer = Sessions()
    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(echo, "bpmux+mem://life") as server:
            with pytest.raises(ValueError, match="what a peer sent"):
                async with muxkit.connect(server.url, observer=observer):
                    raise ValueError("what a peer sent")
    assert isinstance(observer.seen[-1][2], ValueError)
    assert any(record.message.endswith("by ValueError") for record in caplog.records)
    assert not any("what a peer sent" in record.message for record in caplog.records)


async def test_the_failure_of_a_handler_names_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(channel: muxkit.Channel) -> None:
        raise RuntimeError

    with trio.fail_after(PATIENCE):
        async with (
            muxkit.open_server(fail, "bpmux+mem://life") as server,
            muxkit.connect(server.url) as session,
            session.open("upload") as channel,
        ):
            with pytest.raises(muxkit.ChannelCancelled):
                await channel.receive()
    (failed,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(failed)["channel"] == "upload"
    assert vars(failed)["peer"].startswith("mem")
