"""Finds the streams of a query: those that options, a file or a directory name, and those that match a pattern.

The planner asks for each batch, so new streams join automatically while the query runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from re import Pattern
from typing import Final

from muxkit.pipeline.errors import OptionError, StreamUnavailable
from muxkit.pipeline.options import Reference, SourceOptions, parse_reference, parse_references
from muxkit.pipeline.source.client import Client, NoStatus, decoded
from muxkit.pipeline.source.offsets import Span
from muxkit.protocols import restream
from muxkit.protocols.restream import Json
from muxkit.protocols.restream.wire import Block

MAX_AHEAD: Final = 1_000_000  # messages of a directory to read at a time

_log = logging.getLogger("muxkit")


class Subscription:
    """The sessions of some servers whose name matches a pattern, as of the last listing of each server.

    The pattern has to match the whole name, as in Kafka's `subscribePattern`. A listing contains the sessions that have
    changed since the one before, so a query with thousands of idle streams costs one small request per server.
    """

    def __init__(self, pattern: Pattern[str], servers: tuple[str, ...]) -> None:
        self._pattern = pattern
        self._servers = servers
        self._next: dict[str, str] = {}  # the `since` of the next request
        self._matching: dict[str, dict[str, restream.Status]] = {server: {} for server in servers}
        self._others: dict[str, set[str]] = {server: set() for server in servers}

    def since(self, server: str) -> str:
        """Return the `since` of the next request to a server."""
        return self._next.get(server, "")

    def apply(self, server: str, listing: restream.Listing) -> bool:
        """Note a listing of a server. Return True if it changes anything about the matching sessions."""
        matching, others = self._matching[server], self._others[server]
        self._next[server] = listing.next
        has_changed = False
        if listing.whole:
            has_changed = bool(matching)
            matching.clear()
            others.clear()
        for uuid, session in listing.sessions.items():
            if session is None:
                others.discard(uuid)
                has_changed |= matching.pop(uuid, None) is not None
            elif self._pattern.fullmatch(session.name):
                matching[uuid] = session.status
                has_changed = True
            else:  # the name of a session never changes
                others.add(uuid)
        return has_changed

    def lists(self, uuid: str) -> bool:
        """Return True if a server has a session, whether it matches or not."""
        return any(uuid in self._matching[server] or uuid in self._others[server] for server in self._servers)

    @property
    def is_complete(self) -> bool:
        """True if every server has sent a listing."""
        return len(self._next) == len(self._servers)

    def sessions(self) -> Mapping[str, tuple[str, restream.Status]]:
        """Return the server and the status of each matching session. If several servers have it, the first counts."""
        return {
            uuid: (server, status)
            for server in reversed(self._servers)
            for uuid, status in self._matching[server].items()
        }


class Discovery:
    """Finds the streams that an option or a file names, and those that a directory lists.

    A directory is itself a session. Each of its messages names a stream as `"uuid"`, `"url#uuid"` or
    `{"stream": ...}`. The directory is read from its first message on and never acknowledged.
    """

    def __init__(self, options: SourceOptions, client: Client) -> None:
        self._options = options
        self._client = client
        self._listed: dict[str, Reference] = {}  # streams in the directory
        self._read = 0  # messages of the directory that were read

    async def streams(self) -> dict[str, Reference]:
        """Return all streams by UUID, with their server if it is known."""
        if self._options.directory is not None:
            await self._read_directory(self._options.directory)
        found = dict(self._listed)
        if self._options.streams_file is not None:
            found.update((each.uuid, each) for each in self._from_file(self._options.streams_file))
        found.update((each.uuid, each) for each in self._options.streams)
        return dict(sorted(found.items()))

    def _from_file(self, path: str) -> tuple[Reference, ...]:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise OptionError("streamsFile", str(error)) from error
        lines = [line.partition("# ")[0] for line in text.splitlines()]
        return parse_references("\n".join(line for line in lines if not line.startswith("#")), "streamsFile")

    async def _read_directory(self, directory: Reference) -> None:
        servers = [directory.server] if directory.server else self._options.servers
        for server in servers:
            answer = await self._client.status(server, directory.uuid)
            if answer is NoStatus.UNKNOWN:
                continue
            if isinstance(answer, NoStatus):
                end = await self._client.count(server, directory.uuid, self._read, most=MAX_AHEAD)
            else:
                end = answer.head
            if end < self._read:
                raise StreamUnavailable(directory.uuid, f"this directory had {self._read} messages and now has {end}")

            async def take(block: Block, server: str = server) -> None:
                for message in block.messages():
                    self._note(decoded(directory.uuid, message), server)
                    self._read = message.id

            await self._client.fetch(Span(directory.uuid, server, self._read, end), take)
            return
        raise OptionError("directory", f"no server knows the session {directory.uuid}")

    def _note(self, data: Json, server: str) -> None:
        told = data.get("stream") if isinstance(data, dict) else data
        try:
            reference = parse_reference(told if isinstance(told, str) else repr(told), "directory")
        except OptionError as error:
            # log: An entry of the directory of streams is invalid.
            _log.warning("a message of the directory was passed over: %s", error)
            return
        self._listed[reference.uuid] = Reference(reference.uuid, reference.server or server)
