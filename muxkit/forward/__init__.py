"""Forwards of TCP connections, Unix sockets and UDP over sessions: `ssh -L`, `-R` and `-D` as a library.

    async with muxkit.connect(url) as session, forward.open_local(session, "8080", "db.internal:5432") as local:
        print(local.address)

The server serves `forward.handler(["db.internal@10.0.0.0/8:5432"])`.
"""

from muxkit.forward.addresses import Address as Address
from muxkit.forward.addresses import parse_address as parse_address
from muxkit.forward.addresses import parse_forward as parse_forward
from muxkit.forward.addresses import without_udp as without_udp
from muxkit.forward.allow import AllowList as AllowList
from muxkit.forward.client import Forward as Forward
from muxkit.forward.client import RemoteForward as RemoteForward
from muxkit.forward.client import open_local as open_local
from muxkit.forward.client import open_remote as open_remote
from muxkit.forward.datagrams import open_datagrams as open_datagrams
from muxkit.forward.line import PATIENCE as PATIENCE
from muxkit.forward.line import Carrier as Carrier
from muxkit.forward.line import Line as Line
from muxkit.forward.line import line as line
from muxkit.forward.relay import ForwardLimits as ForwardLimits
from muxkit.forward.relay import ForwardStats as ForwardStats
from muxkit.forward.server import ForwardHandler as ForwardHandler
from muxkit.forward.server import handler as handler
from muxkit.forward.socks import socks as socks
from muxkit.forward.wire import NAME as NAME
from muxkit.forward.wire import Code as Code
from muxkit.forward.wire import ForwardRefused as ForwardRefused
