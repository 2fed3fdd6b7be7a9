"""Where is a client's server? A URL's transport, or a function of the caller that dials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from muxkit._plugins import load_transport

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import trio

    from muxkit.runtime import Dial

PROTOCOL: Final = "restream"
FORM: Final = "restream+transport://address, such as restream+tcp://127.0.0.1:7000"


def dial_of(where: str | Dial, options: dict[str, Any]) -> Dial:
    """What dials `where`. Raises ValueError for a URL that cannot be meant, `PluginError` for an unknown transport."""
    if not isinstance(where, str):
        if options:
            raise TypeError(f"a dial function takes no options of a transport: {', '.join(options)}")
        return where
    scheme, separator, address = where.partition("://")
    protocol, _, name = scheme.partition("+")
    if not separator or protocol != PROTOCOL or not name:
        raise ValueError(f"{where!r} is no URL of the form {FORM}")
    transport = load_transport(name, PROTOCOL)

    def dial() -> AbstractAsyncContextManager[trio.abc.Stream]:
        return transport.connect(address, **options)

    return dial
