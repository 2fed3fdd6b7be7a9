"""Parses URLs, and finds the protocols and transports that they name.

`muxkit.connect` and the servers use this module. Protocols and transports are plugins. Those that come with muxkit are
listed in the table `OWN`. Plugins of other packages are found by their entry points, which takes longer the more
packages are installed, so the result is cached for the life of the process. If a name isn't found, nothing is cached,
so the plugin is found later if its package is installed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, Literal, cast

import attrs

from muxkit._errors import MuxError
from muxkit.core import without_secrets
from muxkit.runtime import ExtraNeeded

if TYPE_CHECKING:
    from muxkit.runtime import LinkKind, Transport

Group = Literal["muxkit.protocols", "muxkit.transports"]
PROTOCOLS: Group = "muxkit.protocols"
TRANSPORTS: Group = "muxkit.transports"
STREAMS: frozenset[LinkKind] = frozenset({"stream"})

OWN: Final[Mapping[Group, Mapping[str, str]]] = {
    PROTOCOLS: {
        name: f"muxkit.protocols.{name}:protocol"
        for name in ("aqueduct", "bpmux", "e3x", "relink", "restream", "yamux")
    },
    TRANSPORTS: {
        "asgi": "muxkit_adapters.asgi:transport",
        "dtls": "muxkit_adapters.dtls:transport",
        "mem": "muxkit_adapters.memory:transport",
        "quic": "muxkit_adapters.quic:transport",
        "sim": "muxkit.testing:sim_transport",
        "tcp": "muxkit_adapters.tcp:transport",
        "tls": "muxkit_adapters.tls:transport",
        "udp": "muxkit_adapters.udp:transport",
        "unix": "muxkit_adapters.unix:transport",
        "ws": "muxkit_adapters.websocket:transport",
        "wss": "muxkit_adapters.websocket:secure_transport",
    },
}
"""The plugins that come with muxkit. Other packages can't use these names."""

OURS: Final = "muxkit"

SUFFIX: Final = "+srv"  # with this suffix, the transport looks up servers in the DNS (SRV records)
SRV: Final = "muxkit_adapters.srv:SrvTransport"

# Defaults for the corrected URL in the error for an invalid one
USUAL: Final = "bpmux"
_BY_SCHEME: Final = {"http": "ws", "https": "wss"}
_BY_TRANSPORT: Final = {"udp": "e3x", "dtls": "e3x", "quic": "aqueduct"}  # the transports that bpmux can't use

_loaded: dict[tuple[Group, str], object] = {}  # the cache of plugins


class PluginError(MuxError):
    """A protocol or transport isn't installed, can't be imported, or is offered by several packages.

    The text names the packages.
    """


@attrs.frozen
class Plugin:
    """Information about a protocol or transport of a package."""

    kind: str
    """"protocol" or "transport"."""
    name: str
    """The name in URLs."""
    package: str
    """The package that offers it."""
    target: str
    """The module and the object, such as `muxkit_adapters.tcp:transport`."""
    problem: str | None
    """Why it can't be used, or None."""
    extra: str | None = None
    """The extra of muxkit that is missing, if that is the problem."""


def split_url(url: str, protocol: str | None = None) -> tuple[str, str, str]:
    """Return the protocol, the transport and the address of a URL.

    Args:
        url: The URL.
        protocol: The protocol that the URL must have. By default, any.

    Raises:
        ValueError: If the URL is invalid. The text suggests a valid one if possible.
        TypeError: If it isn't a string.
    """
    given: object = url  # programs without a type checker may pass anything
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
    """Return a valid URL that the user may have meant, or None."""
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


def load(group: Group, name: str) -> object:
    """Import a plugin and return it. Raises `PluginError` if it doesn't exist or can't be used."""
    loaded = _loaded.get((group, name))
    if loaded is None:
        loaded = _loaded[group, name] = _find(group, name)
    return loaded


def _find(group: Group, name: str) -> object:
    found = _named(group, name)
    if not found:
        known = names(group)
        close = get_close_matches(name, known, 1)
        meant = f"; did you mean {close[0]!r}?" if close else ";"
        raise PluginError(
            f"there is no {_kind(group)} {name!r}{meant} {'There' if close else 'there'} are: {', '.join(known)}. "
            f"A package adds one by an entry point of the group {group!r}"
        )
    if len(found) > 1:
        raise PluginError(f"the {_kind(group)} {name!r} is offered by {_packages(found)}; uninstall all but one")
    problem, missing = _problem(group, found[0])
    if missing is not None:
        raise PluginError(str(missing)) from missing
    if problem is not None:
        raise PluginError(f"the {_kind(group)} {name!r} of {_packages(found)} is broken: {problem}")
    loaded: object = found[0].load()
    return loaded


def names(group: Group) -> list[str]:
    """Return the sorted names of all plugins, including those that can't be used."""
    return sorted({*OWN[group], *(point.name for point in entry_points(group=group))})


