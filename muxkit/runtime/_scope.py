"""Nurseries for background tasks, and protection of the library's own code from KeyboardInterrupt.

Trio asks the interrupted stack, from the innermost frame outwards, whether its code is protected. It defers the
interrupt to the main task's next checkpoint if so. The mark belongs to the code object, so that a call costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from types import CellType, CodeType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, ParamSpec, TypeVar

import trio

from muxkit._errors import Refused
from muxkit.core import Reason
from muxkit.runtime._errors import LinkLost
from muxkit.runtime._links import ClosingNowait

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

FunctionT = TypeVar("FunctionT", bound="Callable[..., object]")

CLOSE_TIMEOUT = 1.0  # s, for a close that does not wait
LOSSES: Final = (trio.BrokenResourceError, trio.EndOfChannel)
"""Errors that say that a channel or its connection has ended; `LinkLost` is among them."""
_TASKS = CO_COROUTINE | CO_ASYNC_GENERATOR
_INTERRUPTIBLE: set[CodeType] = set()


def protect_package(name: str) -> None:
    """Defer interrupts in all functions of this module and of those below it that are loaded, in sub-packages as well.

    Call it behind the last import of the package. Compiled functions need no mark.
    """
    for module_name, module in [*sys.modules.items()]:
        if module_name == name or module_name.startswith(f"{name}."):
            for thing in [*vars(module).values()]:
                if getattr(thing, "__module__", None) == module_name:
                    for function in _functions(thing):
                        if function.__globals__ is vars(module):  # not what another package's decorator made of it
                            _protect(function.__code__)


def _protect(code: CodeType) -> None:
    if code not in _INTERRUPTIBLE:
        trio.lowlevel.enable_ki_protection(FunctionType(code, {}, closure=tuple(CellType() for _ in code.co_freevars)))
    for constant in code.co_consts:
        # A coroutine function that is defined inside may become a task, whose stack ends with it.
        if isinstance(constant, CodeType) and constant.co_flags & _TASKS:
            _protect(constant)


def _functions(thing: object) -> Iterator[FunctionType]:
    if isinstance(thing, type):
        for member in vars(thing).values():
            yield from _functions(member)
    elif isinstance(thing, (classmethod, staticmethod)):
        yield from _functions(thing.__func__)
    elif isinstance(thing, property):
        for accessor in (thing.fget, thing.fset, thing.fdel):
            yield from _functions(accessor)
    elif isinstance(thing, FunctionType):
        yield thing
        yield from _functions(getattr(thing, "__wrapped__", None))


def interruptible(function: FunctionT) -> FunctionT:
    """Let interrupts strike in this function: it runs code of the program, and no work of the library is half done."""
    _INTERRUPTIBLE.add(function.__code__)
    return trio.lowlevel.disable_ki_protection(function)


@interruptible
async def run_handler(handler: Callable[[T], Awaitable[R]], subject: T) -> R:
    """Call a handler, which is code of the program, and raise what its errors mean.

    An interrupt may strike inside the handler, although library code is below it on the stack. An exception group that
    stands for a single error is raised as that error: see `meaning_of`.
    """
    try:
        return await handler(subject)
    except BaseExceptionGroup as group:
        meaning = meaning_of(group)
        if meaning is group:
            raise
        _raise_bare(meaning)


async def close_at_once(resource: trio.abc.AsyncResource) -> None:
    """Close without waiting; an interrupt that is under way is not replaced by a cancellation from outside."""
    if isinstance(resource, ClosingNowait):
        resource.close_nowait()
        return
    with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
        await trio.aclose_forcefully(resource)


class NeedsBlock:
    """Explains to a beginner that an object is used with `async with`.

    Without it, Python's own errors would name a private class: "'_Manager' object can't be used in 'await' expression".
    A subclass has `_call`, the call that made the object, such as "connect(…)".
    """

    _call: str

    if not TYPE_CHECKING:  # type checkers find these mistakes by themselves

        def __await__(self) -> NoReturn:
            raise TypeError(self._explain("'await'"))

        def __enter__(self) -> NoReturn:
            raise TypeError(self._explain("'with'"))

        def __exit__(self, *_: object) -> None:
            """Exist, since Python looks for it before it calls `__enter__`."""

        def __aiter__(self) -> NoReturn:
            raise TypeError(self._explain("'async for'"))

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(self._explain(f".{name}"), name=name, obj=self)

    def _explain(self, got: str) -> str:
        return f"{self._call} is not open yet: expected 'async with {self._call} as ...:', got {got}"


class _Manager(NeedsBlock, AbstractAsyncContextManager[T]):
    """What `asynccontextmanager` makes, with no moment for an interrupt between its entrance and the block."""

    def __init__(self, manager: AbstractAsyncContextManager[T], call: str) -> None:
        self._manager = manager
        self._call = call

    async def __aenter__(self) -> T:
        if not trio.lowlevel.in_trio_task():
            raise RuntimeError(
                "muxkit runs on Trio: start the program with trio.run(main). "
                "In a program of asyncio, use muxkit.asyncio.connect or muxkit.asyncio.open_server"
            )
        return await self._manager.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._manager.__aexit__(kind, error, traceback)


def protected_manager(function: Callable[P, AsyncIterator[T]]) -> Callable[P, AbstractAsyncContextManager[T]]:
    """`asynccontextmanager` whose entrance and exit defer interrupts; its block does not."""
    make = asynccontextmanager(function)
    trio.lowlevel.enable_ki_protection(function)

    @wraps(function)
    def manager(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        return _Manager(make(*args, **kwargs), f"{function.__name__}(...)")

    return manager


def called(name: str, manager: AbstractAsyncContextManager[T]) -> AbstractAsyncContextManager[T]:
    """Return a manager whose errors name the public function that made it, not the one that is decorated."""
    if isinstance(manager, _Manager):
        manager._call = f"{name}(...)"
    return manager


@protected_manager
async def bare_nursery() -> AsyncGenerator[trio.Nursery, None]:
    """Open a nursery out of which an interrupt comes as it was, not in a group that the program did not make.

    Unless other errors came with it.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        _, rest = group.split((KeyboardInterrupt, trio.Cancelled))
        interrupt = next((leaf for leaf in leaves_of(group) if isinstance(leaf, KeyboardInterrupt)), None)
        if rest is not None or interrupt is None:
            raise
        _raise_bare(interrupt)


