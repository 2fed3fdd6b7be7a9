"""How does an application make messages for a store? Step by step, and the others keep their turns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import trio

from muxkit.protocols.restream.server.quota import IN_THE_LOOP

if TYPE_CHECKING:
    from muxkit.protocols.restream.applications import Application
    from muxkit.protocols.restream.server.quota import Turns

GIVE_WAY: Final = 4  # messages that a store's thread makes before it lets the event loop have the interpreter


class StreamIsOver(Exception):
    """The application makes no more messages of this session."""


class Steps:
    """The application at work for one put, in whichever thread the store calls it; perhaps more than once."""

    def __init__(self, application: Application[Any, Any], turns: Turns) -> None:
        self._application = application
        self._turns = turns
        self._made = 0
        self.ends = False
        """Whether the last message that was made is the final one."""

    def step(self, state: object) -> tuple[object, object]:
        application = self._application
        if application.is_over(state):
            raise StreamIsOver
        if trio.lowlevel.in_trio_task():
            self._turns.room = IN_THE_LOOP
        else:
            self._made += 1
            if self._made % GIVE_WAY == 0:
                time.sleep(0)  # or each write to a socket might cost the loop a whole switch interval, 5 ms
        data, following = application.step(state)
        self.ends = application.is_over(following) or application.is_final(data)
        return data, following

    def is_final(self, data: object) -> bool:
        return self.ends
