"""Services: a class with typed async methods, and the description of its calls that both sides make from it.

The parameters of a method become a struct of msgspec, which encodes and checks all of them together. A parameter or a
result that is a stream isn't part of it: its items are messages of their own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import attrs
import msgspec

from muxkit.codecs import MAX_MESSAGE, Codec, codec_for
from muxkit.rpc._errors import ErrorRecord
from muxkit.rpc._stream import Stream

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Service:
    """The base of an interface: `class Orders(rpc.Service)` has the methods of a service, without bodies.

    Type checkers see it as `typing.Protocol`. A server implements the interface in a subclass, or in any other class
    with the same methods. A class that has bodies may be a service without this base.
    """

    __slots__ = ()


PREFIX: Final = "rpc:"  # of the names of channels that are calls
_QUALIFIED: Final = re.compile(r"\b(?:\w+\.)+(?=\w)")  # what stands in front of the name of a type
_OPTIONS: Final = "__muxkit_rpc__"
_STREAMS: Final = (Stream, AsyncIterable, AsyncIterator, AsyncGenerator)


@attrs.frozen(kw_only=True)
class Options:
    """The options of one method; see `method`."""

    raises: tuple[type[Exception], ...] = ()
    idempotent: bool = False
    timeout: float | None = None
    max_concurrent: int | None = None
    max_size: int = MAX_MESSAGE


def method(
    *,
    raises: type[Exception] | tuple[type[Exception], ...] = (),
    idempotent: bool = False,
    timeout: float | None = None,
    max_concurrent: int | None = None,
    max_size: int = MAX_MESSAGE,
) -> Callable[[FunctionT], FunctionT]:
    """Set options of a method of a service: `@rpc.method(raises=OutOfStock, idempotent=True)`.

    Set them in the interface, so that both sides know them.

    Args:
        raises: Exceptions that the handler may raise and the caller gets as themselves. Their fields travel by the
            names of the parameters that the class is made with. Any other exception reaches the caller as
            `rpc.Error("internal")`.
        idempotent: A client made by `rpc.connect` repeats the call if the connection is lost before the answer.
        timeout: Seconds that a handler may run, in addition to the deadline of the caller.
        max_concurrent: How many handlers of this method may run at the same time in one server. Further calls wait.
        max_size: The largest arguments, result or item that is decoded, in bytes.
    """
    declared = raises if isinstance(raises, tuple) else (raises,)
    options = Options(
        raises=declared, idempotent=idempotent, timeout=timeout, max_concurrent=max_concurrent, max_size=max_size
    )

    def decorate(function: FunctionT) -> FunctionT:
        setattr(function, _OPTIONS, options)
        return function

    return decorate


@attrs.frozen(eq=False)
class CallCodec:
    """Encodes and decodes the messages of one method with one codec."""

    name: str
    arguments: Codec[Any]
    result: Codec[Any]
    item: Codec[Any]
    """Of the items that the caller sends."""
    error: Codec[ErrorRecord]


@attrs.frozen(eq=False)
class Method:
    """One method of a service, as both sides see it."""

    service: str
    name: str
    """The name of the attribute."""
    arguments: type[msgspec.Struct]
    signature: inspect.Signature
    result: Any
    """The type of the result, or of the items of the stream that the method returns."""
    returns_stream: bool
    stream_parameter: str | None
    """The parameter that is a stream of the caller."""
    item: Any
    """The type of the items of that stream."""
    options: Options
    doc: str
    full_name: str = attrs.field(init=False)
    """The name by which it is called, such as "Orders.get"."""
    channel_name: str = attrs.field(init=False)
    """The name of the channel of a call."""
    _codecs: dict[str, CallCodec] = attrs.field(factory=dict, init=False)

    @full_name.default
    def _make_full_name(self) -> str:
        return f"{self.service}.{self.name}"

    @channel_name.default
    def _make_channel_name(self) -> str:
        return f"{PREFIX}{self.service}.{self.name}"

    @property
    def errors(self) -> dict[str, type[Exception]]:
        """The exceptions that it declares, by name."""
        return {kind.__name__: kind for kind in self.options.raises}

    def codec(self, name: str) -> CallCodec:
        """Return the codec of a name. Raises `UnknownCodec` if there is none for the types of this method."""
        found = self._codecs.get(name)
        if found is None:
            kinds: tuple[Any, ...] = (self.arguments, self.result, self.item, ErrorRecord)
            codecs: list[Any] = [codec_for(name, kind) for kind in kinds]
            for each in codecs:
                each.max_size = self.options.max_size
            found = self._codecs[name] = CallCodec(codecs[0].name, *codecs)
        return found

    def show(self) -> str:
        """Return the method as clients see it, written in Python: `Orders.get(id: int) -> Order`."""
        result = _shown(self.result)
        shown = self.signature.replace(
            parameters=[
                each.replace(annotation=_shown(each.annotation)) for each in [*self.signature.parameters.values()][1:]
            ],
            return_annotation=_Name(f"Stream[{result}]") if self.returns_stream else result,
        )
        return f"{self.full_name}{shown}"


_known: WeakKeyDictionary[type, dict[str, Method]] = WeakKeyDictionary()


def methods_of(service: type) -> dict[str, Method]:
    """Return the methods of a service, by the name of the attribute.

    Raises TypeError for a method that can't be called over a connection: a parameter without a type, or `*args`.
    """
    known = _known.get(service)
    if known is not None:
        return known
    interface = _interface_of(service)
    name: str = getattr(interface, "__rpc_name__", interface.__name__)
    found: dict[str, Method] = {}
    for attribute in dir(interface):
        function = inspect.getattr_static(interface, attribute)
        if not attribute.startswith("_") and inspect.isfunction(function):
            method = _method(name, attribute, function, getattr(service, attribute, None))
            if method is not None:
                found[attribute] = method
    if not found:
        raise TypeError(f"invalid service {service.__name__!r}: expected at least one public async method, got none")
    _known[service] = found
    return found


def _interface_of(service: type) -> type:
    """Return the class that declares the service: the last one before `Service` or `Protocol`, or the class itself."""
    for kind in service.__mro__:
        if Service in kind.__bases__ or getattr(kind, "_is_protocol", False):
            return kind
    return service


def _method(service: str, name: str, function: Callable[..., Any], own: object) -> Method | None:
    hints = get_type_hints(inspect.unwrap(function), include_extras=True)
    where = f"{service}.{name}"
    result = hints.get("return", Any)
    returns_stream = _item_of(result) is not None
    if not (inspect.iscoroutinefunction(function) or returns_stream):
        return None  # a helper
    signature = inspect.signature(function)
    signature = signature.replace(
        parameters=[each.replace(annotation=hints.get(each.name, Any)) for each in signature.parameters.values()],
        return_annotation=result,
    )
    stream_parameter, item = None, None
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in [*signature.parameters.values()][1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"invalid method {where}: expected parameters with names, got *{parameter.name}")
        if parameter.name not in hints:
            raise TypeError(f"invalid method {where}: expected a type for each parameter, {parameter.name!r} has none")
        streamed = _item_of(parameter.annotation)
        if streamed is not None:
            if stream_parameter is not None:
                raise TypeError(f"invalid method {where}: expected one stream at most, got {parameter.name!r} as well")
            stream_parameter, item = parameter.name, streamed[0]
        elif parameter.default is parameter.empty:
            fields.append((parameter.name, parameter.annotation))
        else:
            default = msgspec.field(default_factory=_Default(parameter.default))
            fields.append((parameter.name, parameter.annotation, default))
    options: Options = getattr(function, _OPTIONS, getattr(own, _OPTIONS, Options()))
    items = _item_of(result)
    return Method(
        service=service,
        name=name,
        arguments=msgspec.defstruct(where, fields, forbid_unknown_fields=True),
        signature=signature,
        result=result if items is None else items[0],
        returns_stream=returns_stream,
        stream_parameter=stream_parameter,
        item=item,
        options=options,
        doc=inspect.getdoc(function) or "",
    )


@attrs.frozen
class _Default:
    """Makes the default of a parameter, which msgspec would not take if it can change."""

    value: Any

    def __call__(self) -> Any:  # noqa: ANN401 - of any parameter
        return self.value


def _item_of(annotation: Any) -> tuple[Any] | None:  # noqa: ANN401 - of any parameter
    """Return the type of the items if the annotation is a stream, in a tuple as it may be None."""
    origin = get_origin(annotation)
    if origin is not None and origin in _STREAMS:
        return (get_args(annotation)[0],)
    if origin is Coroutine or annotation in _STREAMS:
        return (Any,) if annotation in _STREAMS else None
    return None


def _shown(annotation: Any) -> Any:  # noqa: ANN401 - for `inspect`, which shows an object by its repr
    if annotation is type(None):
        return _Name("None")
    shown = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return _Name(_QUALIFIED.sub("", shown))


class _Name(str):
    """A text whose repr is the text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
