"""What does the door find under the name `restream`? That it has no channels, and whom to ask instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from muxkit.runtime import Unsupported

if TYPE_CHECKING:
    import trio


class _Protocol:
    """One stream, from the server to the client: not a session with channels, so it has entrances of its own."""

    options: frozenset[str] = frozenset()

    def session(self, stream: trio.abc.Stream, **_: Any) -> NoReturn:
        raise Unsupported(
            "restream has no channels: use restream.serve, and restream.numbers, stream or integers "
            "(from muxkit.protocols import restream)"
        )


protocol = _Protocol()
