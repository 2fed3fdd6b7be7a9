"""Planted secrets are in no log, no metric, no list of sessions, no trace without payloads, and no text of an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trustme
from cryptography.hazmat.primitives import serialization

import muxkit
from muxkit.metrics import Metrics, endpoint
from muxkit.protocols import restream
from muxkit.trace import FOLDER
from tests.canaries import PASSPHRASE, PASSWORD, PAYLOAD, QUERY, TOKEN, LeakWatch, secrets_in
from tests.metrics._http import get

SECRET = PAYLOAD.encode()
URLS = [
    "bpmux+tcp://127.0.0.1:0",
    "relink+tcp://127.0.0.1:0/jobs",
    "aqueduct+tcp://127.0.0.1:0",
    "e3x+tcp://127.0.0.1:0",
]


@pytest.fixture(autouse=True)
def all_levels() -> Iterator[None]:
    """Let the library log everything: the suite's watch sees what is logged at all."""
    logger = logging.getLogger("muxkit")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    yield
    logger.setLevel(before)


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "traces"))
    return tmp_path / "traces"


def secrets_of_traces(folder: Path) -> list[str]:
    files = [*folder.iterdir()] if folder.exists() else []  # without a session there is no trace
    return [secret for file in files for secret in secrets_in(file.name.encode() + file.read_bytes())]


def texts_of(error: BaseException) -> str:
    """All texts of an error, its causes and its parts."""
    parts = [str(error), repr(error)]
    parts += map(texts_of, error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    parts += [texts_of(error.__cause__)] if error.__cause__ is not None else []
    return " ".join(parts)


async def fails(channel: muxkit.Channel) -> None:
    """Send the first message back, and raise with the second in the text."""
    await channel.send(await channel.receive())
    raise RuntimeError(f"what is {await channel.receive()!r}")


@pytest.mark.parametrize("url", URLS)
async def test_a_handler_that_fails_with_payload_gives_none_of_it_away(
    url: str, traces: Path, watched_log: LeakWatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, ours = Metrics(label_peers=10), Metrics()
    authorize = muxkit.tokens({"alice": TOKEN})
    async with muxkit.open_server(fails, url, observer=metrics, authorize=authorize) as server:
        async with endpoint(server, "127.0.0.1:0") as shown:
            async with muxkit.connect(server.url, token=TOKEN, observer=ours) as session:
                channel = await session.open("tea", payload=SECRET)
                await channel.send(SECRET)
                assert await channel.receive() == SECRET
                pages = [(await get(shown.url, path))[2] for path in ("/metrics", "/sessions", "/healthz")]
                await channel.send(SECRET)
                with pytest.raises((muxkit.ChannelCancelled, muxkit.ChannelStopped)) as caught:
                    await channel.receive()
                channel.abort()
    assert [secrets_in(page) for page in pages] == [[], [], []]
    assert secrets_in(texts_of(caught.value)) == []
    assert secrets_of_traces(traces) == []
    assert watched_log.found == []
    assert "the handler of a channel failed" in caplog.text  # the log was looked at


async def test_a_wrong_token_is_told_to_neither_side(watched_log: LeakWatch) -> None:
    async with muxkit.open_server(fails, URLS[0], authorize=muxkit.tokens({"alice": "tea"})) as server:
        with pytest.raises(muxkit.Refused) as caught:
            await _ping(server.url, token=TOKEN)
    assert secrets_in(texts_of(caught.value)) == []
    assert watched_log.found == []


async def _ping(url: str, *, token: str | None = None) -> None:
    async with muxkit.connect(url, token=token) as session:
        await session.ping()


async def test_a_message_above_the_limit_is_quoted_nowhere(traces: Path, watched_log: LeakWatch) -> None:
    limits = muxkit.Limits(message=100, reassembly=100)
    async with muxkit.open_server(fails, URLS[0], limits=limits) as server:
        with pytest.raises(muxkit.LinkLost) as caught:
            await _send_too_much(server.url)
    assert secrets_in(texts_of(caught.value)) == []
    assert secrets_of_traces(traces) == []
    assert watched_log.found == []


async def _send_too_much(url: str) -> None:
    async with muxkit.connect(url) as session, session.open() as channel:
        await channel.send(SECRET * 100)
        await channel.receive()


def test_the_password_of_a_key_is_in_no_text(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("localhost")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"another")
    )
    (tmp_path / "cert.pem").write_bytes(issued.cert_chain_pems[0].bytes())
    (tmp_path / "key.pem").write_bytes(encrypted)
    with pytest.raises(ValueError, match="password") as caught:
        muxkit.TLS(cert=tmp_path / "cert.pem", key=tmp_path / "key.pem", password=PASSPHRASE).server_context()
    assert secrets_in(texts_of(caught.value)) == []


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
@pytest.mark.parametrize("transport", ["tcp", "ws", "tls"])
async def test_a_password_in_a_url_is_quoted_by_no_error(protocol: str, transport: str, watched_log: LeakWatch) -> None:
    url = f"{protocol}+{transport}://somebody:{PASSWORD}@127.0.0.1:1/jobs"
    with pytest.raises((ValueError, muxkit.LinkLost, ExceptionGroup)) as caught:
        await _ping(url)
    assert secrets_in(texts_of(caught.value)) == []
    assert watched_log.found == []


async def test_what_is_no_url_is_quoted_without_its_password() -> None:
    with pytest.raises(ValueError, match="invalid URL") as caught:
        await _ping(f"tcp://somebody:{PASSWORD}@127.0.0.1:1")
    assert secrets_in(texts_of(caught.value)) == []


@pytest.mark.parametrize("protocol", ["bpmux", "relink"])
async def test_the_query_of_a_url_is_in_no_log_and_no_trace(
    protocol: str, traces: Path, watched_log: LeakWatch
) -> None:
    url = f"{protocol}+ws://127.0.0.1:1/jobs?token={QUERY}"
    with trio.move_on_after(0.2):
        async with muxkit.reconnecting(url, backoff=muxkit.Backoff(first=0.01)) as sessions:
            async for session in sessions:
                await session.ping()
    assert watched_log.found == []
    assert secrets_of_traces(traces) == []


async def test_readers_of_restream_log_no_query(watched_log: LeakWatch) -> None:
    with trio.move_on_after(0.2):
        async with restream.numbers(f"restream+ws://127.0.0.1:1/?token={QUERY}", count=3) as reader:
            await reader.receive()
    assert watched_log.found == []


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_the_watch_finds_what_is_planted(level: int) -> None:
    watch, logger = LeakWatch(), logging.getLogger("watched")
    logger.addHandler(watch)
    try:
        logger.log(level, "a line with %s", TOKEN)
        logger.log(level, "a field", extra={"peer": TOKEN})
        try:
            raise RuntimeError(TOKEN)
        except RuntimeError as error:
            logger.log(level, "a traceback", exc_info=error)
    finally:
        logger.removeHandler(watch)
    assert len(watch.found) == (3 if logger.isEnabledFor(level) else 0)
