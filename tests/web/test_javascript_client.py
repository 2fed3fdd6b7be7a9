"""The JavaScript client in Node, with a real server of muxkit at the other end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit.protocols import bpmux
from muxkit_adapters import websocket
from tests.adapters._links import wire_of

if TYPE_CHECKING:
    from tests.web._node import Node

URL = "bpmux+ws://127.0.0.1:0"
MIB = 1024 * 1024


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)
    await channel.finish()


@asynccontextmanager
async def serving(handler: object, url: str = URL, **options: object) -> AsyncIterator[str]:
    """Serve; give the URL that a page would use."""
    async with muxkit.open_server(handler, url, **options) as server:  # type: ignore[arg-type]  # each test has its own
        yield server.url.removeprefix("bpmux+")


# --- channels


async def test_a_channel_has_a_name_and_a_payload_and_carries_messages_both_ways(node: Node) -> None:
    async def greet(channel: muxkit.Channel) -> None:
        await channel.send(f"{channel.name} {channel.opening.decode()}".encode())
        await echo(channel)

    async with serving(muxkit.by_name({"grüße": greet})) as url:
        said = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open("grüße", { payload: "from Node" });
            await channel.send("one");
            await channel.send(Uint8Array.of(0, 255));
            await channel.finish();
            for await (const message of channel) say([...message]);
            await session.close();
            say(await session.closed);
            """,
            url,
        )
    assert [bytes(message) for message in said[:-1]] == ["grüße from Node".encode(), b"one", b"\0\xff"]
    assert said[-1] is None


async def test_an_opening_payload_arrives_as_it_is_whatever_it_begins_with(node: Node) -> None:
    openings: list[tuple[str, bytes]] = []

    async def note(channel: muxkit.Channel) -> None:
        openings.append((channel.name, channel.opening))

    async def serve(session: bpmux.Session) -> None:
        async with session.open("news", headers={"lang": "de"}, payload=b"\xc0h\0\5today") as channel:
            await channel.send(b"")
        await muxkit.each_channel(note)(session)

    async with serving(serve) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const { value: news } = await session.incoming.getReader().read();
            say([news.name, [...news.opening]]);
            for (const name of ["", "named"]) {
              for (const mark of [0x68, 0x6e]) {
                const channel = await session.open(name, { payload: Uint8Array.of(0xc0, mark, 0) });
                await channel.close();
              }
            }
            await session.close();
            """,
            url,
        )
    assert said == ["news", [*b"\xc0h\0\5today"]]
    assert sorted(openings) == sorted((name, bytes((0xC0, mark, 0))) for name in ("", "named") for mark in b"hn")


async def test_the_streams_of_a_channel_can_be_piped(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const { readable, writable } = await session.open();
            const upper = new TransformStream({ transform: (m, c) => c.enqueue(text(m).toUpperCase()) });
            const source = new Blob(["a ", "piped ", "text"]).stream();
            const sent = source.pipeTo(writable);
            let got = "";
            for await (const part of readable.pipeThrough(upper)) got += part;
            await sent;
            say(got);
            await session.close();
            """,
            url,
        )
    assert said == "A PIPED TEXT"


