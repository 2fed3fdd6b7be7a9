"""An engine for tests that name channels by their numbers, and that look at the events when they want to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from muxkit.core.events import Failed, GoingAway, Pong, Writable
from muxkit.protocols.relink import Config, Engine
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.core import Buffer
    from muxkit.protocols.relink.events import Event
    from muxkit.protocols.relink.state import State


class NumberedEngine:
    """An `Engine` whose commands take the number of a channel, and whose events wait until `events` is called."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        is_connector: bool,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.engine = Engine(config, is_connector=is_connector, limits=limits, observer=observer)
        self.state: State = self.engine.state
        self.config: Config = self.engine.config
        self.limits: Limits = self.engine.limits

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the engine or its state has
        return getattr(self.engine if hasattr(self.engine, name) else self.state, name)

    @property
    def over(self) -> bool:
        return self.engine.over

    @property
    def channels(self) -> tuple[int, ...]:
        """Our open channels, including those whose close is not confirmed yet."""
        return tuple(self.state.ours.live)

    @property
    def peer_channels(self) -> tuple[int, ...]:
        return tuple(self.state.theirs.live)

    @property
    def channel_count(self) -> int:
        return len(self.state.ours.live) + len(self.state.theirs.live)

    @property
    def unanswered(self) -> int:
        """Messages of ours that are still in a window."""
        return self.state.ours.unanswered

    @property
    def held_bytes(self) -> int:
        """Bytes received and not consumed."""
        return self.state.theirs.bytes

    @property
    def retained_bytes(self) -> int:
        """Bytes queued, or sent and not yet released from the window."""
        return self.state.ours.retained

    @property
    def owed_answers(self) -> int:
        """Channels of the peer with committed messages that we have not answered."""
        return self.state.theirs.unanswered

    @property
    def frames_at_once(self) -> int:
        return self.engine.frames_at_once

    @frames_at_once.setter
    def frames_at_once(self, most: int) -> None:
        self.engine.frames_at_once = most

    @property
    def unparsed(self) -> int:
        return self.engine.unparsed

    @property
    def is_connected(self) -> bool:
        return self.state.is_connected

    @property
    def is_shutting_down(self) -> bool:
        return self.state.is_shutting_down

    @property
    def has_peer_shut_down(self) -> bool:
        return self.state.has_peer_shut_down

    # --- bytes and events

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Event]:
        self._keep(self.engine.receive_bytes(data, now))
        return ()

    def receive_eof(self, now: float) -> Sequence[Event]:
        self._keep(self.engine.receive_eof(now))
        return ()

    def handle_deadline(self, now: float) -> Sequence[Event]:
        self._keep(self.engine.handle_deadline(now))
        return ()

    def _keep(self, events: Sequence[Event]) -> None:
        self.state.events = [*events, *self.state.events]

    def events(self) -> Sequence[Event]:
        return self.engine.events()

    def has_output(self) -> bool:
        return self.engine.has_output()

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[Buffer]:
        return self.engine.buffers_to_send(limit)

    def next_deadline(self) -> float | None:
        return self.engine.next_deadline()

    # --- what we send

    def room(self, channel: int) -> int:
        return self.engine.sender(channel).room

    def admits(self, channel: int, size: int, parts: int = 1) -> bool:
        return self.engine.sender(channel).admits(size, parts)

    def watch(self, channel: int, size: int = 1, parts: int = 1) -> None:
        sender = self.engine.sender(channel)
        (self.engine.next_sender(channel) if sender.closing else sender).watch(size, parts)

    def send(self, channel: int, parts: Sequence[bytes], *, overdraw: bool = False) -> int:
        return self.engine.sender(channel).send_parts(parts, overdraw=overdraw)

    def try_send(self, channel: int, payload: bytes, reserve: int = 0) -> int | None:
        return self.engine.sender(channel).try_push(payload, reserve)

    def try_send_all(self, channel: int, payloads: Sequence[bytes], reserve: int = 0) -> int | None:
        return self.engine.sender(channel).try_push_all(payloads, reserve)

    def multicast(self, channels: Sequence[int], parts: Sequence[bytes]) -> list[int]:
        senders = {channel: self.engine.sender(channel) for channel in channels}
        return self.engine.multicast([senders[channel] for channel in channels], parts)

    def commit(self, channel: int, *, through: int | None = None) -> None:
        self.engine.sender(channel).commit(through)

    def rollback(self, channel: int, *, through: int | None = None) -> None:
        self.engine.sender(channel).rollback(through)

    def close(self, channel: int) -> None:
        self.engine.sender(channel).close()

    # --- what we receive

    def receiver(self, channel: int) -> ChannelReceiver:
        """Return the live channel of the peer, or another one that is not open."""
        return self.state.theirs.live.get(channel) or ChannelReceiver(channel, self.state)

    def consume(self, channel: int, *, through: int, now: float) -> None:
        self.receiver(channel).consume(through, now)

    def committed(self, channel: int, *, through: int, now: float) -> None:
        self.receiver(channel).committed(through, now)

    def uncommitted(self, channel: int, *, through: int, now: float) -> None:
        self.receiver(channel).uncommitted(through, now)

    def rewind(self, channel: int) -> None:
        self.receiver(channel).rewind()


def channel_of(event: Any) -> int:  # noqa: ANN401 - of several classes
    """Return the number of the channel that an event is about."""
    half = event.receiver if hasattr(event, "receiver") else event.sender
    assert isinstance(half, (ChannelSender, ChannelReceiver))
    return half.channel


def told(event: Event) -> tuple[object, ...]:
    """Return an event as a tuple of its name and its fields, with numbers for channels."""
    name = type(event).__name__
    if isinstance(event, Failed):
        error = event.error
        return name, error.rule, error.limit, error.offset, error.message
    if isinstance(event, (Pong, GoingAway)):
        return (name,)
    if isinstance(event, Writable):
        return name, channel_of(event)
    values = [getattr(event, field.name) for field in attrs.fields(type(event))]
    return name, *(one.channel if isinstance(one, (ChannelSender, ChannelReceiver)) else one for one in values)