@protected_manager
async def background() -> AsyncGenerator[trio.Nursery, None]:
    """Open a nursery whose tasks end with the block, and which adds no exception group to what the block raises.

    Its tasks record expected failures instead of raising them, so one error comes out: the block's own, as it was
    raised, even if it is a group that the block made. If a single background task raises nevertheless (a bug of the
    library), that error comes out bare as well; only several at once come as a group. An interrupt from the keyboard
    comes out bare wherever it struck.
    """
    own: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except BaseException as raised:
                own = raised
                raise
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = _the_one(group, own)
        if error is None:
            raise
        _raise_bare(error)
    finally:
        del own


def _raise_bare(error: BaseException) -> NoReturn:
    """Raise an error that was in a group, which does not become the context of its own member."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context


def _the_one(group: BaseExceptionGroup[BaseException], own: BaseException | None) -> BaseException | None:
    """Return the error to raise instead of the group, None if it holds several; `own` is what the block raised."""
    told = set() if own is None else {id(leaf) for leaf in leaves_of(own)}
    strange = [leaf for leaf in leaves_of(group) if id(leaf) not in told and not isinstance(leaf, trio.Cancelled)]
    if not strange:
        return own or next(leaves_of(group))
    if len(strange) > 1:
        return None
    # An interrupt comes before the error that it caused in the block.
    is_the_reason = own is None or isinstance(own, trio.Cancelled) or not isinstance(strange[0], Exception)
    return strange[0] if is_the_reason else None


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the errors in a group and in the groups inside it; an error that is no group is the only one."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from leaves_of(member)
    else:
        yield error


def meaning_of(error: BaseException) -> BaseException:
    """Return the error that an exception group stands for, or the error itself if it isn't a group.

    A nursery wraps whatever its block or its tasks raise in a group, even a single error, and so does
    `asyncio.TaskGroup`. A handler that raises `Refused` inside a nursery means the refusal, and one whose sending and
    receiving tasks both notice the loss of the connection means that loss. We therefore read groups as follows, and
    ignore each `trio.Cancelled` in them, because its scope cancels the task again at the next checkpoint:

    - If the group holds refusals, or refusals and losses, it means its first `Refused`.
    - If it holds nothing but losses, it means one of them. The loss of the whole connection takes precedence.
    - Any other group means itself, without its cancellations. An interrupt stays where it is.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    _, rest = error.split(trio.Cancelled)
    if rest is None:
        return error
    leaves = [*leaves_of(rest)]
    refusals = [leaf for leaf in leaves if isinstance(leaf, Refused)]
    losses = [leaf for leaf in leaves if isinstance(leaf, LOSSES)]
    if len(refusals) + len(losses) == len(leaves):
        whole = [leaf for leaf in losses if isinstance(leaf, LinkLost)]
        return [*refusals, *whole, *losses][0]
    return rest if isinstance(rest, Exception) else error


def reason_for_leaving(error: BaseException, otherwise: Reason) -> Reason:
    """Return what to tell the peer when a session's block is left by this error: the text of a `Refused`, if it is one.

    All other errors give `otherwise`, since their text may hold payload.
    """
    meaning = meaning_of(error)
    return Reason(meaning.reason, meaning.code) if isinstance(meaning, Refused) else otherwise
