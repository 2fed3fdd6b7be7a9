"""The session of Relink: a link over one connection after the other, with senders and receivers or common channels."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import get_args, overload

import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Facts, Observer, measured, tell_limit
from muxkit.codecs import Codec, announced
from muxkit.core import Headers, Reason, encode_headers, with_name
from muxkit.protocols.relink._session.common import Channel, CommonChannels, goodbye_in
from muxkit.protocols.relink._session.core import Core, In, LinkChanged, LinkRefused, Out
from muxkit.protocols.relink._session.native import Receipt, Receiver, Sender, as_parts
from muxkit.protocols.relink.engine import events
from muxkit.protocols.relink.engine.engine import LinkEngine
from muxkit.runtime import (
    ChannelOpening,
    ErrorMaker,
    LinkLost,
    Outage,
    Pings,
    PumpOwner,
    SessionInfo,
    SessionStats,
    Side,
    StreamPump,
    TypedChannel,
    ValueT,
    background,
    can_heal,
    describe,
    may_log,
    protected_manager,
    reason_for_leaving,
    turns,
    typed,
)
from muxkit.runtime import Session as CommonSession
from muxkit.runtime.pumps.clock import Reminder

OnChanged = Callable[[events.LinkReplaced], None]


LEAVE_TIMEOUT = 5.0  # s, for taking leave
LEFT_BY_ERROR = Reason("the other side left the session by an error", 500)
PEER_BROKE_A_RULE = 400  # the code of a link that ends because its peer broke a rule
LAST_WORDS = 64 * 1024  # bytes to pull at a time until the reason for the end is among them
LAST_PULLS = 64  # buffers that may stand before it
CLOSE_TIMEOUT = 1.0  # s, for the end of a connection whose link is finished
CHANNEL_COST = 3 * 1024  # bytes that a channel in one direction counts, with nothing in it; it takes up to twice that
SHORT_CONNECTION = 1.0  # s; a connection that ends sooner and brought nothing forward may have been refused
MOST_REFUSALS = 50  # such connections in a row; bad weather alone makes dozens

# Events that bring the application's work forward.
PROGRESS = frozenset(
    (
        events.Opened,
        events.Arrived,
        events.Ended,
        *get_args(events.Acknowledged),
        events.RolledBack,
        events.ChannelClosed,
        events.PeerShutDown,
    )
)

_log = logging.getLogger("muxkit")


@protected_manager
async def living(link: Link, linger: float, *work: Callable[[], Awaitable[None]]) -> AsyncGenerator[Link, None]:
    """Run a link and its background `work` for a block: a normal end leaves the link in order, an error drops it."""
    with measured(link.facts, link):
        async with background() as nursery:
            for task in work:
                nursery.start_soon(task)
            link._common.unclaimed.nursery = nursery
            try:
                yield link
            except BaseException as error:
                if isinstance(error, Exception):
                    told = reason_for_leaving(error, LEFT_BY_ERROR)
                    link._say_goodbye(told)
                link._lose_because("the link was left by an error", by="local")
                raise
            finally:
                link._common.unclaimed.nursery = None  # a connection may still bring channels, which are refused now
            await link.leave(linger)


class Link(CommonSession, PumpOwner[events.Event]):
    """One link at work, with or without a connection; made by `link`, `listen` and `session`.

    Use `sender`, `receiver` and `receivers` for what Relink is, or `open` and `incoming` for the common channels.
    """

    wire_name = "Relink"

    def __init__(
        self,
        engine: LinkEngine,
        *,
        on_changed: OnChanged | None = None,
        outage: Outage | None = None,
        facts: Facts | None = None,
    ) -> None:
        self.facts = facts
        self._core: Core = Core(engine, self.handle_events, self, facts)
        self.observer: Observer | None = engine.observer
        self.facts = facts
        self.reminder: Reminder | None = self._core.budget.watchdog
        self._engine = engine
        self._common = CommonChannels(self._core, self._shut_down_if_idle)
        self._on_changed = on_changed
        self._outage = outage
        self._pings: Pings[None] = Pings(facts)
        self._peer = ""
        self._info = SessionInfo(protocol="relink", peer="")
        self.connections: int = 0
        """How many connections it has had."""
        self._bytes_received = 0  # on connections that are over
        self._bytes_sent = 0
        # The end.
        self._over = trio.Event()
        self._is_leaving = False
        self._is_finished = False  # in the way that both sides wanted
        self._is_violated = False  # the link is over because the peer broke a rule
        self._was_unheard = False  # when the link was over
        self._unreported: ErrorMaker | None = None  # a change of the link that lost messages, and was raised nowhere
        # What connections were good for.
        self._last_loss: ErrorMaker = partial(LinkLost, "there was no connection", by="local")  # of the last one
        self._progress: int = 0
        """Grows with everything that brings the application's work forward."""
        self._refusals: int = 0
        """Connections in a row that were over at once and brought nothing forward."""
        self._began = 0.0  # the present connection
        self._lost_at: float | None = None  # the connection before, while there is none
        self._progress_before = 0
        self._arrivals_before = 0
        self._actions: dict[type, Callable[..., None]] = {
            events.Opened: self._on_opened,
            events.Ended: self._on_ended,
            **dict.fromkeys(get_args(events.Acknowledged), self._on_acknowledged),
            events.ChannelClosed: self._on_closed,
            events.Writable: self._on_writable,
            events.Ponged: lambda event: self._pings.answered(None),
            events.Resumed: lambda event: self._core.budget.wake_waiting(),
            events.LinkReplaced: self._on_changed_link,
            events.EpochChanged: self._on_changed_link,
            events.Silent: self._on_silent,
            events.PeerShutDown: lambda event: self._common.peer_shut_down(),
            events.Finished: self._on_finished,
            events.Failed: self._on_failed,
        }
        self._core.on_goodbye = self._on_goodbye

    # --- messages

    def sender(self, channel: int = 0) -> Sender:
        """To send on a channel of ours. Its first message opens it; one sender at a time, and one more that waits until
        the channel's end is confirmed."""
        core = self._core
        self._check_channel(channel, core.engine.out_id_size)
        core.budget.owner.check()
        before = core.outs.get(channel)
        sender = Sender(core, channel)
        if before is None:
            core.outs[channel] = sender
        elif isinstance(before, Sender) and before.is_closed and channel not in core.successors:
            core.successors[channel] = sender
        else:
            raise LocalProtocolError(f"channel {channel} has a sender")
        return sender

    def receiver(self, channel: int = 0) -> Receiver:
        """To receive what the peer sends on this channel, now or once the peer opens it; one receiver at a time."""
        self._core.budget.owner.check()
        self._check_channel(channel, self._core.engine.in_id_size)
        if channel in self._core.ins:
            raise LocalProtocolError(f"channel {channel} has a receiver")
        return self._common.receiver(channel)

    def _check_channel(self, channel: int, id_size: int) -> None:
        self._core.raise_if_over()
        if not 0 <= channel < 1 << 8 * id_size:
            raise LocalProtocolError(f"channel {channel} does not fit an id of {id_size} bytes")
        self._common.check_free(channel)

    def receivers(self) -> AsyncIterator[Receiver]:
        """A receiver for each channel that the peer opens, until the peer's shutdown."""
        return self._common.receivers()

    async def multicast(self, senders: Sequence[Sender], *parts: bytes) -> list[Receipt]:
        """Send one message to several channels in one packet; waits until all of them have room.

        A sender that stands there twice sends it twice. Gives a receipt for each, in the order of `senders`. Cancelled
        means that it was sent to none of them. Raises as `Sender.send` does, and `LocalProtocolError` if it could not
        even be sent when nothing else is under way.
        """
        self._core.budget.owner.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        message = as_parts(parts)
        engine, channels = self._engine, [sender.channel for sender in senders]
        engine.check_targets(len(senders))
        while True:
            full = next((one for one in senders if one.is_closed or not one._may_send(one._size_of(message))), None)
            if full is not None:
                await full.wait_for_room(full._size_of(message))
            elif not engine.fits(channels, message) and engine.unanswered:
                await self._core.moved.park()  # each has room, but not all together
            else:
                break
        numbers = engine.multicast(channels, message)
        receipts = [sender._sent(number) for sender, number in zip(senders, numbers, strict=True)]
        self._core.request_write()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return receipts

    # --- the common channels

    @overload
    def open(
        self, name: str = "", *, payload: bytes = b"", headers: Headers | None = None
    ) -> ChannelOpening[Channel]: ...
    @overload
    def open(
        self, name: str = "", *, codec: Codec[ValueT], payload: bytes = b"", headers: Headers | None = None
    ) -> ChannelOpening[TypedChannel[ValueT]]: ...
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT] | None = None,
        payload: bytes = b"",
        headers: Headers | None = None,
    ) -> ChannelOpening[Channel] | ChannelOpening[TypedChannel[ValueT]]:
        """A channel in both directions; the peer hears of it with its first message.

        With a name or a payload it hears of it at once.
        """
        if codec is not None:
            return typed(self.open(name, payload=payload, headers=announced(headers, codec)), codec)
        return ChannelOpening(
            partial(self._common.open, with_name(name, payload, encode_headers(headers, self.limits.headers)))
        )

    def incoming(self) -> AsyncIterator[Channel]:
        return self._common.incoming()

    def channels(self) -> Sequence[Channel]:
        return self._common.taken()

    # --- the link

    @property
    def id(self) -> int:
        """0 before there is a link. It is a secret of both sides: a peer that knows it can take the link over."""
        return self._engine.link_id

    @property
    def is_connected(self) -> bool:
        """True while there is a connection."""
        return self._core.pump is not None

    @property
    def unanswered(self) -> int:
        """Messages of ours that the peer has not consumed, or answered, yet."""
        return self._engine.unanswered

    @property
    def outage(self) -> Exception | None:
        """What went wrong with the last attempt to connect, if nothing has worked since."""
        return None if self._outage is None else self._outage.last

    async def connected(self) -> None:
        """Wait for a connection on which messages flow.

        Raises what ended the link if it is over; put `trio.fail_after` around it for a limit.
        """
        self._core.budget.owner.check()
        await trio.lowlevel.checkpoint()
        while self._core.pump is None or not self._engine.is_resumed:
            self._core.raise_if_over()
            await self._core.moved.park()

    async def ping(self) -> float:
        """One round trip, in seconds; it waits for a connection, and is repeated on the next if this one is lost."""
        self._core.budget.owner.check()
        await trio.lowlevel.checkpoint()
        self._core.raise_if_over()
        if self._core.pump is None:
            self._pings.forget_unwanted()
        ping = self._pings.sent(None)
        if self._core.pump is not None:
            self._send_ping()
        return await ping.wait()

    def _send_ping(self, _about: None = None) -> None:
        self._engine.ping()
        self._core.request_write()

    async def shutdown(self, *, grace: float) -> None:
        """Open no more channels, let the live ones end for up to `grace` seconds, then cut them.

        The peer is told at once. Senders that are not closed by then are closed, what they had not decided is rolled
        back; what was sent before is still delivered while the link lives.
        """
        self._core.budget.owner.check()
        await trio.lowlevel.checkpoint()
        core = self._core
        if core.error is not None:
            return
        self._common.ended(None)
        self._common.announce_all()
        self._common.refuse_unclaimed()
        self._shut_down()
        with trio.move_on_after(grace):
            while self._common.live or any(one._is_live for one in self._senders()):
                await core.moved.park()
        if core.error is None:
            with trio.CancelScope(shield=True):  # for some turns
                await self._common.close_all(abort=True)
            for sender in self._senders():
                sender.close()

    def _shut_down(self) -> None:
        """Tell the peer that we open no more channels."""
        if not (self._engine.is_shutting_down or self._engine.over):
            self._engine.shutdown()
            self._common.wake_openers()
            self._core.after_command()

    def _senders(self) -> list[Sender]:
        outs = (*self._core.outs.values(), *self._core.successors.values())
        return [sender for sender in outs if isinstance(sender, Sender)]

    @property
    def limits(self) -> Limits:
        return self._core.limits

    @property
    def info(self) -> SessionInfo:
        return self._info

    def stats(self) -> SessionStats:
        core, pump = self._core, self._core.pump
        return SessionStats(
            bytes_received=self._bytes_received + (self._engine.bytes_received if pump is not None else 0),
            bytes_sent=self._bytes_sent + (pump.bytes_sent if pump is not None else 0),
            messages_received=core.messages_received,
            messages_sent=core.messages_sent,
            channels=len(self._common.live) + len(self._senders()) + len(core.peer_channels.keys() - self._common.live),
            queued=self._engine.outbox + (pump.unsent if pump is not None else 0),
            round_trip=self._pings.round_trip,
        )

    def __repr__(self) -> str:
        state = "over" if self._core.error is not None else "connected" if self.is_connected else "absent"
        return f"<relink.Link {self._peer or 'without a peer yet'}: {state}>"

    # --- connections, for dialling and listening

    async def _run_connection(self, stream: trio.abc.Stream, *, epoch: int, link_id: int) -> None:
        """Run the link over this stream until the connection is lost or the link is over; closes the stream."""
        core, engine = self._core, self._engine
        if core.pump is not None:
            raise RuntimeError("the link has a connection; it has to be over first")
        pump: StreamPump[events.Event] = StreamPump(stream, engine, self, outbox=engine.waiting)
        pump.phase = "open"  # the handshake was done before there was a pump
        engine.connection_made(trio.current_time(), epoch=epoch, link_id=link_id)
        core.pump = pump
        core.deadline = None
        self._peer = self._common.unclaimed.peer = pump.peer or self._peer
        self._info = describe(stream, "relink")
        self.connections += 1
        self._tell_resumed()
        self._began, self._progress_before = trio.current_time(), self._progress
        self._arrivals_before = engine.arrivals
        try:
            core.dispatch_events()
            self._pings.resend(self._send_ping)
            core.moved.unpark_all()
            async with background() as nursery:
                nursery.start_soon(self._end_connection, pump)
                nursery.start_soon(self._notice_that_it_works)
                await pump.run()
        finally:
            works = self._works
            self._progress += engine.arrivals != self._arrivals_before
            self._bytes_received += engine.bytes_received
            self._bytes_sent += pump.bytes_sent
            core.pump = None
            self._last_loss = pump.loss
            engine.connection_lost(trio.current_time())
            core.dispatch_events()
            self._count_refusal(works=works)
            self._tell_outage()
            core.moved.unpark_all()

    def _tell_outage(self) -> None:
        if self.facts is not None and self._core.error is None:
            self._lost_at = trio.current_time()
            self.facts.outage()

    def _tell_resumed(self) -> None:
        if self.facts is not None and self._lost_at is not None:
            self.facts.resumed(trio.current_time() - self._lost_at)
            self._lost_at = None

    @property
    def _works(self) -> bool:
        """True if the connection has made progress or lasted SHORT_CONNECTION; a handshake alone is none."""
        if self._core.pump is None:
            return False
        if self._progress != self._progress_before or trio.current_time() >= self._began + SHORT_CONNECTION:
            return True
        return self._engine.arrivals != self._arrivals_before

    async def _notice_that_it_works(self) -> None:
        await trio.sleep(SHORT_CONNECTION)
        self._core.moved.unpark_all()

    def _count_refusal(self, *, works: bool) -> None:
        self._refusals = 0 if works else self._refusals + 1
        if self._refusals < MOST_REFUSALS or self._core.error is not None:
            return
        count, last, peer, engine = self._refusals, self._last_loss(), self._peer, self._engine

        def error() -> LinkRefused:
            return LinkRefused(count, last, peer=peer, unsent=engine.outbox)

        if may_log("links that were given up after refusals"):
            # log "PEER: N connections in a row were ended at once and brought nothing forward: …": Connections are over
            # as soon as they begin, and nothing comes forward: the link is given up.
            _log.warning("%s", error())
        self._lose(error)

    async def _end_connection(self, pump: StreamPump[events.Event]) -> None:
        """End the connection once the link is over, with a flush if the link finished in order."""
        await self._over.wait()
        if self._is_finished:
            with trio.move_on_after(CLOSE_TIMEOUT):
                await pump.flushed()
                await pump.hang_up()
        pump.lose("the link is over", by="local")

    def _lose_because(
        self,
        reason: str,
        *,
        by: Side,
        cause: BaseException | None = None,
        told: Reason | None = None,
        hint: str | None = None,
    ) -> None:
        """End the link with a `LinkLost`; later calls do nothing. `told` is what the peer gave as its reason."""
        peer, engine = self._peer, self._engine
        text, code = (told.text or None, told.code or None) if told is not None else (None, None)

        def error() -> LinkLost:
            unsent = engine.outbox
            lost = LinkLost(reason, by=by, peer=peer, unsent=unsent, peer_reason=text, code=code, hint=hint)
            lost.__cause__ = cause
            return lost

        self._lose(error)

    def _say_goodbye(self, told: Reason) -> None:
        """Tell the peer why the link ends, for which its document has no place, and end the connection."""
        pump, engine = self._core.pump, self._engine
        if pump is None or self._core.error is not None:
            return
        parting: list[bytes] = []
        with engine.last_words(), self._core.written_together():
            channel = self._common.say_goodbye(told)
            while channel is not None and engine.queued(channel) and len(parting) < LAST_PULLS:
                pulled = engine.buffers_to_send(LAST_WORDS)
                if not pulled:  # what stands before it may not be sent yet
                    break
                parting += map(bytes, pulled)
            parting += map(bytes, engine.buffers_to_send(LAST_WORDS))
        pump.lose("the link was ended", by="local", parting=parting)

    def _lose_because_of_last(self) -> None:
        """End the link with the loss of its last connection."""
        self._lose(self._last_loss)

    def _lose(self, error: ErrorMaker) -> None:
        core = self._core
        if core.error is not None:
            return
        core.error = error
        self._was_unheard = self._is_unheard
        self._fail_channels(error)
        orderly = self._is_finished or self._engine.has_peer_shut_down
        self._common.ended(None if orderly else error)
        self._pings.ended(error)
        self._over.set()
        core.moved.unpark_all()

    def _fail_channels(self, error: ErrorMaker) -> None:
        core = self._core
        users: list[Out | In] = [*core.outs.values(), *core.successors.values(), *core.ins.values()]
        core.outs.clear()
        core.successors.clear()
        core.ins.clear()
        core.peer_channels.clear()
        with turns().spreading():
            for user in dict.fromkeys(users):
                user._lost(error)

    @property
    def _retained_bytes(self) -> int:
        """What is kept of messages in both directions, and of the channels themselves."""
        engine = self._engine
        return engine.held_bytes + engine.retained_bytes + CHANNEL_COST * engine.channel_count

    # --- events

    def handle_written(self) -> None:
        self._core.budget.wake_waiting()

    def queued_bytes(self) -> int:
        return self._engine.outbox

    def handle_events(self, happened: Sequence[events.Event]) -> None:
        core, actions = self._core, self._actions
        for event in happened:
            kind = type(event)
            self._progress += kind in PROGRESS
            if isinstance(event, events.Arrived):
                taker = core.ins.get(event.channel)
                if taker is not None:  # else it comes again when one asks for the channel
                    taker._arrived(event)
                elif (told := goodbye_in(event.messages[0])) is not None:
                    self._on_goodbye(told)
            elif kind in actions:
                actions[kind](event)
        if core.moved:
            core.moved.unpark_all()

    def _on_opened(self, event: events.Opened) -> None:
        core, channel = self._core, event.channel
        core.peer_channels[channel] = False
        taker = core.ins.get(channel)
        if taker is not None and taker._opened():
            return
        core.ins.pop(channel, None)
        self._common.opened(channel)
        if self._is_leaving or self._engine.is_shutting_down:
            self._common.refuse_unclaimed()

    def _on_ended(self, event: events.Ended) -> None:
        self._core.peer_channels[event.channel] = True
        taker = self._core.ins.get(event.channel)
        if taker is not None:
            taker._peer_closed()

    def _on_acknowledged(self, event: events.Acknowledged) -> None:
        sender = self._core.outs.get(event.channel)
        if sender is not None:
            sender._acknowledged(event)

    def _on_closed(self, event: events.ChannelClosed) -> None:
        core = self._core
        sender = core.outs.pop(event.channel, None)
        successor = core.successors.pop(event.channel, None)
        if successor is not None:
            core.outs[event.channel] = successor
        if sender is not None:
            sender._closed()
        core.budget.wake_waiting()

    def _on_writable(self, event: events.Writable) -> None:
        sender = self._core.successors.get(event.channel) or self._core.outs.get(event.channel)
        if sender is not None:
            sender._window_changed()

    def _on_changed_link(self, event: events.LinkReplaced) -> None:
        peer = self._peer

        def error() -> LinkChanged:
            self._unreported = None
            return LinkChanged(event, peer=peer)

        # Watches of the old link are over; new senders and receivers use the new one.
        self._common.forget_unclaimed()
        if self._on_changed is not None:
            self._on_changed(event)
        elif self._is_unheard:
            self._unreported = error
        if self._is_leaving:
            self._lose(error)
        self._fail_channels(error)
        self._core.budget.wake_waiting()
        if not event.link_id:
            self._lose(error)

    def _on_silent(self, event: events.Silent) -> None:
        if self._core.pump is not None:
            what = "a packet made no progress" if event.stalled else "nothing was heard"
            self._core.pump.lose(f"{what} for {event.seconds:.0f} s", by="network")

    def _on_goodbye(self, told: Reason, channel: Channel | None = None) -> None:
        if channel is not None:
            self._common.drop(channel)
        self._lose_because("the peer ended the link", by="peer", told=told)

    def _on_finished(self, _event: events.Finished) -> None:
        self._is_finished = True
        self._lose_because("the link was shut down by both sides", by="peer")

    def _on_failed(self, event: events.Failed) -> None:
        if may_log("peers that broke a rule"):
            # log: As of the other protocols; a link is not resumed after that.
            _log.warning("%s broke a rule, the link was given up: %s", self._peer or "a peer", event.error)
        self._say_goodbye(Reason(str(event.error), PEER_BROKE_A_RULE))
        self._is_violated = self._core.error is None
        tell_limit(self.facts, event.error)
        self._lose_because(str(event.error), by="peer", cause=event.error)

    def _shut_down_if_idle(self) -> None:
        """Answer the peer's shutdown once no channel is left, if all were common ones."""
        is_asked = self._common.is_common and self._engine.has_peer_shut_down and self._core.error is None
        if is_asked and not self._common.live and not self._senders():
            self._shut_down()

    # --- leaving

    @property
    def _is_unheard(self) -> bool:
        """True if something was sent that the peer may not have received."""
        return bool(self._unheard())

    def _is_awaited(self, one: Sender | Channel) -> bool:
        """Return True while the peer may still receive what was sent on a channel of the present link."""
        if self._core.error is not None or not one._is_unheard:
            return False
        if isinstance(one, Channel):
            return self._common.live.get(one.id) is one
        return one in (self._core.outs.get(one.channel), self._core.successors.get(one.channel))

    def _unheard(self) -> list[Sender | Channel]:
        """Return who sent something that the peer may not have received."""
        senders: list[Sender | Channel] = [*self._senders(), *self._common.live.values()]
        return [one for one in senders if one._is_unheard]

    async def leave(self, linger: float) -> None:
        """Close all channels, wait until the peer has received everything, shut down; at most `linger` seconds."""
        core = self._core
        self._is_leaving = True
        with trio.move_on_after(linger):
            self._common.ended(None)
            self._common.refuse_unclaimed()
            await self._common.close_all()
            for sender in self._senders():
                sender.close()
            while core.error is None and (unheard := self._unheard()):
                for one in unheard:  # one after the other, so that a packet of the peer costs one look and not all
                    while self._is_awaited(one):
                        await core.moved.park()
            if core.error is None:
                self._shut_down()
            while core.error is None and (self._common.is_common or not self._owes_the_application):
                await core.moved.park()
            # Messages for receivers that are no longer read are never consumed, so the link cannot finish in order.
            if core.pump is not None and core.error is None:
                await core.pump.flushed()
                await core.pump.hang_up()
            while core.pump is not None:
                await core.moved.park()
        self._lose_because(f"the peer did not take leave within {linger} s", by="local")
        if self._unreported is not None:
            raise self._unreported()
        # A refusal may have been reported by no other call.
        if core.error is not None and (self._was_unheard or self._is_violated or not can_heal(core.error())):
            raise core.error()

    @property
    def _owes_the_application(self) -> bool:
        """True if received messages wait for our application."""
        return bool(self._engine.owed_answers if self._core.engine.in_transactions else self._engine.held_bytes)
