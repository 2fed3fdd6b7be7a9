"""The order of measurements: all contestants take turns in each cell of a round, so a slow minute affects all."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.cli.terminal import CommandFailed
from muxkit_bench.report.results import Failure, Pass
from muxkit_bench.run.awake import awake
from muxkit_bench.run.processes import Ends, both_ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit_bench.contestants.contestant import Contestant
    from muxkit_bench.run.cells import Cell
    from muxkit_bench.run.measure import Say


@attrs.frozen(kw_only=True)
class Plan:
    """The plan of a run."""

    cells: Sequence[Cell]
    contestants: Sequence[Contestant]
    rounds: int
    seconds: float
    """Seconds of a pass."""
    seed: int
    cores: Sequence[int]
    """Cores of the server and the client; empty if the system chooses."""
    awake: Sequence[int] = ()
    """Cores that are kept from sleeping."""
    quick: bool = False
    """A short run that only shows that it works."""


@attrs.define
class Rounds:
    """A run: every pass and every failure so far."""

    plan: Plan
    say: Say
    passes: list[Pass] = attrs.field(factory=list)
    failures: list[Failure] = attrs.field(factory=list)
    complete: int = 0
    """Complete rounds."""
    _counts: dict[tuple[str, str], int] = attrs.field(factory=dict)
    """How many units on a channel fill a pass, found in the first round."""
    _ends: dict[str, Ends] = attrs.field(factory=dict)

    async def run(self) -> None:
        async with awake(self.plan.awake):
            await self._run()

    async def _run(self) -> None:
        order = random.Random(self.plan.seed)
        for number in range(1, self.plan.rounds + 1):
            # New processes in each round, so that the layout of memory is part of the spread.
            async with AsyncExitStack() as stack:
                await self._start(number, stack)
                for cell in self.plan.cells:
                    taking_part = [one for one in self.plan.contestants if one.takes_part(cell)]
                    order.shuffle(taking_part)
                    for contestant in taking_part:
                        if not self._has_failed(contestant):
                            self.say(number, cell.key, contestant.name)
                            await self._pass(number, cell, contestant)
                self.complete = number
                for ends in self._ends.values():
                    await ends.release()
                self._ends.clear()

    async def _start(self, number: int, stack: AsyncExitStack) -> None:
        """Start all processes at once, before anything is measured."""

        async def start(contestant: Contestant) -> None:
            try:
                ends = await stack.enter_async_context(both_ends(contestant, self.plan.cores, hold=False))
            except (CommandFailed, OSError) as error:
                self._fail(number, "", contestant, error)
            else:
                self._ends[_program(contestant)] = ends

        standing = [cell for cell in self.plan.cells if cell.job != "idle"]
        programs = {
            _program(one): one
            for one in reversed(self.plan.contestants)
            if not self._has_failed(one) and any(map(one.takes_part, standing))
        }
        async with trio.open_nursery() as nursery:
            for contestant in programs.values():
                nursery.start_soon(start, contestant)

    async def _pass(self, number: int, cell: Cell, contestant: Contestant) -> None:
        count = self._counts.get((cell.key, contestant.name), 0)
        fitted = contestant.fitted(cell)
        task = fitted.task(seconds=self.plan.seconds, count=count, coalesced=contestant.coalesces)
        try:
            if cell.job == "idle":  # in new processes, which have opened nothing
                async with both_ends(contestant, self.plan.cores, hold=True) as ends:
                    measured = await ends.measure(task)
            elif _program(contestant) in self._ends:
                measured = await self._ends[_program(contestant)].measure(task)
            else:
                raise CommandFailed(f"{contestant.name}: its processes could not be started")
        except (CommandFailed, OSError) as error:
            self._fail(number, cell.key, contestant, error)
            return
        self._counts[cell.key, contestant.name] = measured["count"]
        self.passes.append(
            Pass(
                round=number,
                cell=cell.key,
                peer=contestant.name,
                units=measured["units"],
                seconds=measured["seconds"],
                client_cpu=measured["client_cpu"],
                server_cpu=measured["server_cpu"],
                also=measured["also"],
            )
        )

    def _has_failed(self, contestant: Contestant) -> bool:
        return any(failure.peer == contestant.name for failure in self.failures)

    def _fail(self, number: int, cell: str, contestant: Contestant, error: CommandFailed | OSError) -> None:
        sentence = error.sentence if isinstance(error, CommandFailed) else str(error)
        self.failures.append(Failure(round=number, cell=cell, peer=contestant.name, sentence=sentence))


def _program(contestant: Contestant) -> str:
    """Both forms of a raw connection share their processes."""
    return f"{contestant.command} {contestant.address}"
