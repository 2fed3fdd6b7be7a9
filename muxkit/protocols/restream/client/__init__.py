"""Reading restream: streams as receive channels that reconnect, and the driver of one connection."""

from muxkit.protocols.restream.client.driver import ClientDriver as ClientDriver
from muxkit.protocols.restream.client.driver import ClientPolicy as ClientPolicy
from muxkit.protocols.restream.client.driver import Closing as Closing
from muxkit.protocols.restream.client.driver import DriverTask as DriverTask
from muxkit.protocols.restream.client.driver import Stop as Stop
from muxkit.protocols.restream.client.driver import StreamRefused as StreamRefused
from muxkit.protocols.restream.client.streams import Reader as Reader
from muxkit.protocols.restream.client.streams import dial_of as dial_of
from muxkit.protocols.restream.client.streams import integers as integers
from muxkit.protocols.restream.client.streams import numbers as numbers
from muxkit.protocols.restream.client.streams import status as status
from muxkit.protocols.restream.client.streams import stream as stream

__all__ = [
    "ClientDriver",
    "ClientPolicy",
    "Closing",
    "DriverTask",
    "Reader",
    "Stop",
    "StreamRefused",
    "dial_of",
    "integers",
    "numbers",
    "status",
    "stream",
]
