"""What is a stream called? By the uuid of its session, perhaps with the server that has it: `url#uuid`."""

from __future__ import annotations

import re
from typing import Final

import attrs

from muxkit.pipeline.errors import OptionError

_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ONE: Final = re.compile(rf"(?:(?P<server>restream\+[a-z][a-z0-9]*://[^\s#]+)#)?(?P<uuid>{_UUID})", re.IGNORECASE)
# A comma also stands between the hosts of one URL: it ends an item only where another one begins, or nothing does.
_BETWEEN: Final = re.compile(rf"\s+|,\s*(?={_UUID}|restream\+|$)", re.IGNORECASE)
_SERVER: Final = re.compile(r"restream\+[a-z][a-z0-9]*://[^\s#]+", re.IGNORECASE)


@attrs.frozen
class Reference:
    """A session of restream; `server` is the URL of the one that has it, None where that has to be found out."""

    uuid: str
    server: str | None = None

    def __str__(self) -> str:
        return self.uuid if self.server is None else f"{self.server}#{self.uuid}"


def parse_reference(text: str, option: str) -> Reference:
    """One stream; raises `OptionError` in the name of this option."""
    found = _ONE.fullmatch(text)
    if found is None:
        raise OptionError(option, f"{text[:200]!r} is neither a uuid nor url#uuid with a URL such as restream+tcp://…")
    return Reference(found["uuid"].lower(), found["server"])


def parse_references(text: str, option: str) -> tuple[Reference, ...]:
    """Several, with white space or commas between; each once, the first one counts."""
    found = {each.uuid: each for each in reversed([parse_reference(item, option) for item in items(text)])}
    return tuple(sorted(found.values(), key=lambda each: each.uuid))


def parse_servers(text: str, option: str) -> tuple[str, ...]:
    """URLs of servers, with white space or commas between."""
    servers = items(text)
    for server in servers:
        if not _SERVER.fullmatch(server):
            raise OptionError(option, f"{server[:200]!r} is no URL of a server, such as restream+tcp://127.0.0.1:7000")
    return tuple(dict.fromkeys(servers))


def items(text: str) -> list[str]:
    """What stands between white space and commas."""
    return [item for item in _BETWEEN.split(text.strip()) if item]
