"""Spans of plain channels and of topics, and the ids of spans in log records and traces."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id
from trio.testing import MockClock

import muxkit
import muxkit.spans
from muxkit import rpc
from muxkit.testing import ChaosPlan, SimNetwork, chaos_relay
from muxkit.trace import Trace, read, summary
from tests._spans import Spans, attributes_of, context_of, is_child, recorded_spans
from tests.rpc.orders import Order, Orders, OrdersService

ALL = pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded_spans() as recorded:
        yield recorded


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@ALL
async def test_a_channel_has_a_span_on_each_side_and_they_are_one_trace(protocol: str, spans: Spans) -> None:
    async with muxkit.open_server(echo, f"{protocol}+mem://spans") as server, muxkit.connect(server.url) as session:
        async with session.open("prices") as channel:
            await channel.send(b"tea")
            assert await channel.receive() == b"tea"
            assert spans.all() == []
    [client], [answering] = spans.of(SpanKind.CLIENT), spans.of(SpanKind.SERVER)
    assert client.name == answering.name == "channel prices"
    assert is_child(answering, client)
    assert attributes_of(client)["muxkit.channel.name"] == "prices"
    assert attributes_of(client)["network.protocol.name"] == protocol
    assert client.status.status_code is answering.status.status_code is StatusCode.UNSET


@ALL
async def test_the_spans_of_a_handler_are_children_of_the_span_of_its_channel(protocol: str, spans: Spans) -> None:
    async def handle(channel: muxkit.Channel) -> None:
        with spans.tracer.start_as_current_span("look up"):
            await channel.send(b"found")

    async with muxkit.open_server(handle, f"{protocol}+mem://inner") as server, muxkit.connect(server.url) as session:
        with spans.tracer.start_as_current_span("outer"):
            async with session.open() as channel:
                assert await channel.receive() == b"found"
    named = {(span.name, span.kind): span for span in spans.all()}
    opened, taken = named["channel", SpanKind.CLIENT], named["channel", SpanKind.SERVER]
    assert is_child(named["look up", SpanKind.INTERNAL], taken)
    assert is_child(taken, opened)
    assert is_child(opened, named["outer", SpanKind.INTERNAL])


@ALL
async def test_a_channel_that_is_opened_without_a_block_has_a_span_until_it_is_closed(
    protocol: str, spans: Spans
) -> None:
    async with muxkit.open_server(echo, f"{protocol}+mem://await") as server, muxkit.connect(server.url) as session:
        channel = await session.open("a")
        await channel.aclose()
        assert [span.name for span in spans.of(SpanKind.CLIENT)] == ["channel a"]
        aborted = await session.open("b")
        aborted.abort("no more", code=418)
        span = spans.of(SpanKind.CLIENT)[1]
        assert attributes_of(span)["error.type"] == "418"
        assert span.status.status_code is StatusCode.ERROR


@ALL
async def test_a_channel_that_the_program_takes_by_itself_has_a_span_too(protocol: str, spans: Spans) -> None:
    async def take(session: muxkit.Session) -> None:
        async for channel in session:
            await channel.send(b"taken")
            await channel.aclose()

    async with muxkit.open_server(take, f"{protocol}+mem://taken") as server, muxkit.connect(server.url) as session:
        async with session.open("mine") as channel:
            assert await channel.receive() == b"taken"
    [client], [answering] = spans.of(SpanKind.CLIENT), spans.of(SpanKind.SERVER)
    assert is_child(answering, client)


@ALL
async def test_a_channel_that_is_used_as_a_stream_of_bytes_ends_its_span_with_the_stream(
    protocol: str, spans: Spans, autojump_clock: MockClock
) -> None:
    async def serve(session: muxkit.Session) -> None:
        async with session.listener("bytes") as listener:
            stream = await listener.accept()
            assert await stream.receive_some() == b"tea"
            await stream.aclose()
            await trio.sleep_forever()

    async with muxkit.open_server(serve, f"{protocol}+mem://bytes") as server, muxkit.connect(server.url) as session:
        channel = await session.open("bytes")
        stream = channel.as_stream()
        await stream.send_all(b"tea")
        assert await stream.receive_some() == b""
        await stream.aclose()
    assert sorted(span.kind.name for span in spans.all()) == ["CLIENT", "SERVER"]


class Rude(Exception):
    """Something that a handler doesn't handle."""


