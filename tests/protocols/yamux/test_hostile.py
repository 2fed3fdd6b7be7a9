"""Peers that break rules or limits lose a stream or their session, and their neighbours notice nothing."""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit import Limits
from muxkit.core import Reason
from muxkit.core.events import ChannelFailed, Failed
from muxkit.protocols import yamux
from muxkit.protocols.yamux.frames import Type, encode_header
from tests.protocols.yamux._helpers import (
    FIN,
    RST,
    SYN,
    WINDOW,
    data,
    engine,
    fed,
    frames_in,
    go_away,
    ping,
    receiver_of,
    sender_of,
    sums_of,
    update,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 60.0  # s
LIMITS = Limits(pongs=2000, channels=200, backlog=50, connection_bytes=2**20, channel_bytes=2**18)

ENDS: dict[str, Sequence[bytes]] = {
    "a window that is exceeded": [data(1, bytes(WINDOW), SYN), data(1, b"x")],
    "a frame of 4 GiB": [update(1, 0, SYN), encode_header(Type.DATA, 0, 1, 2**32 - 1)],
    "credit of 4 GiB twice": [update(1, 2**32 - 1, SYN)],
    "an id of our parity": [update(2, 0, SYN)],
    "the id of the session": [update(0, 0, SYN)],
    "a second opening": [update(1, 0, SYN), update(1, 0, SYN)],
    "data after the end": [data(1, b"x", SYN | FIN), data(1, b"x")],
    "two ends": [update(1, 0, SYN), update(1, 0, FIN), update(1, 0, FIN)],
    "an unknown type": [encode_header(9, 0, 1, 0)],
    "another version": [b"\x07" + ping(1)[1:]],
    "another protocol": [b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"],
    "a flood of pings": [ping(value) for value in range(5000)],
    "a flood of openings beyond the limit": [update(id, 0, SYN) for id in range(1, 10_001, 2)],
}
"""What ends the attacker's session, with go-away 1."""

LIVES: dict[str, Sequence[bytes]] = {
    "a flood of openings and resets": [
        frame for id in range(1, 6001, 2) for frame in (update(id, 0, SYN), update(id, 0, RST))
    ],
    "a flood of zero windows": [update(1, 0, SYN), *[update(1, 0)] * 20_000],
    "a flood of empty data": [data(1, b"", SYN), *[data(1)] * 20_000],
    "a flood about unknown streams": [data(id, b"late") for id in range(1, 20_001)],
    "a flood of answers to nothing": [ping(value, 2) for value in range(20_000)],
    "messages that are no messages": [data(1, b"\x80\x00\x00\x08muxkit/1", SYN), data(1, b"\xff" * 20)],
    "a message beyond the limit": [data(1, b"\x80\x00\x00\x08muxkit/1", SYN), data(1, b"\x7f\xff\xff\xff")],
    "a go-away": [go_away(0)],
}
"""What an attacker may do without losing the session, as it costs it more than us."""


@pytest.mark.parametrize("attack", ENDS)
def test_what_breaks_a_rule_ends_the_session_with_a_go_away(attack: str) -> None:
    server = engine(limits=LIMITS)
    octets = b"".join(ENDS[attack])
    events = [
        event for place in range(0, len(octets), 1 << 16) for event in fed(server, octets[place : place + (1 << 16)])
    ]
    failed = [event for event in events if isinstance(event, Failed)]
    assert len(failed) == 1
    (told,) = frames_in(server.farewell(Reason()))
    assert (told.type, told.length) == (Type.GO_AWAY, 1)
    assert fed(server, update(1, 5)) == []


@pytest.mark.parametrize("attack", LIVES)
def test_what_costs_nothing_does_not_end_the_session(attack: str) -> None:
    server = engine(limits=LIMITS)
    for frame in LIVES[attack]:
        assert not any(isinstance(event, Failed) for event in fed(server, frame))
        written(server)
    assert not server.over
    assert server.channels <= 1
    assert sums_of(server).held <= 20


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@pytest.mark.parametrize("attack", [*ENDS, *LIVES])
async def test_an_attack_costs_only_the_attacker(attack: str) -> None:
    octets = b"".join({**ENDS, **LIVES}[attack])
    with trio.fail_after(PATIENCE):
        async with (
            muxkit.open_server(echo, "yamux+tcp://127.0.0.1:0", limits=LIMITS) as server,
            yamux.connect(server.url) as neighbour,
            neighbour.open("neighbour") as channel,
            trio.open_nursery() as nursery,
        ):
            port = int(server.url.rpartition(":")[2])

            async def attack_now() -> None:
                async with await trio.open_tcp_stream("127.0.0.1", port) as attacker:
                    with suppress(trio.BrokenResourceError):
                        await attacker.send_all(octets)
                        while await attacker.receive_some():
                            pass

            nursery.start_soon(attack_now)
            for number in range(50):
                await channel.send(struct.pack(">I", number))
                assert await channel.receive() == struct.pack(">I", number)
            nursery.cancel_scope.cancel()


async def test_streams_that_are_never_read_do_not_hold_more_than_the_limit() -> None:
    """yamux gives each stream 256 KiB, so a thousand of them would be 256 MiB."""
    limits = Limits(connection_bytes=2**20, channels=4000, channel_memory=2**30)
    server = engine(limits=limits)
    events = fed(server, *(data(id, bytes(WINDOW), SYN) for id in range(1, 401, 2)))
    assert sum(isinstance(event, ChannelFailed) for event in events) == 200 - 4
    assert sums_of(server).held <= 2**20 + 200 * limits.channel_floor
    assert not server.over


@pytest.mark.parametrize("seed", range(200))
def test_random_frames_never_raise_and_leave_no_debt(seed: int) -> None:
    """Frames that are mostly legal, with errors among them, in both directions, and commands between them."""
    dice = Random(seed)
    one = engine(is_client=dice.random() < 0.5, limits=Limits(channels=30, backlog=20, handshake=1.0))
    theirs = [2, 4, 6] if dice.random() < 0.1 else [1, 3, 5, 7, 9, 77]
    now = 0.0
    for _ in range(300):
        id = dice.choice([*theirs, 1, 2, 3, 4])
        flags = dice.choice([0, 0, 0, SYN, SYN, FIN, RST, 2, SYN | FIN, 2 | FIN])
        payload = dice.choice([b"", b"x", b"\x80\x00\x00\x08muxkit/1", dice.randbytes(dice.randrange(3000))])
        frame = dice.choice(
            [
                partial(data, id, payload, flags),
                partial(update, id, dice.choice([0, 1, 65_536]), flags),
                partial(ping, dice.randrange(5), dice.choice([1, 2])),
            ]
        )()
        cut = dice.randrange(len(frame) + 1)
        for piece in (frame[:cut], frame[cut:]):
            one.receive_bytes(piece, now)
        if one.over:
            return
        for halves in one.streams():
            sender, act = sender_of(halves), dice.randrange(12)
            if act == 0:
                sender.finish()
            elif act == 1:
                sender.cancel(Reason("why", 3))
            elif act == 2:
                receiver_of(halves).stop(Reason())
            elif act == 3 and sender.has_room(10) and not sender.is_ending:
                sender.send(dice.randbytes(10))
        if dice.random() < 0.2 and one.places:
            one.open_channel(b"") if dice.random() < 0.5 else one.open_stream()
        if dice.random() < 0.3:
            written(one)
        now += dice.random() / 10
        one.handle_deadline(now)
        state = sums_of(one)
        assert state.held >= 0
        assert state.outbox.used >= 0
        assert 0 <= state.reassembly.left <= state.limits.reassembly
