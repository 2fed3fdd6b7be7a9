"""The pump for an engine on a packet link, whose packets may be lost, duplicated or reordered.

As with byte streams, the reader never waits for the writer. If the link reports an error about a packet, for example
that the packet is too large or that the peer is unreachable, the pump drops that packet and goes on. Such an error
doesn't end the connection, because somebody else may have forged the report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from time import perf_counter

import trio

from muxkit.core import DatagramEngine, SeparateTimers
from muxkit.runtime._errors import CLOSED_HERE, Phase
from muxkit.runtime._links import NowaitPackets, PacketLink
from muxkit.runtime.pumps.owner import EventT, PumpOwner
from muxkit.runtime.pumps.pump import BROKEN, CLOSE_TIMEOUT, INLINE_PAUSE, Pump
from muxkit.runtime.pumps.turns import LONG_TURN

TURN_PACKETS = 64  # maximum number of packets to handle before other sessions get their turn
STEP_PACKETS = 8  # number of packets to handle before their events are dispatched and the time of the turn is checked
MAX_FAILURES = 1000  # the link counts as broken after this many errors without a packet in between


class DatagramPump(Pump[EventT]):
    """Runs a `DatagramEngine` over a packet link.

    The link can be any `trio.abc.Channel[bytes]`. A link that implements `NowaitPackets` is faster. An `OSError` whose
    errno is in `fatal` ends the connection. Any other `OSError` only loses a packet.
    """

    def __init__(
        self, link: PacketLink, engine: DatagramEngine[EventT], owner: PumpOwner[EventT], *, fatal: Iterable[int] = ()
    ) -> None:
        super().__init__(link, engine, owner)
        self._link = link
        self._engine = engine
        self._timers = engine if isinstance(engine, SeparateTimers) else None
        self._fatal = frozenset(fatal)
        self._is_heavy = False  # True if the last turn was long, so the next turn has to wait in the queue of turns
        self._kept: deque[bytes] = deque()  # received packets that were left when the time of the last turn was used up
        self._nowait = link if isinstance(link, NowaitPackets) else None
        self._time = trio.lowlevel.current_clock().current_time  # `trio.current_time` would look up the clock each time
        self._carry: list[bytes] = []  # packets that the pump has taken from the engine and the link hasn't accepted
        self._wrote_at = float("-inf")
        self.too_large: int = 0
        """Number of packets that were dropped because they were too large for the link."""
        self.refused: int = 0
        """Number of errors of the link about a packet."""
        # A packet link has no handshake. The connection counts as open once the owner has received a valid packet.
        self.phase = "handshake"

    # --- closing the link

    def _stop(self, cause: BaseException | None) -> None:
        self._carry = []

    async def _close_link(self) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
            await self._link.aclose()

    async def _part(self) -> None:
        with suppress(OSError, ValueError, *BROKEN):
            for packet in self._parting:
                await self._link.send(packet)

    @property
    def unsent(self) -> int:
        """Number of bytes that the pump has taken from the engine and the link hasn't accepted."""
        return sum(map(len, self._carry))

    async def flushed(self) -> None:
        """Wait until all packets that the engine may send now have been sent, and the writer sleeps."""
        self.request_write()
        while not self.is_lost and (self._sleeper is None or self._carry):
            await self._idle.park()

    async def hang_up(self) -> None:
        """Close the link. A packet link can't signal a clean close, so the protocol has to say goodbye before this."""
        await self.flushed()
        self.lose(CLOSED_HERE, by="local")

    # --- writing

    def request_write(self) -> None:
        if self._sleeper is None or self.is_lost:  # the writer is awake, and checks the engine before it sleeps
            return
        if self._nowait is None or perf_counter() - self._wrote_at < INLINE_PAUSE:
            self._wake_writer()
            return
        try:
            self._carry = self._pull()
            if self._carry:
                self._send_burst(self._nowait)
        except BROKEN as error:
            self._broke("writing", error)
        if self._carry:
            self._wake_writer()
        else:
            self.rearm()  # sending a packet may have started timers of the engine

    async def _write(self) -> None:
        while True:
            self._carry = self._carry or self._pull()
            if not self._carry:
                await self._sleep_until_requested()
                continue
            if self._nowait is not None:
                self._send_burst(self._nowait)
            # Sending a packet may have started timers of the engine. This loop may not sleep for a long time, because
            # the rate of the engine may allow the next packet in each pass.
            self.rearm()
            if self._carry:
                await self._send_one()
            else:
                await trio.lowlevel.checkpoint()  # let other tasks run after a burst

    def _pull(self) -> list[bytes]:
        packets = [*self._engine.datagrams_to_send(self._time())]
        if not packets:
            self.dispatch_events()
            return packets
        self.bytes_sent += sum(map(len, packets))
        if self._observer is not None:
            for packet in packets:
                self._observer.transport("out", packet)
        self.dispatch_events()
        self._owner.handle_written()
        return packets

    def _send_burst(self, link: NowaitPackets) -> None:
        """Send as many packets of `_carry` as the kernel accepts, and keep the rest."""
        while self._carry:
            try:
                taken = link.send_nowait(self._carry)
            except ValueError:
                self._drop_large(link.packet_limit)
                continue
            except OSError as error:
                self._judge(error)
                taken = 1
            if not taken:
                break
            del self._carry[:taken]
        self._wrote_at = perf_counter()

    async def _send_one(self) -> None:
        """Send the next packet, and wait until the link accepts it."""
        packet = self._carry[0]
        try:
            await self._link.send(packet)
        except ValueError:
            self._drop_large(None if self._nowait is None else self._nowait.packet_limit)
            await trio.lowlevel.checkpoint()
            return
        except OSError as error:
            self._judge(error)
            await trio.lowlevel.checkpoint()
        if self._carry:  # empty if the connection was lost in the meantime
            del self._carry[0]

    def _drop_large(self, limit: int | None) -> None:
        """Drop all packets above the limit, or the first packet if the link doesn't report which one was too large."""
        fitting = [packet for packet in self._carry if limit is None or len(packet) <= limit]
        if limit is None or len(fitting) == len(self._carry):
            fitting = self._carry[1:]
        self.too_large += len(self._carry) - len(fitting)
        self._carry = fitting
        if limit is not None:
            self._owner.handle_packet_limit(limit)

    async def _sleep_until_requested(self) -> None:
        self._sleeper = trio.lowlevel.current_task()  # set this first, because `rearm` checks whether the writer sleeps
        self.rearm()
        await super()._sleep_until_requested()

    # --- reading

    async def _read(self, nursery: trio.Nursery) -> None:
        failures = 0
        try:
            while not self.is_lost:
                if self._kept:
                    await self._turns.wait()
                    self._take_in(None)
                    continue
                try:
                    packet = await self._link.receive()
                except OSError as error:
                    failures += 1
                    self._judge(error)
                    if failures > MAX_FAILURES:
                        self.lose(f"the link failed {failures} times in a row", by="network", cause=error)
                    await trio.lowlevel.checkpoint()
                    continue
                failures = 0
                if self._is_heavy:
                    await self._turns.wait()
                self._take_in(packet)
        except trio.EndOfChannel:
            self.lose("the peer hung up", by="peer")

    def _take_in(self, packet: bytes | None) -> None:
        """Handle a packet and the packets that have arrived after it, within one turn.

        If `packet` is None, handle packets that an earlier turn has left.
        """
        clock = self._turns.now
        began = clock()
        now = self._time()
        if packet is not None:
            self._receive(packet, now)
            if self._nowait is not None:
                try:
                    self._kept.extend(self._nowait.receive_nowait(TURN_PACKETS - 1))
                except OSError as error:
                    self._judge(error)
                except (trio.EndOfChannel, *BROKEN):
                    self._dispatch()  # the last packet may contain the reason for the end, so handle it first
                    raise
        if self._kept:
            self._take_in_kept(now, began + self._turns.allowance)
        self._dispatch()
        if self.phase == "handshake" and self._owner.has_understood_peer():
            self.phase: Phase = "open"
        self._is_heavy = clock() - began > LONG_TURN

    def _take_in_kept(self, now: float, until: float) -> None:
        kept = self._kept
        while kept and not self.is_lost:
            for _ in range(min(STEP_PACKETS, len(kept))):
                self._receive(kept.popleft(), now)
            if self._turns.now() >= until:
                break
            if kept:
                self.dispatch_events()

    def _receive(self, packet: bytes, now: float) -> None:
        if self._observer is not None:
            self._observer.transport("in", packet)
        if events := self._engine.receive_datagram(packet, now):
            self._owner.handle_events(events)
            if self._place is not None:
                self._heard()

    def _judge(self, error: OSError) -> None:
        self.refused += 1
        if error.errno in self._fatal:
            self.lose(f"the network refused a packet: {error.strerror}", by="network", cause=error)

    # --- time

    def _engine_deadline(self) -> float | None:
        if self._sleeper is not None:
            return self._engine.next_deadline()
        # The writer is awake and sends the packets that are due. It may never sleep while there is always another
        # packet, so the clock still has to act on the timers.
        if self._timers is not None:
            return self._timers.next_timer()
        deadline = self._engine.next_deadline()
        return None if deadline is None or deadline <= self._time() else deadline
