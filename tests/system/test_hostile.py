"""A hostile peer gets one typed error or has to wait; the server serves its other connections, within its limits.

Each attack runs over real TCP against a server process while an honest client works on another connection. At its
end the honest client has lost nothing, the server has no task, descriptor or session more than at its start, and
its log holds nothing of what was sent.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trustme

import muxkit
from muxkit.core import encode_varu64
from muxkit.protocols.bpmux import Type, encode_partial
from muxkit.runtime import background
from tests.system.hostile import CANARY, KIB, MIB, PATIENCE, Raw, Server, attacker, chunk, friend_of

if TYPE_CHECKING:
    from pathlib import Path

Attack = Callable[[Raw], Awaitable[object]]

REQUEST, ANSWER, SINK, PEERS_SINK, STREAM, PEERS_STREAM, DUPLEX, _ = Type
OPEN = {"requests": REQUEST, "sinks": SINK, "streams": STREAM, "duplexes": DUPLEX}
STALL = chunk(PEERS_SINK, 0, b"stall")  # told to the server's application: take nothing that is opened
NOISE = 8 * MIB  # bytes by which a Python process may grow without anybody's fault
MARGIN = 1.5  # times the declared limits, as R-03 has it

SMALL = {
    "channels": 500,
    "backlog": 500,
    "channel_bytes": 16 * KIB,
    "channel_floor": KIB,
    "connection_bytes": 1 * MIB,
    "message": 64 * KIB,
    "reassembly": 256 * KIB,
    "outbox": 64 * KIB,
    "pongs": 10_000,
    "resets_burst": 50,
    "resets_per_second": 1,
    "stall": 60,  # s; an attacker that the machine keeps waiting is not one that dribbles
    "stall_bytes": 16,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the default limits of these tests."""
    with Server(tmp_path_factory.mktemp("hostile") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With limits that are soon reached."""
    with Server(tmp_path_factory.mktemp("hostile") / "log", limits=SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Which soon has enough of a message that does not come to its end."""
    with Server(tmp_path_factory.mktemp("hostile") / "log", limits=SMALL | {"stall": 0.3}) as running:
        yield running


@asynccontextmanager
async def fresh(log: Path, *, linger: float = 0.5, **limits: float) -> AsyncGenerator[Server, None]:
    """A server of its own, for what leaves traces in a process: memory, or a log full of failures."""
    with Server(log, linger=linger, limits=limits) as running:
        yield running


def declared(server: Server) -> int:
    """Bytes that the limits let one connection hold, by R-03: 1.5 times what they add up to, plus 64 KiB."""
    limits = server.limits
    floors = limits.channels * limits.channel_floor
    return int((limits.connection_bytes + floors + limits.reassembly + limits.outbox) * MARGIN) + 64 * KIB


async def verdict(server: Server, *sent: bytes, hang_up: bool = False) -> str:
    """What becomes of a connection that says this and then pings: the rule or limit that it broke, or `alive` when
    the ping was answered. With `hang_up` it hangs up at once instead: then `waits` means that it was legal."""
    async with attacker(server) as peer:
        await peer.read()  # the first grant: it is known by now who we are
        await peer.send(*sent)
        alive = not hang_up and await peer.round_trip()
        if alive:
            peer.reset()  # a peer that only ended its direction could be owed an answer for as long as a handler works
        else:
            await peer.leave()
        over = await server.over(peer)
    assert CANARY.decode() not in over["text"]
    if alive and over["by"] == "network":
        return "alive"
    assert over["by"] == "peer"
    if over["cause"] not in (None, "BrokenResourceError"):  # the latter: the server still owed an answer
        assert over["cause"] == "RemoteProtocolError"
        return str(over["rule"] or over["limit"])
    assert over["reason"].startswith("the peer hung up")
    return "alive" if alive else "waits"


async def meets(server: Server, expected: str, *sent: bytes) -> None:
    assert await verdict(server, *sent, hang_up=expected == "waits") == expected, b"".join(sent).hex(" ")


# --- bytes that mean nothing, or too little


@pytest.mark.requirement("R-21", "R-66")
@pytest.mark.seeds(10, soak=2000)
async def test_garbage_ends_with_one_typed_error(server: Server, seed: int) -> None:
    dice = random.Random(seed)
    async with friend_of(server):
        for _ in range(10):
            noise = dice.randbytes(dice.choice([1, 10, 1000, 5000]))
            told = await verdict(server, noise, CANARY, hang_up=True)
            assert told.startswith("bpmux-") or told in ("message", "reassembly", "waits")
    await server.rests()


TRANSCRIPT = [
    chunk(DUPLEX, 5, b"tell!", credit=200_000),
    chunk(SINK, 5, CANARY),
    chunk(REQUEST, 7, CANARY, credit=300),
    encode_partial(3 * len(CANARY)),
    *[chunk(SINK, 5, CANARY)] * 3,
    chunk(PEERS_SINK, 0, b"hello"),
    chunk(SINK, 5, CANARY, end=b""),
]


@pytest.mark.requirement("R-47")
@pytest.mark.parametrize("how", ["end of file", "reset"])
async def test_a_session_that_is_cut_at_any_byte_delivers_whole_messages_only(server: Server, how: str) -> None:
    data = b"".join(TRANSCRIPT)
    whole = [CANARY.hex(), (3 * CANARY).hex(), CANARY.hex()]
    async with friend_of(server):
        for cut in range(len(data) + 1):
            async with attacker(server) as peer:
                await peer.read()  # the first grant: it is known by now who we are
                await peer.send(data[:cut])
                if how == "reset":
                    peer.reset()
                else:
                    await peer.leave()
                over = await server.over(peer)
            assert over["by"] in ("peer", "network")
            assert over["cause"] in (None, "BrokenResourceError")
            assert over["handlers"] == 0
            got = [said["got"] for said in server.take("got")]
            assert got == whole[: len(got)]
            assert how == "reset" or len(got) >= sum(cut >= end for end in MESSAGE_ENDS)
    await server.rests()


MESSAGE_ENDS = [len(b"".join(TRANSCRIPT[:2])), len(b"".join(TRANSCRIPT[:7])), len(b"".join(TRANSCRIPT))]


# --- numbers

NUMBERS = [0, 1, 247, 248, 255, 256, 2**16, 2**16 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
FIRST = 128 * KIB  # what the top level, and a new channel, are granted at once: Limits(channel_first)


@pytest.mark.requirement("R-16", "R-17", "R-18")
async def test_each_boundary_of_an_id_gets_its_exact_verdict(server: Server) -> None:
    async with friend_of(server):
        for id in NUMBERS:
            top = id == 0
            for type, expected in {
                REQUEST: "alive",
                ANSWER: "bpmux-R10",
                SINK: "bpmux-S05" if top else "alive",
                PEERS_SINK: "alive" if top else "bpmux-R11",
                STREAM: "bpmux-S05" if top else "alive",
                PEERS_STREAM: "bpmux-R22" if top else "bpmux-R11",
                DUPLEX: "bpmux-R09" if top else "alive",
            }.items():
                await meets(server, expected, chunk(type, id, b""))
    await server.rests()


@pytest.mark.requirement("R-16", "R-17")
async def test_each_boundary_of_a_credit_gets_its_exact_verdict(server: Server) -> None:
    async with friend_of(server):
        for amount in NUMBERS:
            more = "bpmux-R25" if amount == 2**64 - 1 else "alive"
            for opening, again in [
                (chunk(REQUEST, 3, b"stall", credit=amount), chunk(REQUEST, 3, credit=1)),
                (chunk(STREAM, 3, b"", credit=amount), chunk(STREAM, 3, credit=1)),
                (chunk(SINK, 3, b"stall", credit=amount), chunk(SINK, 3, credit=1)),
                (chunk(DUPLEX, 3, b"stall", credit=amount), chunk(STREAM, 3, credit=1)),
                (chunk(PEERS_STREAM, 0, credit=amount), chunk(PEERS_STREAM, 0, credit=1)),
                (chunk(PEERS_SINK, 0, credit=amount), chunk(PEERS_SINK, 0, credit=1)),
            ]:
                await meets(server, "alive", opening)
                if not (opening[0] >> 5 == REQUEST and amount):  # it is answered, and gone
                    await meets(server, more, opening, again)
    await server.rests()


@pytest.mark.requirement("R-16", "R-17", "R-18", "R-26")
async def test_each_boundary_of_a_length_gets_its_exact_verdict(server: Server) -> None:
    async with friend_of(server):
        for size in NUMBERS:
            length, fits = encode_varu64(size), "waits" if size > 2 else "alive"
            openings = "bpmux-R15" if size > FIRST else fits
            for type in (REQUEST, SINK, STREAM, DUPLEX):
                head = bytes([type << 5 | 0x10, 3])
                await meets(server, openings, head, length, b"x" * min(size, 2))
                ended = bytes([type << 5 | 0x12, 3, 0]) + length
                await meets(server, ("bpmux-R18" if size else "alive"), ended)
            known = "bpmux-R23" if size > FIRST else fits
            await meets(server, known, b"\x50\x03\x00\x50\x03", length, b"x" * min(size, 2))
            await meets(server, known, b"\x70\x00", length, b"x" * min(size, 2))
            known = "bpmux-R29" if size > FIRST else fits
            await meets(server, known, b"\x50\x03\x00\x42\x03", length, b"x" * min(size, 2))
            known = "bpmux-R29" if size else "alive"
            await meets(server, known, b"\x90\x03\x00\x82\x03", length)
            await meets(server, known, b"\xa2\x00", length)
    await server.rests()


@pytest.mark.requirement("R-16", "R-26")
async def test_each_boundary_of_an_announced_total_gets_its_exact_verdict(server: Server) -> None:
    async with friend_of(server):
        with server.growth() as growth:
            for total in [*NUMBERS, 16 * MIB, 16 * MIB + 1]:
                length = max(1, (total.bit_length() + 7) // 8)
                for more in range(9 - length):
                    announced = bytes([0xE0 | length + more - 1]) + total.to_bytes(length + more)
                    expected = "bpmux-P17" if total > 16 * MIB else "alive"
                    if more or not total:
                        expected = "bpmux-P05" if more else "bpmux-P04"
                    await meets(server, expected, announced, chunk(SINK, 3, b"x"))
        assert growth.bytes < NOISE, "nothing is reserved for what was only announced"
    await server.rests()


# --- too many of something


@asynccontextmanager
async def attacked(server: Server, *, within: float) -> AsyncGenerator[Raw, None]:
    """A connection beside an honest one, for an attack during which the server may grow so far."""
    async with friend_of(server) as friend, attacker(server) as peer:
        with server.growth() as growth, trio.fail_after(2 * PATIENCE):
            yield peer
            await friend.is_well()
        assert growth.bytes < within, f"{growth.bytes:,} bytes more, {within:,.0f} allowed"
    await server.rests()


@pytest.mark.requirement("R-01", "R-02", "R-03")
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "not taken"])
@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("what", OPEN)
async def test_whoever_opens_without_end_is_cut_off_at_the_limit(
    small: Server, what: str, *, in_parts: bool, taken: bool
) -> None:
    partial = encode_partial(100) if in_parts else b""
    async with attacked(small, within=declared(small) + NOISE) as peer:
        if not taken:
            await peer.send(STALL)
        for id in range(1, 20 * small.limits.channels):
            # A request that is not answered at once stays: it has no credit for its answer.
            if not await peer.send(partial, chunk(OPEN[what], id, b"x")):
                break
        over = await small.over(peer)
        assert (over["by"], over["cause"]) == ("peer", "RemoteProtocolError")
        assert over["limit"] == "channels" or (over["rule"] == "bpmux-R15" and in_parts)
        assert over["handlers"] <= small.limits.channels


@pytest.mark.soak
@pytest.mark.requirement("R-02", "R-03")
@pytest.mark.parametrize("what", OPEN)
async def test_a_hundred_thousand_openings_meet_the_usual_limit(server: Server, what: str) -> None:
    async with attacked(server, within=declared(server) + NOISE) as peer:
        await peer.send(b"".join(chunk(OPEN[what], id, b"") for id in range(1, 100_001)))
        assert (await server.over(peer))["limit"] == "channel_memory"


# Both halves of a duplex may end in order, so that it stays for the application, and the backlog is the limit.
CHURN = {
    "requests that are cancelled": (chunk(REQUEST, 3, b"x"), chunk(REQUEST, 3, end=b"")),
    "streams that are stopped": (chunk(STREAM, 3, b""), chunk(STREAM, 3, end=b"")),
    "streams that are stopped at birth": (chunk(STREAM, 3, b"", end=b""),),
    "duplexes that are broken off": (chunk(DUPLEX, 3, b""), chunk(STREAM, 3, end=b""), chunk(SINK, 3, end=b"")),
}


@pytest.mark.requirement("R-10", "R-12")
@pytest.mark.parametrize("what", CHURN)
async def test_channels_that_are_opened_and_broken_off_without_end_cost_bounded_memory(
    small: Server, what: str
) -> None:
    """They end no connection: who cancels thousands of channels may be right, after a timeout for example."""
    async with attacked(small, within=declared(small) + NOISE) as peer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.read_all)
            lives = await peer.flood(b"".join(CHURN[what]), 100_000)
            nursery.cancel_scope.cancel()
        if what == "duplexes that are broken off":
            assert (await small.over(peer))["limit"] == "backlog"
        else:
            assert lives
            assert await peer.round_trip()


