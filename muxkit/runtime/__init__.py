"""The Trio half: pumps, halves and the common face of sessions; what adapters and protocol plugins build on."""

from muxkit._info import Identity as Identity
from muxkit._info import Request as Request
from muxkit._info import SessionInfo as SessionInfo
from muxkit._observer import Facts as Facts
from muxkit._observer import facts_of as facts_of
from muxkit._observer import frames_of as frames_of
from muxkit._observer import measured as measured
from muxkit._observer import turned_away as turned_away
from muxkit.core import Reason as Reason
from muxkit.core import ReceiveBudget as ReceiveBudget
from muxkit.core import ReceiveWindow as ReceiveWindow
from muxkit.core import RoundTrip as RoundTrip
from muxkit.core import StartPace as StartPace
from muxkit.core import TokenBucket as TokenBucket
from muxkit.runtime._errors import CLOSED_HERE as CLOSED_HERE
from muxkit.runtime._errors import HEAD as HEAD
from muxkit.runtime._errors import MOVED as MOVED
from muxkit.runtime._errors import AllAttemptsFailed as AllAttemptsFailed
from muxkit.runtime._errors import ChannelCancelled as ChannelCancelled
from muxkit.runtime._errors import ChannelStopped as ChannelStopped
from muxkit.runtime._errors import ExtraNeeded as ExtraNeeded
from muxkit.runtime._errors import HandshakeFailed as HandshakeFailed
from muxkit.runtime._errors import LinkLost as LinkLost
from muxkit.runtime._errors import Phase as Phase
from muxkit.runtime._errors import PlaintextWarning as PlaintextWarning
from muxkit.runtime._errors import Side as Side
from muxkit.runtime._errors import Unsupported as Unsupported
from muxkit.runtime._errors import alert_of as alert_of
from muxkit.runtime._errors import can_heal as can_heal
from muxkit.runtime._errors import looks_like as looks_like
from muxkit.runtime._failures import log_failure as log_failure
from muxkit.runtime._failures import loggable_text as loggable_text
from muxkit.runtime._links import Arrival as Arrival
from muxkit.runtime._links import ByteLink as ByteLink
from muxkit.runtime._links import Candidate as Candidate
from muxkit.runtime._links import Choosing as Choosing
from muxkit.runtime._links import ClosingNowait as ClosingNowait
from muxkit.runtime._links import Datagram as Datagram
from muxkit.runtime._links import Described as Described
from muxkit.runtime._links import Explaining as Explaining
from muxkit.runtime._links import Link as Link
from muxkit.runtime._links import LinkKind as LinkKind
from muxkit.runtime._links import Listening as Listening
from muxkit.runtime._links import MultistreamLink as MultistreamLink
from muxkit.runtime._links import NowaitLink as NowaitLink
from muxkit.runtime._links import NowaitPackets as NowaitPackets
from muxkit.runtime._links import OneAtATime as OneAtATime
from muxkit.runtime._links import PacketLink as PacketLink
from muxkit.runtime._links import Parting as Parting
from muxkit.runtime._links import ProtocolPlugin as ProtocolPlugin
from muxkit.runtime._links import ResumingPlugin as ResumingPlugin
from muxkit.runtime._links import StreamData as StreamData
from muxkit.runtime._links import StreamReset as StreamReset
from muxkit.runtime._links import StreamStopped as StreamStopped
from muxkit.runtime._links import Transport as Transport
from muxkit.runtime._links import WaitableLink as WaitableLink
from muxkit.runtime._links import check_options as check_options
from muxkit.runtime._links import peer_of as peer_of
from muxkit.runtime._log_pace import may_log as may_log
from muxkit.runtime._log_pace import may_trace as may_trace
from muxkit.runtime._scope import LOSSES as LOSSES
from muxkit.runtime._scope import NeedsBlock as NeedsBlock
from muxkit.runtime._scope import background as background
from muxkit.runtime._scope import bare_nursery as bare_nursery
from muxkit.runtime._scope import called as called
from muxkit.runtime._scope import close_at_once as close_at_once
from muxkit.runtime._scope import interruptible as interruptible
from muxkit.runtime._scope import leaves_of as leaves_of
from muxkit.runtime._scope import meaning_of as meaning_of
from muxkit.runtime._scope import protect_package as protect_package
from muxkit.runtime._scope import protected_manager as protected_manager
from muxkit.runtime._scope import reason_for_leaving as reason_for_leaving
from muxkit.runtime._scope import run_handler as run_handler
from muxkit.runtime._session import Channel as Channel
from muxkit.runtime._session import ChannelStats as ChannelStats
from muxkit.runtime._session import IncomingRequest as IncomingRequest
from muxkit.runtime._session import Ping as Ping
from muxkit.runtime._session import Pings as Pings
from muxkit.runtime._session import Session as Session
from muxkit.runtime._session import SessionStats as SessionStats
from muxkit.runtime._session import TypedChannel as TypedChannel
from muxkit.runtime._session import ValueT as ValueT
from muxkit.runtime._session import describe as describe
from muxkit.runtime._session import typed as typed
from muxkit.runtime._thread import HomeThread as HomeThread
from muxkit.runtime._thread import home_thread as home_thread
from muxkit.runtime.admission import Admission as Admission
from muxkit.runtime.admission import Occupant as Occupant
from muxkit.runtime.admission import Place as Place
from muxkit.runtime.admission import Refusing as Refusing
from muxkit.runtime.admission import Standing as Standing
from muxkit.runtime.admission import current_place as current_place
from muxkit.runtime.admission import source_of as source_of
from muxkit.runtime.channel import MuxChannel as MuxChannel
from muxkit.runtime.connection import MuxConnection as MuxConnection
from muxkit.runtime.halves.budget import ErrorMaker as ErrorMaker
from muxkit.runtime.halves.budget import OutboxBudget as OutboxBudget
from muxkit.runtime.halves.budget import Watermark as Watermark
from muxkit.runtime.halves.bytestream import ByteStream as ByteStream
from muxkit.runtime.halves.mailbox import ItemQueue as ItemQueue
from muxkit.runtime.halves.mailbox import Mailbox as Mailbox
from muxkit.runtime.halves.mailbox import Storage as Storage
from muxkit.runtime.halves.opening import Backlog as Backlog
from muxkit.runtime.halves.opening import ChannelOpening as ChannelOpening
from muxkit.runtime.halves.opening import Openable as Openable
from muxkit.runtime.halves.opening import Opening as Opening
from muxkit.runtime.halves.opening import SlotQueue as SlotQueue
from muxkit.runtime.halves.opening import Taker as Taker
from muxkit.runtime.halves.opening import Unclaimed as Unclaimed
from muxkit.runtime.halves.receive import ReceiveHalf as ReceiveHalf
from muxkit.runtime.halves.send import YIELD_BYTES as YIELD_BYTES
from muxkit.runtime.halves.send import YIELD_CALLS as YIELD_CALLS
from muxkit.runtime.halves.send import YIELD_LEAST as YIELD_LEAST
from muxkit.runtime.halves.send import SendHalf as SendHalf
from muxkit.runtime.halves.send import as_bytes as as_bytes
from muxkit.runtime.mux_session import MuxSession as MuxSession
from muxkit.runtime.pumps.alarms import read_first as read_first
from muxkit.runtime.pumps.multistream import MultistreamPump as MultistreamPump
from muxkit.runtime.pumps.owner import PumpOwner as PumpOwner
from muxkit.runtime.pumps.packets import DatagramPump as DatagramPump
from muxkit.runtime.pumps.reading import Reading as Reading
from muxkit.runtime.pumps.stream import StreamPump as StreamPump
from muxkit.runtime.pumps.turns import Turns as Turns
from muxkit.runtime.pumps.turns import turns as turns
from muxkit.runtime.racing import STAGGER as STAGGER
from muxkit.runtime.racing import Attempt as Attempt
from muxkit.runtime.racing import Won as Won
from muxkit.runtime.racing import first_of as first_of
from muxkit.runtime.resume.adopt import Adopted as Adopted
from muxkit.runtime.resume.adopt import Forgotten as Forgotten
from muxkit.runtime.resume.adopt import Registry as Registry
from muxkit.runtime.resume.handshake import HandshakeQueue as HandshakeQueue
from muxkit.runtime.resume.handshake import HandshakeReader as HandshakeReader
from muxkit.runtime.resume.handshake import prefixed as prefixed
from muxkit.runtime.resume.redial import Backoff as Backoff
from muxkit.runtime.resume.redial import Dial as Dial
from muxkit.runtime.resume.redial import Ended as Ended
from muxkit.runtime.resume.redial import OnFailed as OnFailed
from muxkit.runtime.resume.redial import Outage as Outage
from muxkit.runtime.resume.redial import OutageLog as OutageLog
from muxkit.runtime.resume.redial import redial as redial
from muxkit.runtime.subscription import BEGUN as BEGUN
from muxkit.runtime.subscription import LOST as LOST
from muxkit.runtime.subscription import MEMBER_HEADER as MEMBER_HEADER
from muxkit.runtime.subscription import ON_LAG_HEADER as ON_LAG_HEADER
from muxkit.runtime.subscription import SINCE_HEADER as SINCE_HEADER
from muxkit.runtime.subscription import UPDATE as UPDATE
from muxkit.runtime.subscription import Lagged as Lagged
from muxkit.runtime.subscription import OnLag as OnLag
from muxkit.runtime.subscription import Subscription as Subscription
from muxkit.runtime.subscription import framed as framed

