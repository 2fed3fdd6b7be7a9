"""The feature matrix says what the plugins and a session of each protocol say."""

from __future__ import annotations

import importlib
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

import muxkit
from muxkit._plugins import PROTOCOLS, STREAMS, PluginError, installed, load, load_transport
from tests._pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "feature-matrix.md").read_text(encoding="utf-8")


def table(heading: str) -> dict[str, dict[str, str]]:
    """The table below a heading: row, column, cell."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


def ours(kind: str) -> set[str]:
    return {each.name for each in installed() if each.package == "muxkit" and each.kind == kind}


def runs(protocol: str, transport: str) -> bool:
    links = getattr(load(PROTOCOLS, protocol), "links", STREAMS)
    try:
        load_transport(transport, protocol, links)
    except PluginError:
        return False
    return True


def test_each_protocol_runs_over_the_transports_that_the_matrix_says() -> None:
    matrix = table("Protocol × transport")
    assert matrix.keys() == ours("protocol")
    for protocol, row in matrix.items():
        assert row.keys() == ours("transport")
        assert row == {each: "yes" if runs(protocol, each) else "–" for each in row}


def test_the_tables_have_every_protocol_and_every_transport() -> None:
    assert table("Protocols")["for"].keys() == ours("protocol")
    assert table("Transports").keys() == ours("transport")


# ---------------------------------------------------------------------------- what a session can do


async def half_closes(session: muxkit.Session, channel: muxkit.Channel) -> bool:
    """True if this side can say that it is done, and still receives what the other says after it has heard that."""
    await channel.finish()
    return await channel.receive() == b"after the end"


async def is_a_stream(session: muxkit.Session, channel: muxkit.Channel) -> bool:
    return isinstance(channel.as_stream(), trio.abc.HalfCloseableStream)


async def takes_large(session: muxkit.Session, channel: muxkit.Channel) -> bool:
    await channel.send(bytes(3 * 2**20))
    return len(await channel.receive()) == 3 * 2**20


async def pings(session: muxkit.Session, channel: muxkit.Channel) -> bool:
    try:
        return await session.ping() >= 0
    except muxkit.Unsupported:
        return False


async def tells_why(session: muxkit.Session, channel: muxkit.Channel) -> bool:
    await channel.send(b"abort")
    try:
        await channel.receive()
    except muxkit.ChannelCancelled as error:
        return error.reason == "disk full"
    return False


async def ends_in_order(session: muxkit.Session, channel: muxkit.Channel) -> bool:
    await channel.aclose()
    await session.shutdown(grace=5)
    return True


Ask = Callable[[muxkit.Session, muxkit.Channel], Awaitable[bool]]
ASKED: dict[str, Ask] = {
    "half-close": half_closes,
    "byte stream on a channel": is_a_stream,
    "messages larger than the window": takes_large,
    "ping": pings,
    "reason of an end reaches the peer": tells_why,
    "orderly end": ends_in_order,
}


async def answer(channel: muxkit.Channel) -> None:
    async for message in channel:
        if message == b"abort":
            channel.abort("disk full")
            return
        await channel.send(message)
    with suppress(trio.BrokenResourceError):
        await channel.send(b"after the end")


@pytest.mark.parametrize("feature", ASKED)
@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_a_session_can_do_what_the_matrix_says(protocol: str, feature: str) -> None:
    said = table("Protocols")[feature][protocol].startswith("yes")
    url = f"{protocol}+mem://matrix-{re.sub('[^a-z]', '', feature)}"
    async with muxkit.open_server(answer, url) as server, muxkit.connect(server.url) as session:
        channel = await session.open("matrix")
        assert await ASKED[feature](session, channel) is said
        await channel.aclose()


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "restream", "yamux"])
def test_the_other_features_are_where_the_matrix_says(protocol: str) -> None:
    said = table("Protocols")
    module = importlib.import_module(f"muxkit.protocols.{protocol}")
    assert said["engine without I/O"][protocol] == "yes"
    assert any(name.endswith("Engine") for name in module.__all__)
    assert said["transactions"][protocol].startswith("yes") == ("NotCommitted" in module.__all__)
    assert said["with `connect`"][protocol].startswith("yes") == (protocol != "restream")
