"""How does a channel end of which the application wants no more? Our end is told; what comes is left lying.

The document has no way to say "stop sending", only `err`, which drops everything in both directions. So it waits:

- until all of ours is confirmed: an err before that could cost the peer what it has not processed yet;
- then an end of the peer's closes the channel in good order, and anything else that came is answered with an err;
- a peer that says nothing has `State.linger` seconds for its end;
- and one that goes on sending and processes nothing of ours for `PATIENCE` would wait for us as we wait for it.

All of it is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit.protocols.e3x.engine.events import Broken, Cause, Closed

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.protocols.e3x.engine._channel_old import EngineChannel
    from muxkit.protocols.e3x.engine.state import State

PATIENCE: Final = 5.0  # s
CLOSED: Final = "closed"


class Closing:
    """The channels that the application has let go of."""

    def __init__(self, state: State, processed: Callable[[EngineChannel], None]) -> None:
        self._state = state
        self._processed = processed

    def look(self, channel: EngineChannel, *, has_moved: bool = False) -> None:
        """Something came, or was confirmed (`has_moved`): what is there to wait for?"""
        state, incoming, outgoing = self._state, channel.incoming, channel.outgoing
        if channel.gone or incoming is None or outgoing is None:
            return
        packet = incoming.next()
        if packet is not None and packet.end and not packet.body:
            self._processed(channel)
        if channel.gone:
            return
        is_unread = incoming.waiting > 0
        if outgoing.acked == outgoing.next_seq - 1:
            if is_unread:
                self._break_off(channel)
            elif has_moved or channel.dies_at is None:
                channel.dies_at = state.now + state.linger
        elif is_unread and (has_moved or channel.dies_at is None):
            channel.dies_at = state.now + PATIENCE
        if not channel.gone:
            state.arm(channel)

    def give_up(self, channel: EngineChannel) -> None:
        """The time is up."""
        outgoing = channel.outgoing
        if outgoing is None or outgoing.acked == outgoing.next_seq - 1:
            self._break_off(channel)
        else:
            text = f"the peer went on sending, and processed nothing of ours for {PATIENCE} s"
            self._state.forget(channel, CLOSED)
            self._state.events.append(Broken(channel, Cause.TIMEOUT, text))

    def _break_off(self, channel: EngineChannel) -> None:
        self._state.forget(channel, CLOSED)
        self._state.events.append(Closed(channel))
