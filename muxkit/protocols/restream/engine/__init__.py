"""The rules of restream without I/O: the engines of a client and of a server, their settings and events."""

from muxkit.protocols.restream.engine.client import ClientEngine as ClientEngine
from muxkit.protocols.restream.engine.config import ClientConfig as ClientConfig
from muxkit.protocols.restream.engine.config import ServerConfig as ServerConfig
from muxkit.protocols.restream.engine.events import Acknowledged as Acknowledged
from muxkit.protocols.restream.engine.events import ClientEvent as ClientEvent
from muxkit.protocols.restream.engine.events import Failed as Failed
from muxkit.protocols.restream.engine.events import Finished as Finished
from muxkit.protocols.restream.engine.events import HungUp as HungUp
from muxkit.protocols.restream.engine.events import Received as Received
from muxkit.protocols.restream.engine.events import ReceivedValue as ReceivedValue
from muxkit.protocols.restream.engine.events import Refused as Refused
from muxkit.protocols.restream.engine.events import Registered as Registered
from muxkit.protocols.restream.engine.events import Resumed as Resumed
from muxkit.protocols.restream.engine.events import ServerEvent as ServerEvent
from muxkit.protocols.restream.engine.events import Silent as Silent
from muxkit.protocols.restream.engine.events import StatelessRequested as StatelessRequested
from muxkit.protocols.restream.engine.events import StatusReceived as StatusReceived
from muxkit.protocols.restream.engine.events import StatusRequested as StatusRequested
from muxkit.protocols.restream.engine.server import Phase as Phase
from muxkit.protocols.restream.engine.server import ServerEngine as ServerEngine
from muxkit.protocols.restream.engine.snapshot import Mode as Mode
from muxkit.protocols.restream.engine.snapshot import StreamState as StreamState
