"""URLs of the form `protocol+transport://address`: their parts, and what an invalid one was probably meant to be."""

from __future__ import annotations

from typing import Final

from muxkit._plugins import OWN, PROTOCOLS, TRANSPORTS
from muxkit.core import without_secrets

USUAL: Final = "bpmux"
_BY_SCHEME: Final = {"http": "ws", "https": "wss"}  # what a reader of other documentation writes
_BY_TRANSPORT: Final = {"udp": "e3x", "dtls": "e3x", "quic": "aqueduct"}  # those that bpmux cannot use


def split_url(url: str, protocol: str | None = None) -> tuple[str, str, str]:
    """Return the protocol, the transport and the address of a URL.

    With `protocol`, the URL has to be one of that protocol. Raises ValueError for a URL of another form, with the one
    that was probably meant, and TypeError for anything but a string.
    """
    given: object = url  # by programs that no type checker has seen
    if not isinstance(given, str):
        raise TypeError(f"invalid URL: expected a string such as {_example(protocol)}, got a {type(given).__name__}")
    scheme, separator, address = url.partition("://")
    name, plus, transport = scheme.partition("+")
    is_swapped = name in OWN[TRANSPORTS] and transport in OWN[PROTOCOLS]
    if separator and plus and name and transport and not is_swapped and protocol in (None, name):
        return name, transport, address
    meant = _meant(url, protocol)
    raise ValueError(
        f"invalid URL {without_secrets(url)!r}: expected {protocol or 'protocol'}+transport://address, "
        f"for example {_example(protocol)}{f'; did you mean {meant!r}?' if meant else ''}"
    )


def _example(protocol: str | None) -> str:
    return f"{protocol or USUAL}+tcp://127.0.0.1:7000"


def _meant(url: str, protocol: str | None) -> str | None:
    """Return the URL that was probably meant; None if it cannot be guessed."""
    shown = without_secrets(url)
    scheme, separator, address = shown.partition("://")
    if not separator:
        is_place = ":" in shown and shown.rpartition(":")[2].isdigit()
        return f"{protocol or USUAL}+tcp://{shown}" if is_place else None
    parts = [_BY_SCHEME.get(part, part) for part in scheme.lower().split("+") if part]
    transport = next((part for part in parts if part in OWN[TRANSPORTS]), None)
    named = next((part for part in parts if part in OWN[PROTOCOLS]), None)
    if not address or (transport is None and named is None):
        return None
    transport = transport or "tcp"
    return f"{protocol or named or _BY_TRANSPORT.get(transport, USUAL)}+{transport}://{address}"
