"""Errors and warnings of the transports."""

from __future__ import annotations


class HandshakeFailed(ConnectionError):
    """The peer was reached, but one side refused the other; the text names the host and the reason."""


class PlaintextWarning(UserWarning):
    """A connection without encryption leaves this machine, because `insecure=True` asked for it."""