def load_transport(name: str, protocol: str, links: frozenset[LinkKind] = STREAMS) -> Transport:
    """Import a transport for a protocol that can use these kinds of links, and return it."""
    loaded: object = None
    inner = name.removesuffix(SUFFIX)
    if inner != name:
        over = load_transport(inner, protocol, links)
        return _over_srv(over, link_kind(over))
    try:
        loaded = load(TRANSPORTS, name)
        several = getattr(loaded, "for_links", None)
        if several is not None:  # the transport supports several kinds
            loaded = several(links)
        kind = link_kind(loaded)
    except PluginError as error:
        # If the protocol couldn't use the transport anyway, don't recommend to install its extra.
        if not isinstance(error.__cause__, ExtraNeeded) or error.__cause__.link in links:
            raise
        kind = cast("LinkKind", error.__cause__.link)
    if kind not in links:
        usable = [one.name for one in installed() if one.kind == "transport" and one.problem is None]
        fitting = [one for one in usable if link_kind(load(TRANSPORTS, one)) in links]
        raise PluginError(
            f"{protocol} can't run over {name!r}: expected a transport for {_kinds(links)}, got one for "
            f"{_CARRIED[kind]}; use one of: {', '.join(fitting)}"
        )
    # The type checker can't know the type of an entry point's object. `load` has checked its attributes.
    return cast("Transport", loaded)


def _over_srv(transport: Transport, link: LinkKind) -> Transport:
    """Return a transport that looks up servers in the DNS, and connects to them with this transport."""
    try:
        over = cast("Callable[[Transport, LinkKind], Transport]", EntryPoint("srv", SRV, TRANSPORTS).load())
    except ExtraNeeded as missing:
        raise PluginError(str(missing)) from missing
    return over(transport, link)


def link_kind(transport: object) -> LinkKind:
    """Return the kind of a transport's connections."""
    kind: LinkKind = getattr(transport, "link", "stream")
    return kind


_CARRIED: dict[LinkKind, str] = {
    "stream": "a byte stream",
    "packets": "packets that may be lost",
    "multistream": "several streams and datagrams",
}


def _kinds(links: frozenset[LinkKind]) -> str:
    return " or ".join(text for kind, text in _CARRIED.items() if kind in links)


def installed() -> list[Plugin]:
    """Return all plugins. Those that can't be used have a `problem`."""
    plugins = []
    for group in (PROTOCOLS, TRANSPORTS):
        own, others = _own(group), _others(group)
        for point in sorted([*own, *others], key=lambda point: point.name):
            package, extra = _package(point), None
            rivals = [other for other in others if other.name == point.name]
            if point in others and point.name in OWN[group]:
                problem: str | None = f"muxkit has a {_kind(group)} of this name, which is used"
            elif len(rivals) > 1:
                problem = f"offered by {_packages(rivals)}"
            else:
                problem, missing = _problem(group, point)
                extra = None if missing is None else missing.extra
            plugins.append(Plugin(_kind(group), point.name, package, point.value, problem, extra))
    return plugins


def _named(group: Group, name: str) -> list[EntryPoint]:
    """Return the entry points with a name. For muxkit's own plugins, no metadata of packages is read."""
    if name in OWN[group]:
        return [EntryPoint(name, OWN[group][name], group)]
    return _distinct(entry_points(group=group, name=name))


def _own(group: Group) -> list[EntryPoint]:
    return [EntryPoint(name, value, group) for name, value in OWN[group].items()]


def _others(group: Group) -> list[EntryPoint]:
    return _distinct(point for point in entry_points(group=group) if _package(point) != OURS)


def _distinct(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Remove duplicates, because a package that is both installed and on the path is found twice."""
    return list({(_package(point), point.name, point.value): point for point in points}.values())


def _problem(group: Group, point: EntryPoint) -> tuple[str | None, ExtraNeeded | None]:
    """Return why a plugin can't be used, or None. If an extra is missing, also return the error that says so."""
    wanted = ("session", "options") if group == PROTOCOLS else ("connect", "serve")
    try:
        loaded = point.load()
    except ExtraNeeded as error:
        return f"needs muxkit[{error.extra}]", error
    except Exception as error:  # importing runs the package's code, which may fail in any way
        return f"{point.value} cannot be loaded: {type(error).__name__}: {error}", None
    missing = [attribute for attribute in wanted if not hasattr(loaded, attribute)]
    return (f"{point.value} has no {' and no '.join(missing)}" if missing else None), None


def _package(point: EntryPoint) -> str:
    if OWN[cast("Group", point.group)].get(point.name) == point.value:
        return OURS
    # A package whose metadata was damaged has no name, and asking for it would warn.
    if point.dist is None or "Name" not in point.dist.metadata:
        return "an unknown package"
    return point.dist.name or "an unknown package"


def _packages(points: list[EntryPoint]) -> str:
    return " and ".join(sorted(_package(point) for point in points))


def _kind(group: Group) -> str:
    return "protocol" if group == PROTOCOLS else "transport"
