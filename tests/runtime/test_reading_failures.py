"""What if something fails while a receiver reads for all? It comes out where it would without him."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import trio

from muxkit import LinkLost
from muxkit.testing import replay

from ._halves import at_rest
from ._tables import Table, table


@pytest.mark.parametrize("seed", range(12))
async def test_what_fails_before_the_reader_stood_back_comes_out_of_the_pump(seed: int) -> None:
    async def guest(laid: Table) -> None:
        assert await laid.a.receive() == b"a1"
        laid.there.send_nowait([b"b"])  # there already when he waits again
        with suppress(ZeroDivisionError, LinkLost):
            await laid.a.receive()

    def fail(event: bytes) -> None:
        if event == b"b":
            raise ZeroDivisionError
        laid.deliver(event)

    with replay(seed), pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery, table() as laid:
            laid.run.on_lost = laid.lose
            await laid.seat(nursery, partial(guest, laid))
            laid.run.on_event = fail
            await laid.there.send_all(b"a1")
            await at_rest()
            assert laid.run.losses == 1  # at once, not when the block is left


async def test_what_fails_while_a_guest_loses_the_connection_comes_out_of_the_pump() -> None:
    async def guest(laid: Table) -> None:
        with suppress(ZeroDivisionError):
            await laid.a.receive()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery, table() as laid:
            laid.run.on_lost = fail
            await laid.seat(nursery, partial(guest, laid))
            await laid.there.aclose()
            await at_rest()


@pytest.mark.parametrize(("failure", "told"), [(ZeroDivisionError, LinkLost), (KeyboardInterrupt, KeyboardInterrupt)])
async def test_what_fails_half_way_through_what_came_ends_the_connection(
    failure: type[BaseException], told: type[BaseException]
) -> None:
    """What follows it in the same read would be missing without a sign."""

    async def guest(laid: Table) -> None:
        with pytest.raises(told):
            await laid.a.receive()

    def fail(event: bytes) -> None:
        raise failure

    with pytest.RaisesGroup(failure, flatten_subgroups=True):
        async with trio.open_nursery() as nursery, table() as laid:
            laid.run.on_lost = laid.lose
            await laid.seat(nursery, partial(guest, laid))
            laid.run.on_event = fail
            await laid.there.send_all(b"b1")
            await at_rest()
            assert laid.run.losses == 1
