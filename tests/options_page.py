"""The page of all options, `docs/reference/options.md`, made from the code. `python tests/options_page.py` writes it.

The names and their meanings are those of the typed dictionaries in `muxkit/_options.py` and in the protocols. The
transports say which of them have an option.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from muxkit._options import Side
from muxkit._plugins import OWN, TRANSPORTS

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "reference" / "options.md"
DECLARATIONS: Final = "muxkit/_options.py"
PROTOCOLS: Final[Mapping[str, str]] = {
    "bpmux": "muxkit/protocols/bpmux/_session.py",
    "relink": "muxkit/protocols/relink/dial/connect.py",
    "aqueduct": "muxkit/protocols/aqueduct/_session.py",
    "e3x": "muxkit/protocols/e3x/_session.py",
    "yamux": "muxkit/protocols/yamux/_session.py",
}
# The two transports share one signature, and `ws` refuses these.
REFUSED: Final = {("ws", "tls"), ("ws", "ssl_context"), ("ws", "server_hostname")}
ALSO: Final[Mapping[Side, Mapping[str, str]]] = {"client": {"resolver": "+srv"}, "server": {}}

# Where more about an option stands.
LINKS: Final[Mapping[str, str]] = {
    "authorize": "../how-to/servers.md",
    "backoff": "../how-to/reconnecting.md",
    "balancers": "../how-to/proxies.md#know-the-client-behind-a-balancer",
    "keep": "relink.md#bounds",
    "limits": "../how-to/limits.md",
    "observer": "../how-to/observe.md",
    "offers": "bpmux.md#a-first-credit",
    "on_changed": "relink.md#the-end-of-a-link",
    "pages": "../how-to/browser.md#pages-on-the-same-port",
    "patience": "../how-to/reconnecting.md",
    "proxy": "../how-to/proxies.md",
    "qlog": "quic.md",
    "redirects": "../how-to/several-servers.md#move-clients-to-another-server",
    "resolver": "../how-to/several-servers.md#find-the-servers-of-a-domain",
    "stagger": "../how-to/several-servers.md",
    "tls": "../how-to/tls.md",
    "token": "../how-to/servers.md",
}

SESSIONS: Final = "[sessions](#sessions)"
TRANSPORT: Final = "[transports](#transports)"
CALLS: Final = (
    (
        "`connect` of `muxkit`, `muxkit.asyncio` and each protocol",
        f"{SESSIONS}, [clients](#clients), {TRANSPORT}",
        "ConnectOptions",
    ),
    (
        "`reconnecting` of the same modules, `rpc.connect`, `muxkit.asyncio.rpc.connect`, `forward.line`",
        f"{SESSIONS}, [clients](#clients), [clients that reconnect](#clients-that-reconnect), {TRANSPORT}",
        "ReconnectOptions",
    ),
    (
        "`open_server` of the same modules, `muxkit.serve`, `muxkit.run_server`",
        f"{SESSIONS}, [servers](#servers), {TRANSPORT}",
        "ServeOptions",
    ),
    ("`relink.link`, `restream.numbers`, `stream`, `integers`, `status`", f"{TRANSPORT} of clients", "DialOptions"),
    ("`relink.listen`, `restream.serve`", f"{TRANSPORT} of servers", "ListenOptions"),
)

HEAD: Final = """\
# Options

You pass options as keyword arguments. Editors complete them and type checkers report a misspelt one, because each call
declares them with a typed dictionary. At run time, an unknown option raises `TypeError`, which suggests the nearest
name and lists all. `python tests/options_page.py` writes this page from the code.

