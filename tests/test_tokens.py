"""Tokens: who is let in, what the others read, and what no log shows."""

from __future__ import annotations

import logging
from contextlib import suppress

import pytest
import trio
import trio.testing

import muxkit
from muxkit.runtime import can_heal

USERS = {"alice": "a-long-token", "bob": "another-token"}
URLS = [
    "bpmux+tcp://127.0.0.1:0",
    "relink+tcp://127.0.0.1:0/chat",
    "aqueduct+tcp://127.0.0.1:0",
    "bpmux+ws://127.0.0.1:0/mux",
    "bpmux+mem://tokens",
]


async def whoami(channel: muxkit.Channel) -> None:
    await channel.send((channel.session.info.user or "nobody").encode())


@pytest.mark.parametrize("url", URLS)
async def test_a_token_says_who_it_is(url: str) -> None:
    async with muxkit.open_server(whoami, url, authorize=muxkit.tokens(USERS)) as server:
        for name, token in USERS.items():
            async with muxkit.connect(server.url, token=token) as session, session.open("whoami") as channel:
                assert await channel.receive() == name.encode()
                assert session.info.user is None


@pytest.mark.parametrize("token", ["wrong", None])
@pytest.mark.parametrize("url", URLS)
async def test_a_client_that_is_not_let_in_reads_why(url: str, token: str | None) -> None:
    async with muxkit.open_server(whoami, url, authorize=muxkit.tokens(USERS)) as server:
        with pytest.raises((muxkit.Refused, muxkit.LinkLost)) as caught:
            async with muxkit.connect(server.url, token=token) as session, session.open("whoami") as channel:
                await channel.receive()
        error = caught.value
        assert isinstance(error, (muxkit.Refused, muxkit.LinkLost))
        reason = error.peer_reason if isinstance(error, muxkit.LinkLost) else error.reason
        why = "this server does not know the token" if token else "this server wants a token: connect(…, token=…)"
        assert (reason, error.code) == (why, 401)
        assert str(error).count(why) == 1


async def test_an_authorize_of_ones_own_sees_the_connection_and_may_wait() -> None:
    seen: list[tuple[muxkit.SessionInfo, str | None]] = []

    async def authorize(info: muxkit.SessionInfo, token: str | None) -> str | None:
        seen.append((info, token))
        await trio.lowlevel.checkpoint()
        if token == "no":
            raise muxkit.Refused("not today", code=7)
        return token

    async with muxkit.open_server(whoami, URLS[0], authorize=authorize) as server:
        async with muxkit.connect(server.url, token="carol") as session, session.open() as channel:
            assert await channel.receive() == b"carol"
        async with muxkit.connect(server.url) as session, session.open() as channel:
            assert await channel.receive() == b"nobody"
        with pytest.raises(muxkit.Refused, match="not today") as caught:
            async with muxkit.connect(server.url, token="no"):
                pass
        assert caught.value.code == 7
    assert [token for _, token in seen] == ["carol", None, "no"]
    assert seen[0][0].protocol == "bpmux"
    assert seen[0][0].peer.startswith("tcp 127.0.0.1:")


async def test_a_client_of_another_protocol_reads_so() -> None:
    async with muxkit.open_server(whoami, URLS[0], authorize=muxkit.tokens(USERS)) as server:
        other = server.url.replace("bpmux+", "aqueduct+")
        with pytest.raises(muxkit.Refused, match="this is a server of bpmux, not of aqueduct"):
            async with muxkit.connect(other, token="a-long-token"):
                pass


async def test_no_token_is_in_any_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with muxkit.open_server(whoami, URLS[0], authorize=muxkit.tokens(USERS)) as server:
        for token in ("a-long-token", "a-wrong-one"):
            try:
                async with muxkit.connect(server.url, token=token) as session:
                    await session.ping()
            except muxkit.Refused:
                pass
    text = caplog.text + "".join(repr(record.args) for record in caplog.records)
    assert "a-long-token" not in text
    assert "a-wrong-one" not in text


@pytest.mark.parametrize(
    "line",
    [b"\x1b[31mred eA==\n", b"\xff eA==\n", b"bpmux \xff\n", bytes(9999)],
    ids=["escape", "name", "token", "long"],
)
async def test_a_token_line_of_odd_bytes_is_one_calm_line_in_the_log(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can send these bytes, so they are no ERROR, and write no escape codes into a log."""
    caplog.set_level(logging.INFO)
    async with muxkit.open_server(whoami, URLS[0], authorize=muxkit.tokens(USERS)) as server:
        async with await trio.open_tcp_stream("127.0.0.1", int(server.url.rpartition(":")[2])) as stream:
            with suppress(trio.BrokenResourceError), trio.fail_after(60):
                await stream.send_all(b"muxkit 1 " + line)
                while await stream.receive_some():
                    pass
    (record,) = [
        record for record in caplog.records if "let in" in record.getMessage() or record.levelno > logging.INFO
    ]
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("a client was not let in: tcp 127.0.0.1:")
    assert record.getMessage().isprintable()


async def test_an_authorize_that_fails_is_named_in_the_log_and_told_to_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was an ERROR about the handler of a connection, and the client only saw that the server hung up."""

    def authorize(info: muxkit.SessionInfo, token: str | None) -> str:
        raise KeyError(token)

    async with muxkit.open_server(whoami, URLS[0], authorize=authorize) as server:
        with pytest.raises(muxkit.Refused, match="failed to check who you are") as caught:
            async with muxkit.connect(server.url, token="a-long-token"):
                pass
    assert caught.value.code == 500
    assert can_heal(caught.value)
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record.getMessage().startswith("authorize failed, the client was not let in: KeyError")
    assert "a-long-token" not in caplog.text


@pytest.mark.parametrize("url", ["bpmux+tcp://127.0.0.1:0", "relink+tcp://127.0.0.1:0"])
async def test_a_refusal_that_quotes_the_client_is_escaped_in_the_log(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def refuse(session: muxkit.Session) -> None:
        raise muxkit.Refused("not \x1b[31mhere\nfor you")

    async with muxkit.open_server(refuse, url) as server:
        with suppress(muxkit.MuxError):
            async with muxkit.connect(server.url) as session, session.open() as channel:
                await channel.receive()
    assert len([text for text in caplog.messages if "sent away" in text]) == 1
    assert all(text.isprintable() for text in caplog.messages)


async def test_a_token_for_a_server_that_wants_none_is_a_clear_error(autojump_clock: trio.testing.MockClock) -> None:
    async with muxkit.open_server(whoami, "bpmux+mem://tokens") as server:
        with pytest.raises(muxkit.MuxError):
            async with muxkit.connect(server.url, token="x") as session:
                await session.ping()


@pytest.mark.parametrize("token", ["", "x" * 3000])
async def test_a_token_that_cannot_be_sent_is_refused_here(token: str) -> None:
    with pytest.raises(ValueError, match=r"invalid token=…: expected 1 to 2048 characters, got \d+"):
        async with muxkit.connect(URLS[0], token=token):
            pass


def test_an_empty_token_is_refused_when_it_is_configured() -> None:
    with pytest.raises(ValueError, match="expected a token, got an empty string"):
        muxkit.tokens({"alice": ""})