@pytest.mark.requirement("R-10")
async def test_a_handler_counts_as_a_channel_until_it_has_really_ended(small: Server) -> None:
    """The peer ends its channels in order, again and again; the handlers that work on them have not ended yet."""
    ended = (chunk(DUPLEX, 3, b"stall"), chunk(SINK, 3, end=b""), chunk(STREAM, 3, end=b""))
    async with attacked(small, within=declared(small) + NOISE) as peer:
        for _ in range(2 * small.limits.channels):
            # Not faster than the application takes them, or the backlog would be the limit that is met.
            if not await peer.send(*ended) or not (await peer.round_trip() and await peer.round_trip()):
                break
        looked = await trio.to_thread.run_sync(small.look)
        assert looked["tasks"] <= small.at_rest["tasks"] + small.limits.channels + 100


@pytest.mark.requirement("R-11")
async def test_a_peer_that_provokes_our_errors_meets_the_same_allowance(tmp_path: Path) -> None:
    """Handlers that fail end no connection, but beyond the allowance the next ones begin later."""
    burst, opened = int(SMALL["resets_burst"]), 8 * int(SMALL["resets_burst"])
    async with fresh(tmp_path / "log", **SMALL) as server:
        server.handlers_fail = True
        async with attacked(server, within=declared(server) + NOISE) as peer:
            began = trio.current_time()
            for id in range(10, 10 + opened):
                assert await peer.send(chunk(DUPLEX, id, b"fail!"))
                assert await peer.round_trip()
            failed = server.log.read_text().count("the handler of a channel failed")
            allowed = burst + (trio.current_time() - began) * SMALL["resets_per_second"]
            assert burst <= failed <= allowed + 1