async def test_a_message_that_is_larger_than_every_window_arrives_whole(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open();
            const message = Uint8Array.from({ length: 5_000_000 }, (_, index) => index * 7);
            await channel.send(message);
            say(Buffer.compare(await channel.receive(), message));
            await session.close();
            """,
            url,
        )
    assert said == 0


async def test_an_invalid_message_is_refused_and_the_channel_goes_on(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        said = await node.run(
            """
            const session = await connect(args[0], { maxMessage: 1000 });
            const channel = await session.open();
            await channel.send(5).catch((error) => say(error.message));
            await channel.send("after it");
            say(text(await channel.receive()));
            await channel.send(new Uint8Array(1001)).catch((error) => say(error.message));
            await session.close();
            """,
            url,
        )
    assert said == [
        "invalid message: expected a string, an ArrayBuffer or a typed array, got number",
        "after it",
        "invalid message: 1001 bytes exceed the limit of 1000 (maxMessage)",
    ]


async def test_reasons_for_giving_up_travel_both_ways(node: Node) -> None:
    heard: list[muxkit.ChannelCancelled] = []

    async def refuse(channel: muxkit.Channel) -> None:
        raise muxkit.Refused("members only", code=403)

    async def listen(channel: muxkit.Channel) -> None:
        await channel.send(b"ready")
        try:
            await channel.receive()
        except muxkit.ChannelCancelled as error:
            heard.append(error)

    async with serving(muxkit.by_name({"refuse": refuse, "listen": listen})) as url:
        said = await node.run(
            """
            const session = await connect(args[0]);
            const refused = await session.open("refuse");
            say(await failure(refused.receive()));
            const channel = await session.open("listen");
            await channel.receive();
            channel.abort("changed my mind", { code: 7 });
            say(await failure(channel.send("too late")));
            const missing = await session.open("lisen");
            say((await failure(missing.receive())).reason);
            await session.close();
            """,
            url,
        )
    assert said[0] == {"type": "ChannelCancelled", "reason": "members only", "code": 403}
    assert said[1]["type"] == "MuxError"
    assert said[2] == "no channel is named 'lisen' here; did you mean 'listen'? There are: listen, refuse"
    assert [(error.reason, error.code) for error in heard] == [("changed my mind", 7)]


async def test_a_peer_that_stops_receiving_stops_the_writer(node: Node) -> None:
    async def take_one(channel: muxkit.Channel) -> None:
        await channel.receive()

    async with serving(muxkit.each_channel(take_one)) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open();
            const writer = channel.writable.getWriter();
            await writer.write("the only one");
            const closed = await failure(writer.closed);
            const other = await session.open();
            await other.send("another one");
            await other.receive();
            while ((await failure(other.send("too much"))) === null) await session.ping();
            say([closed.type, (await failure(other.finish())).type]);
            await session.close();
            """,
            url,
        )
    assert said == ["ChannelStopped", "ChannelStopped"]


async def test_channels_in_one_direction_and_top_level_messages_work(node: Node) -> None:
    async def serve(session: bpmux.Session) -> None:
        source, opening = await anext(session.sources())
        received = [message async for message in source]
        sink, asked = await anext(session.sinks())
        async with sink:
            await sink.send(opening + b" " + asked + b" " + b"".join(received))
        await session.send(await session.receive())
        async with session.open_sink(b"down") as down:
            await down.send(b"sink")
        async with session.open_source(b"up") as up:
            await session.send(await up.receive())

    async with serving(serve) as url:
        said = await node.run(
            """
            const session = await connect(args[0]);
            const writer = (await session.openSink("to you")).getWriter();
            await writer.write("1");
            await writer.write("2");
            await writer.close();
            const readable = await session.openSource("to me");
            for await (const message of readable) say(text(message));
            const top = session.writable.getWriter();
            const messages = session.readable.getReader();
            await top.write("top");
            say(text((await messages.read()).value));
            const { value: source } = await session.sources.getReader().read();
            for await (const message of source.readable) say([text(source.opening), text(message)]);
            const { value: sink } = await session.sinks.getReader().read();
            const up = sink.writable.getWriter();
            await up.write(`${text(sink.opening)}!`);
            say(text((await messages.read()).value));
            await session.close();
            """,
            url,
        )
    assert said == ["to you to me 12", "top", ["down", "sink"], "up!"]


