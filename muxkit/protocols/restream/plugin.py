"""restream under its name among the protocols, and the URLs of its servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn

import trio

from muxkit._options import Side, check_link_options
from muxkit._plugins import load_transport, split_url
from muxkit.runtime import Transport, Unsupported

PROTOCOL: Final = "restream"


class _Protocol:
    """The plugin. restream has one stream from the server to the client and no channels, so no session."""

    options: frozenset[str] = frozenset()

    no_sessions = (
        "restream has no channels: use restream.serve, and restream.numbers, stream or integers "
        "(from muxkit.protocols import restream)"
    )

    def session(self, stream: trio.abc.Stream, **_: Any) -> NoReturn:
        raise Unsupported(self.no_sessions)


protocol: _Protocol = _Protocol()


def transport_of(url: str, side: Side, options: Iterable[str]) -> tuple[Transport, str]:
    """Return the transport and the address of a URL.

    Raises ValueError for an invalid URL, `PluginError` for an unknown transport, and TypeError for an option that the
    transport doesn't have.
    """
    _, name, address = split_url(url, PROTOCOL)
    transport = load_transport(name, PROTOCOL)
    check_link_options(name, transport, side, options)
    return transport, address