protect_package(__name__)

__all__ = [
    "BEGUN",
    "CLOSED_HERE",
    "HEAD",
    "LOSSES",
    "LOST",
    "MEMBER_HEADER",
    "MOVED",
    "ON_LAG_HEADER",
    "SINCE_HEADER",
    "STAGGER",
    "UPDATE",
    "YIELD_BYTES",
    "YIELD_CALLS",
    "YIELD_LEAST",
    "Admission",
    "Adopted",
    "AllAttemptsFailed",
    "Arrival",
    "Attempt",
    "Backlog",
    "Backoff",
    "ByteLink",
    "ByteStream",
    "Candidate",
    "Channel",
    "ChannelCancelled",
    "ChannelOpening",
    "ChannelStats",
    "ChannelStopped",
    "Choosing",
    "ClosingNowait",
    "Datagram",
    "DatagramPump",
    "Described",
    "Dial",
    "Ended",
    "ErrorMaker",
    "Explaining",
    "ExtraNeeded",
    "Facts",
    "Forgotten",
    "HandshakeFailed",
    "HandshakeQueue",
    "HandshakeReader",
    "HomeThread",
    "Identity",
    "IncomingRequest",
    "ItemQueue",
    "Lagged",
    "Link",
    "LinkKind",
    "LinkLost",
    "Listening",
    "Mailbox",
    "MultistreamLink",
    "MultistreamPump",
    "MuxChannel",
    "MuxConnection",
    "MuxSession",
    "NeedsBlock",
    "NowaitLink",
    "NowaitPackets",
    "Occupant",
    "OnFailed",
    "OnLag",
    "OneAtATime",
    "Openable",
    "Opening",
    "Outage",
    "OutageLog",
    "OutboxBudget",
    "PacketLink",
    "Parting",
    "Phase",
    "Ping",
    "Pings",
    "Place",
    "PlaintextWarning",
    "ProtocolPlugin",
    "Reading",
    "Reason",
    "ReceiveBudget",
    "ReceiveHalf",
    "ReceiveWindow",
    "Refusing",
    "Registry",
    "Request",
    "ResumingPlugin",
    "RoundTrip",
    "SendHalf",
    "Session",
    "SessionInfo",
    "SessionStats",
    "Side",
    "SlotQueue",
    "Standing",
    "Storage",
    "StreamData",
    "StreamPump",
    "StreamReset",
    "StreamStopped",
    "Subscription",
    "Taker",
    "TokenBucket",
    "Transport",
    "Turns",
    "TypedChannel",
    "Unclaimed",
    "Unsupported",
    "ValueT",
    "WaitableLink",
    "Watermark",
    "Won",
    "alert_of",
    "as_bytes",
    "background",
    "bare_nursery",
    "called",
    "can_heal",
    "check_options",
    "close_at_once",
    "current_place",
    "describe",
    "facts_of",
    "first_of",
    "framed",
    "frames_of",
    "home_thread",
    "interruptible",
    "leaves_of",
    "log_failure",
    "loggable_text",
    "looks_like",
    "meaning_of",
    "measured",
    "peer_of",
    "prefixed",
    "protect_package",
    "protected_manager",
    "read_first",
    "reason_for_leaving",
    "redial",
    "run_handler",
    "source_of",
    "turned_away",
    "turns",
    "typed",
]
