"""Where a KeyboardInterrupt may strike: in the program's own code and at checkpoints, never inside of the library.

Trio asks the interrupted stack, from the innermost frame outwards, whether its code is protected. It defers the
interrupt to the main task's next checkpoint if so. The mark belongs to the code object, so that a call costs nothing.
"""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

FunctionT = TypeVar("FunctionT", bound="Callable[..., object]")

CLOSE_TIMEOUT = 1.0  # s, for a close that does not wait
_TASKS = CO_COROUTINE | CO_ASYNC_GENERATOR
_INTERRUPTIBLE: set[CodeType] = set()


def protect_package(name: str) -> None:
    """Defer interrupts in all functions of the modules below this name that are loaded; compiled ones need no mark."""
    for module_name, module in [*sys.modules.items()]:
        if module_name == name or module_name.startswith(f"{name}."):
            for thing in [*vars(module).values()]:
                if getattr(thing, "__module__", None) == module_name:
                    for function in _functions(thing):
                        if function.__globals__ is vars(module):  # not what a decorator of others made of it
                            _protect(function.__code__)


def _protect(code: CodeType) -> None:
    if code not in _INTERRUPTIBLE:
        trio.lowlevel.enable_ki_protection(FunctionType(code, {}, closure=tuple(CellType() for _ in code.co_freevars)))
    for constant in code.co_consts:
        # A coroutine that is defined inside may become a task, whose stack ends with itself.
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
    """Let interrupts strike in this function: it runs code of the program, and nothing of ours can be half done."""
    _INTERRUPTIBLE.add(function.__code__)
    return trio.lowlevel.disable_ki_protection(function)


@interruptible
async def run_interruptible(handler: Callable[[T], Awaitable[R]], subject: T) -> R:
    """Call a function of the program: an interrupt may strike there, although code of ours is on the stack below."""
    return await handler(subject)


async def close_at_once(resource: trio.abc.AsyncResource) -> None:
    """Close without waiting; a cancellation from outside does not take the place of an interrupt that is under way."""
    with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
        await trio.aclose_forcefully(resource)


class _Manager(AbstractAsyncContextManager[T]):
    """What `asynccontextmanager` makes, without a moment between its entrance and the block."""

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager

    async def __aenter__(self) -> T:
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
        return _Manager(make(*args, **kwargs))

    return manager


@protected_manager
async def bare_nursery() -> AsyncGenerator[trio.Nursery, None]:
    """A nursery out of which an interrupt comes as it was, not as a group that the program did not make."""
    with _BareInterrupt():
        async with trio.open_nursery() as nursery:
            yield nursery


class _BareInterrupt:
    """Raise an interrupt that a nursery of ours wrapped as it was, unless other errors came with it."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, BaseExceptionGroup):
            _, rest = error.split((KeyboardInterrupt, trio.Cancelled))
            interrupt = _first_interrupt(error)
            if rest is None and interrupt is not None:
                context = interrupt.__context__
                try:
                    raise interrupt
                finally:
                    interrupt.__context__ = context
                    del interrupt, context, error


def _first_interrupt(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        found = (_first_interrupt(member) for member in error.exceptions)
        return next((interrupt for interrupt in found if interrupt is not None), None)
    return error if isinstance(error, KeyboardInterrupt) else None


protect_package(__name__)
