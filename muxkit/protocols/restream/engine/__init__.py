"""The rules of restream without I/O: the engines of a client and of a server, their settings and events."""

from muxkit.protocols.restream.engine.blocks import BlockEngine as BlockEngine
from muxkit.protocols.restream.engine.client import ClientConfig as ClientConfig
from muxkit.protocols.restream.engine.client import ClientEngine as ClientEngine
from muxkit.protocols.restream.engine.client import ClientEvent as ClientEvent
from muxkit.protocols.restream.engine.client import EncodedMessage as EncodedMessage
from muxkit.protocols.restream.engine.client import Finished as Finished
from muxkit.protocols.restream.engine.client import ListingReceived as ListingReceived
from muxkit.protocols.restream.engine.client import Mode as Mode
from muxkit.protocols.restream.engine.client import Received as Received
from muxkit.protocols.restream.engine.client import ReceivedBlock as ReceivedBlock
from muxkit.protocols.restream.engine.client import ReceivedValue as ReceivedValue
from muxkit.protocols.restream.engine.client import StatusReceived as StatusReceived
from muxkit.protocols.restream.engine.client import StreamState as StreamState
from muxkit.protocols.restream.engine.line_engine import Failed as Failed
from muxkit.protocols.restream.engine.line_engine import HungUp as HungUp
from muxkit.protocols.restream.engine.line_engine import Silent as Silent
from muxkit.protocols.restream.engine.server import Phase as Phase
from muxkit.protocols.restream.engine.server import ServerConfig as ServerConfig
from muxkit.protocols.restream.engine.server import ServerEngine as ServerEngine
from muxkit.protocols.restream.engine.server import ServerEvent as ServerEvent
from muxkit.protocols.restream.wire.messages import Acknowledged as Acknowledged
from muxkit.protocols.restream.wire.messages import ListingRequested as ListingRequested
from muxkit.protocols.restream.wire.messages import Refused as Refused
from muxkit.protocols.restream.wire.messages import Registered as Registered
from muxkit.protocols.restream.wire.messages import Resumed as Resumed
from muxkit.protocols.restream.wire.messages import StatelessRequested as StatelessRequested
from muxkit.protocols.restream.wire.messages import StatusRequested as StatusRequested

__all__ = [
    "Acknowledged",
    "BlockEngine",
    "ClientConfig",
    "ClientEngine",
    "ClientEvent",
    "EncodedMessage",
    "Failed",
    "Finished",
    "HungUp",
    "Mode",
    "Phase",
    "Received",
    "ReceivedBlock",
    "ReceivedValue",
    "Refused",
    "Registered",
    "Resumed",
    "ServerConfig",
    "ServerEngine",
    "ServerEvent",
    "Silent",
    "StatelessRequested",
    "StatusReceived",
    "StatusRequested",
    "StreamState",
]
