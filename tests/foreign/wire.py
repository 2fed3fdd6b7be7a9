"""A loopback connection that ends after a number of bytes, and what a referee writes down, without muxkit."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio


class LineCut(Exception):
    """The connection is gone: cut here as planned, or by the other side."""


@dataclass(frozen=True)
class Refusal:
    """One violation that a peer saw."""

    clause: str
    text: str

    def __str__(self) -> str:
        return f"{self.clause}: {self.text}"


class Violation(Exception):
    """Raised inside a peer where the other side broke a rule."""

    def __init__(self, clause: str, text: str) -> None:
        super().__init__(f"{clause}: {text}")
        self.refusal = Refusal(clause, text)


@dataclass(frozen=True)
class Cutting:
    """How many bytes one connection carries until it is cut; None is no bound."""

    sends: int | None = None
    takes: int | None = None


Plan = Callable[[int], Cutting]  # of a connection's number, from 0


def uncut(_: int) -> Cutting:
    """Cut nothing."""
    return Cutting()


def share(size: int, step: int, seed: int, *variant: object) -> range:
    """Give each `step`th number from 1 to below `size`, so that the seeds from 0 to below `step` share out all."""
    return range(1 + (seed + zlib.crc32(repr(variant).encode())) % step, size, step)


@dataclass
class Count:
    """What one protocol showed with muxkit in one role."""

    conversations: int = 0
    cuts: int = 0  # connections that were cut as planned, or packets that were lost
    refusals: list[str] = field(default_factory=list)


LEDGER: dict[tuple[str, str], Count] = {}  # by protocol and our role


def note(protocol: str, role: str, refusals: Iterable[object], cuts: int = 0) -> None:
    """Write a conversation of muxkit's with a plain peer into the ledger."""
    count = LEDGER.setdefault((protocol, role), Count())
    count.conversations += 1
    count.cuts += cuts
    count.refusals += map(str, refusals)


@dataclass
class Wire:
    """A TCP connection with its planned end; `transcript` has every byte that passed, with `>` for ours."""

    stream: trio.SocketStream
    cutting: Cutting = Cutting()
    gone: bool = False
    was_cut: bool = False  # as planned
    transcript: list[tuple[str, bytes]] = field(default_factory=list)
    sent: int = 0
    taken: int = 0

    async def send(self, data: bytes) -> None:
        """Send all, or as much as the plan allows and then cut."""
        bound = self.cutting.sends
        part = data if bound is None else data[: bound - self.sent]
        if self.gone:
            raise LineCut
        self.sent += len(part)
        self.transcript.append((">", part))
        try:
            if part:
                await self.stream.send_all(part)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise LineCut from None
        if len(part) < len(data):
            self.was_cut = True
            await self.cut()
            raise LineCut

    async def take(self) -> bytes:
        """Give what came, b"" at the orderly end."""
        bound = self.cutting.takes
        size = 65536 if bound is None else min(65536, bound - self.taken)
        if size == 0:
            self.was_cut = True
            await self.cut()
            raise LineCut
        try:
            data = bytes(await self.stream.receive_some(size))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise LineCut from None
        self.taken += len(data)
        self.transcript.append(("<", data))
        return data

    async def cut(self) -> None:
        """Close without a word."""
        self.gone = True
        with trio.CancelScope(shield=True):
            await self.stream.aclose()

    async def end(self) -> None:
        """Say that no more is sent."""
        try:
            await self.stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise LineCut from None

    def __str__(self) -> str:
        return " ".join(f"{way}{data.hex()}" for way, data in self.transcript)


async def listeners() -> tuple[list[trio.SocketListener], int]:
    """Listen on a free loopback port."""
    bound = await trio.open_tcp_listeners(0, host="127.0.0.1")
    return bound, int(bound[0].socket.getsockname()[1])