async def test_the_server_can_open_channels_and_send_requests(node: Node) -> None:
    answers: list[bytes] = []
    cancelled = trio.Event()

    async def serve(session: bpmux.Session) -> None:
        async with session.open("news", payload=b"today") as channel:
            await channel.send(b"sun")
            answers.append(await channel.receive())
        answers.append(await session.request(b"abc"))
        with pytest.raises(muxkit.ChannelStopped, match="not today"):
            await session.request(b"no")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.request, b"wait")
            await session.receive()
            nursery.cancel_scope.cancel()
        await session.receive()
        cancelled.set()

    async with serving(serve) as url:
        said = await node.run(
            """
            const session = await connect(args[0]);
            const top = session.writable.getWriter();
            const { value: channel } = await session.incoming.getReader().read();
            say([channel.name, text(channel.opening), text(await channel.receive())]);
            await channel.send("rain");
            const requests = session.requests.getReader();
            for (const answer of ["cba", null]) {
              const { value: request } = await requests.read();
              if (answer === null) request.decline("not today", { code: 9 });
              else request.respond(answer);
            }
            const { value: waiting } = await requests.read();
            await top.write("it waits");
            await new Promise((resolve) => waiting.signal.addEventListener("abort", resolve));
            await top.write("it was cancelled");
            say(await session.closed);
            """,
            url,
        )
    assert said == [["news", "today", "sun"], None]
    assert answers == [b"rain", b"cba"]
    assert cancelled.is_set()


async def test_a_client_that_takes_no_channels_declines_them(node: Node) -> None:
    told: list[muxkit.ChannelCancelled] = []

    async def serve(session: bpmux.Session) -> None:
        async with session.open("news") as channel:
            try:
                await channel.receive()
            except muxkit.ChannelCancelled as error:
                told.append(error)

    async with serving(serve) as url:
        await node.run(
            """
            const later = globalThis.setTimeout;
            globalThis.setTimeout = (task, pause) => later(task, pause === 10_000 ? 1 : pause); // don't wait so long
            const session = await connect(args[0]);
            await session.closed;
            """,
            url,
        )
    assert [(error.reason, error.code) for error in told] == [("nothing here takes channels of this kind", 405)]


# --- requests


async def test_requests_are_answered_declined_and_cancelled(node: Node) -> None:
    cancelled = trio.Event()

    async def answer(request: muxkit.IncomingRequest) -> None:
        if request.payload == b"no":
            raise muxkit.Refused("won't say", code=410)
        if request.payload == b"wait":
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()
        await request.respond(request.payload * 2)

    async with serving(muxkit.each_request(answer)) as url:
        said = await node.run(
            """
            const session = await connect(args[0]);
            say(text(await session.request("ab")));
            say((await session.request(new Uint8Array(400_000))).length);
            say(await failure(session.request("no")));
            const controller = new AbortController();
            const waiting = failure(session.request("wait", { signal: controller.signal }));
            await session.ping();
            controller.abort();
            say((await waiting).type);
            await session.ping();
            await session.close();
            """,
            url,
        )
        with trio.fail_after(10):
            await cancelled.wait()
    assert said == ["abab", 800_000, {"type": "ChannelStopped", "reason": "won't say", "code": 410}, "AbortError"]


# --- back-pressure