| calls | options of | declared by |
|---|---|---|
"""

OWN_OPTIONS: Final = """
The dictionaries are names of `muxkit`, so that your own functions can take the same options and pass them on. A
protocol's `connect`, `reconnecting` and `open_server` also take [the protocol's own options](#protocols), which it
declares in dictionaries of the same names, such as `relink.ServeOptions`. The calls of `muxkit` pass these on as well,
but they declare only `config`. So with a type checker, use the protocol's calls, or assign the protocol's options to a
variable of the general type first:

```python
from typing import Unpack

import muxkit
import trio
from muxkit.protocols import relink


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def try_once(url: str, **options: Unpack[muxkit.ServeOptions]) -> None:
    async with muxkit.open_server(echo, url, **options) as server, muxkit.connect(server.url) as session:
        await session.ping()
        print("served at", server.url)


async def main() -> None:
    options: relink.ServeOptions = {"keep": relink.Keep(age=7200), "linger": 1.0}
    known: muxkit.ServeOptions = options  # `keep` is still in it
    await try_once("relink+mem://jobs", **known)


trio.run(main)
```

[Options of other packages' transports](../how-to/transport.md#4-declare-your-options) are passed on in the same way.
"""

SETTINGS: Final = """
`config` has the settings of the protocol: [bpmux](bpmux.md#settings), [relink](relink.md#settings),
[e3x](e3x.md#settings), [aqueduct](aqueduct.md#settings), [yamux](yamux.md#settings).
"""


def declared(path: str) -> dict[str, dict[str, str]]:
    """Return the keys of each typed dictionary in a module with their docstrings, without inherited keys."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Options"):
            found[node.name] = dict(keys_of(node))
    return found


def keys_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the keys of a typed dictionary with the docstrings below them. Raises ValueError for a key without one."""
    for key, below in zip(node.body, [*node.body[1:], None], strict=True):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())
            case ast.AnnAssign(target=ast.Name(id=name)), _:
                raise ValueError(f"{node.name}: expected a docstring below {name!r}, got none")


def transports_with(option: str) -> str:
    """Say which transports have an option, and whether only one side of them has it."""
    having: dict[Side, list[str]] = {"client": [], "server": []}
    for side, names in having.items():
        for scheme, place in OWN[TRANSPORTS].items():
            module, _, name = place.partition(":")
            if (scheme, option) not in REFUSED and option in getattr(import_module(module), name).options(side):
                names.append(scheme)
        names += filter(None, [ALSO[side].get(option)])
    clients, servers = having["client"], having["server"]
    both = [name for name in clients if name in servers]
    parts = [
        (", ".join(both), ""),
        (", ".join(name for name in clients if name not in both), "clients of "),
        (", ".join(name for name in servers if name not in both), "servers of "),
    ]
    return "; ".join(f"{side}{names}" for names, side in parts if names)


def row(name: str, *cells: str) -> str:
    linked = f"[`{name}`]({LINKS[name]})" if name in LINKS else f"`{name}`"
    return f"| {' | '.join([linked, *(cell.replace('|', chr(92) + '|') for cell in cells)])} |\n"


def table(options: Mapping[str, str]) -> str:
    """Return a table of options with their meanings."""
    return "\n| option | meaning |\n|---|---|\n" + "".join(row(name, text) for name, text in options.items())


def page() -> str:
    """Return the page as it should be."""
    general = declared(DECLARATIONS)
    links: dict[str, list[str]] = {}
    for group in ("TransportOptions", "DialOptions", "ListenOptions"):
        for name, text in general[group].items():
            links.setdefault(name, []).append(text)
    parts = [HEAD, *(f"| {calls} | {groups} | `{name}` |\n" for calls, groups, name in CALLS), OWN_OPTIONS]
    parts += ["\n## Sessions\n", SETTINGS, table(general["SessionOptions"])]
    parts += ["\n## Clients\n", table(general["ConnectOptions"])]
    parts += ["\n## Clients that reconnect\n", table(general["ReconnectOptions"])]
    parts += ["\n## Servers\n", table(general["ServeOptions"])]
    parts += ["\n## Transports\n\n| option | for | meaning |\n|---|---|---|\n"]
    parts += [row(name, transports_with(name), " For servers: ".join(texts)) for name, texts in links.items()]
    parts += ["\n## Protocols\n\n| option | for | meaning |\n|---|---|---|\n", *rows_of_protocols(general)]
    return "".join(parts)


def rows_of_protocols(general: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield a row for each option of one protocol, except `config`, which all protocols have."""
    for protocol, path in PROTOCOLS.items():
        dictionaries = declared(path)
        clients, servers = dictionaries["ConnectOptions"], dictionaries["ServeOptions"]
        for name, text in (servers | clients).items():
            if name == "config":
                continue
            side = "" if name in clients and name in servers else "clients of " if name in clients else "servers of "
            yield row(name, f"{side}{protocol}", text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"docs/reference/{PAGE.name} is stale: run `make conformance` and commit it")
