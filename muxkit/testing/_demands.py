"""Assertions of the checks: they fail with a sentence, under any test runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


async def must_raise(
    kind: type[Exception], what: str, call: Callable[..., Awaitable[object]], *arguments: object
) -> None:
    try:
        await call(*arguments)
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__}, not {kind.__name__}") from error
    raise AssertionError(f"{what} does not raise {kind.__name__}")
