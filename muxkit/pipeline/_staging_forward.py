"""How do committed rows become messages of a restream session? One after the other, each once, whoever is killed.

How far it got is the state of that session, and is stored in one step with the messages themselves.
"""

from __future__ import annotations

import base64
import logging
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from muxkit._errors import MuxError
from muxkit.pipeline.staging.store import Encoding
from muxkit.protocols.restream.store import SessionExists
from muxkit.storage import StoreFailed, StoreFull

if TYPE_CHECKING:
    from muxkit.pipeline.staging.store import Published, Staging
    from muxkit.protocols.restream.store import SessionStore, Transform

FORWARDED: Final = "forwarded"  # of the session's state: the id of the last row of the stream that is in it
PAUSE: Final = 5.0  # s, behind trouble with a store

_json: msgspec.json.Decoder[object] = msgspec.json.Decoder(object)
_log = logging.getLogger("muxkit")


class NotForwarding(MuxError):
    """The session is another one's: its messages are not rows of a stream."""


async def forward(staging: Staging, stream: str, sessions: SessionStore[Any, Any], uuid: str) -> None:
    """Append what is committed to a stream to a session of restream, until cancelled; the session is made if need be.

    A row of JSON becomes that value, one of text a string, one of bytes `{"base64": "…"}`. Message and row have the
    same number. What was forwarded is trimmed from the stream. While the session is full of what nobody has
    acknowledged this waits; while a store is in trouble it tries again. Two at once for one session disturb each
    other, and nothing comes twice.
    """
    while True:
        try:
            await _register(sessions, stream, uuid)
            while True:
                await _forward_some(staging, stream, sessions, uuid)
        except (StoreFailed, StoreFull) as error:
            _log.warning("stream %a waits to be forwarded to session %s: %s", stream, uuid, error)
            await trio.sleep(PAUSE)


async def _register(sessions: SessionStore[Any, Any], stream: str, uuid: str) -> None:
    try:
        await sessions.register(uuid, {FORWARDED: 0}, params={"stream": stream}, attached=False, keep=math.inf)
    except SessionExists as error:
        _log.debug("stream %a goes on behind message %d of session %s", stream, error.status.head, uuid)


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
                at = (await sessions.put_many(uuid, _following(published, uuid), last - at))[-1].id
                is_full = False
            except StoreFull:
                if is_full:  # though it is not the session
                    raise
                is_full = True
                await sessions.wait_room(uuid)
    except _Elsewhere:
        _log.warning("stream %a is forwarded to session %s by somebody else as well", stream, uuid)
    await staging.trim(stream, (await sessions.status(uuid)).head)


def _following(published: Published, uuid: str) -> Transform[object, object]:
    """The message behind those that the session has, whichever those are when it is made."""

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
    """The session is not where it was when the rows were read."""


def _message(encoding: Encoding, row: bytes) -> object:
    try:
        if encoding is Encoding.JSON:
            return _json.decode(row)
        if encoding is Encoding.TEXT:
            return row.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # it is not what its writer said: it goes on as the bytes that it is
    return {"base64": base64.b64encode(row).decode("ascii")}
