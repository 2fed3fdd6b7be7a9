"""The toolkit that the engines of all protocols share.

Nothing in this package does I/O or reads a clock, and it imports neither `trio` nor `time`. It contains the interfaces
between engines and the runtime, the events, flow control, timers, and the encoding of numbers.
"""

from muxkit._quick_check import QuickCheck as QuickCheck
from muxkit.core._channels import CODE_MOST as CODE_MOST
from muxkit.core._channels import RECEIVING as RECEIVING
from muxkit.core._channels import SENDING as SENDING
from muxkit.core._channels import Census as Census
from muxkit.core._channels import ChannelTable as ChannelTable
from muxkit.core._channels import Ids as Ids
from muxkit.core._channels import Opened as Opened
from muxkit.core._channels import Reason as Reason
from muxkit.core._channels import Receiving as Receiving
from muxkit.core._channels import Sending as Sending
from muxkit.core._channels import Step as Step
from muxkit.core._channels import advance as advance
from muxkit.core._channels import counted as counted
from muxkit.core._channels import decode_name as decode_name
from muxkit.core._channels import draw as draw
from muxkit.core._channels import encode_name as encode_name
from muxkit.core._channels import join_opening as join_opening
from muxkit.core._channels import printable as printable
from muxkit.core._channels import split_opening as split_opening
from muxkit.core._channels import with_name as with_name
from muxkit.core._channels import without_name as without_name
from muxkit.core._channels import without_secrets as without_secrets
from muxkit.core._engine import Answering as Answering
from muxkit.core._engine import BoundedParsing as BoundedParsing
from muxkit.core._engine import Buffer as Buffer
from muxkit.core._engine import Clock as Clock
from muxkit.core._engine import Consumed as Consumed
from muxkit.core._engine import DatagramEngine as DatagramEngine
from muxkit.core._engine import Engine as Engine
from muxkit.core._engine import Lent as Lent
from muxkit.core._engine import MultistreamEngine as MultistreamEngine
from muxkit.core._engine import Reset as Reset
from muxkit.core._engine import SeparateTimers as SeparateTimers
from muxkit.core._engine import Stop as Stop
from muxkit.core._engine import StreamControl as StreamControl
from muxkit.core._engine import StreamEngine as StreamEngine
from muxkit.core._engine import StreamId as StreamId
from muxkit.core._headers import HEADERS_TOO_LARGE as HEADERS_TOO_LARGE
from muxkit.core._headers import NO_HEADERS as NO_HEADERS
from muxkit.core._headers import Headers as Headers
from muxkit.core._headers import decode_headers as decode_headers
from muxkit.core._headers import encode_headers as encode_headers
from muxkit.core._headers import headers_refusal as headers_refusal
from muxkit.core._headers import opening_refusal as opening_refusal
from muxkit.core._liveness import Deadlines as Deadlines
from muxkit.core._liveness import DelayQueue as DelayQueue
from muxkit.core._liveness import Keepalive as Keepalive
from muxkit.core._liveness import StallWatch as StallWatch
from muxkit.core._numbers import Cursor as Cursor
from muxkit.core._numbers import NeedMore as NeedMore
from muxkit.core._numbers import Pieces as Pieces
from muxkit.core._numbers import Ranges as Ranges
from muxkit.core._numbers import encode_varint as encode_varint
from muxkit.core._numbers import encode_varu64 as encode_varu64
from muxkit.core._numbers import serial_add as serial_add
from muxkit.core._numbers import serial_distance as serial_distance
from muxkit.core._queues import NO_QUEUE as NO_QUEUE
from muxkit.core._queues import QUANTUM as QUANTUM
from muxkit.core._queues import Outbox as Outbox
from muxkit.core._queues import Queued as Queued
from muxkit.core._queues import Scheduler as Scheduler
from muxkit.core._queues import Source as Source
from muxkit.core._queues import queue_of as queue_of
from muxkit.core._windows import U64_MAX as U64_MAX
from muxkit.core._windows import Ceiling as Ceiling
from muxkit.core._windows import Credit as Credit
from muxkit.core._windows import Reassembly as Reassembly
from muxkit.core._windows import StartPace as StartPace
from muxkit.core._windows import TokenBucket as TokenBucket
from muxkit.core.receive_windows import ReceiveBudget as ReceiveBudget
from muxkit.core.receive_windows import ReceiveWindow as ReceiveWindow
from muxkit.core.receive_windows import RoundTrip as RoundTrip

__all__ = [
    "CODE_MOST",
    "HEADERS_TOO_LARGE",
    "NO_HEADERS",
    "NO_QUEUE",
    "QUANTUM",
    "RECEIVING",
    "SENDING",
    "U64_MAX",
    "Answering",
    "BoundedParsing",
    "Buffer",
    "Ceiling",
    "Census",
    "ChannelTable",
    "Clock",
    "Consumed",
    "Credit",
    "Cursor",
    "DatagramEngine",
    "Deadlines",
    "DelayQueue",
    "Engine",
    "Headers",
    "Ids",
    "Keepalive",
    "Lent",
    "MultistreamEngine",
    "NeedMore",
    "Opened",
    "Outbox",
    "Pieces",
    "Queued",
    "Ranges",
    "Reason",
    "Reassembly",
    "ReceiveBudget",
    "ReceiveWindow",
    "Receiving",
    "Reset",
    "RoundTrip",
    "Scheduler",
    "Sending",
    "SeparateTimers",
    "Source",
    "StallWatch",
    "Step",
    "Stop",
    "StreamControl",
    "StreamEngine",
    "StreamId",
    "TokenBucket",
    "advance",
    "counted",
    "decode_headers",
    "decode_name",
    "draw",
    "encode_headers",
    "encode_name",
    "encode_varint",
    "encode_varu64",
    "headers_refusal",
    "opening_refusal",
    "printable",
    "queue_of",
    "serial_add",
    "serial_distance",
    "with_name",
    "without_name",
    "without_secrets",
]
