"""The rules of Aqueduct without any I/O: the engine, its events and the two halves of a channel."""

from muxkit.protocols.aqueduct.engine.engine import Engine as Engine
from muxkit.protocols.aqueduct.engine.engine import Statistics as Statistics
from muxkit.protocols.aqueduct.engine.events import Acked as Acked
from muxkit.protocols.aqueduct.engine.events import Arrived as Arrived
from muxkit.protocols.aqueduct.engine.events import Attachment as Attachment
from muxkit.protocols.aqueduct.engine.events import Connected as Connected
from muxkit.protocols.aqueduct.engine.events import Ended as Ended
from muxkit.protocols.aqueduct.engine.events import Event as Event
from muxkit.protocols.aqueduct.engine.events import Failed as Failed
from muxkit.protocols.aqueduct.engine.events import HungUp as HungUp
from muxkit.protocols.aqueduct.engine.events import Nacked as Nacked
from muxkit.protocols.aqueduct.engine.events import Silent as Silent
from muxkit.protocols.aqueduct.engine.events import Unclaimed as Unclaimed
from muxkit.protocols.aqueduct.engine.events import Writable as Writable
from muxkit.protocols.aqueduct.engine.halves import Half as Half
from muxkit.protocols.aqueduct.engine.halves import Mode as Mode
from muxkit.protocols.aqueduct.engine.halves import Outcome as Outcome
from muxkit.protocols.aqueduct.engine.halves import Promise as Promise
from muxkit.protocols.aqueduct.engine.halves import ReceiverMachine as ReceiverMachine
from muxkit.protocols.aqueduct.engine.halves import SenderMachine as SenderMachine
from muxkit.protocols.aqueduct.engine.halves import Ticket as Ticket