async def test_a_server_that_does_not_read_stops_the_writer_with_bounded_memory(node: Node) -> None:
    may_read = trio.Event()
    total = 0

    async def stall(channel: muxkit.Channel) -> None:
        nonlocal total
        await may_read.wait()
        async for message in channel:
            total += len(message)

    async def answer(request: muxkit.IncomingRequest) -> None:
        may_read.set()
        await request.respond(str(request.session.stats().channels).encode())

    async with serving(muxkit.each_channel(stall, requests=answer)) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open();
            let sent = 0;
            const sending = (async () => {
              for (; sent < 20_000_000; sent += 10_000) await channel.send(new Uint8Array(10_000));
              await channel.finish();
            })();
            // When nothing more went out during a few round trips, the writer is waiting.
            let before = -1;
            for (let same = 0; same < 5; ) {
              await session.ping();
              same = sent === before ? same + 1 : 0;
              before = sent;
            }
            const stalled = sent;
            await session.request("read");
            await sending;
            say({ stalled, sent });
            await session.close();
            """,
            url,
        )
    assert 0 < said["stalled"] <= muxkit.Limits().channel_bytes
    assert said["sent"] == total == 20_000_000


async def test_a_reader_that_stalls_in_node_stops_the_server_and_no_other_channel(node: Node) -> None:
    sent = 0

    async def flood(channel: muxkit.Channel) -> None:
        nonlocal sent
        for _ in range(2000):
            await channel.send(bytes(10_000))
            sent += 10_000
        await channel.finish()

    async def report(request: muxkit.IncomingRequest) -> None:
        await request.respond(str(sent).encode())

    async with serving(muxkit.by_name({"flood": flood, "echo": echo}, requests=report)) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0], { window: 100_000 });
            const slow = await session.open("flood");
            await slow.receive();
            const other = await session.open("echo");
            let stalled = -1;
            for (let same = 0; same < 5; ) {
              await other.send("still here");
              await other.receive();
              const sent = Number(text(await session.request("how much?")));
              same = sent === stalled ? same + 1 : 0;
              stalled = sent;
            }
            let got = 10_000;
            for await (const message of slow) got += message.length;
            say({ stalled, got });
            await session.close();
            """,
            url,
        )
    # What the server may have handed over: the window, and the message that waits for more of it.
    assert 100_000 <= said["stalled"] <= 100_000 + 2 * 10_000
    assert said["got"] == 20_000_000


@pytest.mark.parametrize("size", [0, 1])
async def test_short_messages_that_nobody_reads_take_little_memory(node: Node, size: int) -> None:
    count = 250_000

    async def flood(channel: muxkit.Channel) -> None:
        for _ in range(count // 500):
            await channel.send_many([bytes(size)] * 500)
        await channel.finish()

    async def idle(request: muxkit.IncomingRequest) -> None:
        await request.respond(b"")

    async with serving(muxkit.each_channel(flood, requests=idle)) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const before = process.memoryUsage();
            const channel = await session.open();
            await session.request();
            for (let round = 0; round < 20; round += 1) await session.ping();
            const { heapUsed } = process.memoryUsage();
            let got = 0;
            for await (const message of channel) got += 1;
            say({ got, grown: heapUsed - before.heapUsed });
            await session.close();
            """,
            url,
        )
    assert said["got"] == count
    assert said["grown"] < 60 * count  # an object for each would take about 100 bytes and more


async def test_a_hundred_mebibytes_go_each_way(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open();
            const block = Uint8Array.from({ length: 65_536 }, (_, index) => index * 31);
            let got = 0;
            let wrong = 0;
            let most = 0;
            const reading = (async () => {
              for await (const message of channel) {
                got += message.length;
                wrong += Buffer.compare(message, block) ? 1 : 0;
                most = Math.max(most, process.memoryUsage.rss());
              }
            })();
            const before = process.memoryUsage.rss();
            for (let index = 0; index < 1600; index += 1) await channel.send(block);
            await channel.finish();
            await reading;
            say({ got, wrong, grown: most - before });
            await session.close();
            """,
            url,
        )
    assert (said["got"], said["wrong"]) == (100 * MIB, 0)
    assert said["grown"] < 100 * MIB


# --- tokens, and being sent away


async def test_a_token_lets_a_client_in_and_a_wrong_one_is_refused(node: Node) -> None:
    users: list[str | None] = []

    async def serve(session: bpmux.Session) -> None:
        users.append(session.info.user)

    async with serving(serve, authorize=muxkit.tokens({"ann": "sësame"})) as url:
        said = await node.run(
            """
            const session = await connect(args[0], { token: "sësame" });
            say(await session.closed);
            say(await failure(connect(args[0], { token: "wrong" })));
            const without = await connect(args[0]);
            say((await without.closed).reason);
            """,
            url,
        )
    assert users == ["ann"]
    assert said[0] is None
    assert said[1]["type"] == "Refused"
    assert "does not know the token" in said[1]["reason"]
    assert "wants a token" in said[2]


