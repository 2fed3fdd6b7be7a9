"""The server of the benchmark: it obeys orders, and echoes every other message."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import trio

from .orders import MAGIC, Order, Receipt, Usage, Way, Wrong, pack_answer, unpack_order

if TYPE_CHECKING:
    from .conversations import Conversation

_STATM = Path("/proc/self/statm")


class Server:
    """A server process."""

    def __init__(self, *, holding: bool = False) -> None:
        self.is_holding = holding
        self._has_first = False
        self._held: list[object] = []
        self._wrong: Wrong | None = None
        self._went_wrong = trio.Event()

    def keeps(self, channel: object) -> bool:
        """Return True if a channel is kept without a task: with `--hold` all but the first."""
        if not self.is_holding:
            return False
        if not self._has_first:
            self._has_first = True
            return False
        self._held.append(channel)
        return True

    async def serve(self, conversation: Conversation) -> None:
        """Serve a channel until the client ends it."""
        with suppress(trio.EndOfChannel):
            while True:
                message = await conversation.receive()
                if not message.startswith(MAGIC):
                    await conversation.send(message)
                    continue
                order = unpack_order(message)
                if order.way in (Way.REPORT, Way.REPORT_COLLECTED):
                    await conversation.send(pack_answer(self._usage(order.way is Way.REPORT_COLLECTED)))
                else:
                    await conversation.send(pack_answer(await self._take(conversation, order)))

    async def until_wrong(self) -> NoReturn:
        """Wait for a message that is not what was sent, and raise the error."""
        await self._went_wrong.wait()
        assert self._wrong is not None
        raise self._wrong

    async def _take(self, conversation: Conversation, order: Order) -> Receipt:
        try:
            return await conversation.take(order)
        except Wrong as wrong:
            # The library may log it only, since an error of a handler ends its channel alone.
            self._wrong = wrong
            self._went_wrong.set()
            raise

    def _usage(self, collected: bool) -> Usage:
        return Usage(time.process_time_ns(), memory_now() if collected else 0, len(self._held))


def memory_now() -> int:
    """Resident bytes of this process after a collection of garbage; 0 where the system does not report it."""
    gc.collect()
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
