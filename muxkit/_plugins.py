"""Protocols and transports by name, and the URLs that name them.

`muxkit.connect` and the servers take URLs apart and look plugins up here. The names of muxkit's own plugins are a
table, so that a session over one of them reads no package's metadata. Any other name is looked up among the entry
points of all installed packages, which costs more the more there are, and is kept for the life of the process. A name
that was not found is looked up again the next time, so a package that was installed meanwhile is noticed.
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
"""The plugins that come with muxkit; another package cannot take one of these names."""

OURS: Final = "muxkit"

SUFFIX: Final = "+srv"  # of a transport whose servers are looked up in the DNS
SRV: Final = "muxkit_adapters.srv:SrvTransport"

USUAL: Final = "bpmux"
_BY_SCHEME: Final = {"http": "ws", "https": "wss"}  # what a reader of other documentation writes
_BY_TRANSPORT: Final = {"udp": "e3x", "dtls": "e3x", "quic": "aqueduct"}  # those that bpmux cannot use

_loaded: dict[tuple[Group, str], object] = {}  # each plugin that was found and is in order


class PluginError(MuxError):
    """A protocol or a transport is missing, broken, or installed twice; the text names the packages."""


@attrs.frozen
class Plugin:
    """One name that a package offers."""

    kind: str
    name: str
    package: str
    target: str
    problem: str | None
    """Why it cannot be used, or None."""
    extra: str | None = None
    """The extra of muxkit that would have to be installed, if that is the problem."""


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


def load(group: Group, name: str) -> object:
    """Return the plugin of that name, imported; raises `PluginError` if there is none or it cannot be used."""
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
    """Return the names of all plugins, sorted, whether or not they can be used."""
    return sorted({*OWN[group], *(point.name for point in entry_points(group=group))})


def load_transport(name: str, protocol: str, links: frozenset[LinkKind] = STREAMS) -> Transport:
    """Load the transport of that name, for a protocol that speaks over links of these kinds."""
    loaded: object = None
    inner = name.removesuffix(SUFFIX)
    if inner != name:
        over = load_transport(inner, protocol, links)
        return _over_srv(over, link_kind(over))
    try:
        loaded = load(TRANSPORTS, name)
        several = getattr(loaded, "for_links", None)
        if several is not None:  # it can carry more than one kind
            loaded = several(links)
        kind = link_kind(loaded)
    except PluginError as error:
        # Before anything is installed that would not do either.
        if not isinstance(error.__cause__, ExtraNeeded) or error.__cause__.link in links:
            raise
        kind = cast("LinkKind", error.__cause__.link)
    if kind not in links:
        usable = [one.name for one in installed() if one.kind == "transport" and one.problem is None]
        fitting = [one for one in usable if link_kind(load(TRANSPORTS, one)) in links]
        raise PluginError(
            f"{protocol} cannot speak over {name!r}, which carries {_CARRIED[kind]}; it can over: {', '.join(fitting)}"
        )
    # What an entry point gives cannot be known to a type checker; `load` has looked at its attributes.
    return cast("Transport", loaded)


def _over_srv(transport: Transport, link: LinkKind) -> Transport:
    """Return the transport that looks servers up in the DNS for this one."""
    try:
        over = cast("Callable[[Transport, LinkKind], Transport]", EntryPoint("srv", SRV, TRANSPORTS).load())
    except ExtraNeeded as missing:
        raise PluginError(str(missing)) from missing
    return over(transport, link)


def link_kind(transport: object) -> LinkKind:
    """Return the kind of link that the connections of a transport are."""
    kind: LinkKind = getattr(transport, "link", "stream")
    return kind


_CARRIED: dict[LinkKind, str] = {
    "stream": "one stream of bytes",
    "packets": "packets that may be lost",
    "multistream": "streams and datagrams side by side",
}


def installed() -> list[Plugin]:
    """List all plugins, with the problem of each that cannot be used."""
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
    """Return the entry points to choose from for a name; the one of muxkit is found without reading metadata."""
    if name in OWN[group]:
        return [EntryPoint(name, OWN[group][name], group)]
    return _distinct(entry_points(group=group, name=name))


def _own(group: Group) -> list[EntryPoint]:
    return [EntryPoint(name, value, group) for name, value in OWN[group].items()]


def _others(group: Group) -> list[EntryPoint]:
    return _distinct(point for point in entry_points(group=group) if _package(point) != OURS)


def _distinct(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Drop repetitions: a package that is installed and also lies on the path is found twice."""
    return list({(_package(point), point.name, point.value): point for point in points}.values())


def _problem(group: Group, point: EntryPoint) -> tuple[str | None, ExtraNeeded | None]:
    """Say why a plugin cannot be used, and give the error if only an extra is missing."""
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
