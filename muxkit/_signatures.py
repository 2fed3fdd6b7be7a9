"""The rule for handlers: what a server accepts as one, and whether it is called with channels or with sessions.

A handler is an async function with one parameter. It is called with each channel, unless its parameter is annotated as
a session: then it is called with each session. Every function that takes a handler applies this rule before it listens,
so that a mistake is a `TypeError` in the line that made it and not a failure with the first client.

Methods, callable objects, `functools.partial` objects and decorated functions count as what they call in the end. A
lambda is never async, and nobody can know what it returns before it is called, so it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, Literal, get_origin, get_type_hints

Kind = Literal["channel", "session"]

NAMES: dict[str, Kind] = {"Channel": "channel", "Duplex": "channel", "Session": "session"}
"""What annotations stand for whose names can't be resolved, because only type checkers import them."""


def kind_of(handler: Callable[..., Any], *, channel: type, session: type, module: str = "muxkit") -> Kind:
    """Return what a handler is called with.

    Args:
        handler: What the program gave as a handler.
        channel: The class, or a base class, of the channels that the server has.
        session: The class of its sessions.
        module: The module from which users import both, for the error.

    Raises:
        TypeError: It isn't an async function of one parameter, or the annotation is neither of the two classes.
    """
    parameter = check_handler(handler)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return "channel"
    expected = f"expected {module}.Channel (or no annotation) for a handler of channels, {module}.Session for sessions"
    annotation = _resolved(handler, parameter)
    if isinstance(annotation, str):
        known = NAMES.get(annotation.rpartition(".")[2])
        if known is None:
            raise TypeError(
                f"invalid handler {_name(handler)}: the annotation {annotation!r} of its parameter "
                f"{parameter.name!r} can't be resolved, {expected}. Import the class outside of `if TYPE_CHECKING:`"
            )
        return known
    bare = getattr(annotation, "__bound__", None) or get_origin(annotation) or annotation
    if isinstance(bare, type):
        if issubclass(bare, session):
            return "session"
        if issubclass(bare, channel):
            return "channel"
    raise TypeError(
        f"invalid handler {_name(handler)}: {expected}, got the annotation {_shown(annotation)} "
        f"of its parameter {parameter.name!r}"
    )


def check_handler(handler: Callable[..., Any]) -> inspect.Parameter | None:
    """Check that a handler is async and can be called with one argument; return the parameter that gets it.

    None stands for a callable whose signature Python doesn't know. Raises TypeError with what to write instead.
    """
    given: object = handler  # by programs that no type checker has seen
    if isinstance(given, Coroutine):
        given.close()  # or Python would warn that it was never awaited
        raise TypeError("invalid handler: expected an async function, got a coroutine. Pass the function, uncalled")
    if isinstance(given, type):
        raise TypeError(
            f"invalid handler {_name(handler)}: expected an async function, got a class. "
            "Pass an instance whose __call__ is async, or one of its methods"
        )
    if not callable(given):
        raise TypeError(
            f"invalid handler: expected an async function, got {type(given).__name__!r}. "
            "The handler is the first argument, and the URL the second"
        )
    if not _is_async(handler):
        if any(inspect.isasyncgenfunction(each) for each in _layers(handler)):
            got = "an async generator. Remove `yield` from it"
        elif getattr(handler, "__name__", "") == "<lambda>":
            got = "a lambda. Write `async def`, or bind arguments with functools.partial"
        else:
            got = "one that isn't async. Write it with `async def`"
        raise TypeError(f"invalid handler {_name(handler)}: expected an async function, got {got}")
    try:
        signature = inspect.signature(handler)
    except ValueError:
        return None
    try:
        (name, *_) = signature.bind(None).arguments
    except (TypeError, ValueError):
        raise TypeError(
            f"invalid handler {_name(handler)}{_shown_parameters(signature)}: expected a function that can be called "
            "with one argument, the channel or the session. Bind other parameters with functools.partial"
        ) from None
    return signature.parameters[name]


def _layers(handler: object) -> list[object]:
    """Return a handler and what it calls in the end: the function of a partial or of a decorator, a `__call__`."""
    layers: list[object] = []
    while handler is not None and not any(handler is each for each in layers):
        layers.append(handler)
        if isinstance(handler, partial):
            handler = handler.func
        elif inspect.ismethod(handler):
            handler = handler.__func__
        elif hasattr(handler, "__wrapped__"):
            handler = handler.__wrapped__
        elif not inspect.isroutine(handler):
            handler = getattr(type(handler), "__call__", None)  # noqa: B004 - the function is needed
    return layers


def _is_async(handler: object) -> bool:
    """Return True for coroutine functions, in whatever they are wrapped.

    We look at the flags of the code, which compiled coroutine functions and mocks of them have as well.
    """
    return any(
        inspect.iscoroutinefunction(each) or inspect.iscoroutinefunction(getattr(type(each), "__call__", None))  # noqa: B004
        for each in _layers(handler)
    ) or bool(getattr(getattr(handler, "__code__", None), "co_flags", 0) & inspect.CO_COROUTINE)


def _resolved(handler: object, parameter: inspect.Parameter) -> object:
    """Return the annotation of a parameter; it stays a string if one of its names doesn't exist at run time."""
    annotation: object = parameter.annotation
    if not isinstance(annotation, str):
        return annotation
    for layer in reversed(_layers(handler)):
        if isinstance(layer, FunctionType):
            closure = dict(inspect.getclosurevars(layer).nonlocals)
            only = SimpleNamespace(__annotations__={parameter.name: annotation})
            try:
                return get_type_hints(only, layer.__globals__, closure)[parameter.name]
            except Exception:  # whatever evaluating it raises
                continue
    return annotation.strip("'\"")


def _name(handler: object) -> str:
    layers = _layers(handler)
    named = next((each for each in layers if hasattr(each, "__qualname__")), type(handler))
    return str(getattr(named, "__qualname__", "")).rpartition("<locals>.")[2]


def _shown(annotation: object) -> str:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return f"{annotation.__module__}.{annotation.__qualname__}"
    return str(annotation)


def _shown_parameters(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"