# --- what is owed to a peer that does not read


@pytest.mark.requirement("R-06", "R-12")
async def test_a_million_pings_of_a_peer_that_never_reads_are_a_number(server: Server) -> None:
    async with attacked(server, within=NOISE) as peer:
        assert await peer.flood(chunk(PEERS_SINK, 0, ping=True), 1_000_000)


@pytest.mark.requirement("R-06", "R-12")
async def test_pings_beyond_the_limit_end_the_connection(small: Server) -> None:
    async with attacked(small, within=NOISE) as peer:
        assert not await peer.flood(chunk(PEERS_SINK, 0, ping=True), 10_000_000)
        assert (await small.over(peer))["limit"] == "pongs"


@pytest.mark.requirement("R-07", "R-08")
async def test_a_peer_that_opens_and_never_reads_holds_up_itself_alone(small: Server) -> None:
    """It grants all the credit there is and reads nothing: what waits for it stays below the outbox."""
    async with attacked(small, within=small.limits.outbox * 2 + NOISE) as peer:
        for id in range(1, 101):
            await peer.send(chunk(STREAM, id, b"push", credit=2**64 - 1))
        await peer.send(chunk(DUPLEX, 200, b"", credit=2**64 - 1))
        with trio.move_on_after(0.5):  # s; as long as it takes what it echoes, at most
            await peer.flood(chunk(SINK, 200, b"x" * 1000), 10_000)


