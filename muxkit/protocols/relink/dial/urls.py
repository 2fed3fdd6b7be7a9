"""URLs of Relink: split into transport, address and endpoint, joined again, and turned into a dial function."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import attrs

from muxkit._plugins import load_transport, split_url
from muxkit.protocols.relink.config import Config

if TYPE_CHECKING:
    import trio

    from muxkit.runtime import Dial


PROTOCOL: Final = "relink"
PATHS: Final = frozenset({"unix", "ws", "wss"})  # transports whose addresses have a path of their own


@attrs.frozen
class Place:
    """The parts of a Relink URL."""

    scheme: str
    transport: str
    address: str
    endpoint: str | None

    def url(self, address: str, endpoint: str) -> str:
        """Return the URL for a client, with the address that the transport really listens on."""
        return f"{self.scheme}://{join_endpoint(self.transport, address, endpoint)}"


def place_of(url: str) -> Place:
    """Split a URL; ValueError if it does not have the form."""
    protocol, transport, rest = split_url(url, PROTOCOL)
    address, endpoint = split_endpoint(transport, rest)
    return Place(f"{protocol}+{transport}", transport, address, endpoint)


def split_endpoint(transport: str, address: str) -> tuple[str, str | None]:
    """Split an address into the transport's own address and the endpoint, if one is named; ValueError if two are."""
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
    """Join what `split_endpoint` split."""
    if not endpoint:
        return address
    if transport not in PATHS:
        return f"{address}/{quote(endpoint, safe='')}"
    return f"{address}{'&' if '?' in address else '?'}endpoint={quote(endpoint, safe='')}"


def config_for(config: Config | None, *names: str | None) -> Config:
    """Return the settings with the endpoint that the URL or the caller named; ValueError if those differ."""
    settings = config or Config()
    named = {name for name in names if name is not None} | ({settings.endpoint} - {""})
    if len(named) > 1:
        raise ValueError(f"several endpoints are named: {', '.join(sorted(map(repr, named)))}")
    return attrs.evolve(settings, endpoint=named.pop()) if named else settings


def dial_of(where: str | Dial, options: dict[str, Any]) -> tuple[Dial, str | None]:
    """Return a function that dials `where`, and the endpoint that `where` names."""
    if not isinstance(where, str):
        if options:
            raise TypeError(f"a dial function takes no options of a transport: {', '.join(options)}")
        return where, None
    place = place_of(where)
    transport = load_transport(place.transport, PROTOCOL)

    def dial() -> AbstractAsyncContextManager[trio.abc.Stream]:
        return transport.connect(place.address, **options)

    return dial, place.endpoint
