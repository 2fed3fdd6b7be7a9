"""An interrupt from the keyboard at any place: one bare KeyboardInterrupt, and nothing is left half done."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest
import trio

from muxkit.runtime import bare_nursery, close_at_once
from tests.cli._command import environment
from tests.soak import interrupts

SEEDS = 60
READY = """\
import sys
from muxkit.cli import main

try:
    print(flush=True)
    sys.exit(main())
except KeyboardInterrupt:  # before `main` was entered, or after it was left
    sys.exit(130)
"""
SERVE = ["restream", "serve", "restream+tcp://127.0.0.1:0", "--stateless", "doubling"]
UGLY = ("Traceback", "ResourceWarning: unclosed", "never awaited", "destroyed", "Exception ignored")
HANGS = 120.0  # s; a command that has not ended by then never will, on a machine however busy


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-36", "R-37")
@pytest.mark.parametrize("protocol", interrupts.PROTOCOLS)
def test_an_interrupt_anywhere_comes_out_bare_and_who_catches_it_can_go_on(protocol: str) -> None:
    """Was: Ctrl-C at an unlucky moment ended in a TrioInternalError or in an exception group, left an engine half
    changed so that a later message broke the protocol, or was lost.
    """
    calls = interrupts.calls_of(protocol)
    runs = [interrupts.run(protocol, seed, calls) for seed in range(SEEDS)]
    assert [run for run in runs if run.kind not in interrupts.CLEAN] == []
    kinds = {run.kind for run in runs}
    assert {"interrupt", "caught"} <= kinds


@pytest.mark.requirement("R-37")
@pytest.mark.seeds(5, soak=50)
def test_the_command_line_ends_with_130_whenever_it_is_interrupted(seed: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-W", "always", "-c", READY, *SERVE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):  # it serves until it is interrupted
                process.wait(random.Random(seed).uniform(0.0, 1.5))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=HANGS)
        finally:
            process.kill()
    ours = [
        line for line in errors.splitlines() if not line.startswith("<frozen importlib")
    ]  # a file left by an import
    assert (process.returncode, [line for line in ours if any(word in line for word in UGLY)]) == (130, [])


@pytest.mark.requirement("R-36", "R-37")
async def test_an_interrupt_in_a_task_comes_out_of_our_nursery_as_it_was() -> None:
    interrupt = KeyboardInterrupt()

    async def fail() -> None:
        raise interrupt

    async def work() -> None:
        async with bare_nursery() as nursery:
            nursery.start_soon(fail)
            await trio.sleep_forever()

    with pytest.raises(KeyboardInterrupt) as caught:
        await work()
    assert caught.value is interrupt


async def test_other_errors_beside_an_interrupt_stay_in_their_group() -> None:
    async def fail(error: BaseException) -> None:
        raise error

    async def work() -> None:
        async with bare_nursery() as nursery:
            nursery.start_soon(fail, KeyboardInterrupt())
            nursery.start_soon(fail, ZeroDivisionError())

    with pytest.raises(BaseExceptionGroup) as caught:
        await work()
    assert {type(error) for error in caught.value.exceptions} == {KeyboardInterrupt, ZeroDivisionError}


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-37")
async def test_a_cancellation_does_not_take_the_place_of_an_interrupt_while_something_is_closed() -> None:
    """Was: A cancellation from outside took the place of a KeyboardInterrupt while a server closed the stream of the
    connection that it had struck: the program went on as if nothing had happened.
    """

    class Slow(trio.abc.AsyncResource):
        async def aclose(self) -> None:
            await trio.lowlevel.checkpoint()

    async def leave(scope: trio.CancelScope) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            scope.cancel()
            await close_at_once(Slow())

    with pytest.raises(KeyboardInterrupt), trio.CancelScope() as scope:
        await leave(scope)