@pytest.mark.requirement("R-08", "R-38")
async def test_credit_that_is_never_granted_delays_the_leave_by_the_linger_at_most(small: Server) -> None:
    async with attacked(small, within=NOISE) as peer:
        await peer.send(chunk(DUPLEX, 3, b""), chunk(SINK, 3, CANARY), chunk(STREAM, 5, b"push"))
        assert await peer.round_trip()
        await peer.send(chunk(PEERS_SINK, 0, b"leave"))
        left = await small.left(peer)
        assert left["seconds"] >= small.linger
        assert left["lived"] < small.linger + 0.5
        assert left["reason"] == f"the peer didn't close the session within {small.linger} s"


async def floods(peer: Raw) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.read_all)
        await peer.flood(chunk(PEERS_SINK, 0, b"", ping=True), 1_000_000)


async def floods_unread(peer: Raw) -> None:
    await peer.flood(chunk(PEERS_SINK, 0, b"", ping=True), 1_000_000)


async def opens_on(peer: Raw) -> None:
    for id in range(10, 100_000):
        if not await peer.send(chunk(DUPLEX, id, b"")):
            return


async def says_nothing(peer: Raw) -> None:
    pass


async def closes_half(peer: Raw) -> None:
    await peer.half_close()


async def resets(peer: Raw) -> None:
    peer.reset()


LEAVES = [floods, floods_unread, opens_on, says_nothing, closes_half, resets]


