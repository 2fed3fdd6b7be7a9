"""The rules of Aqueduct as one object: streams, datagrams and commands in, events and output out; no Trio, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core import Consumed, Reset, StreamControl, encode_varint
from muxkit.protocols.aqueduct._channels import Channels, Half, Ticket
from muxkit.protocols.aqueduct._config import Config
from muxkit.protocols.aqueduct._datagrams import Datagrams
from muxkit.protocols.aqueduct._dispatch import Dispatch
from muxkit.protocols.aqueduct._events import Event, Failed, HungUp, Message, Outcome
from muxkit.protocols.aqueduct._frames import ConnectionHeaders, encode_frame
from muxkit.protocols.aqueduct._ids import Role, creator_of
from muxkit.protocols.aqueduct._reader import Reader
from muxkit.protocols.aqueduct._receiving import Receiver
from muxkit.protocols.aqueduct._sending import Mode, Outgoing, Receipt, Sender
from muxkit.protocols.aqueduct._timers import Timer
from muxkit.protocols.aqueduct._varint import encode_headers, encode_varbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._observer import Observer
    from muxkit.core import StreamId

    Pairs = Sequence[tuple[bytes, bytes]]


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

    Commands take and give `Sender`, `Receiver` and `Ticket` objects. A command either does all of its work or
    raises `LocalProtocolError` and changes nothing. `consumed` must be called for every `Message` that the
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
        self.config = config or Config()
        self.limits = limits or Limits()
        self.role = role
        greeting = encode_frame(ConnectionHeaders(tuple(headers)))
        _check_headers(greeting, headers, self.config, self.config.connection_headers)
        self._channels = Channels(role, self.config, self.limits, observer)
        self._dispatch = Dispatch(self._channels, greeting)
        self._datagrams = Datagrams(self._channels, self._dispatch)
        self.most_streams = 2 * self.limits.channels + self.config.streams
        self._reader = Reader(self._channels, self._dispatch, self._datagrams, self.most_streams)
        self._observer = observer
        self.over = False
        if now is not None:
            self._channels.now = now
            self._channels.timers.deadlines.set(Timer.HANDSHAKE, now + self.limits.handshake)

    # --- what is known

    @property
    def entrypoint(self) -> Half:
        """The client's sender, the server's receiver."""
        return self._channels.entrypoint

    @property
    def is_connected(self) -> bool:
        """Have the peer's connection headers come?"""
        return self._dispatch.is_open

    @property
    def senders(self) -> dict[int, Sender]:
        return {half.id or 0: half for half in self._channels.table if isinstance(half, Sender)}

    @property
    def receivers(self) -> dict[int, Receiver]:
        return {half.id or 0: half for half in self._channels.table if isinstance(half, Receiver)}

    @property
    def frames(self) -> int:
        """Frames received."""
        return self._dispatch.frames

    @property
    def receipt_deadline(self) -> float:
        """How long a datagram that is known to have been sent is waited for, in seconds."""
        return self._channels.receipt_deadline

    def set_rtt(self, seconds: float) -> None:
        """The link has measured its round trip."""
        self._channels.rtt = seconds

    def statistics(self) -> Statistics:
        channels = self._channels
        return Statistics(
            len(channels.table),
            len(self._reader.incoming),
            len(channels.line.streams),
            channels.outbox,
            len(channels.ended),
            self._datagrams.dropped,
        )

    # --- the link brings

    def receive_stream(self, stream: StreamId, data: bytes, fin: bool, now: float) -> None:
        self._receive(lambda: self._reader.stream(stream, data, fin), now, f"stream {stream}")

    def receive_reset(self, stream: StreamId, now: float) -> None:
        self._receive(lambda: self._reader.reset(stream), now, f"stream {stream}")

    def receive_stopped(self, stream: StreamId, now: float) -> None:
        """The peer wants no more of a stream of ours: it is reset, and a sender that needs it gives up."""
        self._receive(lambda: self._reader.stopped(stream), now, f"stream {stream}")

    def receive_datagram(self, data: bytes, now: float) -> None:
        self._receive(lambda: self._datagrams.feed(data), now, f"datagram of {len(data)} bytes")

    def _receive(self, take: Callable[[], None], now: float, where: str) -> None:
        """A violation ends the connection; none is raised to the link."""
        if self.over:
            return
        self._channels.now = now
        try:
            take()
        except RemoteProtocolError as error:
            error.message = f"{where}: {error.message}"
            self.fail(error)

    def receive_closed(self, now: float, *, clean: bool = True) -> None:
        """The link is gone: nothing more comes, nothing more can be sent."""
        if not self.over:
            self._channels.now = now
            alive = [half for half in self._channels.table if half is not self.entrypoint]
            self._stop(HungUp(clean=clean and not alive))

    def fail(self, error: RemoteProtocolError) -> None:
        """The peer broke a rule, of Aqueduct or of the link."""
        if not self.over:
            if self._observer is not None:
                self._observer.error(error)
            self._stop(Failed(error))

    def _stop(self, last: Event) -> None:
        self.over = True
        self._channels.tell(last)
        self._channels.line.clear()
        self._channels.ring.clear()
        self._reader.clear()

    # --- the link takes

    def events(self) -> Sequence[Event]:
        events = self._channels.events
        if not events:
            return ()
        self._channels.events = []
        return events

    def has_output(self, may_open: bool = True) -> bool:
        if self.over:
            return False
        channels = self._channels
        line = channels.line
        return bool(
            line.has_ready
            or (may_open and line.waits_to_open)
            or channels.ring
            or channels.consumed
            or channels.lent
            or line.resets
            or channels.stops
        )

    def control_to_run(self) -> Sequence[StreamControl]:
        channels = self._channels
        control: list[StreamControl] = [*map(Reset, channels.line.resets), *channels.stops.values(), *channels.lent]
        control += [Consumed(stream, amount) for stream, amount in channels.consumed.items()]
        channels.line.resets.clear()
        channels.stops.clear()
        channels.lent.clear()
        channels.consumed.clear()
        return () if self.over else control

    def next_stream(self, may_open: bool) -> StreamId | None:
        return None if self.over else self._channels.line.next(may_open)

    def stream_to_send(self, stream: StreamId, limit: int) -> tuple[bytes, bool]:
        return self._channels.line.pull(stream, limit)

    def stream_writable(self, stream: StreamId) -> None:
        self._channels.line.writable(stream)

    def datagram_to_send(self, limit: int) -> bytes | None:
        return None if self.over else self._channels.next_datagram(limit)

    # --- time

    def next_deadline(self) -> float | None:
        return None if self.over else self._channels.timers.deadlines.next()

    def handle_deadline(self, now: float) -> None:
        if not self.over:
            self._channels.now = max(now, self._channels.now)
            try:
                self._channels.timers.handle(now)
            except RemoteProtocolError as error:
                self.fail(error)

    # --- commands

    @overload
    def channel(self, *, sends: Literal[True], oneshot: bool = ..., headers: Pairs = ...) -> tuple[Sender, Ticket]: ...
    @overload
    def channel(
        self, *, sends: Literal[False], oneshot: bool = ..., headers: Pairs = ...
    ) -> tuple[Receiver, Ticket]: ...
    def channel(self, *, sends: bool, oneshot: bool = False, headers: Pairs = ()) -> tuple[Half, Ticket]:
        """A new channel: the half that stays here, and a ticket for the other one. It has an id once that is sent."""
        self._check_alive()
        encoded = encode_headers(headers)
        _check_headers(encoded, headers, self.config, self.config.headers)
        ticket = self._channels.channel(sends=sends, oneshot=oneshot, headers=encoded)
        return ticket.half, ticket

    def admits(self, sender: Sender, size: int) -> bool:
        """Is there room for a reliable message of this size, headers included?"""
        return not self.over and sender.admits(size)

    def watch(self, sender: Sender, size: int) -> None:
        """Tell `Writable` once it is admitted."""
        sender.check_open()
        sender.watched = size
        sender.wake()

    def send(
        self,
        sender: Sender,
        payload: bytes,
        *,
        headers: Pairs = (),
        attachments: Sequence[Ticket] = (),
        mode: Mode = Mode.ORDERED,
        receipt: bool = False,
    ) -> Receipt | None:
        """A message. With `receipt` it is told whether it arrived. Unreliable ones are always admitted."""
        self._check_alive()
        sender.check_open()
        encoded = encode_headers(headers)
        _check_headers(encoded, headers, self.config, self.config.headers)
        self._channels.check_tickets(attachments)
        size = len(payload) + len(encoded) + sum(10 + len(ticket.headers) for ticket in attachments)
        if size > self.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self.limits.message})")
        if mode is not Mode.UNRELIABLE and not sender.admits(size):
            raise LocalProtocolError(
                f"channel {sender.id}: {size} bytes to send beside {sender.queued}, {sender.unanswered} unanswered"
            )
        ids = self._channels.hand_over(attachments)
        block = encode_varbytes(b"".join(encode_varint(id) + channel_headers for id, channel_headers in ids))
        promise = Receipt(sender) if receipt else None
        nodes = tuple(ticket.half.transit for ticket in attachments)
        sender.enqueue(Outgoing(payload, encoded, block, nodes, promise), mode)
        return promise

    def finish(self, sender: Sender) -> None:
        """No more messages; `Finished` comes when all have arrived."""
        self._check_alive()
        sender.check_open()
        sender.finish()

    def cancel(self, sender: Sender, now: float) -> None:
        """Give up what is on its way; `Cancelled` comes when the peer has heard."""
        self._check_alive()
        sender.check_open()
        self._channels.now = max(now, self._channels.now)
        self._channels.cancel(sender)

    def close(self, receiver: Receiver, now: float) -> None:
        """Want no more messages. The receiver is gone at once."""
        self._check_alive()
        self._check_here(receiver)
        self._channels.now = max(now, self._channels.now)
        self._channels.close(receiver, Outcome.NO_RECEIVER)

    def forget(self, half: Half, now: float) -> None:
        """Let go of a channel that we made, both halves of it, whatever is on its way."""
        self._check_alive()
        self._check_here(half)
        if half.id is None or creator_of(half.id) != self.role:
            raise LocalProtocolError(f"channel {half.id} was made by the peer")
        self._channels.now = max(now, self._channels.now)
        self._channels.tell_forget(half.id)
        self._channels.end(half, Outcome.FORGOTTEN)

    def accept(self, half: Half) -> None:
        """The application has taken a half that came."""
        if half.id is not None:
            self._channels.table.accept(half.id)

    def consumed(self, message: Message) -> None:
        """The application has taken a message; harmless the second time."""
        cost, loan, incoming = message.cost, message.loan, message.incoming
        message.cost = message.loan = 0
        message.incoming = None
        if self.over or not cost:
            return
        if incoming is None:
            message.receiver.unread -= cost
            self._channels.unread_datagrams -= cost
            return
        incoming.consume(cost)
        if loan:
            self._dispatch.repay(loan)
        self._reader.release(incoming)

    def _check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the connection is over")

    def _check_here(self, half: Half) -> None:
        if half.id is None:
            raise LocalProtocolError("the other half has not been sent yet")
        if half.gone:
            raise LocalProtocolError(f"channel {half.id} is gone: {half.outcome}")


def _check_headers(encoded: bytes, headers: Pairs, config: Config, most: int) -> None:
    if len(encoded) > most or len(headers) > config.header_pairs:
        raise LocalProtocolError(
            f"{len(headers)} headers in {len(encoded)} bytes against {config.header_pairs} in {most}"
        )
