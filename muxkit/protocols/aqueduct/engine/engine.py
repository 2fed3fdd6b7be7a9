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
from muxkit.protocols.aqueduct._events import Arrived, Event, Failed, HungUp, Outcome, Silent
from muxkit.protocols.aqueduct._frames import ConnectionHeaders, encode_frame
from muxkit.protocols.aqueduct._ids import Role, creator_of
from muxkit.protocols.aqueduct._reader import Reader
from muxkit.protocols.aqueduct._receiving import ReceiverMachine
from muxkit.protocols.aqueduct._sending import Mode, Outgoing, Promise, SenderMachine
from muxkit.protocols.aqueduct._sizes import NO_HEADERS, Sizes, check_headers
from muxkit.protocols.aqueduct._timers import Timer
from muxkit.protocols.aqueduct._varint import encode_varbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._observer import Observer
    from muxkit.core import StreamId
    from muxkit.protocols.aqueduct._transit import Transit

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


CHANNEL_PRICE = 5 * 1024  # bytes of memory for a half, its session objects and a share of a task that handles it


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
        self.config = config or Config()
        self.limits = (limits or Limits()).at_price(CHANNEL_PRICE)
        self.role = role
        greeting = encode_frame(ConnectionHeaders(tuple(headers)))
        check_headers(greeting, headers, self.config, self.config.connection_headers)
        self._sizes = Sizes(self.config, self.limits)
        self._channels = Channels(role, self.config, self.limits, observer)
        self._dispatch = Dispatch(self._channels, greeting)
        self._datagrams = Datagrams(self._channels, self._dispatch)
        self.most_streams = 2 * self.limits.channels + self.config.streams
        self._reader = Reader(self._channels, self._dispatch, self._datagrams, self.most_streams)
        self._reader.stalls.on_silent = lambda seconds: self._stop(Silent(seconds))
        self.missing = self._reader.missing  # a part of the `MultistreamPump`'s face, and called often
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
    def halves(self) -> list[Half]:
        """All that live here, the entrypoint's among them."""
        return [*self._channels.table]

    @property
    def ours(self) -> int:
        """How many of them are of channels that we made."""
        return self._channels.table.census.ours

    @property
    def outbox(self) -> int:
        """Bytes of messages that wait for the link."""
        return self._channels.outbox

    @property
    def senders(self) -> dict[int, SenderMachine]:
        return {half.id or 0: half for half in self._channels.table if isinstance(half, SenderMachine)}

    @property
    def receivers(self) -> dict[int, ReceiverMachine]:
        return {half.id or 0: half for half in self._channels.table if isinstance(half, ReceiverMachine)}

    @property
    def frames(self) -> int:
        """Frames received."""
        return self._dispatch.frames

    @property
    def bytes_received(self) -> int:
        """Of streams and datagrams."""
        return self._reader.stalls.came

    @property
    def receipt_deadline(self) -> float:
        """How long a datagram that is known to have been sent is waited for, in seconds."""
        return self._channels.receipt_deadline

    def set_rtt(self, seconds: float) -> None:
        """The link has measured its round trip."""
        self._channels.rtt = seconds

    def keeps_order(self) -> None:
        """On this link no datagram is overtaken by what was written after it, so none has to be waited for."""
        self._channels.in_order = True

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
        self._reader.stalls.came += len(data)
        self._receive(lambda: self._reader.stream(stream, data, fin), now, f"stream {stream}")

    def receive_reset(self, stream: StreamId, now: float) -> None:
        self._receive(lambda: self._reader.reset(stream), now, f"stream {stream}")

    def receive_stopped(self, stream: StreamId, now: float) -> None:
        """The peer wants no more of a stream of ours: it is reset, and a sender that needs it gives up."""
        self._receive(lambda: self._reader.stopped(stream), now, f"stream {stream}")

    def receive_datagram(self, data: bytes, now: float) -> None:
        self._reader.stalls.came += len(data)
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
        if not (channels.consumed or channels.lent or channels.stops or channels.line.resets):
            return ()
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
        return None if self.over else self._channels.timers.deadlines.next

    def handle_deadline(self, now: float) -> None:
        if not self.over:
            self._channels.now = max(now, self._channels.now)
            try:
                self._channels.timers.handle(now)
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
        """A new channel: the half that stays here, and a ticket for the other one. It has an id once that is sent."""
        self._check_alive()
        encoded = self._sizes.encode(headers)
        ticket = self._channels.channel(sends=sends, oneshot=oneshot, headers=encoded)
        return ticket.half, ticket

    def admits(self, sender: SenderMachine, size: int) -> bool:
        """Is there room for a reliable message of this size, headers included?"""
        return not self.over and sender.admits(size)

    def watch(self, sender: SenderMachine, size: int) -> None:
        """Tell `Writable` once it is admitted."""
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
        """A message. With `receipt` it is told whether it arrived. Unreliable ones are always admitted."""
        self._check_alive()
        sender.check_open()
        encoded = self._sizes.encode(headers)
        if attachments:
            self._channels.check_tickets(attachments)
        size = self._sizes.of(payload, encoded, attachments)
        if mode is not Mode.UNRELIABLE and not sender.admits(size):
            raise LocalProtocolError(
                f"channel {sender.id}: {size} bytes to send beside {sender.queued}, {sender.unanswered} unanswered"
            )
        block = NO_HEADERS
        nodes: tuple[Transit, ...] = ()
        if attachments:
            ids = self._channels.hand_over(attachments)
            block = encode_varbytes(b"".join(encode_varint(id) + channel_headers for id, channel_headers in ids))
            nodes = tuple(ticket.half.transit for ticket in attachments)
        promise = Promise(sender) if receipt else None
        sender.enqueue(Outgoing(payload, encoded, block, nodes, promise), mode)
        return promise

    def size_of(self, payload: bytes, headers: Pairs, attachments: Sequence[Ticket]) -> int:
        """What a message counts for `admits`; raises `LocalProtocolError` for one that can never be sent."""
        return self._sizes.of(payload, self._sizes.encode(headers), attachments)

    def finish(self, sender: SenderMachine) -> None:
        """No more messages; `Ended` comes when all have arrived."""
        self._check_alive()
        sender.check_open()
        sender.finish()

    def cancel(self, sender: SenderMachine, now: float) -> None:
        """Give up what is on its way; `Ended` comes when the peer has heard. Too late once the end was written."""
        self._check_alive()
        sender.check_cancellable()
        self._channels.now = max(now, self._channels.now)
        self._channels.cancel(sender)

    def close(self, receiver: ReceiverMachine, now: float) -> None:
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

    def blame(self) -> None:
        """The peer made a channel that failed here; so many of them are its budget, as if it had cancelled them."""
        if not self.over:
            try:
                self._channels.check_churn("a channel failed at our side")
            except RemoteProtocolError as error:
                self.fail(error)

    def consumed(self, message: Arrived, now: float = 0.0) -> bool:
        """The application has taken a message; harmless the second time. Gives whether others came in for it."""
        cost, loan, incoming = message.cost, message.loan, message.incoming
        message.cost = message.loan = 0
        message.incoming = None
        if self.over or not cost:
            return False
        if incoming is None:
            message.receiver.unread -= cost
            self._channels.unread_datagrams -= cost
            return False
        incoming.consume(cost)
        if loan:
            self._dispatch.repay(loan)
        self._reader.release(incoming)
        crowd = self._channels.crowd
        crowd.left(message.receiver)
        if not crowd.waits_for(message.receiver):
            return False
        self._receive(lambda: crowd.let_in(message.receiver), max(now, self._channels.now), "what was held back")
        return True

    def _check_alive(self) -> None:
        if self.over:
            raise LocalProtocolError("the connection is over")

    def _check_here(self, half: Half) -> None:
        if half.id is None:
            raise LocalProtocolError("the other half has not been sent yet")
        if half.gone:
            raise LocalProtocolError(f"channel {half.id} is gone: {half.outcome}")