@pytest.mark.requirement("R-38")
@pytest.mark.parametrize("behaviour", LEAVES, ids=lambda behaviour: behaviour.__name__)
@pytest.mark.parametrize("order", [b"leave", b"shutdown"], ids=["leave", "shutdown"])
async def test_leaving_ends_within_its_time_whatever_the_peer_does(
    small: Server, order: bytes, behaviour: Attack
) -> None:
    async with attacked(small, within=declared(small) + NOISE) as peer:
        await peer.read()  # the first grant: it is known by now who we are
        await peer.send(chunk(DUPLEX, 3, b""), chunk(SINK, 3, CANARY), chunk(PEERS_SINK, 0, order))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(behaviour, peer)
            left = await small.left(peer)
            nursery.cancel_scope.cancel()
        assert left["lived"] < small.linger + 0.5
        small.take("leaving"), small.take("over")


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-39")
async def test_a_violation_while_the_server_shuts_down_is_still_a_violation(tmp_path: Path) -> None:
    """An opening that comes too late, and in the same breath something illegal."""
    async with fresh(tmp_path / "log", linger=60, **SMALL) as small, attacked(small, within=NOISE) as peer:
        await peer.send(chunk(DUPLEX, 3, b""), chunk(PEERS_SINK, 0, b"shutdown"))
        while (said := await peer.chunk()) is not None and said.end is None:
            pass  # until it says that it takes nothing new
        await peer.send(chunk(DUPLEX, 5, b"") + chunk(ANSWER, 9, b""))
        await peer.read_all()
        over = await small.over(peer)
        assert (over["by"], over.get("rule")) == ("peer", "bpmux-R10")


# --- as much as the windows hold


@pytest.mark.requirement("R-03", "R-07")
async def test_every_window_full_and_nobody_reading_costs_what_the_limits_say(tmp_path: Path) -> None:
    async with fresh(tmp_path / "log", **SMALL | {"channels": 100}) as server:
        async with attacked(server, within=declared(server) + NOISE) as peer:
            await peer.send(STALL, *(chunk(SINK, id, b"") for id in range(1, 101)))
            assert await peer.round_trip()
            for id, credit in (await granted(peer, 100)).items():
                assert await peer.send(chunk(SINK, id, bytes(credit)))
            assert await peer.round_trip()


async def granted(peer: Raw, channels: int) -> dict[int, int]:
    """The credit of each channel that it opened, once a ping has gone round."""
    credit = dict.fromkeys(range(1, channels + 1), 0)
    for said in peer.chunks():
        if said.type is PEERS_STREAM and said.id in credit:
            credit[said.id] += said.credit or 0
    assert all(credit.values())
    return credit


@pytest.mark.requirement("R-04")
@pytest.mark.parametrize("size", [1, 10])
async def test_short_messages_on_many_channels_cost_four_times_their_bytes_at_most(tmp_path: Path, size: int) -> None:
    limits = SMALL | {"channel_bytes": 4 * KIB, "channel_floor": 4 * KIB}
    async with fresh(tmp_path / "log", **limits) as server:
        async with friend_of(server), attacker(server) as peer:
            await peer.send(STALL, *(chunk(SINK, id, b"") for id in range(1, 501)))
            assert await peer.round_trip()
            credit = await granted(peer, 500)
            with server.growth() as growth:
                for id, allowed in credit.items():
                    assert await peer.send(chunk(SINK, id, b"x" * size) * (allowed // size))
                assert await peer.round_trip()
            assert growth.bytes < 4 * sum(credit.values()) + 2 * MIB, f"{growth.bytes / sum(credit.values()):.1f} times"
        await server.rests()


@pytest.mark.requirement("R-04", "R-05")
@pytest.mark.parametrize("message", [b"", b"x"], ids=["empty", "of a byte"])
async def test_a_million_messages_in_an_unread_channel_cost_four_times_their_bytes_at_most(
    tmp_path: Path, message: bytes
) -> None:
    async with fresh(tmp_path / "log", channel_first=MIB) as server:
        async with attacked(server, within=4 * MIB * len(message) + NOISE) as peer:
            await peer.send(chunk(SINK, 1, b"stall"))
            assert await peer.flood(chunk(SINK, 1, message), 1_000_000)
            assert await peer.round_trip()


@pytest.mark.requirement("R-04")
async def test_single_bytes_of_large_messages_on_many_channels_cost_four_times_their_number(tmp_path: Path) -> None:
    async with fresh(tmp_path / "log", **SMALL | {"reassembly": 8 * MIB}) as server:
        channels, bytes_each = 100, 1000
        async with attacked(server, within=4 * channels * bytes_each + 4 * KIB * channels + NOISE) as peer:
            await peer.send(STALL, *(chunk(SINK, id, b"") for id in range(1, channels + 1)))
            await peer.send(*(encode_partial(64 * KIB) + chunk(SINK, id, b"x") for id in range(1, channels + 1)))
            everywhere = b"".join(chunk(SINK, id, b"x") for id in range(1, channels + 1))
            assert await peer.flood(everywhere, bytes_each - 1)
            assert await peer.round_trip()


@pytest.mark.requirement("R-03")
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "not taken"])
async def test_end_payloads_that_nobody_has_seen_stay_within_the_limits(tmp_path: Path, *, taken: bool) -> None:
    """Each channel ends with an error as large as its window; the task that should read that is busy."""
    async with fresh(tmp_path / "log", **SMALL | {"channel_bytes": 64 * KIB}) as server:
        async with attacked(server, within=declared(server) + NOISE) as peer:
            if not taken:
                await peer.send(STALL)
            for id in range(1, server.limits.backlog):
                if not await peer.send(chunk(SINK, id, b"stall")) or not await peer.round_trip():
                    break
                size = sum(said.credit or 0 for said in peer.chunks() if (said.type, said.id) == (PEERS_STREAM, id))
                peer.got.clear()
                await peer.send(chunk(SINK, id, end=bytes(size)))


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-03")
async def test_what_is_unread_on_channels_that_ended_stays_within_the_limits(tmp_path: Path) -> None:
    """Was: What was unread on channels that had ended was without bound."""
    limits = SMALL | {"channels": 100, "backlog": 100, "channel_floor": 16 * KIB}
    async with fresh(tmp_path / "log", **limits) as server:
        async with attacked(server, within=declared(server) + NOISE) as peer:
            for id in range(1, 2000):
                filled = chunk(SINK, id, b"stall") + chunk(SINK, id, bytes(16 * KIB), end=b"")
                if not await peer.send(filled) or not await peer.round_trip():
                    break