@pytest.mark.parametrize(
    ("error", "kind", "is_server_fault"),
    [(Rude("the secret"), "Rude", True), (muxkit.Refused("not today", code=403), "403", False)],
    ids=["failed", "refused"],
)
async def test_the_span_of_a_failed_handler_notes_its_kind_and_not_its_text(
    error: Exception, kind: str, is_server_fault: bool, spans: Spans
) -> None:
    async def fail(channel: muxkit.Channel) -> None:
        raise error

    async with muxkit.open_server(fail, "bpmux+mem://failing") as server, muxkit.connect(server.url) as session:
        with pytest.raises(muxkit.ChannelCancelled):
            async with session.open() as channel:
                await channel.receive()
    [client], [answering] = spans.of(SpanKind.CLIENT), spans.of(SpanKind.SERVER)
    assert attributes_of(answering)["error.type"] == kind
    assert (answering.status.status_code is StatusCode.ERROR) is is_server_fault
    assert client.status.status_code is StatusCode.ERROR
    assert "secret" not in answering.to_json()


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct"])  # the others end the channel before the connection
async def test_a_lost_connection_ends_the_span_of_a_channel_that_nobody_closes(protocol: str, spans: Spans) -> None:
    answered = trio.Event()

    async def relay(target: str, task_status: trio.TaskStatus[str]) -> None:
        async with chaos_relay(target, ChaosPlan()) as running:
            task_status.started(running.address)
            await answered.wait()  # then the relay resets the connection

    async def use(url: str) -> None:
        async with muxkit.connect(url) as session:
            channel = await session.open("cut")
            await channel.send(b"1")
            await channel.receive()
            answered.set()
            await channel.receive()

    async with muxkit.open_server(echo, f"{protocol}+tcp://127.0.0.1:0") as server, trio.open_nursery() as nursery:
        address = await nursery.start(relay, server.url.partition("://")[2])
        with pytest.raises(muxkit.LinkLost):
            await use(f"{protocol}+tcp://{address}")
    [span] = spans.of(SpanKind.CLIENT)
    assert attributes_of(span)["error.type"] == "LinkLost"


@ALL
@pytest.mark.parametrize("is_cut", [False, True])
async def test_the_end_of_a_session_ends_the_spans_of_ended_channels_that_nobody_closes(
    protocol: str, is_cut: bool, spans: Spans, autojump_clock: MockClock
) -> None:
    async def take_one(channel: muxkit.Channel) -> None:
        await channel.receive()  # and end both halves by returning

    kept: list[muxkit.Channel] = []
    with SimNetwork() as network:
        async with muxkit.open_server(take_one, f"{protocol}+sim://server", linger=1) as server:
            with suppress(muxkit.LinkLost):
                async with muxkit.connect(server.url, linger=1) as session:
                    channel = await session.open("left")
                    kept.append(channel)
                    await channel.send(b"1")
                    with pytest.raises(trio.EndOfChannel):
                        await channel.receive()
                    await trio.sleep(1)
                    assert spans.of(SpanKind.CLIENT) == []  # a program that goes on could still note an error
                    if is_cut:
                        network.cut()
                        await trio.sleep(1)
    [span] = spans.of(SpanKind.CLIENT)
    was_open = protocol == "e3x"  # whose channels end when both sides have closed them
    assert attributes_of(span).get("error.type") == ("LinkLost" if is_cut and was_open else None)


async def test_a_typed_channel_notes_a_message_that_does_not_fit(spans: Spans) -> None:
    @muxkit.handler(int)
    async def numbers(channel: muxkit.TypedChannel[int]) -> None:
        await channel.receive()

    async with muxkit.open_server(numbers, "bpmux+mem://typed") as server, muxkit.connect(server.url) as session:
        async with session.open("numbers", codec=muxkit.Json(str)) as channel:
            await channel.send("seven")
            with pytest.raises(muxkit.ChannelCancelled):
                await channel.receive()
    [answering] = spans.of(SpanKind.SERVER)
    assert attributes_of(answering)["error.type"] == "422"
    assert answering.status.status_code is StatusCode.UNSET
    assert [span.name for span in spans.of(SpanKind.CLIENT)] == ["channel numbers"]


@ALL
async def test_a_subscription_and_each_publication_have_spans(protocol: str, spans: Spans) -> None:
    topic = muxkit.Topic(int)
    async with muxkit.open_server(muxkit.by_name({"prices": topic}), f"{protocol}+mem://topic") as server:
        async with muxkit.connect(server.url) as session:
            async with session.subscribe("prices", codec=muxkit.Json(int)) as prices:
                await topic.publish(3)
                topic.publish_nowait(4)
                assert [await prices.__anext__(), await prices.__anext__()] == [3, 4]
    [client], [answering] = spans.of(SpanKind.CLIENT), spans.of(SpanKind.SERVER)
    assert client.name == answering.name == "subscribe prices"
    assert is_child(answering, client)
    expected = {
        "messaging.system": "muxkit",
        "messaging.operation.name": "subscribe",
        "messaging.operation.type": "receive",
        "messaging.destination.name": "prices",
    }
    assert expected.items() <= attributes_of(client).items()
    published = spans.of(SpanKind.PRODUCER)
    assert [span.name for span in published] == ["publish prices"] * 2
    assert attributes_of(published[0])["messaging.operation.type"] == "send"


