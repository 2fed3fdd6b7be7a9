"""Forwards of TCP connections, Unix sockets and UDP over sessions: `ssh -L`, `-R` and `-D` as a library.

    async with muxkit.connect(url) as session, forward.open_local(session, "8080", "db.internal:5432") as local:
        print(local.address)

The server serves the channel handler `forward.handler(["db.internal@10.0.0.0/8:5432"])`, which connects only to what
its rules allow. With a `forward.line` instead of a session, forwards survive lost sessions.
"""

from muxkit.forward.addresses import Address, parse_address, parse_forward, without_udp
from muxkit.forward.allow import AllowList
from muxkit.forward.client import Forward, RemoteForward, open_local, open_remote
from muxkit.forward.datagrams import open_datagrams
from muxkit.forward.line import PATIENCE, Carrier, Line, line
from muxkit.forward.proxy_header import ProxyHeader
from muxkit.forward.relay import ForwardLimits, ForwardStats
from muxkit.forward.server import ForwardHandler, handler
from muxkit.forward.socks import socks
from muxkit.forward.wire import NAME, Code, ForwardRefused

__all__ = [
    "NAME",
    "PATIENCE",
    "Address",
    "AllowList",
    "Carrier",
    "Code",
    "Forward",
    "ForwardHandler",
    "ForwardLimits",
    "ForwardRefused",
    "ForwardStats",
    "Line",
    "ProxyHeader",
    "RemoteForward",
    "handler",
    "line",
    "open_datagrams",
    "open_local",
    "open_remote",
    "parse_address",
    "parse_forward",
    "socks",
    "without_udp",
]
