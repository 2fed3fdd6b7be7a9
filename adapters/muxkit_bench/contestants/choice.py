"""The choice of muxkit's contestants: each protocol over each transport that it can use, beside raw connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import attrs
import trio.testing

from muxkit import Limits
from muxkit import _plugins as plugins
from muxkit.cli.doctor import make_certificate
from muxkit.cli.terminal import CommandFailed, Exit
from muxkit.runtime import ResumingPlugin, Unsupported
from muxkit_bench.contestants.contestant import CERTIFICATE, CERTIFIED, KEY, Contestant, ours, raw

if TYPE_CHECKING:
    from pathlib import Path

    from muxkit.runtime import ProtocolPlugin


@attrs.frozen
class LineUp:
    """The contestants, and why others cannot take part."""

    contestants: list[Contestant]
    left_out: list[str]


def line_up(
    protocols: tuple[str, ...],
    transports: tuple[str, ...],
    scratch: Path,
    window: int | None,
    compiled: Path | None = None,
) -> LineUp:
    """Raises `CommandFailed` for a name that is not installed, and if nothing is left to measure.

    With `compiled`, the interpreter of another environment, each contestant stands there in its compiled form too.
    """
    contestants: dict[str, Contestant] = {}
    left_out: list[str] = []
    links = {name: _load(plugins.TRANSPORTS, name) for name in dict.fromkeys(transports)}
    sessions = {name: _load(plugins.PROTOCOLS, name) for name in dict.fromkeys(protocols)}
    for protocol, plugin in [*sessions.items()]:
        if why := _why_no_session(plugin):
            left_out.append(f"{protocol}: {why}")
            del sessions[protocol]
    for transport in [*links] if sessions else []:
        try:
            if transport in CERTIFIED:
                make_certificate(scratch / CERTIFICATE, scratch / KEY)
        except CommandFailed as failure:
            left_out.append(f"{transport}: {failure.sentence}")
            del links[transport]
    for protocol, plugin in sessions.items():
        for transport, link in links.items():
            if plugins.link_kind(link) in getattr(plugin, "links", plugins.STREAMS):
                for python in (None,) if compiled is None else (None, compiled):
                    one = ours(protocol, transport, scratch, window=window, compiled=python)
                    contestants[one.name] = one
            else:
                left_out.append(f"{protocol}+{transport}: {protocol} does not speak over what {transport} carries")
    if not contestants:
        raise CommandFailed(f"nothing of muxkit can be measured: {'; '.join(left_out)}", Exit.USAGE)
    for transport in ["tcp", *links]:  # the others are compared with TCP
        contestants.update((one.name, one) for one in raw(transport, scratch))
    return LineUp(list(contestants.values()), left_out)


def _load(group: plugins.Group, name: str) -> object:
    try:
        return plugins.load(group, name)
    except plugins.PluginError as error:
        option = "--protocol" if group == plugins.PROTOCOLS else "--transport"
        raise CommandFailed(f"{option}: {error}", Exit.USAGE) from error


def _why_no_session(plugin: object) -> str | None:
    """Check a protocol for sessions with channels; one without them refuses by an error."""
    if isinstance(plugin, ResumingPlugin):
        return None
    # A type checker cannot know an entry point; `load` has checked its attributes.
    protocol = cast("ProtocolPlugin", plugin)
    link, _ = trio.testing.memory_stream_pair()
    try:
        protocol.session(link, role="client", address="", limits=Limits(), observer=None, linger=0.0)
    except Unsupported as error:
        return str(error)
    except Exception:  # it may need another link or options; then it fails when it is started, with a reason
        return None
    return None
