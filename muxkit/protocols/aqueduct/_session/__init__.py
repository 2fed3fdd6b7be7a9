"""The Trio side of Aqueduct: connections, the halves of channels, and common channels."""

from muxkit.protocols.aqueduct._session.common import Channel as Channel
from muxkit.protocols.aqueduct._session.connection import Client as Client
from muxkit.protocols.aqueduct._session.connection import Connection as Connection
from muxkit.protocols.aqueduct._session.connection import Server as Server
from muxkit.protocols.aqueduct._session.connection import connection as connection
from muxkit.protocols.aqueduct._session.connection import protocol as protocol
from muxkit.protocols.aqueduct._session.core import Cancelled as Cancelled
from muxkit.protocols.aqueduct._session.core import Finished as Finished
from muxkit.protocols.aqueduct._session.core import LostInTransit as LostInTransit
from muxkit.protocols.aqueduct._session.core import Message as Message
from muxkit.protocols.aqueduct._session.core import NoReceiver as NoReceiver
from muxkit.protocols.aqueduct._session.core import Receipt as Receipt
from muxkit.protocols.aqueduct._session.core import Receiver as Receiver
from muxkit.protocols.aqueduct._session.core import Sender as Sender
