"""Traces that are written by real sessions, and read again."""

from __future__ import annotations

import gc
import json
import logging
import os
from pathlib import Path

import pytest
import trio
import trio.testing

import muxkit
from muxkit.protocols import bpmux, restream
from muxkit.trace import FOLDER, Follower, Recording, SessionTrace, Trace, TraceError, differences, read, summary

PROTOCOLS = ("bpmux", "relink", "aqueduct", "e3x", "yamux")
SENT = 20


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


def only(folder: Path, side: str) -> Recording:
    [path] = folder.glob(f"*-{side}-*.sqlog")
    return read(path)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_trace_says_what_the_session_counted(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    async with (
        muxkit.open_server(muxkit.each_channel(echo), f"{protocol}+tcp://127.0.0.1:0") as server,
        muxkit.connect(server.url) as session,
    ):
        async with session.open() as channel:
            for _ in range(SENT):
                await channel.send(bytes(1000))
                await channel.receive()
        stats = session.stats()
    found = summary(only(tmp_path, "client"))
    assert found.broken == 0
    assert found.errors == []
    assert sum(one.bytes_sent for one in found.channels.values()) >= SENT * 1000
    assert sum(one.bytes_received for one in found.channels.values()) >= SENT * 1000
    # Leaving the session writes a little more than the session had counted by then.
    assert stats.bytes_sent <= found.transport_sent <= stats.bytes_sent + 500
    assert stats.bytes_received <= found.transport_received <= stats.bytes_received + 500


async def test_restream_is_traced_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(restream.serve, "restream+tcp://127.0.0.1:0", store)
        async with restream.numbers(served.url, count=10) as numbers:
            assert len([number async for number in numbers]) == 10
        nursery.cancel_scope.cancel()
    del numbers, served
    gc.collect()  # the door knows nothing of restream's streams: their files are closed with the objects
    client, server = (summary(only(tmp_path, side)) for side in ("client", "server"))
    received = [number for name, number in client.frames.items() if name.startswith("received ")]
    assert sum(received) >= 10
    assert client.transport_received == server.transport_sent > 0


async def test_a_file_is_json_seq_with_a_qlog_header(tmp_path: Path) -> None:
    trace = SessionTrace(tmp_path / "trace", name="client here")
    trace.frame("out", 'a "b"\n', "payload", 7)
    trace.transport("out", b"secret")
    trace.close()
    records = (tmp_path / "trace").read_text(encoding="ascii").split("\x1e")
    assert records[0] == ""
    assert all(record.endswith("\n") for record in records[1:])
    header, frame, sent = map(json.loads, records[1:])
    assert header["qlog_format"] == "JSON-SEQ"
    assert header["trace"]["vantage_point"]["type"] == "client"
    assert header["trace"]["common_fields"]["time_format"] == "relative"
    assert (frame["name"], frame["data"]) == (
        "muxkit:frame_sent",
        {"channel": 'a "b"\n', "frame": "payload", "size": 7},
    )
    assert sent["data"] == {"size": 6}  # sizes only
    assert frame["time"] <= sent["time"]


async def test_payloads_are_written_if_asked_for(tmp_path: Path) -> None:
    trace = SessionTrace(tmp_path / "trace", payloads=True)
    trace.transport("in", b"tea")
    trace.close()
    assert read(tmp_path / "trace").events[0].data == {"size": 3, "payload": "dGVh"}


async def test_the_text_of_an_error_of_the_program_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        async with (
            muxkit.open_server(muxkit.each_channel(echo), "bpmux+mem://traced-errors") as server,
            muxkit.connect(server.url, observer=Trace(tmp_path)),
        ):
            raise RuntimeError("secret payload")
    written = [await path.read_text() for path in await trio.Path(tmp_path).iterdir()]
    assert len(written) == 1
    assert "secret" not in written[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full to be a full disk")
async def test_a_full_disk_ends_the_trace_and_not_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *mode: (
            real("/dev/full", os.O_WRONLY) if ".sqlog" in str(path) else real(path, flags, *mode)
        ),
    )
    with caplog.at_level(logging.WARNING, "muxkit"):
        async with (
            muxkit.open_server(muxkit.each_channel(echo), "bpmux+mem://full") as server,
            muxkit.connect(server.url, observer=Trace(tmp_path)) as session,
            session.open() as channel,
        ):
            for _ in range(200):
                await channel.send(bytes(100))
                await channel.receive()
    [said] = [record.getMessage() for record in caplog.records if "the trace" in record.getMessage()]
    assert said.endswith("No space left on device")


async def test_a_folder_that_cannot_be_made_ends_the_trace_and_not_the_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    async with (
        muxkit.open_server(muxkit.each_channel(echo), "bpmux+mem://no-folder") as server,
        muxkit.connect(server.url, observer=Trace(tmp_path / "file" / "below")) as session,
        session.open() as channel,
    ):
        await channel.send(b"tea")
        assert await channel.receive() == b"tea"
    assert "no traces in" in caplog.text


async def test_a_limit_bounds_the_file(tmp_path: Path) -> None:
    trace = SessionTrace(tmp_path / "trace", most=100_000)
    for _ in range(10_000):
        trace.frame("out", "in 1", "payload", 1)
    trace.close()
    assert (tmp_path / "trace").stat().st_size <= 100_000


async def test_a_violation_carries_the_last_events(tmp_path: Path) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    trace = SessionTrace(tmp_path / "trace")

    async def break_a_rule() -> None:
        async with bpmux.session(ours, observer=trace) as session:
            await theirs.send_all(b"\xff" * 100)
            await session.receive()

    with pytest.raises(muxkit.LinkLost) as caught:
        await break_a_rule()
    cause = caught.value.__cause__
    assert isinstance(cause, muxkit.RemoteProtocolError)
    assert any("credit_granted" in line for line in cause.recent)
    assert any("the last events" in note for note in cause.__notes__)


def test_a_record_that_was_cut_off_is_left_out_and_counted(tmp_path: Path) -> None:
    trace = SessionTrace(tmp_path / "trace")
    trace.timer("keepalive")
    trace.close()
    whole = (tmp_path / "trace").read_bytes()
    (tmp_path / "cut").write_bytes(whole + b'\x1e{"time":1,"na')
    found = read(tmp_path / "cut")
    assert (len(found.events), found.broken) == (1, 1)


def test_the_time_without_enough_credit_is_counted(tmp_path: Path) -> None:
    now = iter([0.0, 0.0, 1.0, 2.0, 5.0, 6.0])
    trace = SessionTrace(tmp_path / "trace", clock=lambda: next(now))
    trace.frame("out", "a", "payload", 0)
    trace.credit("in", "a", 100)
    trace.frame("out", "a", "payload", 100)  # at 2 s, and nothing is left
    trace.credit("in", "a", 100)  # at 5 s
    trace.frame("out", "a", "payload", 50)
    trace.close()
    found = summary(read(tmp_path / "trace"))
    assert found.channels["a"].blocked_ms == pytest.approx(3000)
    assert differences(found, found) == []


def test_a_file_that_is_no_trace_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(TraceError, match="this is no trace"):
        Follower(tmp_path / "other").more()
    (tmp_path / "empty").write_text("")
    assert Follower(tmp_path / "empty").more() == []  # its program has only begun


def test_a_state_that_one_side_does_not_know_is_no_number(tmp_path: Path) -> None:
    for name, channel in (("one", "a"), ("other", "b")):
        trace = SessionTrace(tmp_path / name)
        trace.state(channel, "open")
        trace.close()
    one, other = (summary(read(tmp_path / name)) for name in ("one", "other"))
    assert {(name, first, second) for name, first, second in differences(one, other) if "state" in name} == {
        ("a: state", "open", ""),
        ("b: state", "", "open"),
    }
