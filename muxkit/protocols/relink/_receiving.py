"""What follows from a packet of the peer: first the checks, which change nothing, then the changes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, assert_never

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.relink._acknowledged import is_end, meant
from muxkit.protocols.relink._control import Purpose
from muxkit.protocols.relink._events import Ended, Opened, PeerShutDown, Ponged, Resumed
from muxkit.protocols.relink._packets import (
    Ack,
    AckPacket,
    General,
    Operation,
    OperationPacket,
    Parts,
    message_cost,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.protocols.relink._frames import MessageHead
    from muxkit.protocols.relink._incoming import Incoming
    from muxkit.protocols.relink._state import Link


class Receiving:
    """One packet at a time."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def apply(self, packet: General | OperationPacket | AckPacket) -> None:
        """A whole packet: raises and changes nothing, or changes everything that follows from it."""
        if isinstance(packet, General):
            self._apply_general(packet)
        elif isinstance(packet, OperationPacket):
            if packet.operation is Operation.CLOSE:
                self._close(packet.channels)
            else:
                self._decide(packet)
            self._observe("in", packet.channels, packet.operation.name.lower())
        else:
            if packet.ack is Ack.CLOSED:
                self._closed(packet.channels)
            else:
                self._acknowledge(packet)
            self._observe("out", packet.channels, packet.ack.name.lower())

    # --- general packets

    def _apply_general(self, packet: General) -> None:
        link = self._link
        match packet:
            case General.NOP:
                pass
            case General.PING:
                if link.control.pongs >= link.limits.pongs:
                    what = f"{link.control.pongs} pings not answered yet because nobody reads"
                    raise RemoteProtocolError(what, limit="pongs")
                link.control.pongs += 1
            case General.PONG:
                if link.control.pong_came() is Purpose.ASKED:
                    link.events.append(Ponged())
            case General.RESUME:
                link.check_resume()
                link.resume()
                link.events.append(Resumed())
            case General.SHUTDOWN:
                if not link.peer_shut_down:
                    link.peer_shut_down = True
                    link.events.append(PeerShutDown())
            case _:
                assert_never(packet)
        if link.observer is not None and packet is not General.NOP:
            link.observer.frame("in", "link", packet.name.lower(), 0)

    # --- messages

    def check(self, head: MessageHead) -> int:
        """May this message come? Gives what it weighs in each of its channels."""
        link = self._link
        weight = message_cost(head.sizes, link.in_id_size, head.padding)
        counts = _counts(head.channels)
        new = 0
        over = link.held_over
        for channel, count in counts.items():
            incoming = link.incoming.get(channel)
            what = f"a message on channel {channel}"
            if incoming is None:
                self._check_opening(channel, new)
                new += 1
                room, held = link.config.window, 0
            else:
                if not incoming.known:
                    raise RemoteProtocolError(f"{what} before it was resumed", rule="relink-H35")
                if incoming.ended:
                    raise RemoteProtocolError(f"{what}, which was closed", rule="relink-K04")
                room, held = incoming.room, incoming.bytes
            if count > room:
                raise RemoteProtocolError(
                    f"{what}: {count} beside {link.config.window - room} that are not consumed, "
                    f"Config(window={link.config.window}) are allowed",
                    rule="relink-F03",
                )
            over += max(0, min(held + count * weight - link.floor, count * weight))
            if over > link.held_most:
                raise RemoteProtocolError(
                    f"{what}: {count * weight} bytes beside {link.held} that are not consumed, "
                    f"{link.limits.connection_bytes} are allowed",
                    limit="connection_bytes",
                )
        return weight

    def _check_opening(self, channel: int, new: int) -> None:
        link = self._link
        what = f"a message that opens channel {channel}"
        if link.peer_shut_down:
            raise RemoteProtocolError(f"{what} after the shutdown", rule="relink-S04")
        if not link.told_resume:
            raise RemoteProtocolError(f"{what} before our resume", rule="relink-H35")
        live = len(link.incoming) + new
        if live >= link.limits.channels:
            raise RemoteProtocolError(f"{what} beside {live} live ones", limit=link.limits.bound_of_channels)

    def deliver(self, channels: Sequence[int], parts: Parts, weight: int) -> None:
        """A message that was checked, now that all of it is here."""
        link = self._link
        for channel in channels:
            incoming = link.incoming.get(channel)
            if incoming is None:
                incoming = link.accept(channel)
                link.events.append(Opened(channel))
            incoming.put(parts)
            incoming.weigh(weight)
            incoming.came(1, weight)
        if link.observer is not None:
            size = sum(map(len, parts))
            for channel in channels:
                link.observer.frame("in", f"in {channel}", "message", size)

    # --- operations

    def _decide(self, packet: OperationPacket) -> None:
        link = self._link
        if link.outcomes > link.outcomes_most:
            raise RemoteProtocolError(f"{link.outcomes} answers, and no sign that the peer has read them")
        plans: list[tuple[Incoming, int | None]] = []
        for channel, count in _counts(packet.channels).items():
            incoming = self._known(channel, packet.operation)
            plans.append((incoming, incoming.meant(packet.operation, packet.sequence, count)))
        for incoming, number in plans:
            if number is not None:
                incoming.decide(packet.operation, number)

    def _close(self, channels: Sequence[int]) -> None:
        link, plans, unopened = self._link, [], dict[int, None]()
        for channel, count in _counts(channels).items():
            if channel not in link.incoming:
                unopened[channel] = None  # a close is tied to no message: there may never have been one
                continue
            incoming = self._known(channel, Operation.CLOSE)
            incoming.check_close()
            if count > 1:
                raise RemoteProtocolError(f"close on channel {channel} {count} times", rule="relink-K04")
            plans.append(incoming)
        owed = len(unopened.keys() | link.control.unopened) if unopened else 0
        if owed > link.limits.channels:
            what = f"close on {owed} channels without a message, and the peer does not read that they are closed"
            raise RemoteProtocolError(what, limit="channels")
        link.control.close_unopened(unopened)
        for incoming in plans:
            incoming.close_came = True
            if not incoming.ended:  # it may have come before, on an earlier connection
                incoming.ended = True
                incoming.direct = False
                link.events.append(Ended(incoming.channel))
            incoming.confirm_end()

    def _known(self, channel: int, operation: Operation) -> Incoming:
        what = f"{operation.name.lower()} on channel {channel}"
        incoming = self._link.incoming.get(channel)
        if incoming is None:
            raise RemoteProtocolError(f"{what}, which is not open", rule="relink-O12")
        if not incoming.known:
            raise RemoteProtocolError(f"{what} before it was resumed", rule="relink-H35")
        return incoming

    # --- acknowledgements

    def _acknowledge(self, packet: AckPacket) -> None:
        link = self._link
        plans = []
        for channel, count in _counts(packet.channels).items():
            outgoing = link.outgoing.get(channel)
            if outgoing is None:
                what = f"{packet.ack.name.lower()} on channel {channel}, which is not open"
                raise RemoteProtocolError(what, rule="relink-O12")
            plans.append((outgoing, meant(outgoing, packet.ack, packet.sequence, count)))
        for outgoing, number in plans:
            outgoing.heard = True
            if number is not None:
                outgoing.take(packet.ack, number)

    def _closed(self, channels: Sequence[int]) -> None:
        link = self._link
        plans = []
        for channel, count in _counts(channels).items():
            outgoing = link.outgoing.get(channel)
            if outgoing is None:
                continue  # it never had a message, or its end was heard of before: nothing follows
            if count > 1:
                what = f"closed on channel {channel} {count} times, which was closed once"
                raise RemoteProtocolError(what, rule="relink-K02")
            if is_end(outgoing):
                plans.append(outgoing)
        for outgoing in plans:
            outgoing.closed()

    def _observe(self, side: str, channels: Sequence[int], name: str) -> None:
        observer = self._link.observer
        if observer is not None:
            for channel in channels:
                observer.frame("in", f"{side} {channel}", name, 0)


def _counts(channels: Sequence[int]) -> dict[int, int]:
    """How often is each named?"""
    return {channels[0]: 1} if len(channels) == 1 else Counter(channels)
