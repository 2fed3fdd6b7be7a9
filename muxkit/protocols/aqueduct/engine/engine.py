"""The sans-I/O engine of one Aqueduct connection: streams, datagrams and commands in, events and output out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, overload

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Reason, Reset, StartPace, StreamControl, StreamId, encode_varint
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.engine.events import Arrived, Event, Failed, HungUp, Parted, Silent
from muxkit.protocols.aqueduct.engine.halves import (
    EMPTY_FIELD,
    Half,
    Mode,
    Outcome,
    Outgoing,
    Promise,
    ReceiverMachine,
    SenderMachine,
    Ticket,
    Transit,
)
from muxkit.protocols.aqueduct.engine.incoming import Incoming
from muxkit.protocols.aqueduct.engine.registry import Registry, Timer
from muxkit.protocols.aqueduct.frames import Pairs, Role

CHANNEL_PRICE = 5 * 1024  # bytes of memory for a half, its session objects and a share of a task that handles it
ATTACHMENT_SIZE = 10  # bytes, the longest channel id
NO_REASON = Reason()


@attrs.define
class Statistics:
    """What an engine holds at this moment."""

    channels: int
    streams_in: int
    streams_out: int
    outbox: int
    ended_unattached: int
    dropped_datagrams: int


class Engine:
    """One end of an Aqueduct connection; a `MultistreamEngine`.

    Commands take and give `SenderMachine`, `ReceiverMachine` and `Ticket` objects. A command either does all of its
    work or raises `LocalProtocolError` and changes nothing. `consumed` must be called for every `Arrived` that the
    application has taken, or its stream is never renewed; `accept` for every half that it has taken.
    """

    def __init__(
        self,
        role: Role,
        config: Config | None = None,
        *,
        headers: Pairs = (),
        limits: Limits | None = None,
        observer: Observer | None = None,
        now: float | None = None,
    ) -> None:
        """With `now` the time for the handshake begins to run."""
        self.config: Config = config or Config()
        self.limits: Limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self.role = role
        self.over: bool = False
        handshake = frames.encode_frame(frames.ConnectionHeaders(tuple(headers)))
        self._check_headers(handshake, headers, self.config.connection_headers)
        self.most_streams: int = 2 * self.limits.channels + self.config.streams
        self.observer: Observer | None = observer
        self._registry = Registry(role, self.config, self.limits, observer)
        self._connection = self._registry.connection
        self._streams = self._registry.streams
        self.starts: StartPace = self._registry.starts
        """Says when work on the next channel of the peer may begin; to be told what began, and what need not."""
        self._incoming = Incoming(self._registry, handshake, self.most_streams)
        # Parts of what a pump needs that are called often
        self.missing: Final = self._incoming.missing
        self.stream_to_send: Final = self._streams.pull
        self.stream_writable: Final = self._streams.writable
        if now is not None:
            self._connection.now = now
            self._registry.deadlines.set(Timer.HANDSHAKE, now + self.limits.handshake)

    # --- state

    @property
    def entrypoint(self) -> Half:
        """The client's sender, the server's receiver."""
        return self._registry.entrypoint

    @property
    def is_connected(self) -> bool:
        """Whether the peer's connection headers have come."""
        return self._incoming.is_connected

    @property
    def halves(self) -> list[Half]:
        """All live halves here, the entrypoint's among them."""
        return [*self._registry.table]

    @property
    def ours(self) -> int:
        """How many of the halves are of channels that we made, with those whose end is not written yet."""
        return self._registry.table.census.ours + len(self._registry.closing)

    @property
    def outbox(self) -> int:
        """Bytes of messages that wait for the link."""
        return self._connection.outbox

    @property
    def senders(self) -> dict[int, SenderMachine]:
        return {half.id or 0: half for half in self._registry.table if isinstance(half, SenderMachine)}

    @property
    def receivers(self) -> dict[int, ReceiverMachine]:
        return {half.id or 0: half for half in self._registry.table if isinstance(half, ReceiverMachine)}

    @property
    def frames(self) -> int:
        """Frames received."""
        return self._incoming.frames

    @property
    def bytes_received(self) -> int:
        """Bytes of streams and datagrams."""
        return self._incoming.bytes_received

    @property
    def receipt_deadline(self) -> float:
        """How long to wait for a datagram that the peer has counted, in seconds."""
        return self._connection.receipt_deadline

    def set_rtt(self, seconds: float) -> None:
        """Set the round-trip time that the link has measured."""
        self._connection.rtt = seconds

    def keeps_order(self) -> None:
        """On this link no datagram is overtaken by what was written after it, so none has to be waited for."""
        self._connection.in_order = True

    def statistics(self) -> Statistics:
        registry = self._registry
        return Statistics(
            len(registry.table),
            len(self._incoming.open),
            len(self._streams.streams),
            self.outbox,
            registry.ended_unattached,
            self._incoming.dropped_datagrams,
        )

    # --- input from the link; a violation ends the connection and is not raised

    def receive_stream(self, stream: StreamId, data: bytes, fin: bool, now: float) -> None:
        if self.over:
            return
        self._connection.now = now
        try:
            self._incoming.receive_stream(stream, data, fin)
        except RemoteProtocolError as error:
            self._fail_at(f"stream {stream}", error)

    def receive_reset(self, stream: StreamId, now: float) -> None:
        self._receive_end(self._incoming.reset, stream, now)

    def receive_stopped(self, stream: StreamId, now: float) -> None:
        """The peer wants no more of a stream of ours: it is reset, and a sender that needs it gives up."""
        self._receive_end(self._incoming.stopped, stream, now)

    def _receive_end(self, end: Callable[[StreamId], None], stream: StreamId, now: float) -> None:
        if self.over:
            return
        self._connection.now = now
        try:
            end(stream)
        except RemoteProtocolError as error:
            self._fail_at(f"stream {stream}", error)

    def receive_datagram(self, data: bytes, now: float) -> None:
        if self.over:
            return
        self._connection.now = now
        self._incoming.bytes_received += len(data)
        try:
            self._incoming.receive_datagram(data)
        except RemoteProtocolError as error:
            self._fail_at(f"datagram of {len(data)} bytes", error)

    def _fail_at(self, where: str, error: RemoteProtocolError) -> None:
        error.message = f"{where}: {error.message}"
        self.fail(error)

    def receive_closed(self, now: float, *, clean: bool = True) -> None:
        """The link is gone: nothing more comes, nothing more can be sent."""
        if not self.over:
            self._connection.now = now
            alive = [half for half in self.halves if half is not self.entrypoint]
            self._stop(HungUp(clean=clean and not alive))

    def fail(self, error: RemoteProtocolError) -> None:
        """End the connection: the peer broke a rule, of Aqueduct or of the link."""
        if not self.over:
            if self.observer is not None:
                self.observer.error(error)
            self._stop(Failed(error))

    def _stop(self, last: Event) -> None:
        self.over = True
        self._registry.events.append(last)
        self._streams.clear()
        self._registry.datagram_senders.clear()
        self._incoming.open.clear()

    # --- output to the link

    def events(self) -> Sequence[Event]:
        events = self._registry.events
        if not events:
            return ()
        self._registry.events = []
        return events

    def has_output(self, may_open: bool = True) -> bool:
        if self.over:
            return False
        if self._registry.datagram_senders:
            return True
        return self._streams.has_output(may_open) or self._incoming.has_control()

    def control_to_run(self) -> Sequence[StreamControl]:
        resets = self._streams.resets
        if not (resets or self._incoming.has_control()):
            return ()
        control = [*map(Reset, resets), *self._incoming.take_control()]
        resets.clear()
        return () if self.over else control

    def next_stream(self, may_open: bool) -> StreamId | None:
        return None if self.over else self._streams.next(may_open)

    def datagram_to_send(self, limit: int) -> bytes | None:
        return None if self.over else self._registry.next_datagram(limit)

    # --- time

    def next_deadline(self) -> float | None:
        return None if self.over else self._registry.deadlines.next

    def handle_deadline(self, now: float) -> None:
        if self.over:
            return
        registry = self._registry
        self._connection.now = max(now, self._connection.now)
        try:
            for timer in registry.deadlines.expired(now):
                if self.observer is not None:
                    self.observer.timer(timer.value)
                match timer:
                    case Timer.FLUSH:
                        registry.flush()
                    case Timer.REPORT:
                        registry.report(now)
                    case Timer.STRAY:
                        registry.drop_strays(now)
                    case Timer.STALL:
                        if self._incoming.check_stall():
                            self._stop(Silent(self.limits.stall))
                    case Timer.HANDSHAKE:
                        raise RemoteProtocolError(
                            f"no connection headers after {self.limits.handshake:g} s", limit="handshake"
                        )
        except RemoteProtocolError as error:
            self.fail(error)

    # --- commands

    @overload
    def channel(
        self, *, sends: Literal[True], oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[SenderMachine, Ticket]: ...
    @overload
    def channel(
        self, *, sends: Literal[False], oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[ReceiverMachine, Ticket]: ...
    def channel(self, *, sends: bool, oneshot: bool = False, headers: Pairs = ()) -> tuple[Half, Ticket]:
        """Make a channel: the half that stays here, and a ticket for the other one. It has an id once that is sent."""
        self._check_alive()
        ticket = self._registry.make_ticket(sends=sends, oneshot=oneshot, headers=self._encode(headers))
        ticket.half.taken = True
        return ticket.half, ticket

    def admits(self, sender: SenderMachine, size: int) -> bool:
        """Whether there is room for a reliable message of this size, headers included."""
        return not self.over and sender.admits(size)

    def watch(self, sender: SenderMachine, size: int) -> None:
        """Report `Writable` once a message of this size is admitted."""
        sender.check_open()
        sender.watched = size
        sender.wake()

    def send(
        self,
        sender: SenderMachine,
        payload: bytes,
        *,
        headers: Pairs = (),
        attachments: Sequence[Ticket] = (),
        mode: Mode = Mode.ORDERED,
        receipt: bool = False,
    ) -> Promise | None:
        """Send a message, if `admits` allows it; unreliable ones are always admitted. With `receipt` give a promise."""
        self._check_alive()
        sender.check_open()
        encoded = self._encode(headers)
        if attachments:
            self._registry.check_tickets(attachments)
        size = self._size_of(payload, encoded, attachments)
        if mode is not Mode.UNRELIABLE and not sender.admits(size):
            raise LocalProtocolError(
                f"channel {sender.id}: {size} bytes to send beside {sender.queued}, {sender.unanswered} unanswered"
            )
        field = EMPTY_FIELD
        nodes: tuple[Transit, ...] = ()
        if attachments:
            ids = self._registry.hand_over(attachments)
            field = frames.encode_varbytes(b"".join(encode_varint(id) + channel_headers for id, channel_headers in ids))
            nodes = tuple(ticket.half.transit for ticket in attachments)
        promise = Promise(sender) if receipt else None
        outgoing = Outgoing(payload, encoded, field, nodes, promise)
        if mode is Mode.UNRELIABLE:
            self._registry.queue_datagram(sender, outgoing)
        else:
            sender.enqueue(outgoing, mode)
        if sender.oneshot:
            sender.finish()
        return promise

    def size_of(self, payload: bytes, headers: Pairs, attachments: Sequence[Ticket]) -> int:
        """What a message counts for `admits`; raises `LocalProtocolError` for one that can never be sent."""
        return self._size_of(payload, self._encode(headers), attachments)

    def finish(self, sender: SenderMachine) -> None:
        """Send no more messages; `Ended` comes when all have arrived."""
        self._check_alive()
        sender.check_open()
        sender.finish()

    def cancel(self, sender: SenderMachine, now: float, reason: Reason = NO_REASON) -> None:
        """Give up what is on its way; `Ended` comes when the peer has heard. Too late once the end was written.

        The reason goes before it as an empty message with a header, except on a oneshot channel.
        """
        self._check_alive()
        sender.check_cancellable()
        self._connection.now = max(now, self._connection.now)
        self._registry.cancel(sender, reason=reason.encode())

    def close(self, receiver: ReceiverMachine, now: float) -> None:
        """Accept no more messages. The receiver is gone at once."""
        self._check_live(receiver)
        self._connection.now = max(now, self._connection.now)
        self._registry.close(receiver, Outcome.NO_RECEIVER)

    def forget(self, half: Half, now: float) -> None:
        """Discard a channel that we made, both halves of it, whatever is on its way."""
        self._check_live(half)
        if half.id is None or frames.creator_of(half.id) != self.role:
            raise LocalProtocolError(f"channel {half.id} was made by the peer")
        self._connection.now = max(now, self._connection.now)
        self._registry.send_forget(half.id)
        self._registry.end(half, Outcome.FORGOTTEN)

    def accept(self, half: Half) -> None:
        """Note that the application has taken a half that came."""
        half.taken = True
        if half.id is not None:
            self._registry.table.accept(half.id)

    def charge_failure(self) -> None:
        """Count a failure of local work on a channel that the peer opened, as if the peer had cancelled it."""
        self._registry.count_reset()

    def receive_reason(self, reason: Reason) -> None:
        """The link brought the reason for which the peer ends the connection."""
        if not self.over:
            self._registry.events.append(Parted(reason))

    def consumed(self, message: Arrived, now: float = 0.0) -> bool:
        """Note that the application has taken a message; harmless the second time.

        True if other messages or streams of the peer may come because of it, so that output should be written soon.
        """
        cost, loan = message.cost, message.loan
        message.cost = message.loan = 0
        if self.over or not cost:
            return False
        if message.stream is None:
            message.receiver.unread -= cost
            self._connection.unread_datagrams -= cost
            return False
        incoming = self._incoming.open[message.stream]
        incoming.consume(cost)
        self._incoming.repay(loan)
        self._incoming.release(incoming)
        unread_limit = self._registry.unread_limit
        if not unread_limit.remove(message.receiver):
            return incoming.fin
        self._connection.now = max(now, self._connection.now)
        try:
            unread_limit.resume(message.receiver)
        except RemoteProtocolError as error:
            self._fail_at("what was held back", error)
        return True

    def _encode(self, headers: Pairs) -> bytes:
        """Encode the headers of a message or a channel."""
        if not headers:
            return EMPTY_FIELD
        encoded = frames.encode_headers(headers)
        self._check_headers(encoded, headers, self.config.headers)
        return encoded

    def _check_headers(self, encoded: bytes, headers: Pairs, most: int) -> None:
        pairs = self.config.header_pairs
        if len(encoded) > most or len(headers) > pairs:
            raise LocalProtocolError(f"{len(headers)} headers in {len(encoded)} bytes against {pairs} in {most}")

    def _size_of(self, payload: bytes, encoded: bytes, attachments: Sequence[Ticket]) -> int:
        size = len(payload) + len(encoded)
        if attachments:
            size += sum(ATTACHMENT_SIZE + len(ticket.headers) for ticket in attachments)
        if size > self.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self.limits.message})")
        return size

    def _check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the connection is over")

    def _check_live(self, half: Half) -> None:
        self._check_alive()
        if half.id is None:
            raise LocalProtocolError("the other half has not been sent yet")
        if half.gone:
            raise LocalProtocolError(f"channel {half.id} is gone: {half.outcome}")
