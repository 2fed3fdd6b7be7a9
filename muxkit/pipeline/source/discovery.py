"""The streams of a query: those that an option or a file names, and those that a directory lists.

A directory is a session itself: each of its messages names a stream, `"uuid"`, `"url#uuid"` or `{"stream": ...}`. It is
read from its first message on and never acknowledged.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muxkit.pipeline.client.client import NoStatus
from muxkit.pipeline.errors import OptionError, StreamUnavailable
from muxkit.pipeline.options import Reference, parse_reference, parse_references
from muxkit.pipeline.source.offsets import Span

if TYPE_CHECKING:
    from muxkit.pipeline.client.client import Client
    from muxkit.pipeline.options import SourceOptions
    from muxkit.protocols.restream import Json, Received

MOST_AHEAD: Final = 1_000_000  # messages of a directory that are read at once

_log = logging.getLogger("muxkit")


class Discovery:
    """Finds the streams of one query. It is asked for each batch, so new streams join by themselves."""

    def __init__(self, options: SourceOptions, client: Client) -> None:
        self._options = options
        self._client = client
        self._listed: dict[str, Reference] = {}  # by the directory
        self._read = 0  # messages of the directory

    async def streams(self) -> dict[str, Reference]:
        """Return all streams by uuid, with the server where it is known."""
        found = dict(self._listed)
        if self._options.directory is not None:
            await self._read_directory(self._options.directory)
            found = dict(self._listed)
        if self._options.streams_file is not None:
            found.update((each.uuid, each) for each in self._from_file(self._options.streams_file))
        found.update((each.uuid, each) for each in self._options.streams)
        return {uuid: self._placed(each) for uuid, each in sorted(found.items())}

    def _placed(self, reference: Reference) -> Reference:
        servers = self._options.servers
        if reference.server is None and len(servers) == 1:
            return Reference(reference.uuid, servers[0])
        return reference

    def _from_file(self, path: str) -> tuple[Reference, ...]:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise OptionError("streamsFile", str(error)) from error
        lines = [line.partition("# ")[0] if "# " in line else line for line in text.splitlines()]
        return parse_references("\n".join(line for line in lines if not line.startswith("#")), "streamsFile")

    async def _read_directory(self, directory: Reference) -> None:
        servers = [directory.server] if directory.server else self._options.servers
        for server in servers:
            answer = await self._client.status(server, directory.uuid)
            if answer is NoStatus.UNKNOWN:
                continue
            if isinstance(answer, NoStatus):
                end, _ = await self._client.count(server, directory.uuid, self._read, most=MOST_AHEAD)
            else:
                end = answer.head
            if end < self._read:
                raise StreamUnavailable(directory.uuid, f"this directory had {self._read} messages and now has {end}")

            async def take(messages: list[Received], server: str = server) -> None:
                for message in messages:
                    self._note(message.data, server)
                    self._read = message.id

            await self._client.fetch(Span(directory.uuid, server, self._read, end), take)
            return
        raise OptionError("directory", f"no server knows the session {directory.uuid}")

    def _note(self, data: Json, server: str) -> None:
        told = data.get("stream") if isinstance(data, dict) else data
        try:
            reference = parse_reference(told if isinstance(told, str) else repr(told), "directory")
        except OptionError as error:
            _log.warning("a message of the directory was passed over: %s", error)
            return
        self._listed[reference.uuid] = Reference(reference.uuid, reference.server or server)
