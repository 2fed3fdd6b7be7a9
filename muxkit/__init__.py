"""One connection, many channels: a structured-concurrency multiplexer for Trio.

async with muxkit.connect("bpmux+tcp://127.0.0.1:7000") as session:
    async with session.open() as channel:
        await channel.send(b"hello")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError as LocalProtocolError
from muxkit._errors import MuxError as MuxError
from muxkit._errors import ProtocolError as ProtocolError
from muxkit._errors import RemoteProtocolError as RemoteProtocolError
from muxkit._lazy import lazily
from muxkit._limits import Limits as Limits
from muxkit._observer import Observer as Observer

if TYPE_CHECKING:
    from muxkit._door import Served as Served
    from muxkit._door import connect as connect
    from muxkit._door import each_channel as each_channel
    from muxkit._door import serve as serve
    from muxkit._plugins import PluginError as PluginError
    from muxkit._tls import TLS as TLS
    from muxkit.runtime import Channel as Channel
    from muxkit.runtime import ChannelCancelled as ChannelCancelled
    from muxkit.runtime import ChannelStopped as ChannelStopped
    from muxkit.runtime import LinkLost as LinkLost
    from muxkit.runtime import Session as Session
    from muxkit.runtime import SessionInfo as SessionInfo
    from muxkit.runtime import SessionStats as SessionStats
    from muxkit.runtime import Unsupported as Unsupported

__version__ = "0.2.0"

# The engines do not need Trio, and a program that uses only them should not import it: names that need it are
# imported at the first access.
_LAZY = {
    "Channel": "runtime",
    "ChannelCancelled": "runtime",
    "ChannelStopped": "runtime",
    "LinkLost": "runtime",
    "PluginError": "_plugins",
    "Served": "_door",
    "Session": "runtime",
    "SessionInfo": "runtime",
    "SessionStats": "runtime",
    "TLS": "_tls",
    "Unsupported": "runtime",
    "connect": "_door",
    "each_channel": "_door",
    "serve": "_door",
}

__getattr__, __dir__ = lazily(globals(), _LAZY)
