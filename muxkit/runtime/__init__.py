"""The Trio half: pumps, halves and the common face of sessions; what adapters and protocol plugins build on."""

from muxkit.runtime._backlog import Backlog as Backlog
from muxkit.runtime._bytestream import ByteStream as ByteStream
from muxkit.runtime._errors import ChannelCancelled as ChannelCancelled
from muxkit.runtime._errors import ChannelStopped as ChannelStopped
from muxkit.runtime._errors import LinkLost as LinkLost
from muxkit.runtime._errors import Unsupported as Unsupported
from muxkit.runtime._gate import Gate as Gate
from muxkit.runtime._gate import Room as Room
from muxkit.runtime._links import ByteLink as ByteLink
from muxkit.runtime._links import Described as Described
from muxkit.runtime._links import NowaitLink as NowaitLink
from muxkit.runtime._links import ProtocolPlugin as ProtocolPlugin
from muxkit.runtime._links import Transport as Transport
from muxkit.runtime._mailbox import Mailbox as Mailbox
from muxkit.runtime._pump import StreamPump as StreamPump
from muxkit.runtime._receive import ReceiveHalf as ReceiveHalf
from muxkit.runtime._scope import background as background
from muxkit.runtime._send import SendHalf as SendHalf
from muxkit.runtime._session import Channel as Channel
from muxkit.runtime._session import Session as Session
from muxkit.runtime._session import SessionInfo as SessionInfo
from muxkit.runtime._session import SessionStats as SessionStats