async def test_a_token_for_a_server_that_asks_for_none_fails_with_a_hint(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        [said] = await node.run(
            'await connect(args[0], { token: "x" }).catch((error) => say([error.name, error.message]));', url
        )
    assert said[0] == "LinkLost"
    assert "leave the token out" in said[1]


async def test_a_full_server_says_so(node: Node) -> None:
    async with serving(muxkit.each_channel(echo), limits=muxkit.Limits(connections=1, handshake=3.0)) as url:
        [said] = await node.run(
            """
            const first = await connect(args[0]);
            const busy = await first.open();
            await busy.send("busy");
            await busy.receive();
            const second = await connect(args[0]).then((session) => session.closed, (error) => error);
            say([second.reason, second.code]);
            await first.close();
            """,
            url,
        )
    assert said == ["the server is full: Limits(connections=1)", 503]


async def test_nobody_listening_is_a_lost_link(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        pass
    [said] = await node.run("await connect(args[0]).catch((error) => say([error.name, error.message]));", url)
    assert said[0] == "LinkLost"
    assert url in said[1]


async def test_a_server_that_breaks_a_rule_is_left_with_the_number_of_the_clause(node: Node) -> None:
    told = []

    async def speak(stream: websocket.WebSocketStream) -> None:
        await stream.send_all(bytes.fromhex("300900"))  # a response to a request that nobody sent
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass
        told.append(stream.peer_reason)

    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(partial(websocket.serve, speak))
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const { by, cause } = await session.closed;
            say([by, cause.name, cause.rule]);
            """,
            f"ws://{address}",
        )
        nursery.cancel_scope.cancel()
    assert said == ["peer", "ProtocolError", "bpmux-R10"]
    [reason] = told
    assert reason is not None
    assert (reason.code, "no such request" in reason.text) == (400, True)


# --- liveness


async def test_both_sides_can_measure_a_round_trip(node: Node) -> None:
    seconds: list[float] = []

    async def serve(session: bpmux.Session) -> None:
        async for channel in session.incoming():
            seconds.append(await session.ping())
            seconds.append(await channel.ping())
            await channel.aclose()

    async with serving(serve) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open();
            const took = [await session.ping(), await channel.ping().catch(() => 0)];
            await channel.receive();
            say(took);
            await session.close();
            """,
            url,
        )
    assert len(seconds) == 2
    assert all(each >= 0 for each in said)


async def test_a_server_that_falls_silent_is_given_up(node: Node) -> None:
    async def sleep(stream: websocket.WebSocketStream) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(partial(websocket.serve, sleep))
        [said] = await node.run(
            """
            const session = await connect(args[0], { keepalive: { interval: 20, timeout: 20 } });
            say(told(await session.closed));
            process.exit(0); // the WebSocket would wait for the other side
            """,
            f"ws://{address}",
        )
        nursery.cancel_scope.cancel()
    assert said == {"type": "LinkLost", "reason": "", "code": 0, "by": "network"}


async def test_an_idle_session_is_kept_alive_by_pings(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        [said] = await node.run(
            """
            const session = await connect(args[0], { keepalive: { interval: 5, timeout: 20_000 } });
            const outcome = await Promise.race([session.closed, new Promise((resolve) => setTimeout(resolve, 100, 1))]);
            say(outcome);
            await session.close();
            """,
            url,
        )
    assert said == 1


# --- the end


async def test_a_server_that_shuts_down_is_noticed_and_the_channels_end_in_order(node: Node) -> None:
    async def serve(session: bpmux.Session) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxkit.each_channel(echo), session)
            await session.receive()
            nursery.start_soon(partial(session.shutdown, grace=30))

    async with serving(serve) as url:
        said = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open();
            await session.writable.getWriter().write("shut down now");
            await session.draining;
            say(await failure(session.open()));
            await channel.send("the old ones go on");
            say(text(await channel.receive()));
            await channel.finish();
            say(await channel.receive() ?? null);
            say(await session.closed);
            """,
            url,
        )
    assert said[0]["type"] == "ChannelStopped"
    assert said[1:] == ["the old ones go on", None, None]


async def test_a_connection_that_is_cut_fails_everything_that_waits(node: Node) -> None:
    async def cut(stream: websocket.WebSocketStream) -> None:
        await stream.receive_some()
        wire_of(stream).socket.close()  # no close frame, as when a network goes away

    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(partial(websocket.serve, cut))
        said = await node.run(
            """
            const session = await connect(args[0]);
            const channel = await session.open();
            const waiting = [channel.receive(), session.open("x", { payload: "needs credit" }), session.request("?")];
            waiting.push(session.ping(), session.readable.getReader().read());
            for (const promise of waiting) say((await failure(promise))?.type ?? "nothing");
            say((await session.closed).by);
            """,
            f"ws://{address}",
        )
        nursery.cancel_scope.cancel()
    # The opening of the second channel was queued, so opening it succeeded.
    assert said == ["LinkLost", "nothing", "LinkLost", "LinkLost", "LinkLost", "network"]


# --- reconnecting


async def test_a_loop_over_sessions_continues_after_the_server_was_started_again(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        pass
    place = f"bpmux+{url}"
    stopped = trio.Event()

    async def once(session: bpmux.Session) -> None:
        channel = await anext(session.incoming())
        await channel.send(await channel.receive())
        stopped.set()

    async def restart() -> None:
        async with bpmux.open_server(once, place):
            await stopped.wait()
        async with muxkit.open_server(muxkit.each_channel(echo), place):
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(restart)
        said = await node.run(
            """
            let number = 0;
            for await (const session of reconnecting(args[0], { backoff: { first: 10, most: 50 } })) {
              try {
                const channel = await session.open();
                await channel.send(`session ${++number}`);
                say(text(await channel.receive()));
                if (number === 2) break;
                await session.closed;
              } catch (error) {
                if (!(error instanceof MuxError)) throw error;
              }
            }
            """,
            url,
        )
        nursery.cancel_scope.cancel()
    assert said == ["session 1", "session 2"]


MOVES = """
const seen = [];
for await (const session of reconnecting(args[0], { backoff: { first: 10, most: 50 }, ...JSON.parse(args[2]) })) {
  const answer = await session.request().then(text, (error) => error.name);
  if (!answer.startsWith("server ")) continue;
  seen.push(answer);
  if (seen.length === Number(args[1])) break;
  await session.request("shut down").catch(() => null);
  await session.closed;
}
say(seen);
"""


class Server:
    """A server of this machine that answers with its name, and shuts down with a redirect when it is told to."""

    def __init__(self, name: str, place: str = "bpmux+ws://127.0.0.1:0") -> None:
        self.name = name
        self._place = place
        self._shut_down = trio.Event()

    async def _answer(self, request: muxkit.IncomingRequest) -> None:
        if request.payload:
            self._shut_down.set()
        await request.respond(self.name.encode())

    async def run(self, redirect: str, *, task_status: trio.TaskStatus[str]) -> None:
        handler = muxkit.each_channel(echo, requests=self._answer)
        async with bpmux.open_server(handler, self._place) as server:
            task_status.started(server.url)
            await self._shut_down.wait()
            await server.shutdown(grace=5, redirect=redirect or None)


async def test_a_loop_over_sessions_follows_a_redirect_to_its_own_host(node: Node) -> None:
    async with trio.open_nursery() as nursery:
        new = await nursery.start(Server("server new").run, "")
        old = await nursery.start(Server("server old").run, new)
        [said] = await node.run(MOVES, old.removeprefix("bpmux+"), "2", "{}")
        nursery.cancel_scope.cancel()
    assert said == ["server old", "server new"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["server old", "server again"]),
        ({"redirects": ["example.org"]}, ["server old", "server again"]),
        ({"redirects": ["localhost"]}, ["server old", "server new"]),
        ({"redirects": ["*"]}, ["server old", "server new"]),
    ],
)
async def test_a_redirect_to_another_host_is_followed_only_if_it_is_allowed(
    node: Node, options: dict[str, list[str]], expected: list[str]
) -> None:
    async with trio.open_nursery() as nursery:
        new = (await nursery.start(Server("server new").run, "")).replace("127.0.0.1", "localhost")
        old = await nursery.start(Server("server old").run, new)

        async def restart() -> None:
            """Serve at the old place as soon as it is free."""
            while True:
                try:
                    await nursery.start(Server("server again", old).run, "")
                except OSError:
                    await trio.sleep(0.01)
                else:
                    return

        nursery.start_soon(restart)
        [said] = await node.run(MOVES, old.removeprefix("bpmux+"), "2", json.dumps(options))
        nursery.cancel_scope.cancel()
    assert said == expected


async def test_a_loop_returns_to_its_own_url_when_a_redirect_leads_nowhere(node: Node) -> None:
    async with trio.open_nursery() as nursery:
        async with serving(muxkit.each_channel(echo)) as gone:
            pass
        old = await nursery.start(Server("server old").run, f"bpmux+{gone}")

        async def restart() -> None:
            while True:
                try:
                    await nursery.start(Server("server again", old).run, "")
                except OSError:
                    await trio.sleep(0.01)
                else:
                    return

        nursery.start_soon(restart)
        [said] = await node.run(MOVES, old.removeprefix("bpmux+"), "2", "{}")
        nursery.cancel_scope.cancel()
    assert said == ["server old", "server again"]


async def test_a_refused_token_is_not_tried_again(node: Node) -> None:
    asked = 0

    def authorize(info: muxkit.SessionInfo, token: str | None) -> str:
        nonlocal asked
        asked += 1
        raise muxkit.Refused("who are you?", code=401)

    async with serving(muxkit.each_channel(echo), authorize=authorize) as url:
        [said] = await node.run(
            """
            try {
              for await (const session of reconnecting(args[0], { token: "x" })) say("a session");
            } catch (error) {
              say(told(error));
            }
            """,
            url,
        )
    assert said == {"type": "Refused", "reason": "who are you?", "code": 401}
    assert asked == 1


async def test_a_session_that_the_server_refuses_later_ends_the_loop(node: Node) -> None:
    async with serving(muxkit.each_channel(echo), authorize=muxkit.tokens({"ann": "sesame"})) as url:
        said = await node.run(
            """
            let sessions = 0;
            try {
              for await (const session of reconnecting(args[0])) {
                sessions += 1; // a client without a token shows nothing, so it learns of the refusal in its session
                await session.closed;
              }
            } catch (error) {
              say([error.name, error.code, sessions]);
            }
            """,
            url,
        )
    assert said == [["LinkLost", 401, 1]]


async def test_a_loop_gives_up_when_its_patience_is_over(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        pass
    said = await node.run(
        """
        const options = { patience: 0, onFailed: () => say("another attempt") };
        try {
          for await (const session of reconnecting(args[0], options)) say("a session");
        } catch (error) {
          say(error.name);
        }
        """,
        url,
    )
    assert said == ["LinkLost"]


async def test_a_loop_tries_again_until_its_signal_is_aborted(node: Node) -> None:
    async with serving(muxkit.each_channel(echo)) as url:
        pass
    said = await node.run(
        """
        const controller = new AbortController();
        const failures = [];
        const onFailed = (error) => failures.push(error.name) === 3 && controller.abort();
        const options = { backoff: { first: 1, most: 5 }, onFailed, signal: controller.signal };
        try {
          for await (const session of reconnecting(args[0], options)) say("a session");
        } catch (error) {
          say([error.name, ...failures]);
        }
        """,
        url,
    )
    assert said == [["AbortError", "LinkLost", "LinkLost", "LinkLost"]]
