"""Typed calls over a session of any protocol.

A service is a class with typed async methods, which both sides import:

    class Orders(rpc.Service):
        async def get(self, id: int) -> Order: ...
        def watch(self, since: int) -> rpc.Stream[Order]: ...
        async def upload(self, rows: rpc.Stream[Row]) -> int: ...

The server implements it, and the client calls it:

    async with muxkit.open_server(rpc.serve(OrdersService()), url): ...

    orders = rpc.client(Orders, session)
    order = await orders.get(7)

One call is one channel. So flow control, fairness between calls, cancellation and every protocol and transport work as
they do for channels. The deadline of the caller travels with the call, and shrinks over several hops.
"""

from typing import TYPE_CHECKING

from muxkit.rpc._call import Call as Call
from muxkit.rpc._call import Interceptor as Interceptor
from muxkit.rpc._call import current_call as current_call
from muxkit.rpc._client import client as client
from muxkit.rpc._connect import connect as connect
from muxkit.rpc._errors import Code as Code
from muxkit.rpc._errors import Error as Error
from muxkit.rpc._reflection import Description as Description
from muxkit.rpc._reflection import MethodDescription as MethodDescription
from muxkit.rpc._reflection import Reflection as Reflection
from muxkit.rpc._server import serve as serve
from muxkit.rpc._service import method as method
from muxkit.rpc._stream import Stream as Stream
from muxkit.rpc._stream import stream as stream
from muxkit.runtime import protect_package

if TYPE_CHECKING:  # checkers know how to handle a class of methods without bodies
    from typing import Protocol as Service
else:
    from muxkit.rpc._service import Service

__all__ = [
    "Call",
    "Code",
    "Description",
    "Error",
    "Interceptor",
    "MethodDescription",
    "Reflection",
    "Service",
    "Stream",
    "client",
    "connect",
    "current_call",
    "method",
    "serve",
    "stream",
]

protect_package(__name__)
