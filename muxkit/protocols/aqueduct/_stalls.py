"""Does a message that has begun go on arriving? What a slow peer makes us hold must not stay for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.aqueduct._timers import Timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.core import StreamId
    from muxkit.protocols.aqueduct._channels import Channels
    from muxkit.protocols.aqueduct._incoming import Incoming


class Stalls:
    """Looks in each `Limits.stall` whether `Limits.stall_bytes` came, while the rest of some frame is up to the peer.

    It is not while a stream waits for a loan, or has messages that nobody has read: then the peer may lack credit.
    """

    def __init__(self, channels: Channels, incoming: dict[StreamId, Incoming]) -> None:
        self.came = 0  # bytes of streams and datagrams, ever
        self._channels = channels
        self._incoming = incoming
        self.on_silent: Callable[[float], None] = _ignore
        self._mark = 0  # `came`, when the present span began
        self._served = 0  # loans that somebody had waited for, then
        channels.timers.on_stall = self.check

    def watch(self) -> None:
        """A frame is unfinished."""
        deadlines = self._channels.timers.deadlines
        if Timer.STALL not in deadlines:
            self._mark, self._served = self.came, self._channels.reassembly.served
            deadlines.set(Timer.STALL, self._channels.now + self._channels.limits.stall)

    def check(self) -> None:
        """The span is over."""
        if not any(incoming.waits_for_peer for incoming in self._incoming.values()):
            return
        limits = self._channels.limits
        came = self.came - self._mark
        unread = sum(incoming.unconsumed for incoming in self._incoming.values())
        is_blamed = self._served == self._channels.reassembly.served and 2 * unread <= limits.connection_bytes
        if is_blamed and not came:  # a dead line looks the same, and the peer must not be blamed for it
            self.on_silent(limits.stall)
            return
        if is_blamed and came < limits.stall_bytes:
            raise RemoteProtocolError(
                f"{came} bytes in {limits.stall} s while a frame is unfinished, {limits.stall_bytes} are asked",
                limit="stall",
            )
        self.watch()


def _ignore(seconds: float) -> None:
    pass
