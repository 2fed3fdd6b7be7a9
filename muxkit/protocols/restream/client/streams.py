"""Streams as receive channels that reconnect, and the functions that open one: numbers, any messages, integers."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Any, Final, TypeVar, Unpack, cast, overload
from uuid import UUID

import msgspec
import trio

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, frames_of, tell_limit
from muxkit._options import DialOptions
from muxkit.core import without_secrets
from muxkit.protocols.restream.applications import MAX_COUNT, Unverified, Verifier
from muxkit.protocols.restream.client.driver import (
    IDLE_SILENCE,
    ClientDriver,
    ClientPolicy,
    OnFailed,
    Stop,
    StreamRefused,
)
from muxkit.protocols.restream.engine import (
    ClientConfig,
    ClientEngine,
    ClientEvent,
    Failed,
    Finished,
    HungUp,
    Mode,
    Received,
    ReceivedValue,
    Refused,
    Silent,
    StatusReceived,
)
from muxkit.protocols.restream.plugin import transport_of
from muxkit.protocols.restream.wire import (
    INLINE_DIGITS,
    ErrorCode,
    Json,
    JsonObject,
    Message,
    Status,
    new_uuid,
    parse_integer,
)
from muxkit.runtime import (
    Dial,
    Ended,
    LinkLost,
    Outage,
    OutageLog,
    background,
    called,
    home_thread,
    protect_package,
    protected_manager,
)
from muxkit.trace import traced

Item = Received | ReceivedValue | StatusReceived
ItemT = TypeVar("ItemT")
DataT = TypeVar("DataT")

LIVE: Final = ClientPolicy(silence=IDLE_SILENCE)
NO_CONNECTION: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class Reader(trio.abc.ReceiveChannel[ItemT]):
    """A stream as a receive channel over any number of connections; made by `numbers`, `stream`, `integers`.

    It reconnects without a limit: deadlines are the caller's, with `fail_after` or Trio's own. A cancelled `receive`
    has taken nothing. Several tasks may receive; each message goes to one of them.
    """

    def __init__(
        self,
        engine: ClientEngine,
        convert: Callable[[Item], ItemT],
        dial: Dial,
        *,
        policy: ClientPolicy,
        observer: Observer | None,
        on_failed: OnFailed | None,
        name: str = "restream",
    ) -> None:
        self._thread = home_thread()
        self._engine = engine
        self._convert = convert
        self._policy = policy
        self._outage_log = OutageLog(name)
        self._driver = ClientDriver(
            dial, _Task(self), policy, observer=observer, on_failed=on_failed or self._outage_log.failed
        )
        engine.frames_at_once = policy.ahead
        self._waiting: deque[Item] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()  # the driver, while `ahead` items wait
        self._taken = trio.lowlevel.ParkingLot()  # the task that acknowledges in time, while there is nothing to
        self.last_id: int = engine.last_id
        """The id of the last message that was received here; 0 before the first."""
        self._end: Callable[[], Exception] | None = trio.EndOfChannel if engine.over else None
        self._is_closed = False
        self._life = trio.CancelScope()
        self._ended = trio.Event()

    # --- for the application

    @property
    def connections(self) -> int:
        """The number of connections so far, with the present one."""
        return self._driver.connections

    @property
    def outage(self) -> Outage:
        """The recent failures to connect."""
        return self._driver.outage

    @property
    def uuid(self) -> str:
        """The uuid of the session; empty for a stateless stream."""
        return self._engine.uuid

    @property
    def acknowledged(self) -> int:
        """The id up to which messages are acknowledged."""
        return self._engine.acknowledged

    @property
    def is_connected(self) -> bool:
        """True while there is a connection."""
        return self._driver.is_connected

    async def receive(self) -> ItemT:
        """Return the next item, in order; each once.

        Raises `trio.EndOfChannel` after the last one, when everything is verified; `StreamRefused` when the server
        sends an error that is final, `RemoteProtocolError` when it breaks a rule or the check, `LinkLost` when there
        can be no connection at all: each only after all items that came before it were received.

        An error of the server whose code is `ErrorCode.UNAVAILABLE` passes. It counts as a failed attempt to connect:
        the stream is resumed after a pause.
        """
        self._thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        was_there = bool(self._waiting)
        while self._is_closed or not self._waiting:
            if self._is_closed:
                raise trio.ClosedResourceError("this stream was closed")
            if self._end is not None:
                raise self._end()
            await self._arrived.park()
        item = self._take()
        if was_there:
            await trio.lowlevel.cancel_shielded_checkpoint()
        if isinstance(item, ReceivedValue) and len(item.value) > INLINE_DIGITS:
            with trio.CancelScope(shield=True):  # the item is taken, and this is bounded work
                return await trio.to_thread.run_sync(self._convert, item)
        return self._convert(item)

    def snapshot(self) -> dict[str, Json]:
        """Return the position of the stream as JSON, for `resume=` in another process.

        A server deletes what was acknowledged: to be able to restore, use `ClientConfig(ack_every=None)` and call
        `acknowledge` after saving.
        """
        return self._engine.snapshot()

    def acknowledge(self, id: int | None = None) -> None:
        """Let the server delete all messages up to this id, or all that were received here; does not wait."""
        self._thread.check()
        if id is None:
            if self._engine.mode is Mode.STATEFUL and self.last_id <= self._engine.acknowledged:
                return
            id = self.last_id
        self._engine.acknowledge(id)
        self._driver.ring()

    def fail_after(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """`trio.fail_after`, but its TooSlowError has the last failure to connect as its cause."""
        return self.outage.fail_after(seconds)

    async def aclose(self) -> None:
        """Write the acknowledgement that is owed and close, in at most `ClientPolicy.linger` seconds."""
        self._thread.check()
        self._is_closed = True
        self._arrived.unpark_all()
        try:
            if self._engine.config.ack_every is not None and self._engine.mode is Mode.STATEFUL:
                self.acknowledge()
            if self._driver.is_connected:
                self._driver.leave()
            elif not self._driver.is_done:
                self._life.cancel()
            with trio.move_on_after(self._policy.linger):
                await self._ended.wait()
        finally:
            self._life.cancel()

    # --- tasks, started by the context manager that makes it

    async def _run(self) -> None:
        """Connect again and again."""
        try:
            with self._life:
                if not self._engine.over:
                    await self._driver.run()
        except NO_CONNECTION as error:  # one that another attempt cannot repair
            self._stop(partial(_no_connection, error))
        finally:
            self._ended.set()

    async def _acknowledge_in_time(self) -> None:
        """Acknowledge received messages `ack_after` seconds later, also while nothing more comes."""
        after, every = self._policy.ack_after, self._engine.config.ack_every
        if after is None or every is None or self._engine.mode is not Mode.STATEFUL:
            return
        told = self.last_id
        while True:
            while self.last_id == told:
                await self._taken.park()
            await trio.sleep(after)
            told = self.last_id
            if not self._engine.over:
                self.acknowledge()

    # --- inside

    async def _hear(self, events: Sequence[ClientEvent]) -> Ended | Exception | None:
        """Handle what the driver brings; the driver reads nothing meanwhile."""
        failed: StreamRefused | None = None
        for event in events:
            match event:
                case Received() | ReceivedValue() | StatusReceived():
                    self._waiting.append(event)
                    self._outage_log.over()
                case Refused(text, code=ErrorCode.UNAVAILABLE):
                    failed = StreamRefused(text, peer=self._driver.peer, code=ErrorCode.UNAVAILABLE)
                case Refused(text, code):
                    self._stop(partial(StreamRefused, text, peer=self._driver.peer, code=code))
                case Failed(error):
                    tell_limit(self._driver.facts, error)
                    self._stop(partial(_copy_of, error))
                case Finished():
                    self._stop(trio.EndOfChannel)
                case HungUp() | Silent():
                    pass  # the connection is lost next
        self._arrived.unpark_all()
        if self._engine.over:
            return Ended.DONE
        if failed is not None:
            return failed  # the driver connects again after a pause
        while len(self._waiting) >= self._policy.ahead:
            await self._room.park()
        return None

    def _take(self) -> Item:
        item = self._waiting.popleft()
        if not isinstance(item, StatusReceived):
            self._engine.taken(item)
        if isinstance(item, Received):
            self.last_id = item.id
            self._taken.unpark_all()
        if self._room and len(self._waiting) < self._policy.ahead:
            self._room.unpark_all()
        if self._engine.has_output():
            self._driver.ring()
        return item

    def _stop(self, end: Callable[[], Exception]) -> None:
        """Nothing more will come; the first reason counts."""
        if self._end is None:
            self._end = end
        self._arrived.unpark_all()


class _Task:
    """What the driver of a reader works for, so that the reader itself shows only what applications call."""

    def __init__(self, reader: Reader[Any]) -> None:
        self._reader = reader

    def engine(self) -> ClientEngine:
        return self._reader._engine

    async def take(self, events: Sequence[ClientEvent]) -> Ended | Exception | None:
        return await self._reader._hear(events)

    def stopped(self, stop: Stop) -> bool:
        return False  # a connection is no reason to end: the engine knows when all has come


def _copy_of(error: RemoteProtocolError) -> RemoteProtocolError:
    """Return an equal error for another task: one exception raised in two would mix their tracebacks."""
    return RemoteProtocolError(error.message, rule=error.rule, offset=error.offset, limit=error.limit)


def _no_connection(cause: Exception) -> LinkLost:
    error = LinkLost(f"there can be no connection: {cause}", by="network", phase="connect")
    error.__cause__ = cause
    return error


# ---------------------------------------------------------------------------- the functions that open a stream


def numbers(
    where: str | Dial,
    *,
    count: int | None = None,
    uuid: str | UUID | None = None,
    resume: JsonObject | None = None,
    config: ClientConfig | None = None,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Unpack[DialOptions],
) -> AbstractAsyncContextManager[Reader[int]]:
    """Read `count` numbers from the server at `where`; after the last one their CRC and count are verified.

    `where` is a URL, `restream+tcp://127.0.0.1:7000`, or a function that dials. Entering does not wait for a
    connection; the stream ends with the block. `resume` is the result of `snapshot`, instead of `count`. Failed
    attempts are logged: the first and each doubling of the outage is a WARNING; `on_failed`, if it is given, gets the
    error of each and the seconds until the next instead. The other options are those of
    `DialOptions`, for the transport.
    """
    observer = traced(observer, "client restream")
    if resume is not None:
        if count is not None or uuid is not None:
            raise ValueError("a stream that is resumed has its count and uuid already")
        engine = ClientEngine.restore(resume, config=config, limits=limits, observer=frames_of(observer))
        _check_mode(engine, Mode.STATEFUL)
    elif count is None:
        raise ValueError("numbers(...) needs a count, or resume=")
    elif not 1 <= count <= MAX_COUNT:
        raise ValueError(f"count={count}: must be from 1 to {MAX_COUNT}")
    else:
        engine = ClientEngine.stateful(
            uuid or new_uuid(), {"count": count}, config=config, limits=limits, observer=frames_of(observer)
        )
    return called(
        "numbers",
        _reading(engine, _as_number, dial_of(where, options), policy or ClientPolicy(), observer, on_failed, where),
    )


@overload
def stream(
    where: str | Dial,
    params: JsonObject | None = None,
    *,
    type: None = None,
    uuid: str | UUID | None = None,
    final_key: str | None = None,
    verifier: Verifier | None = None,
    resume: JsonObject | None = None,
    config: ClientConfig | None = None,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Unpack[DialOptions],
) -> AbstractAsyncContextManager[Reader[Message[Json]]]: ...
@overload
def stream(
    where: str | Dial,
    params: JsonObject | None = None,
    *,
    type: type[DataT],
    uuid: str | UUID | None = None,
    final_key: str | None = None,
    verifier: Verifier | None = None,
    resume: JsonObject | None = None,
    config: ClientConfig | None = None,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Unpack[DialOptions],
) -> AbstractAsyncContextManager[Reader[Message[DataT]]]: ...
def stream(
    where: str | Dial,
    params: JsonObject | None = None,
    *,
    type: type[DataT] | None = None,
    uuid: str | UUID | None = None,
    final_key: str | None = None,
    verifier: Verifier | None = None,
    resume: JsonObject | None = None,
    config: ClientConfig | None = None,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Unpack[DialOptions],
) -> AbstractAsyncContextManager[Reader[Message[Json]]] | AbstractAsyncContextManager[Reader[Message[DataT]]]:
    """Read the messages of a session of any application, with `id`, `data` and perhaps `time`.

    With `params` it is a new session; with only `uuid` an existing one, from its first message on; with `resume` it
    continues after a `snapshot`. Data with the key `final_key` is the last; without it the stream has no end. A
    `verifier` checks the data and knows which is final. The other arguments are those of `numbers`, except that the
    default policy allows a silence of 300 s, since a live stream may be idle.

    With `type`, the data of each message is converted to that type by msgspec: a `msgspec.Struct`, a dataclass, a
    `TypedDict`, or a built-in type. `receive` raises `msgspec.ValidationError` for data of another shape, with the id
    of the message and the place in it. That message counts as received, and the next call goes on after it.
    """
    if verifier is not None and final_key is not None:
        raise ValueError("a verifier knows by itself what is final: there can be no final_key beside it")
    checks = verifier or Unverified(final_key)
    observer = traced(observer, "client restream")
    if resume is not None:
        if params is not None or uuid is not None:
            raise ValueError("a stream that is resumed has its params and uuid already")
        engine = ClientEngine.restore(
            resume, verifier=checks, config=config, limits=limits, observer=frames_of(observer)
        )
        _check_mode(engine, Mode.STATEFUL)
    elif params is None and uuid is None:
        raise ValueError("stream(...) needs params for a new session, the uuid of one, or resume=")
    else:
        engine = ClientEngine.stateful(
            uuid or new_uuid(), params, verifier=checks, config=config, limits=limits, observer=frames_of(observer)
        )
    dial, policy = dial_of(where, options), policy or LIVE
    if type is None:
        return called("stream", _reading(engine, _as_message, dial, policy, observer, on_failed, where))
    return called("stream", _reading(engine, partial(_as_message_of, type), dial, policy, observer, on_failed, where))


def integers(
    where: str | Dial,
    *,
    resume: JsonObject | None = None,
    config: ClientConfig | None = None,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Unpack[DialOptions],
) -> AbstractAsyncContextManager[Reader[int]]:
    """Read a stateless stream, which has no end. The arguments are those of `numbers`.

    After a reconnect any server continues after the last integer that came.
    """
    observer = traced(observer, "client restream")
    if resume is not None:
        engine = ClientEngine.restore(resume, config=config, limits=limits, observer=frames_of(observer))
        _check_mode(engine, Mode.STATELESS)
    else:
        engine = ClientEngine.stateless(config=config, limits=limits, observer=frames_of(observer))
    return called(
        "integers",
        _reading(engine, _as_integer, dial_of(where, options), policy or ClientPolicy(), observer, on_failed, where),
    )


async def status(
    where: str | Dial,
    uuid: str | UUID,
    *,
    policy: ClientPolicy | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    on_failed: OnFailed | None = None,
    **options: Unpack[DialOptions],
) -> Status:
    """Return the progress of a session.

    This extends the specification: a server without `ServerConfig(status=True)` refuses it with `StreamRefused`.
    """
    observer = traced(observer, "client restream")
    engine = ClientEngine.status(uuid, limits=limits, observer=frames_of(observer))
    dial = dial_of(where, options)
    async with _reading(engine, _as_status, dial, policy or ClientPolicy(), observer, on_failed, where) as reader:
        return await reader.receive()


@protected_manager
async def _reading(
    engine: ClientEngine,
    convert: Callable[[Item], ItemT],
    dial: Dial,
    policy: ClientPolicy,
    observer: Observer | None,
    on_failed: OnFailed | None,
    where: str | Dial,
) -> AsyncGenerator[Reader[ItemT], None]:
    name = without_secrets(where) if isinstance(where, str) else "restream"
    reader = Reader(engine, convert, dial, policy=policy, observer=observer, on_failed=on_failed, name=name)
    async with background() as nursery:
        nursery.start_soon(reader._run)
        nursery.start_soon(reader._acknowledge_in_time)
        try:
            yield reader
        except trio.TooSlowError as error:
            # A deadline of Trio's own does not know why there was no message.
            if reader.outage.last is not None and error.__cause__ is None:
                error.add_note(f"restream: there was no connection: {reader.outage.last}")
            raise
        await reader.aclose()


def dial_of(where: str | Dial, options: Mapping[str, Any]) -> Dial:
    """Return a function that dials `where`. Raises ValueError for an invalid URL, `PluginError` for its transport."""
    if not isinstance(where, str):
        if options:
            raise TypeError(f"a dial function takes no options of a transport: {', '.join(options)}")
        return where
    transport, address = transport_of(where, "client", options)

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


def _as_message_of(kind: type[DataT], item: Item) -> Message[DataT]:
    assert isinstance(item, Received)
    try:
        data = msgspec.convert(item.data, kind)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"message {item.id} is not a {kind.__name__}: {error}") from None
    return Message(item.id, data, item.time)


def _as_integer(item: Item) -> int:
    assert isinstance(item, ReceivedValue)
    return parse_integer(item.value)


def _as_status(item: Item) -> Status:
    assert isinstance(item, StatusReceived)
    assert item.status is not None  # the request is for one session
    return item.status


protect_package("muxkit.protocols.restream")
