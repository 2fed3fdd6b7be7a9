"""A plain e3x peer over datagrams, written from the document alone, with the habits of the originals.

It keeps 50 packets ahead of what was processed and drops what is above without a word, answers duplicates with an ack,
names what is missing, and sends its last packet again after two seconds of silence.
"""

import contextlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

BUFFER = 50  # packets ahead of the last processed one
ASK_AGAIN = 2.0  # s of silence until the last packet is sent again
REPEAT = 1.0  # s between two resends of a packet
SETTLED = 0.01  # s after which the other side has surely taken what was delivered
LARGEST = 1400  # bytes of a packet
GREATEST = 2**32 - 1


class Refused(Exception):
    """What came breaks the named clause."""


def packet(head: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode() if head else b""
    return len(text).to_bytes(2, "big") + text + body


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The head and the body of a packet."""
    size = int.from_bytes(data[:2], "big")
    if len(data) < 2 or len(data) < size + 2:
        raise Refused(f"e3x-packet: a head of {size} bytes in {len(data)}")
    if 0 < size < 7:
        raise Refused(f"e3x-packet: a head of {size} bytes is binary")
    try:
        head = json.loads(data[2 : size + 2]) if size else {}
    except ValueError as error:
        raise Refused(f"e3x-packet: {error}") from None
    if not isinstance(head, dict):
        raise Refused("e3x-packet: the head is no object")
    return head, data[size + 2 :]


def deltas(ack: int, missing: list[int], limit: int) -> list[int]:
    found, at = [], ack
    for number in [*missing, limit]:
        found.append(number - at)
        at = number
    return found


def _whole(value: object, clause: str, least: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= GREATEST:
        raise Refused(f"{clause}: {what} {value!r}")
    return value


@dataclass
class Channel:
    """Both directions of a channel, and what the other side has been seen to know."""

    id: int
    is_mine: bool
    type: str
    is_reliable: bool = True
    # what this side sends
    sent: int = 0
    queue: list[tuple[dict[str, Any], bytes]] = field(default_factory=list)
    kept: dict[int, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    confirmed: int = 0
    window: int = BUFFER
    ends: bool = False
    asked: float = 0.0
    resent: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)  # when a packet of ours was handed to the network
    early: set[int] = field(default_factory=set)  # what arrived before the opening only, and may have been dropped
    named: set[int] = field(default_factory=set)  # what was named as missing
    # what the other side sends
    seen: dict[int, tuple[object, ...]] = field(default_factory=dict)
    seen_at: dict[int, list[float]] = field(default_factory=dict)
    held: dict[int, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    done: int = 0
    end_at: int | None = None
    told: list[tuple[float, int, int]] = field(default_factory=list)  # when which ack and limit were delivered
    told_window: int = BUFFER
    messages: list[bytes] = field(default_factory=list)
    parts: bytes = b""
    has_ended: bool = False
    error: str | None = None
    is_over: bool = False
    is_paused: bool = False  # its application takes nothing


class Peer:
    """One end of a session as packets in and packets out; what it refuses stands in `refusals`."""

    def __init__(
        self,
        *,
        is_odd: bool,
        now: Callable[[], float] = trio.current_time,
        knows_frag: bool = True,
        settled: float = SETTLED,
    ) -> None:
        self.out: list[bytes] = []
        self.refusals: list[str] = []
        self.channels: dict[int, Channel] = {}
        self.types: set[str] = {"test", "loose"}
        self.echoes = False
        self.window = BUFFER
        self.knows_frag = knows_frag
        self.resends = 0
        self._now = now
        self._settled = settled  # endless where the other side may be slow, which excuses what came before it knew
        self._next = 1 if is_odd else 2

    # ------------------------------------------------------------ what the test says

    def open(self, type: str = "test", body: bytes = b"", *, is_reliable: bool = True) -> Channel:
        channel = Channel(self._next, True, type, is_reliable)
        self._next += 2
        self.channels[channel.id] = channel
        self._queue(channel, {"type": type}, body)
        return channel

    def send(self, channel: Channel, body: bytes) -> None:
        self._queue(channel, {}, body)

    def end(self, channel: Channel) -> None:
        if not channel.ends:
            channel.ends = True
            self._queue(channel, {"end": True}, b"")

    def fail(self, channel: Channel, text: str) -> None:
        channel.is_over = True
        self.out.append(packet({"c": channel.id, "err": text}))

    def resume(self, channel: Channel) -> None:
        """Let the application of a paused channel go on."""
        channel.is_paused = False
        self._process(channel)

    def tick(self) -> None:
        """Do what is due after two seconds of silence."""
        for channel in self.channels.values():
            if channel.kept and not channel.is_over and self._now() - channel.asked >= ASK_AGAIN:
                channel.resent[max(channel.kept)] = self._now()
                self._write(channel, max(channel.kept))

    # ------------------------------------------------------------ writing

    def _queue(self, channel: Channel, head: dict[str, Any], body: bytes) -> None:
        channel.queue.append((head, body))
        self._pump(channel)

    def _pump(self, channel: Channel) -> None:
        while channel.queue and (not channel.is_reliable or channel.sent < channel.confirmed + channel.window):
            head, body = channel.queue.pop(0)
            channel.sent += 1
            if channel.is_reliable:
                channel.kept[channel.sent] = head, body
                self._write(channel, channel.sent)
            else:
                self.out.append(packet({"c": channel.id, **head}, body))

    def _write(self, channel: Channel, number: int) -> None:
        head, body = channel.kept[number]
        channel.asked = self._now()
        self.out.append(packet({"c": channel.id, **head, "seq": number, **self._acks(channel)}, body))

    def _acks(self, channel: Channel) -> dict[str, Any]:
        highest = max(channel.held, default=channel.done)
        missing = [number for number in range(channel.done + 1, highest) if number not in channel.held]
        waiting = len(channel.held) > self.window // 2
        if missing or waiting:
            return {"ack": channel.done, "miss": deltas(channel.done, missing, channel.done + self.window)}
        return {"ack": channel.done} if channel.done else {}

    def _ack(self, channel: Channel) -> None:
        acks = self._acks(channel)
        if acks:
            self.out.append(packet({"c": channel.id, **acks}))

    def delivered(self, data: bytes) -> None:
        """Take note that a packet of this side has reached the other: from now on the other must know it."""
        try:
            head, _ = opened(data)
        except Refused:
            return
        channel = self.channels.get(head.get("c", 0))
        if channel is None:
            return
        if "seq" in head:
            is_open = not channel.is_mine or 1 in channel.arrived or head["seq"] == 1
            number = head["seq"]
            if is_open and number in channel.early:
                channel.early.discard(number)
                channel.arrived[number] = self._now()  # the copy that counts
            elif not is_open and number not in channel.arrived:
                channel.early.add(number)
            channel.arrived.setdefault(number, self._now())
        if "ack" in head:
            channel.told_window = sum(head.get("miss", [channel.told_window]))
            channel.told.append((self._now(), head["ack"], head["ack"] + channel.told_window))

    # ------------------------------------------------------------ what comes

    def judge(self, data: bytes) -> None:
        """Refuse a packet as it leaves the other side, before the network does anything to it."""
        try:
            self._judge(data)
        except Refused as refusal:
            self.refusals.append(str(refusal))

    def _judge(self, data: bytes) -> None:
        if len(data) > LARGEST:
            raise Refused(f"e3x-packet: {len(data)} bytes")
        head, body = opened(data)
        if not head:
            if body:
                raise Refused("e3x-packet: content without a channel")
            return
        channel_id = _whole(head.get("c"), "e3x-packet", 1, "channel")
        unknown = head.keys() - {"c", "type", "seq", "ack", "miss", "end", "err", "frag"}
        if unknown or ("frag" in head and not self.knows_frag):
            raise Refused(f"e3x-packet: {sorted(head)} is more than the document knows")
        channel = self.channels.get(channel_id)
        if channel is None:
            if channel_id % 2 == self._next % 2:
                raise Refused(f"e3x-packet: channel {channel_id} is for this side to open")
            if "type" not in head and "err" not in head:
                return  # the opening was lost, or comes later
            channel = Channel(channel_id, False, head.get("type", ""), "seq" in head)
            self.channels[channel_id] = channel
        if "err" in head:
            if "seq" in head or not isinstance(head["err"], str) or not head["err"]:
                raise Refused(f"e3x-R04: an err is a text without seq, {head}")
            return
        if channel.error is not None and "seq" in head:
            raise Refused(f"e3x-R04: content on channel {channel_id} behind an err")
        if not channel.is_reliable:
            if head.keys() & {"seq", "ack", "miss"}:
                raise Refused(f"e3x-R01: {sorted(head)} on an unreliable channel")
            return
        self._judge_acks(channel, head)
        if "seq" in head:
            self._judge_content(channel, _whole(head["seq"], "e3x-S02", 1, "seq"), head, body)
        elif body or head.keys() & {"end", "type", "frag"}:
            raise Refused(f"e3x-S01: content without seq, {head}, {len(body)} bytes")
        elif "ack" not in head:
            raise Refused(f"e3x-A08: a packet that says nothing, {head}")

    def _known(self, channel: Channel) -> set[int]:
        """Give the packets of this side that the other one must have, and know of."""
        times = channel.arrived.items()
        return {number for number, at in times if self._now() - at > self._settled} - channel.early

    def _judge_acks(self, channel: Channel, head: dict[str, Any]) -> None:
        if "ack" not in head:
            if "miss" in head:
                raise Refused(f"e3x-M03: miss without ack, {head}")
            return
        ack, miss = _whole(head["ack"], "e3x-A01", 0, "ack"), head.get("miss")
        if not ack and miss is None:
            raise Refused("e3x-A04: ack 0 confirms nothing")
        if any(number not in channel.arrived for number in range(channel.confirmed + 1, ack + 1)):
            raise Refused(f"e3x-A03: ack {ack}, of which not everything has come")
        latest = max(channel.named - channel.arrived.keys(), default=0)
        if miss is None:
            gaps = [
                each for each in range(ack + 1, max(self._known(channel), default=0)) if each not in channel.arrived
            ]
            if gaps or latest > ack:
                raise Refused(f"e3x-M01: ack {ack} without miss, while {gaps or latest} is missing")
            return
        if not isinstance(miss, list) or not miss:
            raise Refused(f"e3x-M02: miss {miss!r}")
        at = ack
        for delta in miss[:-1]:
            at += _whole(delta, "e3x-M02", 1, "delta")
            if at >= channel.sent:
                raise Refused(f"e3x-M02: {at} named as missing, {channel.sent} is the last")
            if at in self._known(channel):
                raise Refused(f"e3x-M02: {at} named as missing, which has come")
            channel.named.add(at)
        _whole(miss[-1], "e3x-X05", 1, "last delta")

    def _judge_content(self, channel: Channel, number: int, head: dict[str, Any], body: bytes) -> None:
        content = head.get("type"), head.get("end"), head.get("frag"), body
        if "type" in head and (number > 1 or channel.is_mine):
            raise Refused(f"e3x-packet: type in packet {number}")
        if channel.seen.setdefault(number, content) != content:
            raise Refused(f"e3x-M08: packet {number} is another than before")
        if number > 1 and number - 1 not in channel.seen:
            raise Refused(f"e3x-S03: packet {number} before packet {number - 1}")
        if channel.end_at is not None and number > channel.end_at:
            raise Refused(f"e3x-S01: packet {number} behind the end, {channel.end_at}")
        if head.get("end"):
            channel.end_at = number
        settled = [(ack, limit) for at, ack, limit in channel.told if self._now() - at > self._settled]
        fresh = [limit for at, _, limit in channel.told if self._now() - at <= self._settled]
        latest = max(settled, key=lambda told: told[0], default=(0, BUFFER))
        lately = [limit for ack, limit in settled if ack == latest[0]][-1:] or [BUFFER]
        if number > max([*lately, *fresh]):
            raise Refused(f"e3x-M06: packet {number}, {max([*lately, *fresh])} is the limit")
        if number <= latest[0]:
            raise Refused(f"e3x-M09: packet {number} again, {latest[0]} are confirmed")
        times = channel.seen_at.setdefault(number, [])
        if len(times) > 1 and self._now() - times[-1] < REPEAT - self._settled:
            raise Refused(f"e3x-M10: packet {number} again after {self._now() - times[-1]:.3f} s")
        times.append(self._now())

    def receive(self, data: bytes) -> None:
        """Take a packet that the network has let through."""
        try:
            head, body = opened(data)
        except Refused:
            return
        channel = self.channels.get(head.get("c", 0))
        if channel is None or channel.is_over:
            return
        if "err" in head:
            channel.error, channel.is_over = head["err"], True
            return
        if channel.type not in self.types:
            self.fail(channel, "unknown type")
            return
        if not channel.is_reliable:
            if body:
                channel.messages.append(body)
            channel.has_ended |= bool(head.get("end"))
            return
        if "ack" in head:
            self._take_ack(channel, head["ack"], head.get("miss"))
        if "seq" in head:
            self._take_content(channel, head["seq"], head, body)
        if channel.is_over and not channel.kept:
            return
        self._pump(channel)

    def _take_ack(self, channel: Channel, ack: int, miss: list[int] | None) -> None:
        if ack < channel.confirmed:
            return
        for number in range(channel.confirmed + 1, ack + 1):
            channel.kept.pop(number, None)
        channel.confirmed = ack
        if miss is None:
            return
        channel.window = sum(miss)
        at = ack
        for delta in miss[:-1]:
            at += delta
            if at in channel.kept and self._now() - channel.resent.get(at, -REPEAT) >= REPEAT:
                channel.resent[at] = self._now()
                self.resends += 1
                self._write(channel, at)

    def _take_content(self, channel: Channel, number: int, head: dict[str, Any], body: bytes) -> None:
        if number <= channel.done or number in channel.held:
            self._ack(channel)
        elif number <= channel.done + self.window:
            channel.held[number] = head, body
            if not self._process(channel):
                self._ack(channel)

    def _process(self, channel: Channel) -> bool:
        """Hand over what is next, and confirm each packet by itself."""
        before = channel.done
        while channel.done + 1 in channel.held and not channel.is_paused:
            head, body = channel.held.pop(channel.done + 1)
            channel.done += 1
            channel.parts += body
            if "frag" not in head and (channel.parts or not head.keys() & {"type", "end"}):
                channel.messages.append(channel.parts)
                if self.echoes and not channel.ends:
                    self.send(channel, channel.parts)
                channel.parts = b""
            if head.get("end"):
                channel.has_ended = True
                if self.echoes:
                    self.end(channel)
            self._ack(channel)
        return channel.done > before


@dataclass
class Weather:
    """What the network does to the packets of one direction, by count or by seed."""

    lost: frozenset[int] = frozenset()
    loss: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    seed: int = 0
    count: int = 0
    drops: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._kept: list[bytes] = []

    def through(self, data: bytes) -> list[bytes]:
        """The packets that arrive now that this one was sent."""
        self.count += 1
        if self.count - 1 in self.lost or self._random.random() < self.loss:
            self.drops += 1
            return []
        if self._random.random() < self.late:
            self._kept.append(data)
            return []
        kept, self._kept = self._kept, []
        return [data] * (1 + (self._random.random() < self.twice)) + kept


class Line(Protocol):
    """What carries packets to the other side and back."""

    async def send(self, value: bytes, /) -> None: ...

    async def receive(self) -> bytes: ...


class Datagrams:
    """A line over a UDP socket, to the address that was heard last."""

    def __init__(self, socket: trio.socket.SocketType, address: tuple[str, int] | None) -> None:
        self._socket, self._address = socket, address

    async def send(self, value: bytes, /) -> None:
        if self._address is not None:
            await self._socket.sendto(value, self._address)

    async def receive(self) -> bytes:
        data, self._address = await self._socket.recvfrom(65536)
        return data


class Packets(trio.abc.Channel[bytes]):
    """One end of a line in memory: what was sent is there at once, so that a virtual clock cannot run ahead of it."""

    def __init__(self, out: trio.MemorySendChannel[bytes], back: trio.MemoryReceiveChannel[bytes]) -> None:
        self._out, self._back = out, back

    async def send(self, value: bytes, /) -> None:
        await self._out.send(bytes(value))

    async def receive(self) -> bytes:
        return await self._back.receive()

    async def aclose(self) -> None:
        self._out.close()
        self._back.close()
        await trio.lowlevel.checkpoint()


def packets() -> tuple[Packets, Packets]:
    """Both ends of a line in memory."""
    there, here = trio.open_memory_channel[bytes](math.inf), trio.open_memory_channel[bytes](math.inf)
    return Packets(there[0], here[1]), Packets(here[0], there[1])


class Wire:
    """Runs a peer on a line, through weather in both directions."""

    def __init__(self, peer: Peer, line: Line, out: Weather | None = None, back: Weather | None = None) -> None:
        self.peer, self.line = peer, line
        self.outward, self.inward = out or Weather(), back or Weather()

    async def until(self, fact: Callable[[], bool], patience: float = 60.0) -> bool:
        """Take part in the conversation until something is so, or for so many seconds."""
        with trio.move_on_after(patience):
            await self.flush()
            while not fact():
                with trio.move_on_after(0.25):
                    try:
                        data = await self.line.receive()
                    except trio.EndOfChannel:  # packets have no end: nothing comes any more
                        await trio.sleep_forever()
                    self.peer.judge(data)
                    for each in self.inward.through(data):
                        self.peer.receive(each)
                self.peer.tick()
                await self.flush()
                if self.peer.refusals:
                    break
        return fact()

    async def idle(self, seconds: float) -> None:
        """Take part in the conversation for so long."""
        await self.until(lambda: False, seconds)

    async def flush(self) -> None:
        sent, self.peer.out = self.peer.out, []
        for data in sent:
            for each in self.outward.through(data):
                self.peer.delivered(each)
                with contextlib.suppress(trio.BrokenResourceError):  # no peer is there
                    await self.line.send(each)
