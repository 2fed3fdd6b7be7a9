"""Errors of calls: what a handler raises, and how the caller gets the same error back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, get_type_hints

import msgspec

from muxkit._errors import MuxError
from muxkit.codecs import from_builtins, to_builtins


class Code(StrEnum):
    """What kind of error ended a call. The names and meanings are those of gRPC and Connect."""

    CANCELED = "canceled"
    UNKNOWN = "unknown"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    ABORTED = "aborted"
    OUT_OF_RANGE = "out_of_range"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    DATA_LOSS = "data_loss"
    UNAUTHENTICATED = "unauthenticated"


class Error(MuxError):
    """A call failed at the server. A handler raises it, and the caller gets an equal one.

        raise rpc.Error("not_found", "no order has this number", details={"id": id})

    Args:
        code: The kind of error; one of `Code`, or its text.
        message: What went wrong, for people. The peer reads it.
        details: Anything that the codec can encode, for programs. The caller gets it as mappings, lists and texts.

    Raises:
        ValueError: The code is none of `Code`.
    """

    _in_repr = ("code", "details")

    def __init__(self, code: Code | str, message: str = "", *, details: Any = None) -> None:  # noqa: ANN401
        self.code: Code = Code(code)
        self.message = message
        self.details = details
        super().__init__(f"{self.code.value}: {message}" if message else self.code.value)


class ErrorRecord(msgspec.Struct, omit_defaults=True):
    """An error as it travels."""

    code: str
    message: str = ""
    details: Any = None
    type: str = ""
    """The name of the class of a declared exception, whose fields are the details."""


def to_record(error: Error) -> ErrorRecord:
    """Return the record of an `Error`."""
    details = None if error.details is None else to_builtins(error.details)
    return ErrorRecord(error.code.value, error.message, details)


def to_declared_record(error: Exception) -> ErrorRecord:
    """Return the record of an exception that the method declares."""
    return ErrorRecord(Code.FAILED_PRECONDITION.value, str(error), _fields_of(error), type(error).__name__)


def from_record(record: ErrorRecord, declared: Mapping[str, type[Exception]]) -> Exception:
    """Return the error that a record describes. A code or an exception that isn't known here becomes "unknown"."""
    kind = declared.get(record.type)
    if kind is not None:
        made = _made(kind, record.details)
        if made is not None:
            return made
    known = {each.value for each in Code}
    return Error(record.code if record.code in known else Code.UNKNOWN, record.message, details=record.details)


def _fields_of(error: Exception) -> Any:  # noqa: ANN401 - what JSON can hold
    names = [field.name for field in _parameters(type(error))]
    if names and all(hasattr(error, name) for name in names):
        return to_builtins({name: getattr(error, name) for name in names})
    return to_builtins(list(error.args))


def _made(kind: type[Exception], details: Any) -> Exception | None:  # noqa: ANN401 - as it was decoded
    """Make an exception from what `_fields_of` returned at the peer; None if it doesn't fit."""
    try:
        if isinstance(details, Mapping):
            hints = _hints(kind)
            values = {str(name): from_builtins(value, hints.get(str(name), Any)) for name, value in details.items()}
            return kind(**values)
        return kind(*details) if isinstance(details, Sequence) else kind()
    except (TypeError, ValueError):  # the peer has another version of the class
        return None


def _parameters(kind: type[Exception]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters that the class is made with; none for those of Python's own exceptions."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return ()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(each for each in parameters if each.kind not in variadic)


def _hints(kind: type[Exception]) -> dict[str, Any]:
    try:
        hints = get_type_hints(kind) | get_type_hints(kind.__init__)
    except (NameError, TypeError):
        return {}
    hints.pop("return", None)
    return hints


CODE_OF_STATUS: Final[Mapping[int, Code]] = {
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.UNIMPLEMENTED,
    405: Code.UNIMPLEMENTED,
    415: Code.INVALID_ARGUMENT,
    422: Code.INVALID_ARGUMENT,
    429: Code.RESOURCE_EXHAUSTED,
    431: Code.RESOURCE_EXHAUSTED,
    500: Code.INTERNAL,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}
"""The codes of channels that were aborted before, or without, an answer of the service."""
