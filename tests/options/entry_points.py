"""Every call that takes options by keyword, each with a misspelt one. Type checkers read this file; nothing runs it.

mypy reports a comment that has nothing to ignore, so `.ci/run types` fails unless mypy finds the mistake in each line.
`test_editor.py` gives the same lines to a language server.
"""

from __future__ import annotations

from typing import Any

import muxkit
import muxkit.asyncio
import muxkit.asyncio.rpc
from muxkit import forward, rpc
from muxkit.protocols import aqueduct, bpmux, e3x, relink, restream, yamux

URL = "tcp://127.0.0.1:7000"


class Orders(rpc.Service):
    """A service without methods."""


async def handler(channel: muxkit.Channel) -> None:
    """Handle a channel."""


async def asyncio_handler(channel: muxkit.asyncio.Channel) -> None:
    """Handle a channel in asyncio."""


async def link_handler(link: relink.Link) -> None:
    """Handle a link."""


async def connect() -> None:
    """Call everything that takes `ConnectOptions`."""
    muxkit.connect(URL, insecrue=True)  # type: ignore[call-arg]
    muxkit.asyncio.connect(URL, insecrue=True)  # type: ignore[call-arg]
    aqueduct.connect(URL, insecrue=True)  # type: ignore[call-arg]
    bpmux.connect(URL, insecrue=True)  # type: ignore[call-arg]
    e3x.connect(URL, insecrue=True)  # type: ignore[call-arg]
    relink.connect(URL, insecrue=True)  # type: ignore[call-arg]
    yamux.connect(URL, insecrue=True)  # type: ignore[call-arg]


async def reconnect() -> None:
    """Call everything that takes `ReconnectOptions`."""
    muxkit.reconnecting(URL, insecrue=True)  # type: ignore[call-arg]
    muxkit.asyncio.reconnecting(URL, insecrue=True)  # type: ignore[call-arg]
    aqueduct.reconnecting(URL, insecrue=True)  # type: ignore[call-arg]
    bpmux.reconnecting(URL, insecrue=True)  # type: ignore[call-arg]
    e3x.reconnecting(URL, insecrue=True)  # type: ignore[call-arg]
    relink.reconnecting(URL, insecrue=True)  # type: ignore[call-arg]
    yamux.reconnecting(URL, insecrue=True)  # type: ignore[call-arg]
    rpc.connect(Orders, URL, insecrue=True)  # type: ignore[call-arg]
    muxkit.asyncio.rpc.connect(Orders, URL, insecrue=True)  # type: ignore[call-arg]
    forward.line(URL, insecrue=True)  # type: ignore[call-arg]


async def serve() -> None:
    """Call everything that takes `ServeOptions`."""
    muxkit.open_server(handler, URL, insecrue=True)  # type: ignore[call-arg]
    await muxkit.serve(handler, URL, insecrue=True)  # type: ignore[call-arg]
    muxkit.run_server(handler, URL, insecrue=True)  # type: ignore[call-arg]
    muxkit.asyncio.open_server(asyncio_handler, URL, insecrue=True)  # type: ignore[call-arg]
    aqueduct.open_server(handler, URL, insecrue=True)  # type: ignore[call-arg]
    bpmux.open_server(handler, URL, insecrue=True)  # type: ignore[call-arg]
    e3x.open_server(handler, URL, insecrue=True)  # type: ignore[call-arg]
    relink.open_server(handler, URL, insecrue=True)  # type: ignore[call-arg]
    yamux.open_server(handler, URL, insecrue=True)  # type: ignore[call-arg]


async def dial() -> None:
    """Call everything that takes `DialOptions`."""
    relink.link(URL, insecrue=True)  # type: ignore[call-arg]
    restream.numbers(URL, insecrue=True)  # type: ignore[call-arg]
    restream.stream(URL, insecrue=True)  # type: ignore[call-overload]
    restream.integers(URL, insecrue=True)  # type: ignore[call-arg]
    await restream.status(URL, "", insecrue=True)  # type: ignore[call-arg]


async def listen(store: restream.Sessions[Any, Any]) -> None:
    """Call everything that takes `ListenOptions`."""
    await relink.listen(link_handler, URL, insecrue=True)  # type: ignore[call-arg]
    await restream.serve(URL, store, insecrue=True)  # type: ignore[call-arg]


def other_mistakes() -> None:
    """Give options of a wrong type, and options of another protocol or of another side."""
    muxkit.connect(URL, token=b"secret")  # type: ignore[arg-type]
    muxkit.connect(URL, authorize=muxkit.tokens({}))  # type: ignore[call-arg]
    muxkit.connect(URL, patience=5.0)  # type: ignore[call-arg]
    bpmux.connect(URL, config=relink.Config())  # type: ignore[arg-type]
    bpmux.connect(URL, on_changed=print)  # type: ignore[call-arg]
    aqueduct.connect(URL, headers={"user": "ann"})  # type: ignore[arg-type]
    muxkit.run_server(handler, URL, keep=relink.Keep())  # type: ignore[call-arg]


def correct() -> None:
    """Give options that exist."""
    muxkit.connect(URL, tls=None, token="secret", limits=muxkit.Limits(), linger=1.0, stagger=0.1, insecure=True)
    muxkit.connect(URL, config=bpmux.Config(), connect_timeout=3.0, headers={"user": "ann"})
    muxkit.open_server(handler, [URL, URL], authorize=muxkit.tokens({}), unsent=1000)
    aqueduct.connect(URL, headers=[(b"user", b"ann")])
    relink.connect(URL, config=relink.Config(), patience=5.0, on_changed=print)
    relink.reconnecting(URL, patience=5.0, redirects=["*"])
    relink.open_server(handler, URL, keep=relink.Keep())
    options: relink.ServeOptions = {"keep": relink.Keep()}
    known: muxkit.ServeOptions = options
    muxkit.run_server(handler, URL, **known)
