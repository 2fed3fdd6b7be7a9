"""How much is queued and waits for nothing but the transport? One number, which the engine keeps and senders read."""

from __future__ import annotations


class Outbox:
    """Shared by an engine, which counts, and whoever asks for room; an object, so that asking costs no call."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = 0
