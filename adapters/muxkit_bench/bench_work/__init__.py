"""The processes of the benchmark: both ends of every job, over any transport.

It needs the standard library and Trio only, so programs in other environments can use it, as the package `bench_work`.
"""

from __future__ import annotations

from .conversations import Conversation, StreamConversation
from .peers import Connection, Peer
from .play import play
from .server import Server

__all__ = ["Connection", "Conversation", "Peer", "Server", "StreamConversation", "play"]
