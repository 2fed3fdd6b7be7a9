"""The names of options: declarations and plugins agree, and the error for a misspelt name says which one is right."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pytest
import trio

import muxkit
import muxkit.asyncio
from muxkit import forward, rpc
from muxkit._plugins import OWN, PROTOCOLS, TRANSPORTS
from muxkit.protocols import aqueduct, bpmux, e3x, relink, restream, yamux
from muxkit_adapters.srv import SrvTransport
from muxkit_adapters.tcp import transport as tcp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from muxkit._options import Side

NOWHERE: Final = "127.0.0.1:1"
HERE: Final = "127.0.0.1:0"
MISSPELT: Final[dict[str, Any]] = {"insecrue": True}
MEANT: Final = r"^unknown option 'insecrue': did you mean 'insecure'\? "


class Orders(rpc.Service):
    async def get(self, number: int) -> str:
        raise NotImplementedError


async def hold(channel: muxkit.Channel) -> None:
    await trio.sleep_forever()


async def hold_link(link: relink.Link) -> None:
    await trio.sleep_forever()


async def hold_in_asyncio(channel: muxkit.asyncio.Channel) -> None:
    await asyncio.sleep(3600)


def keys(options: Any) -> set[str]:  # noqa: ANN401 - a typed dictionary has no type of its own
    return set(options.__annotations__)


# ---------------------------------------------------------------------------- declarations


@pytest.mark.parametrize(("side", "declared"), [("client", muxkit.DialOptions), ("server", muxkit.ListenOptions)])
def test_the_options_of_all_transports_are_declared(side: Side, declared: object) -> None:
    known = set(SrvTransport(tcp, "stream").options(side)) if side == "client" else set()
    for place in OWN[TRANSPORTS].values():
        module, name = place.split(":")
        known |= getattr(import_module(module), name).options(side)
    assert keys(declared) == known


@pytest.mark.parametrize("module", [aqueduct, bpmux, e3x, relink, yamux])
def test_a_protocol_declares_the_options_that_it_takes(module: Any) -> None:  # noqa: ANN401 - as above
    general = keys(muxkit.ReconnectOptions) - keys(muxkit.ConnectOptions)
    own = keys(module.ConnectOptions) - keys(muxkit.ConnectOptions)
    own |= keys(module.ServeOptions) - keys(muxkit.ServeOptions)
    assert module.protocol.options == own | {"config"}
    assert keys(module.ReconnectOptions) >= keys(module.ConnectOptions) | general


def test_every_protocol_with_sessions_is_checked() -> None:
    assert {*OWN[PROTOCOLS]} == {"aqueduct", "bpmux", "e3x", "relink", "yamux", "restream"}


# ---------------------------------------------------------------------------- misspelt options


async def entering(manager: AbstractAsyncContextManager[object]) -> None:
    async with manager:
        pass


async def inside(manager: AbstractAsyncContextManager[object]) -> None:
    """Enter, and wait for the background task that connects."""
    async with manager:
        await trio.sleep_forever()


async def first(manager: AbstractAsyncContextManager[AsyncIterator[object]]) -> None:
    async with manager as sessions:
        await anext(sessions)


async def restream_server() -> None:
    async with restream.open_store("memory:") as store:
        await restream.serve(f"restream+tcp://{HERE}", store, **MISSPELT)


CALLS: Final[dict[str, Callable[[], Awaitable[object]]]] = {
    "connect": lambda: entering(muxkit.connect(f"bpmux+tcp://{NOWHERE}", **MISSPELT)),
    "connect to several": lambda: entering(muxkit.connect([f"bpmux+tcp://{NOWHERE}"] * 2, **MISSPELT)),
    "reconnecting": lambda: first(muxkit.reconnecting(f"bpmux+tcp://{NOWHERE}", **MISSPELT)),
    "open_server": lambda: entering(muxkit.open_server(hold, f"bpmux+tcp://{HERE}", **MISSPELT)),
    "serve": lambda: muxkit.serve(hold, f"bpmux+tcp://{HERE}", **MISSPELT),
    "aqueduct.connect": lambda: entering(aqueduct.connect(f"tcp://{NOWHERE}", **MISSPELT)),
    "bpmux.connect": lambda: entering(bpmux.connect(f"tcp://{NOWHERE}", **MISSPELT)),
    "e3x.reconnecting": lambda: first(e3x.reconnecting(f"tcp://{NOWHERE}", **MISSPELT)),
    "yamux.open_server": lambda: entering(yamux.open_server(hold, f"tcp://{HERE}", **MISSPELT)),
    "relink.connect": lambda: entering(relink.connect(f"tcp://{NOWHERE}", **MISSPELT)),
    "relink.open_server": lambda: entering(relink.open_server(hold, f"tcp://{HERE}", **MISSPELT)),
    "relink.link": lambda: entering(relink.link(f"relink+tcp://{NOWHERE}", **MISSPELT)),
    "relink.listen": lambda: relink.listen(hold_link, f"relink+tcp://{HERE}", **MISSPELT),
    "restream.numbers": lambda: entering(restream.numbers(f"restream+tcp://{NOWHERE}", count=1, **MISSPELT)),
    "restream.serve": restream_server,
    "rpc.connect": lambda: inside(rpc.connect(Orders, f"bpmux+tcp://{NOWHERE}", **MISSPELT)),
    "forward.line": lambda: inside(forward.line(f"bpmux+tcp://{NOWHERE}", **MISSPELT)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_misspelt_option_is_an_error_that_names_the_right_one(call: Callable[[], Awaitable[object]]) -> None:
    """Was: `relink.link` took any option, and dialled without end."""
    with (
        trio.fail_after(60),
        pytest.RaisesGroup(pytest.RaisesExc(TypeError, match=MEANT), allow_unwrapped=True, flatten_subgroups=True),
    ):
        await call()


def test_run_server_names_the_right_option() -> None:
    with pytest.raises(TypeError, match=MEANT):
        muxkit.run_server(hold, f"bpmux+tcp://{HERE}", **MISSPELT)


def test_calls_from_asyncio_name_the_right_option() -> None:
    async def main() -> None:
        for call in (
            entering(muxkit.asyncio.connect(f"bpmux+tcp://{NOWHERE}", **MISSPELT)),
            entering(muxkit.asyncio.open_server(hold_in_asyncio, f"bpmux+tcp://{HERE}", **MISSPELT)),
            first(muxkit.asyncio.reconnecting(f"bpmux+tcp://{NOWHERE}", **MISSPELT)),
        ):
            with pytest.raises(TypeError, match=MEANT):
                await call

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "right"),
    [("tokne", "token"), ("confg", "config"), ("lingre", "linger"), ("stager", "stagger"), ("observr", "observer")],
)
async def test_the_options_of_every_client_are_suggested(given: str, right: str) -> None:
    """Was: only the options of the transport and of the protocol were."""
    options: dict[str, Any] = {given: None}
    with pytest.raises(TypeError, match=f"unknown option '{given}': did you mean '{right}'"):
        await entering(muxkit.connect(f"bpmux+tcp://{NOWHERE}", **options))


async def test_the_options_of_every_server_are_suggested() -> None:
    options: dict[str, Any] = {"authorise": None}
    with pytest.raises(TypeError, match="unknown option 'authorise': did you mean 'authorize'"):
        await entering(muxkit.open_server(hold, f"bpmux+tcp://{HERE}", **options))


async def test_the_options_of_the_loop_are_suggested() -> None:
    options: dict[str, Any] = {"pateince": 1.0}
    with pytest.raises(TypeError, match="unknown option 'pateince': did you mean 'patience'"):
        await first(muxkit.reconnecting(f"bpmux+tcp://{NOWHERE}", **options))


async def test_an_option_of_a_server_is_refused_by_a_client() -> None:
    options: dict[str, Any] = {"authorize": muxkit.tokens({})}
    with pytest.raises(TypeError, match="tcp has no option 'authorize'"):
        await entering(muxkit.connect(f"bpmux+tcp://{NOWHERE}", **options))


async def test_an_option_that_the_protocol_gives_its_transport_can_be_overridden() -> None:
    """Was: "got multiple values for keyword argument 'offers'"."""
    with pytest.raises(ConnectionRefusedError):
        await entering(muxkit.connect(f"bpmux+tls://{NOWHERE}", offers=["mine"]))


# ---------------------------------------------------------------------------- transports of other packages


class Serial:
    """A transport that declares its options by its signatures, as the how-to guide says."""

    @asynccontextmanager
    async def connect(self, address: str, *, speed: int = 9600) -> AsyncIterator[trio.abc.Stream]:
        raise OSError(f"{address}: {speed} baud")
        yield

    async def serve(self, handler: object, address: str, *, limits: object, task_status: object) -> None:
        raise OSError(f"{address}: no server")


@pytest.fixture
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(import_module("muxkit._plugins")._loaded, (TRANSPORTS, "serial"), Serial())


async def test_a_transport_of_another_package_gets_its_option(serial: None) -> None:
    options: dict[str, Any] = {"speed": 115200}
    with pytest.raises(OSError, match="115200 baud"):
        await entering(muxkit.connect("bpmux+serial:///dev/ttyS0", **options))


async def test_its_misspelt_option_is_named(serial: None) -> None:
    """Was: "connect() got an unexpected keyword argument", without the right name."""
    options: dict[str, Any] = {"sped": 115200}
    with pytest.raises(TypeError, match=r"^unknown option 'sped': did you mean 'speed'\? Options of serial: speed; "):
        await entering(muxkit.connect("bpmux+serial:///dev/ttyS0", **options))
