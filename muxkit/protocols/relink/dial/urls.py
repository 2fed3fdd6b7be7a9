"""URLs of Relink: functions that split a URL into transport, address and endpoint, join these, and dial a URL."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import attrs

from muxkit._options import check_link_options
from muxkit._plugins import load_transport, split_url
from muxkit.protocols.relink.config import Config

if TYPE_CHECKING:
    import trio

    from muxkit.runtime import Dial


PROTOCOL: Final = "relink"
# Transports whose addresses have their own path. For these the endpoint is in the query: `?endpoint=NAME`. For all
# other transports the path of the URL is the endpoint.
PATHS: Final = frozenset({"unix", "ws", "wss"})


@attrs.frozen
class Place:
    """The parts of a Relink URL."""

    scheme: str
    transport: str
    address: str
    endpoint: str | None

    def url(self, address: str, endpoint: str) -> str:
        """Return the URL for a client, with the address that the transport actually listens on."""
        return f"{self.scheme}://{join_endpoint(self.transport, address, endpoint)}"


def place_of(url: str) -> Place:
    """Split a URL into its parts. Raises ValueError for an invalid URL."""
    protocol, transport, rest = split_url(url, PROTOCOL)
    address, endpoint = split_endpoint(transport, rest)
    return Place(f"{protocol}+{transport}", transport, address, endpoint)


def split_endpoint(transport: str, address: str) -> tuple[str, str | None]:
    """Split an address into the transport's own address and the name of the endpoint, or None without a name.

    Raises:
        ValueError: The address names two endpoints, or the name isn't valid UTF-8.
    """
    front, question, query = address.partition("?")
    endpoint: str | None = None
    if question:
        left = []
        for item in query.split("&"):
            name, _, value = item.partition("=")
            if name == "endpoint" and endpoint is None:
                endpoint = _name(value)
            else:
                left.append(item)
        address = f"{front}?{'&'.join(left)}" if left else front
    if transport not in PATHS:
        front, slash, path = address.partition("/")
        if slash and endpoint is not None:
            raise ValueError(f"several endpoints are named: {path!r} in the path, {endpoint!r} behind it")
        if slash:
            address, endpoint = front, _name(path)
    return address, endpoint


def _name(quoted: str) -> str:
    try:
        return unquote(quoted, errors="strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"endpoint {quoted!r} is not UTF-8 behind its percent signs") from error


def join_endpoint(transport: str, address: str, endpoint: str | None) -> str:
    """Add the name of an endpoint to a transport's address. This is the inverse of `split_endpoint`."""
    if not endpoint:
        return address
    if transport not in PATHS:
        return f"{address}/{quote(endpoint, safe='')}"
    return f"{address}{'&' if '?' in address else '?'}endpoint={quote(endpoint, safe='')}"


def config_for(config: Config | None, *names: str | None) -> Config:
    """Return the settings with the endpoint that the URL, the caller or `config` names.

    Raises:
        ValueError: The URL, the caller and `config` name different endpoints.
    """
    settings = config or Config()
    named = {name for name in names if name is not None} | ({settings.endpoint} - {""})
    if len(named) > 1:
        raise ValueError(f"several endpoints are named: {', '.join(sorted(map(repr, named)))}")
    return attrs.evolve(settings, endpoint=named.pop()) if named else settings


def dial_of(where: str | Dial, options: Mapping[str, Any]) -> tuple[Dial, str | None]:
    """Return a function that dials `where`, and the name of the endpoint in `where`, or None without a name."""
    if not isinstance(where, str):
        if options:
            raise TypeError(f"a dial function takes no options of a transport: {', '.join(options)}")
        return where, None
    place = place_of(where)
    transport = load_transport(place.transport, PROTOCOL)
    check_link_options(place.transport, transport, "client", options)

    def dial() -> AbstractAsyncContextManager[trio.abc.Stream]:
        return transport.connect(place.address, **options)

    return dial, place.endpoint
