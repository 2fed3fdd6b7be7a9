"""Who waits for bytes? A task of the pump's own, or a receiver who waits for his message anyway.

A reader who delivers to somebody else has to wake him, and Trio's loop makes one more turn before the answer can
leave. So a receiver who finds nothing takes the reader's place while that is free, and gives it back when he has what
he wants. The reader offers it after reads that brought little: what comes in bulk he serves better himself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from muxkit.runtime._links import WaitableLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.core import Paced

READ_SMALL = 64 * 1024  # bytes to ask for while reads come short
READ_LARGE = 256 * 1024  # and while they bring half of that


class Guest(Protocol):
    """A task that waits for something which only reading can bring."""

    is_called: bool
    """Has it what it waits for, or an error?"""


class Reading:
    """Reads a stream until `stop`, one task at a time.

    `take_in` parses and hands out what came, b"" if that is only the rest of what came before; it gives whether it was
    little, so that whoever got it will probably be back at once. It may call `stop`, and so may the others.
    """

    __slots__ = (
        "_failure",
        "_guest_sleeps",
        "_has_guest",
        "_is_over",
        "_link",
        "_may_hold_more",
        "_on_broken",
        "_on_end",
        "_paced",
        "_reader",
        "_size",
        "_stream",
        "_take_in",
        "is_free",
    )

    def __init__(
        self,
        stream: trio.abc.ReceiveStream,
        paced: Paced | None,
        *,
        take_in: Callable[[bytes], bool],
        on_end: Callable[[], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._stream = stream
        self._link = stream if isinstance(stream, WaitableLink) else None
        self._paced = paced
        self._take_in = take_in
        self._on_end = on_end
        self._on_broken = on_broken
        self._size = READ_SMALL
        self._may_hold_more = False  # the last read brought all that it had asked for
        self._reader: trio.lowlevel.Task | None = None  # while he stands back
        self._has_guest = False
        self._guest_sleeps = False
        self._failure: Exception | None = None  # of what a guest's read led to; it is the reader who raises it
        self._is_over = False
        self.is_free = False
        """May a guest take the reader's place?"""

    def stop(self) -> None:
        """The connection is over, and will be closed, which wakes whoever reads."""
        self._is_over = True
        self.is_free = False

    # --- the reader

    async def run(self) -> None:
        try:
            while not self._is_over:
                if self._has_guest:
                    await self._stand_back()
                elif self._is_behind:
                    await trio.lowlevel.checkpoint()
                    self._take_in(b"")
                else:
                    await self._read()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._on_broken(error)

    async def _read(self) -> None:
        self.is_free = False
        if self._link is None:
            data = await self._stream.receive_some(self._size)
            self._took(data if type(data) is bytes else bytes(data))
        else:
            if self._may_hold_more:
                await trio.lowlevel.checkpoint()
            else:
                await self._link.wait_readable()
            if not self._is_over and self._read_now(self._link):
                self._offer()
                await trio.lowlevel.checkpoint()

    async def _stand_back(self) -> None:
        """Until the guest is gone."""
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if self._failure is not None:
            raise self._failure

    # --- the guest

    async def read_for(self, guest: Guest) -> None:
        """Take the reader's place, which must be free, until the guest is called or has to leave it.

        Cancelled, nothing was read that somebody has not got.
        """
        assert self._link is not None
        self.is_free = False
        self._has_guest = True
        try:
            while not (guest.is_called or self._is_over or self._is_behind):
                self._guest_sleeps = True
                await self._link.wait_readable()
                self._guest_sleeps = False
                if not self._is_over:  # the protocol may have gone on to another connection
                    self._read_now(self._link)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._on_broken(error)
        except Exception as error:
            if self._reader is None:
                raise
            self._failure = error
        finally:
            self._guest_sleeps = self._has_guest = False
            self._offer()
            if self._reader is not None:
                task, self._reader = self._reader, None
                trio.lowlevel.reschedule(task)

    def call(self) -> None:
        """Wake the guest, if there is one who sleeps."""
        if self._guest_sleeps and self._link is not None:
            self._guest_sleeps = False
            self._link.stop_waiting()

    # --- what both do

    @property
    def _is_behind(self) -> bool:
        """Is there something left to parse? That is for the reader, who lets others have their turns meanwhile."""
        return self._paced is not None and self._paced.unparsed > 0

    def _offer(self) -> None:
        self.is_free = not (self._is_over or self._failure or self._is_behind)

    def _read_now(self, link: WaitableLink) -> bool:
        """What has come, if anything has; gives whether somebody else should have the place."""
        data = link.receive_nowait(self._size)
        if data is None:
            self._may_hold_more = False
            return False
        return self._took(data)

    def _took(self, data: bytes) -> bool:
        size, asked = len(data), self._size
        self._may_hold_more = size == asked
        self._size = READ_LARGE if size >= READ_SMALL // 2 else READ_SMALL
        if not size:
            self._on_end()
            return False
        return self._take_in(data)
