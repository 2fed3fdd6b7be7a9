"""How does a command connect? As everybody does, and a failure to do so has an exit code of its own."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import muxkit
from muxkit.cli.outcome import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[muxkit.Session, None]:
    """`muxkit.connect`; what keeps it from connecting is told apart from what happens later."""
    async with AsyncExitStack() as stack:
        try:
            session = await stack.enter_async_context(muxkit.connect(url))
        except OSError as error:
            raise CommandFailed(f"could not connect to {url}: {error}", Exit.NOT_CONNECTED) from error
        yield session