@pytest.mark.requirement("R-03", "R-07")
async def test_messages_half_said_do_not_keep_a_small_channel_of_the_same_peer_waiting(tmp_path: Path) -> None:
    """All that may be lent is lent to messages that never end; a large one waits in line."""
    async with fresh(tmp_path / "log", **SMALL) as server, attacked(server, within=declared(server) + NOISE) as peer:
        half_said = range(100, 120)
        for id in half_said:
            await peer.send(chunk(SINK, id, b""), encode_partial(64 * KIB), chunk(SINK, id, b"x"))
        await peer.send(chunk(DUPLEX, 1, b"", credit=2**32), chunk(DUPLEX, 3, b"", credit=2**32))
        assert await peer.round_trip()
        sent = max(said.credit or 0 for said in peer.chunks() if said.id == 1)
        await peer.send(encode_partial(60 * KIB), chunk(SINK, 1, b"x" * sent))
        await peer.send(chunk(SINK, 3, CANARY))
        assert CANARY in [said.payload async for said in peer.chunks_until(PEERS_SINK, 3)]
        # No sender can give up a message in the middle, so they are finished: what was lent comes back, in turn.
        for id in half_said:
            while sum(said.credit or 0 for said in peer.chunks() if said.id == id) < 64 * KIB:
                assert await peer.round_trip()
            await peer.send(chunk(SINK, id, bytes(64 * KIB - 1)))
        lent = 0
        async for said in peer.chunks_until(PEERS_STREAM, 1):
            lent = said.credit or 0
        assert lent >= 60 * KIB - sent
        await peer.send(chunk(SINK, 1, b"x" * (60 * KIB - sent)))
        echoed = 0
        while echoed < 60 * KIB and (one := await peer.chunk()) is not None:
            echoed += len(one.payload or b"") if one.id == 1 else 0
        assert echoed == 60 * KIB


# --- slowness, and noise


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("sent", [b"\x50", b"\x50\xff\x01", b"\x50\x03\x00\x50\x03\xf9\x10\x00\x78",
    b"\x50\x03\x00\xe1\x10\x00\x50\x03\x01x"], ids=["a tag", "an id", "a payload", "parts"])  # fmt: skip
async def test_a_message_that_stays_unfinished_is_dropped_at_the_stall_limit(impatient: Server, sent: bytes) -> None:
    async with attacked(impatient, within=NOISE) as peer:
        for byte in sent:
            await peer.send(bytes([byte]))  # on a slow machine it is dropped before the last one
        over = await impatient.over(peer)
        # The bytes came within one span, and then the line is silent; or they were spread over two.
        assert (over["by"], over.get("limit")) in (("network", None), ("peer", "stall"))
        assert over["reason"].startswith("no data from the peer") or over["limit"] == "stall"


FLOODS = {
    "credit of 0": (b"", chunk(PEERS_STREAM, 0, credit=0)),
    "credit": (chunk(STREAM, 9, b""), chunk(STREAM, 9, credit=1)),
    "parts of nothing": (chunk(SINK, 9, b"") + encode_partial(5) + chunk(SINK, 9, b""), chunk(SINK, 9, b"")),
    "empty messages": (b"", chunk(PEERS_SINK, 0, b"")),
    "pongs": (b"", chunk(PEERS_SINK, 0)),
    "pings": (b"", chunk(PEERS_SINK, 0, ping=True)),
}


