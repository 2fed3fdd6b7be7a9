"""What a yamux engine reports in addition to the events of all protocols (`muxkit.core.events`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from muxkit._errors import RemoteProtocolError

if TYPE_CHECKING:
    from muxkit.protocols.yamux.receive import StreamReceiver
    from muxkit.protocols.yamux.send import StreamSender


@attrs.define(eq=False)
class Acknowledged:
    """The peer has acknowledged a stream, or has reset it, so this side may open one more."""


@attrs.define(eq=False)
class BrokenOff:
    """The engine resets one stream, because its bytes broke a rule of channels or a limit. The session goes on."""

    sender: StreamSender
    receiver: StreamReceiver
    error: RemoteProtocolError


@attrs.define(eq=False)
class LimitReached:
    """The engine refused a stream of the peer because of a field of `Limits`, before the session knew of it."""

    limit: str
