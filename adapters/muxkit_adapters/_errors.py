"""What can go wrong before there is a connection? The peer answers, and is no peer that can be trusted."""

from __future__ import annotations


class HandshakeFailed(ConnectionError):
    """The peer was reached, but one side refused the other; the text says which host, and why."""


class PlaintextWarning(UserWarning):
    """A connection without encryption leaves this machine, because `insecure=True` asked for it."""
