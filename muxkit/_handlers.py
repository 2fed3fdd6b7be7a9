"""Handlers: from a function for one channel to a handler of sessions, and how their failures are logged."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias, cast, get_type_hints

import trio

from muxkit._errors import Refused
from muxkit.runtime import (
    Channel,
    LinkLost,
    Session,
    SlotQueue,
    bare_nursery,
    interruptible,
    leaves_of,
    protect_package,
)

SessionHandler: TypeAlias = "Callable[[Session], Awaitable[object]]"
ChannelHandler: TypeAlias = "Callable[[Channel], Awaitable[object]]"

HANDLER_FAILED = 500  # the code of a channel whose handler raised
UNKNOWN_NAME = 404  # the code of a channel that was refused because no handler has its name

_log = logging.getLogger("muxkit")


def each_channel(handler: ChannelHandler, *, max_concurrent: int | None = None) -> SessionHandler:
    """Make a session handler that calls `handler` with each channel that the peer opens, concurrently.

    At most `max_concurrent` handlers run at the same time in one session, by default its `Limits.channels`: work that
    goes on after its channel is gone still counts, or a peer could start it without bound. A channel is closed when
    its handler returns. `Refused` aborts it with that reason. What else a handler raises aborts its own channel and is
    logged, except when the peer ended the channel or the connection was lost.
    """

    async def handle_session(session: Session) -> None:
        running: set[Channel] = set()
        bound = max_concurrent or session.limits.channels
        slots = SlotQueue(lambda: bound - len(running))
        async with bare_nursery() as nursery:
            try:
                async for channel in session.incoming():
                    running.add(channel)
                    nursery.start_soon(handle_channel, channel, running, slots)
                    await slots.wait_for_slot()  # before the next channel is taken, which must not wait for a handler
            except LinkLost as error:
                _log.debug("session lost: %s", error)

    @interruptible
    async def handle_channel(channel: Channel, running: set[Channel], slots: SlotQueue) -> None:
        try:
            await handler(channel)
        except Refused as error:
            channel.abort(error.reason, code=error.code)
            _log.info("a channel was refused: %s", error, extra=_fields(channel))
        except Exception as error:
            if is_loss(error, of_channel=True):
                channel.abort()
                _log.debug("the peer ended a channel before its handler was done: %s", error, extra=_fields(channel))
            else:
                channel.abort("the handler of this channel failed", code=HANDLER_FAILED)
                log_failure("the handler of a channel failed, the channel was aborted", error, _fields(channel))
        except BaseException:
            channel.abort()
            raise
        else:
            await channel.aclose()
        finally:
            running.discard(channel)
            slots.wake_waiters()

    return handle_session


def by_name(handlers: Mapping[str, ChannelHandler], *, max_concurrent: int | None = None) -> SessionHandler:
    """Make a session handler that calls the handler with the name that the peer opened a channel for.

    A channel with another name is aborted with a reason that says which names there are.
    """
    known = dict(handlers)

    async def handle_channel(channel: Channel) -> None:
        handler = known.get(channel.name)
        if handler is None:
            channel.abort(_unknown(channel.name, [*known]), code=UNKNOWN_NAME)
        else:
            await handler(channel)

    return each_channel(handle_channel, max_concurrent=max_concurrent)


def session_handler(handler: SessionHandler | ChannelHandler) -> SessionHandler:
    """Return a handler of sessions; a function whose parameter is a channel is called for each channel."""
    if takes_channel(handler, trio.abc.Channel):
        return each_channel(cast("ChannelHandler", handler))
    return cast("SessionHandler", handler)


def is_loss(error: BaseException, *, of_channel: bool = False) -> bool:
    """Return True for nothing but lost links, or ended channels as well, in the groups of a handler's nurseries too."""
    expected = (trio.BrokenResourceError, trio.EndOfChannel) if of_channel else (LinkLost,)
    return all(isinstance(leaf, expected) for leaf in leaves_of(error))


def log_failure(what: str, error: Exception, fields: Mapping[str, object]) -> None:
    """Log what a handler raised: its type and traceback, but not its text, which may quote what a peer sent."""
    _log.error("%s: %s", what, _where(error), extra=fields)
    _log.debug("in full", exc_info=error, extra=fields)


def _fields(channel: Channel) -> dict[str, object]:
    return {"peer": channel.session.info.peer, "channel": channel.name}


def takes_channel(handler: Callable[..., Any], kind: type) -> bool:
    """Return True if the first parameter is annotated as a `kind`, or is named `channel` and not annotated."""
    try:
        first = next(iter(inspect.signature(handler).parameters.values()))
    except (ValueError, TypeError, StopIteration):
        return False
    if first.annotation is inspect.Parameter.empty:
        return first.name == "channel"
    if not isinstance(first.annotation, str):
        return _is_kind(first.annotation, kind)
    try:
        return _is_kind(get_type_hints(inspect.unwrap(handler))[first.name], kind)
    except Exception:  # a name that only type checkers import
        return first.annotation.rpartition(".")[2] in ("Channel", "Duplex")


def _is_kind(annotation: object, kind: type) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, kind)


def _unknown(name: str, known: list[str]) -> str:
    said, listed = f"no channel is named {name[:64]!r} here", ", ".join(sorted(known))
    close = get_close_matches(name, known, 1)
    if close:
        return f"{said}; did you mean {close[0]!r}? There are: {listed}"
    return f"{said}; there are: {listed}" if known else f"{said}; there are none"


def _where(error: BaseException) -> str:
    way = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    inner = [_where(member) for member in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    if isinstance(error, AttributeError) and isinstance(error.obj, Session):  # a text of muxkit's, without payload
        told = str(error)
    else:
        told = "its text is left out, it may hold payload; set the logger 'muxkit' to DEBUG to see it"
    return "\n".join([f"{type(error).__name__} ({told})", way, *inner])


protect_package(__name__)