@pytest.mark.requirement("R-27")
@pytest.mark.parametrize(("before", "unit"), FLOODS.values(), ids=FLOODS)
async def test_a_flood_does_not_keep_another_connection_waiting(server: Server, before: bytes, unit: bytes) -> None:
    """How long a turn may be is shown without a clock in `test_session_floods.py`; here the real thing goes on."""
    async with friend_of(server) as friend, attacker(server) as peer, trio.open_nursery() as nursery:
        nursery.start_soon(peer.read_all)
        await peer.send(before)
        nursery.start_soon(peer.flood, unit, 1_000_000_000)
        with trio.fail_after(PATIENCE):
            took = [await friend.session.ping() for _ in range(20)]
        nursery.cancel_scope.cancel()
    assert len(took) == 20


@pytest.mark.requirement("R-27", "R-39")
async def test_a_peer_with_all_its_channels_that_hangs_up_does_not_delay_another_connection(tmp_path: Path) -> None:
    async with fresh(tmp_path / "log", channels=4000) as server:
        async with friend_of(server) as friend:
            for _ in range(3):
                async with attacker(server) as peer:
                    for first in range(1, 4000, 100):
                        await peer.send(*(chunk(DUPLEX, id, b"") for id in range(first, first + 100)))
                        assert await peer.round_trip()
                    peer.reset()
                    with trio.fail_after(PATIENCE):
                        assert min([await friend.session.ping() for _ in range(3)]) > 0
                    assert (await server.over(peer))["by"] in ("peer", "network")
        await server.rests()


