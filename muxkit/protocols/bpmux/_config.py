"""What can be chosen for one bpmux connection, apart from the limits?"""

from __future__ import annotations

import attrs

from muxkit.core import U64_MAX


def _is_id(instance: Config, field: attrs.Attribute[int], value: int) -> None:
    if not 1 <= value <= U64_MAX:
        raise ValueError(f"Config({field.name}={value}): ids go from 1 to {U64_MAX}")


def _is_span(instance: Config, field: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise ValueError(f"Config({field.name}={value}): must be above 0 s")


@attrs.frozen(kw_only=True)
class Config:
    """The settings of an engine; times in seconds."""

    letter: bool = False
    """Opening payloads must be empty, as the document has it; otherwise they are paid from top-level credit."""
    grants: bool = True
    """Grant credit by itself as the application consumes; otherwise every grant is made by hand."""
    pongs: bool = True
    """Answer pings by itself."""
    keepalive: float | None = attrs.field(default=20.0, validator=attrs.validators.optional(_is_span))
    """Ping when nothing came for so long; None never pings."""
    keepalive_timeout: float = attrs.field(default=20.0, validator=_is_span)
    """Give up when nothing comes for so long after such a ping."""
    first_id: int = attrs.field(default=1, validator=_is_id)
    """Where the ids of our entities begin."""
