"""Spans around calls: interceptors that a program switches on for the whole process.

`muxkit.rpc.otel.instrument` puts them here. Without it, a call costs the test of an empty tuple.
"""

from __future__ import annotations

from muxkit.rpc._call import Interceptor

_everywhere: list[Interceptor] = []


def around_calls(own: tuple[Interceptor, ...]) -> tuple[Interceptor, ...]:
    """Return the interceptors of a call: those of the process, then those of the server or the client."""
    return (*_everywhere, *own) if _everywhere else own


def add_everywhere(interceptor: Interceptor) -> None:
    """Run an interceptor around each call of this process, on both sides."""
    _everywhere.append(interceptor)


def remove_everywhere(interceptor: Interceptor) -> None:
    """Take an interceptor back."""
    _everywhere.remove(interceptor)
