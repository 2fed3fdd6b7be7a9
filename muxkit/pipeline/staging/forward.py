"""Forwarding of committed rows to a restream session, in order and each once, even if processes are killed.

The position is part of the session's state, and is stored together with the messages in one step.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

import msgspec
import trio

from muxkit._errors import MuxError, RemoteProtocolError
from muxkit.pipeline.staging.records import Encoding, Published
from muxkit.pipeline.staging.store import Staging
from muxkit.protocols.restream.store import SessionExists, SessionStore, Transform
from muxkit.protocols.restream.wire import Record
from muxkit.storage import StoreFailed, StoreFull

FORWARDED: Final = "forwarded"  # key in the session's state: the id of the last forwarded row
PAUSE: Final = 5.0  # s after an error of a store

_json: msgspec.json.Decoder[object] = msgspec.json.Decoder(object)
_log = logging.getLogger("muxkit")


class NotForwarding(MuxError):
    """Raised when the session has messages that aren't rows of a stream."""


async def forward(staging: Staging, stream: str, sessions: SessionStore[Any, Any], uuid: str) -> None:
    """Append the committed rows of a stream to a restream session until cancelled. Create the session if necessary.

    A JSON row becomes the same JSON value, a text row a string, and a binary row or a record a `restream.Record`. A
    message has the same number as its row, and the time at which it was forwarded. Forwarded rows are trimmed from the
    stream.

    While the session is full of unacknowledged messages, this function waits. After an error of a store, it tries
    again. If two processes forward to the same session, they slow each other down, but no message is duplicated.

    Args:
        staging: the store with the rows.
        stream: the name of the stream.
        sessions: the store with the session.
        uuid: the session.

    Raises:
        NotForwarding: if the session has messages that aren't rows of a stream.
        RowsGone: if rows that the session needs next were trimmed.
    """
    while True:
        try:
            await _register(sessions, stream, uuid)
            while True:
                await _forward_some(staging, stream, sessions, uuid)
        except (StoreFailed, StoreFull) as error:
            # log: The session store can't accept messages now, for example because it is full. The forward tries again.
            _log.warning("stream %a waits to be forwarded to session %s: %s", stream, uuid, error)
            await trio.sleep(PAUSE)


async def _register(sessions: SessionStore[Any, Any], stream: str, uuid: str) -> None:
    try:
        await sessions.register(uuid, {FORWARDED: 0}, params={"stream": stream}, attached=False, keep=math.inf)
    except SessionExists as error:
        # log: A forwarded stream continued where the session had ended.
        _log.debug("stream %a continues after message %d of session %s", stream, error.status.head, uuid)


async def _forward_some(staging: Staging, stream: str, sessions: SessionStore[Any, Any], uuid: str) -> None:
    at = (await sessions.status(uuid)).head
    await staging.wait(stream, at)
    published = await staging.read(stream, at)
    if published is None:
        return
    last = at + len(published.rows)
    is_full = False
    try:
        while at < last:
            try:
                at = (await sessions.put_many(uuid, _following(published, uuid), last - at, timed=True))[-1].id
                is_full = False
            except StoreFull:
                if is_full:  # the session has room, so the store is full
                    raise
                is_full = True
                await sessions.wait_room(uuid)
    except _Elsewhere:
        # log: Two processes append to the same session. Stop one of them.
        _log.warning("stream %a is forwarded to session %s by another process as well", stream, uuid)
    await staging.trim(stream, (await sessions.status(uuid)).head)


def _following(published: Published, uuid: str) -> Transform[object, object]:
    """Return the function that appends the next message, whatever the session contains when it is called."""

    def following(state: object) -> tuple[object, object]:
        done = state.get(FORWARDED) if isinstance(state, dict) else None
        if type(done) is not int:
            raise NotForwarding(f"session {uuid} has messages of its own; forward to another one")
        index = done + 1 - published.first
        if not 0 <= index < len(published.rows):
            raise _Elsewhere
        return _message(published.encoding, published.rows[index]), {FORWARDED: done + 1}

    return following


class _Elsewhere(Exception):
    """Raised when the session has changed since the rows were read."""


def _message(encoding: Encoding, row: bytes) -> object:
    try:
        if encoding is Encoding.JSON:
            return _json.decode(row)
        if encoding is Encoding.TEXT:
            return row.decode()
        if encoding is Encoding.RECORD:
            return Record.decode(row)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, RemoteProtocolError):
        pass  # the row doesn't match its encoding, so it is forwarded as bytes
    return Record(row)
