"""What do two sides say to each other beside the application's messages? The signs of the common channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit.protocols.relink._packets import OVERHEAD, PART_OVERHEAD

if TYPE_CHECKING:
    from muxkit.protocols.relink._packets import Parts

BEGIN: Final[Parts] = ()
END: Final[Parts] = (b"end", b"")
"""No more messages follow."""
CANCEL: Final[Parts] = (b"cancel", b"")
"""No more follow, and some are missing."""
STOP: Final[Parts] = (b"stop", b"")
"""No more are wanted in the other direction."""

RESERVE: Final = 3 * (OVERHEAD + PART_OVERHEAD + 48)  # bytes kept free in each window, so that signs can always go
