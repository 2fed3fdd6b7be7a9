"""The e3x protocol without I/O: received packets and commands go in, events and packets to send come out."""

from muxkit.protocols.e3x.engine.channel import EngineChannel as EngineChannel
from muxkit.protocols.e3x.engine.chunked import ChunkedEngine as ChunkedEngine
from muxkit.protocols.e3x.engine.chunked import Dechunker as Dechunker
from muxkit.protocols.e3x.engine.chunked import encode_chunks as encode_chunks
from muxkit.protocols.e3x.engine.engine import Engine as Engine
from muxkit.protocols.e3x.engine.engine import Stats as Stats
from muxkit.protocols.e3x.engine.events import Broken as Broken
from muxkit.protocols.e3x.engine.events import Cause as Cause
from muxkit.protocols.e3x.engine.events import Closed as Closed
from muxkit.protocols.e3x.engine.events import Delivered as Delivered
from muxkit.protocols.e3x.engine.events import Ended as Ended
from muxkit.protocols.e3x.engine.events import Event as Event
from muxkit.protocols.e3x.engine.events import Fault as Fault
from muxkit.protocols.e3x.engine.events import Faulted as Faulted
from muxkit.protocols.e3x.engine.events import Message as Message
from muxkit.protocols.e3x.engine.events import Opened as Opened
from muxkit.protocols.e3x.engine.events import Writable as Writable
