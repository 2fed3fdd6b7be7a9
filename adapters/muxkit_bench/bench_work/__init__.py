"""What does a process of the benchmark do? Both ends of every job, over whatever carries it.

Nothing but the standard library and Trio is needed here, so that programs in other environments can use it: they find
it as the package `bench_work`.
"""

from __future__ import annotations

from .conversations import Connection, Conversation, Peer, StreamConversation
from .play import play
from .server import Server

__all__ = ["Connection", "Conversation", "Peer", "Server", "StreamConversation", "play"]