# --- other ports


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def every_port(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[Server]:
    """One server on three ports: TLS, WebSocket, and WebSocket over TLS."""
    folder = tmp_path_factory.mktemp("hostile")
    certificate = folder / "certificate"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    urls = ("bpmux+tls://127.0.0.1:0", "bpmux+ws://127.0.0.1:0", "bpmux+wss://127.0.0.1:0")
    with Server(folder / "log", urls=urls, certificate=str(certificate), limits={"handshake": PATIENCE / 2}) as running:
        yield running


UPGRADE = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
UPGRADE += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
MASK = b"\0\0\0\0"
HANDSHAKES = {
    "a TLS record that is none": [b"\x16\x03\x01\xff\xff" + CANARY],
    "a TLS alert": [b"\x15\x03\x03\x00\x02\x02\x28"],
    "bpmux": [b"".join(TRANSCRIPT)],
    "no HTTP": [b"\0" * 100, CANARY + b"\r\n\r\n"],
    "a head without end": [b"GET / HTTP/1.1\r\n" + b"X: " + CANARY * 1000],
    "a head without a key": [b"GET / HTTP/1.1\r\nHost: x\r\nX: " + CANARY + b"\r\n\r\n"],
    "a target that is none": [UPGRADE.replace(b"GET /", b"GET //[") + b"\r\n"],
    "a text frame": [UPGRADE + b"\r\n", b"\x81\xa2" + MASK + CANARY],
    "a frame without a mask": [UPGRADE + b"\r\n", b"\x82\x22" + CANARY],
    "a frame with reserved bits": [UPGRADE + b"\r\n", b"\xf2\xa2" + MASK + CANARY],
    "an opcode that is none": [UPGRADE + b"\r\n", b"\x83\xa2" + MASK + CANARY],
    "a frame of 2^63 bytes": [UPGRADE + b"\r\n", b"\x82\xff\x7f" + b"\xff" * 7 + MASK + CANARY],
    "a large ping": [UPGRADE + b"\r\n", b"\x89\xfe\x01\x00" + MASK + CANARY * 8],
    "a close with a reason": [
        UPGRADE + b"\r\n",
        b"\x88\xa4" + MASK + b"\x0b\xb8" + b"a reason is no payload and is told",
    ],
    "a close with half a code": [UPGRADE + b"\r\n", b"\x88\x81" + MASK + b"\x03"],
    "a violation in a frame": [UPGRADE + b"\r\n", b"\x82\x82" + MASK + b"\x30\x07"],
    "fragments without end": [UPGRADE + b"\r\n", b"\x02\x81" + MASK + b"\x50", *[b"\x00\x80" + MASK] * 2000],
}


@pytest.mark.requirement("R-14", "R-21", "R-66")
@pytest.mark.parametrize("parts", HANDSHAKES.values(), ids=HANDSHAKES)
async def test_garbage_below_the_protocol_ends_its_own_connection(
    every_port: Server, authority: trustme.CA, parts: list[bytes]
) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    for url in every_port.urls:
        more = {} if "+ws:" in url else {"ssl_context": context}
        async with friend_of(every_port, url, **more):
            async with attacker(every_port, int(url.rpartition(":")[2])) as peer:
                for part in parts:
                    if not await peer.send(part):
                        break
                await peer.leave()
    every_port.take("over"), every_port.take("left"), every_port.take("leaving")
    await every_port.rests()


@pytest.mark.requirement("R-21", "R-40")
async def test_a_websocket_peer_that_is_gone_before_it_is_answered_is_no_failure_of_ours(tmp_path: Path) -> None:
    """What follows its upgrade request ends the WebSocket before our answer is out, or the answer finds no peer."""
    with Server(tmp_path / "log", urls=("bpmux+ws://127.0.0.1:0",)) as server:
        async with friend_of(server):
            for _ in range(50):
                async with attacker(server) as peer:
                    await peer.send(UPGRADE + b"\r\n" + b"\x00\x80" + MASK)
                    peer.reset()
        await server.rests()


# --- a network that changes bytes


class Mangler:
    """Between two honest ends: flips single bits, about one in so many bytes, then cuts. Who hangs up is passed on."""

    def __init__(self, seed: int, port: int, every: int) -> None:
        self.dice = random.Random(seed)
        self.port = port
        self.every = every
        self.over = trio.Event()

    async def handle(self, near: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as far:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.relay, near, far, nursery.cancel_scope)
                nursery.start_soon(self.relay, far, near, nursery.cancel_scope)
                await self.over.wait()
                nursery.cancel_scope.cancel()
            await trio.aclose_forcefully(near)

    async def relay(self, source: trio.SocketStream, sink: trio.SocketStream, both: trio.CancelScope) -> None:
        try:
            while data := bytearray(await source.receive_some(64 * KIB)):
                for _ in range(len(data) // self.every + (self.dice.random() * self.every < len(data) % self.every)):
                    data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
                await sink.send_all(data)
            await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            both.cancel()


async def echoes(url: str, **options: Any) -> int:
    """Work over a line that lies, as an application would; how many echoes came back."""
    rounds = 0

    async def echo(session: muxkit.Session, size: int) -> None:
        nonlocal rounds
        with suppress(trio.BrokenResourceError, trio.EndOfChannel, trio.ClosedResourceError):
            async with session.open() as channel:
                for _ in range(50):
                    await channel.send(bytes(size))
                    await channel.receive()
                    rounds += 1

    with suppress(muxkit.LinkLost):
        async with muxkit.connect(url, linger=0.2, **options) as session, trio.open_nursery() as nursery:
            for size in (1, 300, 3000):
                nursery.start_soon(echo, session, size)
    return rounds


@pytest.mark.requirement("R-49")
@pytest.mark.seeds(10, soak=1000)
async def test_flipped_bits_neither_crash_nor_hang_nor_cost_memory(small: Server, seed: int) -> None:
    mangler = Mangler(seed, small.port, every=random.Random(seed).choice([50, 1000, 20_000]))
    async with friend_of(small), trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, mangler.handle, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        url = f"bpmux+tcp://127.0.0.1:{listener.socket.getsockname()[1]}"
        with small.growth() as growth, trio.fail_after(PATIENCE):
            async with trio.open_nursery() as clients:
                clients.start_soon(partial(echoes, url, limits=small.limits))
                # What was changed so that neither side can notice (an id, an amount of credit) leaves both waiting.
                await trio.sleep(0.3)
                mangler.over.set()
        assert growth.bytes < declared(small) + NOISE
        nursery.cancel_scope.cancel()
    await small.rests()


@pytest.mark.requirement("R-49", "R-63")
@pytest.mark.seeds(5, soak=100)
async def test_under_tls_a_flipped_bit_is_an_error_of_the_connection(
    every_port: Server, authority: trustme.CA, seed: int
) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    mangler = Mangler(seed, every_port.port, every=30_000)
    async with friend_of(every_port, ssl_context=context), trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, mangler.handle, 0, host="127.0.0.1"))
        url = f"bpmux+tls://127.0.0.1:{listener.socket.getsockname()[1]}"
        wrong, told = 0, ""
        message = random.Random(seed).randbytes(3000)

        async def send_on(channel: muxkit.Channel) -> None:
            """Without waiting for an echo: the bit may be in the length of a record, whose end is to come first."""
            with suppress(trio.BrokenResourceError):
                while True:
                    await channel.send(message)

        with trio.fail_after(PATIENCE):
            try:
                async with muxkit.connect(url, ssl_context=context) as session, session.open() as channel:
                    async with background() as beside:
                        beside.start_soon(send_on, channel)
                        while True:
                            wrong += await channel.receive() != message
            except muxkit.LinkLost as error:
                told = error.by
            except ConnectionError:  # in the handshake already
                told = "network"
        assert (wrong, told in ("network", "peer")) == (0, True)
        mangler.over.set()
        nursery.cancel_scope.cancel()
    await every_port.rests()
