"""The functions that read restream as receive channels: numbers, messages of any application, plain integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import trio

from muxkit._errors import LocalProtocolError
from muxkit.protocols.restream.applications import MAX_COUNT, Unverified
from muxkit.protocols.restream.client.driver import IDLE_SILENCE, ClientPolicy
from muxkit.protocols.restream.client.reader import Reader
from muxkit.protocols.restream.engine import ClientEngine, Mode, Received, ReceivedValue, StatusReceived
from muxkit.protocols.restream.plugin import transport_of
from muxkit.protocols.restream.store import Message
from muxkit.protocols.restream.wire import new_uuid, parse_integer
from muxkit.runtime import background, protect_package, protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.restream.applications import Verifier
    from muxkit.protocols.restream.client.driver import OnFailed
    from muxkit.protocols.restream.client.reader import Item
    from muxkit.protocols.restream.engine import ClientConfig
    from muxkit.protocols.restream.wire import Json, JsonObject, Status
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
    """Read `count` numbers from the server at `where`; after the last one their CRC and count are verified.

    `where` is a URL, `restream+tcp://127.0.0.1:7000`, or a function that dials. Entering does not wait for a
    connection; the stream ends with the block. `resume` is the result of `snapshot`, instead of `count`. `on_failed`
    gets the error of each failed attempt and the seconds until the next. Other keyword arguments are options of the
    transport.
    """
    if resume is not None:
        if count is not None or uuid is not None:
            raise ValueError("a stream that is resumed has its count and uuid already")
        engine = ClientEngine.restore(resume, config=config, limits=limits, observer=observer)
        _check_mode(engine, Mode.STATEFUL)
    elif count is None:
        raise ValueError("numbers(...) needs a count, or resume=")
    elif not 1 <= count <= MAX_COUNT:
        raise ValueError(f"count={count}: must be from 1 to {MAX_COUNT}")
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
    """Read the messages of a session of any application, with `id`, `data` and perhaps `time`.

    With `params` it is a new session; with only `uuid` an existing one, from its first message on; with `resume` it
    continues after a `snapshot`. Data with the key `final_key` is the last; without it the stream has no end. A
    `verifier` checks the data and knows which is final. The other arguments are those of `numbers`, except that the
    default policy allows a silence of 300 s, since a live stream may be idle.
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
    """Read a stateless stream, which has no end. The arguments are those of `numbers`.

    After a reconnect any server continues after the last integer that came.
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
    """Return the progress of a session.

    This extends the specification: a server without `ServerConfig(status=True)` refuses it with `StreamRefused`.
    """
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
            # A deadline of Trio's own does not know why there was no message.
            if reader.outage.last is not None and error.__cause__ is None:
                error.add_note(f"restream: there was no connection: {reader.outage.last}")
            raise
        await reader.aclose()


def dial_of(where: str | Dial, options: dict[str, Any]) -> Dial:
    """Return a function that dials `where`. Raises ValueError for an invalid URL, `PluginError` for its transport."""
    if not isinstance(where, str):
        if options:
            raise TypeError(f"a dial function takes no options of a transport: {', '.join(options)}")
        return where
    transport, address = transport_of(where)

    def dial() -> AbstractAsyncContextManager[trio.abc.Stream]:
        return transport.connect(address, **options)

    return dial


def _check_mode(engine: ClientEngine, mode: Mode) -> None:
    if engine.mode is not mode:
        raise LocalProtocolError(f"the saved state is of a {engine.mode.value} stream, not of a {mode.value} one")


# How an event becomes an item of the channel; the engine has checked the types.


def _as_number(item: Item) -> int:
    assert isinstance(item, Received)
    return cast("dict[str, int]", item.data)["value"]  # the verifier has checked it


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