@ALL
async def test_a_call_has_no_span_for_its_channel(protocol: str, spans: Spans) -> None:
    async with muxkit.open_server(rpc.serve(OrdersService()), f"{protocol}+mem://calls") as server:
        async with muxkit.connect(server.url) as session:
            assert await rpc.client(Orders, session).get(7) == Order(7)
    assert [span.name for span in spans.all()] == ["Orders/get"] * 2


async def test_channels_can_be_left_without_spans() -> None:
    with recorded_spans(channels=False) as spans:
        async with muxkit.open_server(rpc.serve(OrdersService(), channels=echo), "bpmux+mem://left") as server:
            async with muxkit.connect(server.url) as session:
                async with session.open("plain") as channel:
                    assert channel.headers == {}
                assert await rpc.client(Orders, session).get(7) == Order(7)
    assert [span.name for span in spans.all()] == ["Orders/get"] * 2


async def test_headers_that_leave_no_room_for_the_context_travel_without_it(spans: Spans) -> None:
    limits = muxkit.Limits(headers=64)
    async with muxkit.open_server(echo, "bpmux+mem://full", limits=limits) as server:
        async with muxkit.connect(server.url, limits=limits) as session:
            async with session.open("full", headers={"tenant": "x" * 50}) as channel:
                assert dict(channel.headers) == {"tenant": "x" * 50}
                await channel.send(b"1")
                assert await channel.receive() == b"1"
    assert len(spans.of(SpanKind.CLIENT)) == 1


@pytest.mark.parametrize("value", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 3000])
async def test_a_peer_with_an_invalid_context_begins_a_trace_of_its_own(value: str, spans: Spans) -> None:
    async def show(channel: muxkit.Channel) -> None:
        await channel.send(channel.headers["traceparent"].encode())

    async with muxkit.open_server(show, "bpmux+mem://invalid") as server:
        async with muxkit.connect(server.url) as session:
            muxkit.spans.uninstrument()
            opened = session.open("odd", headers={"traceparent": value})  # as a peer without spans of its own does
            muxkit.spans.instrument(spans.tracer)
            async with opened as channel:
                assert await channel.receive() == value.encode()
    [answering] = spans.of(SpanKind.SERVER)
    assert answering.parent is None


async def test_log_records_about_a_channel_have_the_ids_of_its_span(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(channel: muxkit.Channel) -> None:
        raise Rude

    async with muxkit.open_server(fail, "bpmux+mem://logged") as server, muxkit.connect(server.url) as session:
        async with session.open() as channel:
            with pytest.raises(muxkit.ChannelCancelled):
                await channel.receive()
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    [answering] = spans.of(SpanKind.SERVER)
    assert record.__dict__["trace_id"] == format_trace_id(context_of(answering).trace_id)


async def test_log_records_about_a_call_have_the_ids_of_its_span(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    async with muxkit.open_server(rpc.serve(OrdersService()), "bpmux+mem://logged") as server:
        async with muxkit.connect(server.url) as session:
            with pytest.raises(rpc.Error, match="internal"):
                await rpc.client(Orders, session).get(500)
    records = [each for each in caplog.records if each.levelno == logging.ERROR]
    [answering] = spans.of(SpanKind.SERVER)
    expected = format_trace_id(context_of(answering).trace_id)
    assert [each.__dict__["trace_id"] for each in records] == [expected, expected]


@ALL
async def test_a_trace_file_names_the_span_of_each_channel_and_call(
    protocol: str, spans: Spans, tmp_path: Path
) -> None:
    handler = rpc.serve(OrdersService(), channels=echo)
    url = f"{protocol}+mem://traced"
    async with muxkit.open_server(handler, url, observer=Trace(tmp_path / "server")) as server:
        async with muxkit.connect(server.url, observer=Trace(tmp_path / "client")) as session:
            async with session.open("plain") as channel:
                await channel.send(b"1")
                await channel.receive()
            await rpc.client(Orders, session).get(7)
    expected = {format_trace_id(context_of(span).trace_id) for span in spans.all()}
    assert len(expected) == 2
    for side in ("client", "server"):
        [file] = (tmp_path / side).iterdir()
        found = summary(read(file))
        if found.events:  # a listener of Relink writes its file when the link is forgotten
            named = {name: one for name, one in found.channels.items() if one.trace_id}
            assert {one.trace_id for one in named.values()} == expected
            assert all(one.state for one in named.values()) or protocol == "relink"  # the same names as of frames


async def test_without_instrumentation_a_channel_has_no_headers() -> None:
    async with muxkit.open_server(echo, "bpmux+mem://plain") as server, muxkit.connect(server.url) as session:
        async with session.open("plain") as channel:
            assert channel.headers == {}


async def test_without_an_sdk_no_context_travels() -> None:
    muxkit.spans.instrument()
    try:
        async with muxkit.open_server(echo, "bpmux+mem://no-sdk") as server, muxkit.connect(server.url) as session:
            async with session.open("plain") as channel:
                assert channel.headers == {}
    finally:
        muxkit.spans.uninstrument()
