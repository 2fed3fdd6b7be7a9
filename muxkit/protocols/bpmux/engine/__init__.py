"""The bpmux/rel protocol without I/O: received bytes and commands go in, events and bytes to send come out."""

from muxkit.protocols.bpmux.engine.engine import Engine as Engine
from muxkit.protocols.bpmux.engine.entities import OURS as OURS
from muxkit.protocols.bpmux.engine.entities import Entity as Entity
from muxkit.protocols.bpmux.engine.entities import Kind as Kind
from muxkit.protocols.bpmux.engine.events import Confirmed as Confirmed
from muxkit.protocols.bpmux.engine.events import Declined as Declined
from muxkit.protocols.bpmux.engine.events import Ended as Ended
from muxkit.protocols.bpmux.engine.events import Event as Event
from muxkit.protocols.bpmux.engine.events import Failed as Failed
from muxkit.protocols.bpmux.engine.events import HungUp as HungUp
from muxkit.protocols.bpmux.engine.events import Message as Message
from muxkit.protocols.bpmux.engine.events import Opened as Opened
from muxkit.protocols.bpmux.engine.events import Pinged as Pinged
from muxkit.protocols.bpmux.engine.events import Ponged as Ponged
from muxkit.protocols.bpmux.engine.events import Probed as Probed
from muxkit.protocols.bpmux.engine.events import Responded as Responded
from muxkit.protocols.bpmux.engine.events import Silent as Silent
from muxkit.protocols.bpmux.engine.events import Writable as Writable
