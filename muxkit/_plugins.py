"""Protocols and transports: the entry points of installed packages, muxkit's own found in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Literal, cast

import attrs

from muxkit._errors import MuxError
from muxkit.runtime import ExtraNeeded

if TYPE_CHECKING:
    from muxkit.runtime import LinkKind, Transport

Group = Literal["muxkit.protocols", "muxkit.transports"]
PROTOCOLS: Group = "muxkit.protocols"
TRANSPORTS: Group = "muxkit.transports"
STREAMS: frozenset[LinkKind] = frozenset({"stream"})


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


def load(group: Group, name: str) -> object:
    """Load the plugin of that name."""
    found = _named(group, name)
    if not found:
        names = ", ".join(sorted({point.name for point in entry_points(group=group)})) or "none"
        raise PluginError(
            f"there is no {_kind(group)} {name!r}; there are: {names}. "
            f"A package that brings it names it as an entry point of the group {group!r}"
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


def load_transport(name: str, protocol: str, links: frozenset[LinkKind] = STREAMS) -> Transport:
    """Load the transport of that name, for a protocol that speaks over links of these kinds."""
    loaded: object = None
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
    """List all plugins, with what is wrong with each."""
    plugins = []
    for group in (PROTOCOLS, TRANSPORTS):
        for point in sorted(_distinct(entry_points(group=group)), key=lambda point: point.name):
            rivals = _named(group, point.name)
            problem, missing = (f"offered by {_packages(rivals)}", None) if len(rivals) > 1 else _problem(group, point)
            extra = None if missing is None else missing.extra
            plugins.append(Plugin(_kind(group), point.name, _package(point), point.value, problem, extra))
    return plugins


def _named(group: Group, name: str) -> list[EntryPoint]:
    return _distinct(entry_points(group=group, name=name))


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
    # A package whose metadata was damaged has no name, and asking for it would warn.
    if point.dist is None or "Name" not in point.dist.metadata:
        return "an unknown package"
    return point.dist.name or "an unknown package"


def _packages(points: list[EntryPoint]) -> str:
    return " and ".join(sorted(_package(point) for point in points))


def _kind(group: Group) -> str:
    return "protocol" if group == PROTOCOLS else "transport"
