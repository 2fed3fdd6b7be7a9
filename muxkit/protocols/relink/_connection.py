"""The implementation below `Link`: the parts of a session that Relink adds to `runtime.connection.MuxConnection`.

A `Connection` represents a whole link, which outlives its network connections. In other protocols a session has one
pump, which moves bytes between the engine and a stream. A link has a new pump for each network connection, so `carrier`
is the current pump, or None. A `Supply` provides the network connections. There are three kinds of supplies: one dials
again after each loss, one has a single stream, and one belongs to a listener that finds the link for an incoming
connection.

A link uses two engines. `link` is Relink's engine: it produces and parses bytes, and has channels with one direction.
`engine` implements muxkit's common channels on top of it. The pump delivers the events of `link` to `handle_events`.
Events about common channels are passed to `engine`, whose own events are then handled as in every protocol.

Each half of `link` has an attribute `owner` with the object that uses it: a `CommonChannel`, a `SenderHalf` or a
`MessageHalf`. Events name halves, and `owner` leads from there to the object that handles the event.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import trio

from muxkit._errors import LocalProtocolError
from muxkit._info import SessionInfo
from muxkit._observer import Observer, tell_limit
from muxkit.core import Reason, Sending
from muxkit.core.events import Failed, GoingAway, Halves, HungUp, Opened, Silent, Writable
from muxkit.core.halves import Receiver as EngineReceiver
from muxkit.core.halves import Sender as EngineSender
from muxkit.protocols.relink import common
from muxkit.protocols.relink import events as link_events
from muxkit.protocols.relink._channels import (
    Channel,
    LinkChanged,
    LinkRefused,
    MessageHalf,
    Receipt,
    Receiver,
    Sender,
    SenderHalf,
    as_parts,
)
from muxkit.protocols.relink.common import CommonChannel, CommonChannels, goodbye_in
from muxkit.protocols.relink.engine import Engine
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender
from muxkit.runtime import (
    MOVED,
    Backlog,
    ErrorMaker,
    LinkLost,
    SessionStats,
    Side,
    StreamPump,
    Unsupported,
    background,
    can_heal,
    describe,
    may_log,
    turns,
)
from muxkit.runtime.connection import PEER_BROKE_A_RULE, MuxConnection
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

OnChanged = Callable[[link_events.LinkReplaced], None]

# Seconds for writing the last bytes and closing the stream once the link has finished.
CLOSE_TIMEOUT: Final = 1.0
# How many bytes an empty channel in one direction counts in `retained_bytes`. It can take up to twice as much memory.
CHANNEL_COST: Final = 3 * 1024
# A connection that ends within this many seconds and made no progress may have been refused by the peer.
SHORT_CONNECTION: Final = 1.0
# The link is given up after this many such connections in a row. A bad network alone can cause dozens.
MOST_REFUSALS: Final = 50
# When a link with many channels ends, the closing task yields after this many channels.
CLOSED_A_TURN: Final = 32

_log = logging.getLogger("muxkit")


class Supply(ABC):  # noqa: B024 - what a supply has to do, if anything, differs
    """Provides the connections of a link."""

    def start(self, connection: Connection, nursery: trio.Nursery) -> None:  # noqa: B027 - a listener has nothing to do
        """Start the tasks that provide connections by calling `Connection.run_on`.

        The tasks are cancelled when the link's block ends.
        """

    def weight_changed(self) -> None:  # noqa: B027 - only a listener weighs its links
        """Handle that `Connection.retained_bytes` may have changed while the link has no connection."""

    @property
    def outage(self) -> Exception | None:
        """The error of the last attempt to connect, or None if a connection has worked since."""
        return None


class Connection(MuxConnection[CommonChannels, Channel]):
    """A link: its two engines, its current network connection if there is one, and the users of its channels."""

    wire_name = "Relink"

    def __init__(
        self, link: Engine, supply: Supply, *, observer: Observer | None = None, on_changed: OnChanged | None = None
    ) -> None:
        self.link: Engine = link
        self.error: ErrorMaker | None = None
        """Makes the error that ended the link. None while the link lives."""
        self.carrier: StreamPump[Any] | None = None
        """The pump of the current network connection, or None."""
        engine = CommonChannels(link, trio.lowlevel.current_clock())
        super().__init__(engine, None, "relink", link.limits, observer, outbox=link.waiting)
        self.supply: Supply = supply
        self.moved: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()
        """Tasks that wait for any change of the link. They are woken after every event and check their condition."""
        self.connections: int = 0
        """How many connections the link has had."""
        self.refusals: int = 0
        """How many connections in a row ended within `SHORT_CONNECTION` seconds and made no progress."""
        self.last_loss: ErrorMaker = partial(LinkLost, "there was no connection", by="local")
        """Makes the error that ended the last connection."""
        self.is_common: bool = False
        """True once the application uses common channels on this link."""
        # The users of channels, by channel number.
        self.live: dict[int, Channel] = {}
        """Common channels."""
        self.senders: dict[int, SenderHalf] = {}
        """Senders of the current lives of our channels."""
        self.successors: dict[int, SenderHalf] = {}
        """Senders for the next lives of channels whose close the peer hasn't confirmed."""
        self.receivers: dict[int, MessageHalf] = {}
        """Receivers of the peer's channels, open or not."""
        # Channels that the peer has opened and that have no user yet.
        self._unowned: dict[int, ChannelReceiver] = {}
        self._new_receivers: Backlog[Receiver] = Backlog(_ignore)
        # True if the application takes the peer's channels from `Link.receivers`.
        self._takes_receivers = False
        self._on_changed = on_changed
        self._peer = ""
        # Totals of the connections that have ended.
        self._bytes_received = 0
        self._bytes_sent = 0
        # The end of the link.
        self._over = trio.Event()
        self._is_leaving = False
        # True if the link has ended cleanly, after both sides have shut it down.
        self._is_finished = False
        # True if the link has ended because the peer broke a rule.
        self._is_violated = False
        # The value of `_is_unheard` when the link ended.
        self._was_unheard = False
        # Makes the error for a replacement of the link that lost messages, until a call has raised that error.
        self._unreported: ErrorMaker | None = None
        # The current connection: when it began, and `progress` at that time.
        self._began = 0.0
        self._progress_before = 0
        # When the last connection was lost. None while there is a connection.
        self._lost_at: float | None = None

    def start(self, nursery: trio.Nursery) -> None:
        self._unclaimed.nursery = nursery
        self.supply.start(self, nursery)

    # --- the network connection

    @property
    def loss(self) -> ErrorMaker | None:
        return self.error

    def request_write(self) -> None:
        """Handle the events of a command, and write its output. This has to be called after every command."""
        if self.engine.events or self.link.state.events:
            self.dispatch_events()
        pump = self.carrier
        if pump is None:
            self.supply.weight_changed()
        elif not self.is_holding:
            pump.request_write()
            if self.link.state.has_new_deadline:
                self.link.state.has_new_deadline = False
                pump.rearm()

    def request_write_soon(self) -> None:
        if self.engine.events or self.link.state.events:
            self.dispatch_events()
        pump = self.carrier
        if pump is None:
            self.supply.weight_changed()
        elif not self.is_holding:
            pump.request_write_soon()
            if self.link.state.has_new_deadline:
                self.link.state.has_new_deadline = False
                pump.rearm()

    def after_consuming(self) -> None:
        """Like `request_write`, but for the command `consume`, after which there is usually nothing to do."""
        if self.engine.has_news:
            self.request_write()

    @contextmanager
    def written_together(self) -> Iterator[None]:
        """Combine the output of all commands in this block into one write at its end. The block must not wait."""
        was_holding = self.is_holding
        self.hold_writes()
        try:
            yield
        finally:
            self.is_holding = was_holding
            self.request_write_soon()

    def dispatch_events(self) -> None:
        while self.engine.events or self.link.state.events:
            self._pass_on()
            self.handle_events(self.link.events())

    def _pass_on(self) -> None:
        """Handle the events of the common channels."""
        while self.engine.events:
            super().handle_events(self.engine.take_events())

    def raise_if_over(self) -> None:
        """Raise the error that ended the link, if the link has ended."""
        if self.error is not None:
            raise self.error()

    async def connected(self) -> None:
        """Wait for a connection on which messages flow. If the link has ended, raise the error that ended it."""
        self.budget.thread.check()
        await trio.lowlevel.checkpoint()
        while self.carrier is None or not self.link.state.is_resumed:
            self.raise_if_over()
            await self.moved.park()

    async def run_on(self, stream: trio.abc.Stream, *, epoch: int, link_id: int) -> None:
        """Run the link over `stream` until the connection is lost or the link ends, and close the stream."""
        link = self.link
        if self.carrier is not None:
            raise RuntimeError("the link has a connection; it has to be over first")
        pump: StreamPump[Any] = StreamPump(stream, link, self, outbox=link.waiting)
        pump.phase = "open"  # the handshake was finished before the pump was created
        link.connection_made(trio.current_time(), epoch=epoch, link_id=link_id)
        self.carrier, self.reading = pump, pump.reading
        self._peer = self._unclaimed.peer = pump.peer or self._peer
        self.info: SessionInfo = describe(stream, "relink")
        self.connections += 1
        if self.facts is not None and self._lost_at is not None:
            self.facts.resumed(trio.current_time() - self._lost_at)
            self._lost_at = None
        self._began, self._progress_before = trio.current_time(), self.progress
        try:
            self.dispatch_events()
            self.pings.resend(self._send_ping)
            self.moved.unpark_all()
            async with background() as nursery:
                nursery.start_soon(self._end_connection, pump)
                nursery.start_soon(self._notice_that_it_works)
                await pump.run()
        finally:
            works = self.works
            self._bytes_received += link.bytes_received
            self._bytes_sent += pump.bytes_sent
            self.carrier = self.reading = None
            self.last_loss = pump.loss
            link.connection_lost(trio.current_time())
            self.dispatch_events()
            self._count_refusal(works=works)
            if self.facts is not None and self.error is None:
                self._lost_at = trio.current_time()
                self.facts.outage()
            self.moved.unpark_all()

    async def _end_connection(self, pump: StreamPump[Any]) -> None:
        """End the connection when the link has ended. If the link has finished cleanly, write all output first."""
        await self._over.wait()
        if self._is_finished:
            with trio.move_on_after(CLOSE_TIMEOUT):
                await pump.flushed()
                await pump.hang_up()
        pump.lose("the link is over", by="local")

    @property
    def progress(self) -> int:
        """A counter that grows with every message, acknowledgement and end of a channel."""
        return self.link.state.progress

    @property
    def works(self) -> bool:
        """True if the current connection has made progress, or has lasted `SHORT_CONNECTION` seconds.

        A successful handshake alone isn't progress.
        """
        if self.carrier is None:
            return False
        return self.progress != self._progress_before or trio.current_time() >= self._began + SHORT_CONNECTION

    async def _notice_that_it_works(self) -> None:
        await trio.sleep(SHORT_CONNECTION)
        self.moved.unpark_all()

    def _count_refusal(self, *, works: bool) -> None:
        self.refusals = 0 if works else self.refusals + 1
        if self.refusals < MOST_REFUSALS or self.error is not None:
            return
        count, last, peer, link = self.refusals, self.last_loss(), self._peer, self.link

        def error() -> LinkRefused:
            return LinkRefused(count, last, peer=peer, unsent=link.outbox)

        if may_log("links that were given up after refusals"):
            # log "PEER: N connections in a row were ended at once and brought nothing forward: …": Connections are over
            # as soon as they begin, and nothing comes forward: the link is given up.
            _log.warning("%s", error())
        self.end(error)

    # --- Relink's own channels

    def sender(self, channel: int) -> Sender:
        """Create the sender of one of our channels. If the last sender was closed, the new one is for the next life."""
        self._check_channel(channel, self.link.state.out_id_size)
        before = self.senders.get(channel)
        if before is None:
            half = self.senders[channel] = SenderHalf(self, self.link.next_sender(channel))
        elif before.state is not Sending.OPEN and channel not in self.successors:
            half = self.successors[channel] = SenderHalf(self, self.link.next_sender(channel))
        else:
            raise LocalProtocolError(f"channel {channel} has a sender")
        return Sender(self, half)

    def forget_sender(self, half: SenderHalf) -> None:
        """Release a sender whose channel has ended."""
        half.out.owner = None  # break the reference cycle, so that no garbage collection is needed
        for table in (self.senders, self.successors):
            if table.get(half.out.channel) is half:
                del table[half.out.channel]

    def receiver(self, channel: int) -> Receiver:
        """Create the receiver of a channel of the peer, whether or not the peer has opened it."""
        self._check_channel(channel, self.link.state.in_id_size)
        if channel in self.receivers:
            raise LocalProtocolError(f"channel {channel} has a receiver")
        half = self._new_receiver(self.link.receiver(channel))
        self._replay(half.incoming)
        if self.link.state.has_peer_shut_down:
            half.peer_shut_down()
        return Receiver(half)

    def _new_receiver(self, incoming: ChannelReceiver) -> MessageHalf:
        self._unowned.pop(incoming.channel, None)
        half = self.receivers[incoming.channel] = MessageHalf(self, incoming)
        return half

    def forget_receiver(self, half: MessageHalf) -> None:
        """Release a receiver whose channel has ended, or that the application has closed."""
        incoming = half.incoming
        if self.receivers.get(incoming.channel) is half:
            del self.receivers[incoming.channel]
        if incoming.owner is half:
            incoming.owner = None
            self.link.forget_expected(incoming)

    def _check_channel(self, channel: int, id_size: int) -> None:
        self.budget.thread.check()
        self.raise_if_over()
        if not 0 <= channel < 1 << 8 * id_size:
            raise LocalProtocolError(f"invalid channel {channel}: expected an id that fits into {id_size} bytes")
        if channel in self.live:
            raise LocalProtocolError(f"channel {channel} is a common one")

    async def multicast(self, senders: Sequence[Sender], *parts: bytes) -> list[Receipt]:
        """Send one message on several channels in one packet, once all of them have room. See `Link.multicast`."""
        self.budget.thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        message, link = as_parts(parts), self.link
        halves = [sender.half for sender in senders]
        targets = [half.out for half in halves]
        link.check_targets(len(senders))
        while True:
            full = next((half for half in halves if not half.may_send_parts(message)), None)
            if full is not None:
                await full.wait_for_room(full.size_of(message))
            elif not link.fits(targets, message) and link.state.ours.unanswered:
                # Each window has room, but the link's budget has no room for the copies in all channels together.
                await self.moved.park()
            else:
                break
        numbers = link.multicast(targets, message)
        receipts = [half.sent(number) for half, number in zip(halves, numbers, strict=True)]
        self.request_write()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return receipts

    def live_senders(self) -> list[SenderHalf]:
        """Return all senders whose channels haven't ended."""
        return [*self.senders.values(), *self.successors.values()]

    # --- common channels

    async def open_channel(self, opening: bytes) -> Channel:
        """Open a common channel.

        With an opening the peer is notified of the channel immediately, and otherwise with the first message.
        """
        self.budget.thread.check()
        self._use_common()
        if self.limits.channels < 2:  # half of the channels are for the peer, so waiting for a slot would never end
            raise Unsupported(
                f"no channel can be opened: expected room for at least 2, of which the peer gets half, "
                f"got {self.limits.channels}; raise Limits({self.limits.bound_of_channels}=…)"
            )
        return await super().open_channel(opening)

    def new_channel(self, channel: Halves, opening: bytes) -> Channel:
        assert isinstance(channel.receiver, CommonChannel)  # the engine opens no others
        return self._new_channel(channel.receiver)

    def _new_channel(self, channel: CommonChannel) -> Channel:
        made = self.live[channel.id] = Channel(self, channel.sender, channel)
        return made

    def use_common(self) -> Backlog[Channel]:
        """Return the iterator over the common channels that the peer opens."""
        self._use_common()
        return self.incoming.claim()

    def _use_common(self) -> None:
        """Treat the peer's channels as common channels from now on."""
        if self.is_common:
            return
        if self._takes_receivers:
            raise LocalProtocolError(
                "the program already takes the channels of this link with receivers(): use either these or incoming()"
            )
        if not self.engine.has_numbers:
            raise Unsupported("with channel ids of 0 bytes there is only one channel: use sender(0) and receiver(0)")
        self.is_common = True
        for incoming in [*self._unowned.values()]:
            if self.engine.is_theirs(incoming.channel):
                self._offer_channel(incoming)
                self._replay(incoming)
        self._fail_if_over()

    def use_receivers(self) -> Backlog[Receiver]:
        """Return the iterator over receivers for the channels that the peer opens."""
        if self.is_common:
            raise LocalProtocolError(
                "the program already uses channels in both directions on this link: take them with incoming()"
            )
        if not self._takes_receivers:
            self._takes_receivers = True
            for incoming in [*self._unowned.values()]:
                self._new_receivers.put(Receiver(self._new_receiver(incoming)))
                self._replay(incoming)
            self._fail_if_over()
        return self._new_receivers

    def _offer_channel(self, incoming: ChannelReceiver) -> None:
        """Queue a common channel of the peer until the application takes it. Refuse the channel if nobody will."""
        self._unowned.pop(incoming.channel, None)
        channel = self._new_channel(self.engine.accept(incoming))
        refusal = None
        if self.is_draining:  # the iterator of `incoming` may have ended already, so nobody would take the channel
            refusal = self.refusal_while_closing
        elif not self.incoming.is_claimed:
            refusal = self._unclaimed.refusal(self.incoming)
        if refusal is not None:
            self.decline(channel, refusal)
        else:
            # The first packet of the channel has its name and headers. It is delivered only after this event.
            self.offer(self.incoming, channel, channel.common, is_complete=False)
            if self._is_leaving:
                self._refuse_unclaimed()

    def _replay(self, incoming: ChannelReceiver) -> None:
        """Deliver the messages, and the end, that arrived on a channel before it had a user."""
        incoming.rewind()
        self.dispatch_events()
        user = incoming.owner
        if incoming.ended and isinstance(user, (CommonChannel, MessageHalf)):
            user.peer_closed()
            self._pass_on()

    def _fail_if_over(self) -> None:
        """If the link has already ended, end the channels that the application has just begun to take."""
        if self.error is not None:
            self._fail_channels(self.error)

    def _refuse_unclaimed(self) -> None:
        """Abort the queued common channels if the application doesn't take any, because they would block the end."""
        if not self.incoming.is_claimed:
            for channel in self.incoming.drop_all():
                channel.abort()

    def took(self, item: Channel) -> None:
        item.common.is_taken = True

    def decline(self, item: Channel, reason: Reason) -> None:
        item.abort(reason.text, code=reason.code)

    def taken_channels(self) -> Sequence[Channel]:
        return [channel for channel in self.live.values() if channel.common.is_taken]

    # --- events

    def handle_events(self, events: Sequence[Any]) -> None:
        for event in events:
            if type(event) is not link_events.Arrived:
                self._handle_of_link(event)
            elif isinstance(user := event.receiver.owner, CommonChannel):
                if items := user.arrived(event.first, event.messages):
                    self._deliver(user, items)
            elif isinstance(user, MessageHalf):
                user.arrived(event)
            elif (told := goodbye_in(event.messages[0])) is not None:
                # The channel has no user. Other messages on it are delivered by `_replay` when it gets one.
                self._handle_goodbye(told)
            if self.engine.events:
                self._pass_on()
        if self.moved:
            self.moved.unpark_all()

    def _deliver(self, channel: CommonChannel, items: list[bytes]) -> None:
        """Deliver application messages of a common channel directly. An event for them would cost four more calls."""
        half = channel.owner
        self.messages_received: int = self.messages_received + len(items)
        if not isinstance(half, ReceiveHalf):
            channel.consumed(items, 0)
        elif len(items) == 1:
            half.deliver(items[0])
        else:
            half.deliver_all(items)

    def _handle_of_link(self, event: object) -> None:
        """Handle an event of the link's engine other than `Arrived`."""
        user: object
        match event:
            case link_events.Received() | link_events.Consumed() | link_events.Committed() | link_events.Uncommitted():
                if isinstance(user := event.sender.owner, (CommonChannel, SenderHalf)):
                    user.acknowledged(event)
            case Writable() if isinstance(user := event.sender.owner, CommonChannel):
                user.room_changed()
            case link_events.ChannelOpened():
                self._handle_channel_opened(event.receiver)
            case link_events.Ended():
                if isinstance(user := event.receiver.owner, (CommonChannel, MessageHalf)):
                    user.peer_closed()
            case link_events.ChannelClosed():
                self._handle_channel_closed(event.sender)
            case link_events.RolledBack():
                pass  # these messages were never delivered to the application
            case link_events.Resumed():
                self.budget.wake_waiting()
            case link_events.LinkReplaced():
                self._handle_replaced(event)
            case link_events.LinkFinished():
                self._is_finished = True
                self.lose("the link was shut down by both sides", by="peer")
            case HungUp():
                pass  # the pump loses the connection for the same reason
            case Silent():
                self._lose_carrier(f"no data from the peer for {event.seconds:.0f} s")
            case link_events.Stalled():
                self._lose_carrier(f"a packet made no progress for {event.seconds:.0f} s")
            case Failed():
                self._handle_failed(event)
            case _:
                self.handle_event(event)

    def handle_own_event(self, event: object) -> None:
        match event:
            case common.ChannelOver():
                self._handle_channel_over(event.channel)
            case common.OpeningRefused():
                self.headers_refused()
                if (channel := self.live.get(event.channel.id)) is not None:
                    self.decline(channel, event.reason)
                    self.drop_broken_off(event.channel)
            case common.GoodbyeCame():
                self.incoming.drop(event.channel)
                self._handle_goodbye(event.reason)
            case _:
                super().handle_own_event(event)

    def handle_opened(self, event: Opened) -> None:
        raise AssertionError("a link reports channels of the peer with `ChannelOpened`")

    def _handle_channel_opened(self, incoming: ChannelReceiver) -> None:
        number = incoming.channel
        if isinstance(user := incoming.owner, (CommonChannel, MessageHalf)):
            user.opened()
            return
        self.receivers.pop(number, None)  # the receiver of the channel's previous life
        if self._takes_receivers:
            self._new_receivers.put(Receiver(self._new_receiver(incoming)))
        elif self.is_common and self.engine.is_theirs(number):
            self._offer_channel(incoming)
        else:
            self._unowned[number] = incoming

    def _handle_channel_closed(self, sender: ChannelSender) -> None:
        user = sender.owner
        if isinstance(user, CommonChannel):
            user.closed()
        elif isinstance(user, SenderHalf):
            self.forget_sender(user)
            if (successor := self.successors.pop(sender.channel, None)) is not None:
                self.senders[sender.channel] = successor
            user.closed()
        self.budget.wake_waiting()

    def drop_broken_off(self, half: EngineSender | EngineReceiver[Any]) -> None:
        """Handle that the peer has cancelled a common channel that it had opened.

        If the application hasn't taken the channel yet, drop the channel. Otherwise count it, because a peer that keeps
        cancelling channels is slowed down.
        """
        dropped = self.incoming.drop(half)
        if dropped is None:
            self.engine.starts.broken_off(trio.current_time())
        else:
            dropped.abort()

    def _handle_channel_over(self, channel: CommonChannel) -> None:
        over = self.live.get(channel.id)
        if over is not None and over.common is channel:
            del self.live[channel.id]
        self.openers.wake_waiters()
        if self.moved:
            self.moved.unpark_all()
        self._shut_down_if_idle()

    def handle_going_away(self, event: GoingAway) -> None:
        """Handle the peer's shutdown. The peer opens no more channels."""
        super().handle_going_away(event)
        self._new_receivers.ended()
        for channel in [*self.live.values()]:
            channel.common.peer_shut_down()
        for half in [*self.receivers.values()]:
            half.peer_shut_down()
        self._pass_on()
        self._shut_down_if_idle()

    def _shut_down_if_idle(self) -> None:
        """Answer the peer's shutdown with ours when no channel is left, if the link uses common channels."""
        is_asked = self.is_common and self.link.state.has_peer_shut_down and self.error is None
        if is_asked and not self.taken_channels() and not self.live_senders():
            self._shut_down()

    def _lose_carrier(self, reason: str) -> None:
        if self.carrier is not None:
            self.carrier.lose(reason, by="network")

    def _handle_goodbye(self, told: Reason) -> None:
        self.end_because("the peer ended the link", by="peer", said=told)

    def _handle_replaced(self, event: link_events.LinkReplaced) -> None:
        """Fail all channels, because the listener no longer has our link.

        Senders and receivers that are created from now on use the new link.
        """
        peer = self._peer

        def error() -> LinkChanged:
            self._unreported = None
            return LinkChanged(event, peer=peer)

        self._unowned.clear()
        if not self.incoming.is_claimed:
            self.incoming.drop_all()
        if self._on_changed is not None:
            self._on_changed(event)
        elif self._is_unheard:
            self._unreported = error
        if self._is_leaving:
            self.end(error)
        self._fail_channels(error)
        self.budget.wake_waiting()
        if not event.link_id:
            self.end(error)

    def _handle_failed(self, event: Failed) -> None:
        if may_log("peers that broke a rule"):
            # log: As of the other protocols; a link is not resumed after that.
            _log.warning("%s broke a rule, the link was given up: %s", self._peer or "a peer", event.error)
        self._say_goodbye(Reason(str(event.error), PEER_BROKE_A_RULE))
        self._is_violated = self.error is None
        tell_limit(self.facts, event.error)
        self.end_because(str(event.error), by="peer", cause=event.error)

    # --- the end of the link

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None, told: Reason | None = None) -> None:
        """End the link with a `LinkLost`. If `told` is given, send this reason to the peer. Later calls do nothing."""
        if told is not None:
            self._say_goodbye(told)
        self.end_because(reason, by=by, cause=cause)

    @property
    def has_goodbye(self) -> bool:
        """True if this link can send the peer a reason for its end. Otherwise each message is the application's."""
        is_native = self._takes_receivers or (self.live_senders() and not self.is_common)
        return self.engine.has_numbers and not is_native

    def _say_goodbye(self, told: Reason) -> None:
        """Send the reason for the end of the link to the peer, if possible, and end the connection.

        Relink has no packet for a reason, so muxkit sends it in a message on a reserved common channel. If the link is
        used without common channels, every message belongs to the application, so no reason is sent.
        """
        pump = self.carrier
        if pump is None or self.error is not None:
            return
        parting = self.engine.farewell(told) if self.has_goodbye else self.engine.last_words()
        pump.lose("the link was ended", by="local", parting=[parting] if parting else ())

    def end_because(
        self, reason: str, *, by: Side, cause: BaseException | None = None, said: Reason | None = None
    ) -> None:
        """End the link with a `LinkLost`. `said` is the reason that the peer has sent, if it has."""
        peer, link = self._peer, self.link
        text, code = (said.text or None, said.code or None) if said is not None else (None, None)

        def error() -> LinkLost:
            lost = LinkLost(reason, by=by, peer=peer, unsent=link.outbox, peer_reason=text, code=code)
            lost.__cause__ = cause
            return lost

        self.end(error)

    def end(self, error: ErrorMaker) -> None:
        """End the link with an error. Later calls do nothing."""
        if self.error is not None:
            return
        self.error = error
        self._unclaimed.nursery = None  # the peer may still open channels, and from now on they are refused
        self._was_unheard = self._is_unheard
        self._fail_channels(error)
        is_orderly = self._is_finished or self.link.state.has_peer_shut_down
        self.incoming.ended(None if is_orderly else error)
        self._new_receivers.ended(None if is_orderly else error)
        self.openers.wake_waiters()
        self.pings.ended(error)
        self._over.set()
        self.moved.unpark_all()

    def _fail_channels(self, error: ErrorMaker) -> None:
        """Fail all channels of the current link with `error`."""
        channels = [*self.live.values()]
        halves: list[SenderHalf | MessageHalf] = [*self.live_senders(), *self.receivers.values()]
        for table in (self.live, self.senders, self.successors, self.receivers):
            table.clear()
        with turns().spreading():
            for half in halves:
                half.lost(error)
            for channel in channels:
                if channel._span is not None:
                    channel._span.failed(error())
                channel.sending.lost(error)
                channel.receiving.ended(error)
                self.engine.forget(channel.common)
                for end in (channel.common.sender, channel.common):
                    self.half_ended(end)
        self.end_spans()
        self._pass_on()

    def handle_lost(self) -> None:
        """Do nothing. The pump calls this when its connection was lost, and a link outlives its connections."""

    @property
    def retained_bytes(self) -> int:
        """The bytes that the link keeps for messages in both directions and for its channels, as an estimate."""
        ours, theirs = self.link.state.ours, self.link.state.theirs
        return theirs.bytes + ours.retained + CHANNEL_COST * (len(ours.live) + len(theirs.live))

    # --- leaving

    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        yield from (channel.sending for channel in self.live.values())
        yield from self.live_senders()
        yield from (channel.receiving for channel in self.live.values())
        yield from self.receivers.values()

    @property
    def _is_unheard(self) -> bool:
        """True if the peer's application may not have consumed all of our messages."""
        return bool(self._unheard())

    def _unheard(self) -> list[SendHalf]:
        """Return the halves with messages that the peer's application may not have consumed."""
        halves = [half for half in self.live_halves() if isinstance(half, SendHalf)]
        return [half for half in halves if half.sender.has_sent and half.is_unheard]

    def _is_awaited(self, half: SendHalf) -> bool:
        """Return True while it makes sense to wait for the peer to consume the messages of a half.

        The half must belong to the current link, and the link must not have ended.
        """
        return self.error is None and half.is_unheard and half.sender.owner is half

    async def leave(self, linger: float) -> None:
        """Close all channels, wait until the peer has consumed all messages, and shut the link down.

        Takes at most `linger` seconds, and then ends the link. Raises the error of the link if messages may be lost.
        """
        self._is_leaving = True
        self._unclaimed.nursery = None  # the peer may still open channels, and from now on they are refused
        with trio.move_on_after(linger):
            await self._close_all()
            if self.error is None:
                # Send the shutdown directly after the ends of the channels. Waiting for the confirmations first would
                # cost a round trip. No channel can be opened after the shutdown, and only an open channel can carry its
                # end, so announce the channels on which nothing was sent.
                for channel in [*self.live.values()]:
                    channel.common.announce()
                self._shut_down()
            await self._wait_until_heard()
            while self.error is None and (self.is_common or not self._owes_the_application):
                await self.moved.park()
            # Some received messages are left, and nobody will consume them. The link can't finish cleanly then, so end
            # the connection after writing all output.
            if self.carrier is not None and self.error is None:
                await self.carrier.flushed()
                await self.carrier.hang_up()
            while self.carrier is not None:
                await self.moved.park()
        self.end_because(f"the peer didn't close the session within {linger} s", by="local")
        if self._unreported is not None:
            raise self._unreported()
        # Raise an error that no other call may have raised: messages may be lost, the peer broke a rule, the server has
        # named another URL, or the error is permanent, such as a refusal by the server.
        if self.error is not None:
            error = self.error()
            is_redirect = isinstance(error, LinkLost) and error.code == MOVED
            if self._was_unheard or self._is_violated or is_redirect or not can_heal(error):
                raise error

    async def finish(self, within: float) -> None:
        """Close all channels, and wait at most `within` seconds until the peer has received everything."""
        with trio.move_on_after(within):
            await self._close_all()
            await self._wait_until_heard()

    async def _close_all(self) -> None:
        """Take no new channels, and close those that are open."""
        self._end_iterators()
        self._refuse_unclaimed()
        await self._close_in_turns(Channel.close)
        for sender in self.live_senders():
            sender.close()

    async def _wait_until_heard(self) -> None:
        """Wait until the peer has received everything, or the link has ended."""
        while self.error is None and (unheard := self._unheard()):
            # Wait for one half after the other. Checking all halves after each packet would take quadratic time.
            for half in unheard:
                while self._is_awaited(half):
                    await self.moved.park()

    @property
    def _owes_the_application(self) -> bool:
        """True if our application still has to consume or answer messages."""
        theirs = self.link.state.theirs
        return bool(theirs.unanswered if self.engine.in_transactions else theirs.bytes)

    def _end_iterators(self) -> None:
        for backlog in (self.incoming, self._new_receivers):
            backlog.ended()
        self.openers.wake_waiters()

    async def _close_in_turns(self, close: Callable[[Channel], None]) -> None:
        """Close or abort all common channels, and yield from time to time."""
        for number, channel in enumerate([*self.live.values()], 1):
            close(channel)
            if not number % CLOSED_A_TURN:
                await turns().wait()

    def _shut_down(self) -> None:
        """Notify the peer that we open no more channels."""
        self.is_draining: bool = True
        self.engine.go_away(Reason())
        self.openers.wake_waiters()
        self.request_write()

    async def shutdown(self, *, grace: float) -> None:
        """Open no more channels, wait up to `grace` seconds for the open ones to end, and abort the rest."""
        await self._drain(grace, announced=True)

    async def drain(self, grace: float) -> None:
        """Do the same without notifying the peer, for a link that is to end with a reason.

        A reason is sent on a new channel, and after the shutdown packet no channel may be opened (section 3.6). The
        channels that the peer opens in the meantime are refused.
        """
        await self._drain(grace, announced=False)

    async def _drain(self, grace: float, *, announced: bool) -> None:
        self.budget.thread.check()
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            return
        self._end_iterators()
        for channel in [*self.live.values()]:
            channel.common.announce()
        self._refuse_unclaimed()
        if announced:
            self._shut_down()
        else:
            self.is_draining = True
        with trio.move_on_after(grace):
            while self.live or any(half.is_live for half in self.live_senders()):
                await self.moved.park()
        if self.error is None:
            with trio.CancelScope(shield=True):  # `_close_in_turns` yields, but doesn't wait for the peer
                await self._close_in_turns(Channel.abort)
            for sender in self.live_senders():
                sender.close()

    # --- pings, numbers

    async def ping_about(self, key: object) -> float:
        """Send a ping and return the round trip in seconds. See `Link.ping`."""
        self.budget.thread.check()
        await trio.lowlevel.checkpoint()
        self.raise_if_over()
        if self.carrier is None:
            self.pings.forget_unwanted()
        ping = self.pings.sent(None)
        if self.carrier is not None:
            self._send_ping()
        return await ping.wait()

    def _send_ping(self, _about: None = None) -> None:
        self.engine.ping(None)
        self.request_write()

    @property
    def live_channels(self) -> int:
        others = self.link.state.theirs.live.keys() - self.live
        return len(self.live) + len(self.live_senders()) + len(others)

    def stats(self) -> SessionStats:
        link, pump = self.link, self.carrier
        return SessionStats(
            bytes_received=self._bytes_received + (link.bytes_received if pump is not None else 0),
            bytes_sent=self._bytes_sent + (pump.bytes_sent if pump is not None else 0),
            messages_received=self.messages_received,
            messages_sent=self.engine.messages_sent,
            channels=self.live_channels,
            queued=link.outbox + (pump.unsent if pump is not None else 0),
            round_trip=self.pings.round_trip,
        )

    def state_text(self) -> str:
        return "over" if self.error is not None else "absent" if self.carrier is None else "connected"


def _ignore(_receiver: Receiver) -> None:
    """Do nothing when the application takes a receiver from the backlog."""
