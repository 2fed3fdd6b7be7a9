"""How does a program read restream? As receive channels that dial again: numbers, other messages, plain integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import trio

from muxkit._errors import LocalProtocolError
from muxkit.protocols.restream.applications import MOST_COUNT
from muxkit.protocols.restream.client.dial import dial_of
from muxkit.protocols.restream.client.policy import IDLE_SILENCE, ClientPolicy
from muxkit.protocols.restream.client.reader import Reader
from muxkit.protocols.restream.engine.client import ClientEngine
from muxkit.protocols.restream.engine.events import Received, ReceivedValue, StatusReceived
from muxkit.protocols.restream.engine.snapshot import Mode
from muxkit.protocols.restream.store.protocol import Message
from muxkit.protocols.restream.verifiers import Unverified
from muxkit.protocols.restream.wire.integers import parse_integer
from muxkit.protocols.restream.wire.messages import new_uuid
from muxkit.runtime import background, protect_package, protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.restream.client.reader import Item, OnFailed
    from muxkit.protocols.restream.engine.config import ClientConfig
    from muxkit.protocols.restream.verifiers import Verifier
    from muxkit.protocols.restream.wire.json import Json, JsonObject
    from muxkit.protocols.restream.wire.messages import Status
    from muxkit.runtime import Dial

ItemT = TypeVar("ItemT")

LIVE: Final = ClientPolicy(silence=IDLE_SILENCE)


def numbers(
    where: str | Dial,
    *,
    count: int | None = None,
    uuid: str | None = None,
    resume: JsonObject | None = None,
    config: ClientConfig | None = None,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[Reader[int]]:
    """`count` numbers from the server at `where`; behind the last one their CRC and count are verified.

    `where` is a URL, `restream+tcp://127.0.0.1:7000`, or a function that dials. Entering waits for nobody; the stream
    ends with the block. `resume` is what `snapshot` gave, instead of `count`. `on_failed` is told of each attempt that
    failed, and of the seconds until the next. Other keyword arguments are options of the transport.
    """
    if resume is not None:
        if count is not None or uuid is not None:
            raise ValueError("a stream that is resumed has its count and uuid already")
        engine = ClientEngine.restore(resume, config=config, limits=limits, observer=observer)
        _check_mode(engine, Mode.STATEFUL)
    elif count is None:
        raise ValueError("numbers(...) needs a count, or resume=")
    elif not 1 <= count <= MOST_COUNT:
        raise ValueError(f"count={count}: must be from 1 to {MOST_COUNT}")
    else:
        engine = ClientEngine.stateful(
            uuid or new_uuid(), {"count": count}, config=config, limits=limits, observer=observer
        )
    return _reading(engine, _as_number, dial_of(where, options), policy or ClientPolicy(), observer, on_failed)


def stream(
    where: str | Dial,
    params: JsonObject | None = None,
    *,
    uuid: str | None = None,
    final_key: str | None = None,
    verifier: Verifier | None = None,
    resume: JsonObject | None = None,
    config: ClientConfig | None = None,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[Reader[Message[Json]]]:
    """The messages of a session of any application, with `id`, `data` and perhaps `time`.

    A new session with `params`; or the one that has this `uuid`, from its first message on; or, with `resume`, where
    `snapshot` left off. Data with `final_key` is the last, without one the stream has no end. A `verifier` says both
    what is right and what is final. The other arguments are those of `numbers`; a silence of 300 s is borne, since a
    live stream may have nothing to say.
    """
    if verifier is not None and final_key is not None:
        raise ValueError("a verifier knows by itself what is final: there can be no final_key beside it")
    checks = verifier or Unverified(final_key)
    if resume is not None:
        if params is not None or uuid is not None:
            raise ValueError("a stream that is resumed has its params and uuid already")
        engine = ClientEngine.restore(resume, verifier=checks, config=config, limits=limits, observer=observer)
        _check_mode(engine, Mode.STATEFUL)
    elif params is None and uuid is None:
        raise ValueError("stream(...) needs params for a new session, the uuid of one, or resume=")
    else:
        engine = ClientEngine.stateful(
            uuid or new_uuid(), params, verifier=checks, config=config, limits=limits, observer=observer
        )
    return _reading(engine, _as_message, dial_of(where, options), policy or LIVE, observer, on_failed)


def integers(
    where: str | Dial,
    *,
    resume: JsonObject | None = None,
    config: ClientConfig | None = None,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[Reader[int]]:
    """A stateless stream, which has no end: leave the block when you have enough. The arguments are those of `numbers`.

    The server goes on after the last integer that came, whichever server it is.
    """
    if resume is not None:
        engine = ClientEngine.restore(resume, config=config, limits=limits, observer=observer)
        _check_mode(engine, Mode.STATELESS)
    else:
        engine = ClientEngine.stateless(config=config, limits=limits, observer=observer)
    return _reading(engine, _as_integer, dial_of(where, options), policy or ClientPolicy(), observer, on_failed)


async def status(
    where: str | Dial,
    uuid: str,
    *,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Any,
) -> Status:
    """How a session stands. An addition of ours: `StreamRefused` by a server without `ServerConfig(status=True)`."""
    engine = ClientEngine.status(uuid, limits=limits, observer=observer)
    dial = dial_of(where, options)
    async with _reading(engine, _as_status, dial, policy or ClientPolicy(), observer, on_failed) as reader:
        return await reader.receive()


@protected_manager
async def _reading(
    engine: ClientEngine,
    convert: Callable[[Item], ItemT],
    dial: Dial,
    policy: ClientPolicy,
    observer: Observer | None,
    on_failed: OnFailed | None,
) -> AsyncGenerator[Reader[ItemT], None]:
    reader = Reader(engine, convert, dial, policy=policy, observer=observer, on_failed=on_failed)
    async with background() as nursery:
        nursery.start_soon(reader.run)
        nursery.start_soon(reader.acknowledge_in_time)
        try:
            yield reader
        except trio.TooSlowError as error:
            # A deadline of Trio's own cannot know what was waited for.
            if reader.outage.last is not None and error.__cause__ is None:
                error.add_note(f"restream: there was no connection: {reader.outage.last}")
            raise
        await reader.aclose()


def _check_mode(engine: ClientEngine, mode: Mode) -> None:
    if engine.mode is not mode:
        raise LocalProtocolError(f"the saved state is of a {engine.mode.value} stream, not of a {mode.value} one")


# What an application gets of what came; the engine has made sure of the types.


def _as_number(item: Item) -> int:
    assert isinstance(item, Received)
    return cast("dict[str, int]", item.data)["value"]  # the verifier has looked at it


def _as_message(item: Item) -> Message[Json]:
    assert isinstance(item, Received)
    return Message(item.id, item.data, item.time)


def _as_integer(item: Item) -> int:
    assert isinstance(item, ReceivedValue)
    return parse_integer(item.value)


def _as_status(item: Item) -> Status:
    assert isinstance(item, StatusReceived)
    return item.status


protect_package("muxkit.protocols.restream")
