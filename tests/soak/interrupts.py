"""Raise SIGINT at random places of a conversation in memory and sort how the program ends.

A seed chooses a call of the run and a place behind it where the interpreter looks for signals. Trio's own handler
decides what happens there, as for a real Ctrl-C. Half of the programs leave by the interrupt; the other half catch
it, repeat what was interrupted and compare everything that arrived. A program of Trio's own parts
is the control, `--protocol trio`; it is not run unless asked for, since an interrupt can bring it to a standstill.
"""

from __future__ import annotations

import argparse
import dis
import gc
import logging
import random
import signal
import sys
import traceback
import warnings
from collections import Counter
from functools import cache, partial
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Protocol, TypeVar

import attrs
import trio
import trio.testing

import muxkit
import muxkit_adapters
from muxkit import MuxError, RemoteProtocolError
from muxkit.protocols import restream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import CodeType, FrameType
    from typing import Any

    Tracer = Callable[[FrameType, str, object], Any]

T = TypeVar("T")

PROTOCOLS = ("bpmux", "relink", "aqueduct", "e3x", "restream", "yamux")
CONTROL = "trio"
BEHIND = 40  # places behind the chosen call, at most
PATIENCE = 3600.0  # virtual seconds
MESSAGES = 4
CHANNELS = 2
NUMBERS = 12
COLLECT_EVERY = 25  # runs

LIBRARY = tuple(str(Path(path).resolve()) for path in (*muxkit.__path__, *muxkit_adapters.__path__))

CLEAN = frozenset({"interrupt", "caught", "not reached", "lost with a typed error"})


# --- striking


@cache
def places(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions before which the interpreter may run a signal handler."""
    found: set[int] = set()
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        # A call that makes a coroutine stays in the interpreter's loop, which looks for no signal before the await.
        if before is not None and _looks_for_signals(before) and instruction.opname != "GET_AWAITABLE":
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD") and "NO_INTERRUPT" not in instruction.opname:
            found.add(int(instruction.argval))
        before = instruction
    return frozenset(found)


def _looks_for_signals(instruction: dis.Instruction) -> bool:
    if instruction.opname == "RESUME":
        return ((instruction.arg or 0) & 3) < 2  # behind an await there is no look
    return instruction.opname in {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}


def is_ours(frame: FrameType) -> bool:
    """Does this frame work for the library, not for the program alone: what Trio does by itself is its own affair."""
    caller: FrameType | None = frame
    while caller is not None:
        name = caller.f_code.co_filename
        if name == __file__:
            return caller is not frame and caller.f_code.co_qualname.startswith("of_trio")
        if name.startswith(LIBRARY):
            return True
        caller = caller.f_back
    return True


class Striker:
    """Counts calls until the chosen one, then places, and raises SIGINT once."""

    def __init__(self, call: int, behind: int) -> None:
        self.calls = 0
        self.place = ""
        self._call = call
        self._behind = behind
        self._returned = False  # from a Python function: the interpreter does not look for signals then

    def count(self, frame: FrameType, event: str, arg: object) -> Tracer | None:
        if "/muxkit" not in (name := frame.f_code.co_filename) and "/trio/" not in name:
            return None  # finding plugins calls more of the standard library than all the rest
        self.calls += 1
        if self.calls < self._call:
            return None
        sys.settrace(self._enter)
        caller = frame.f_back
        while caller is not None:
            self._watch(caller)
            caller = caller.f_back
        return self._enter(frame, event, arg)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Tracer:
        self._watch(frame)
        return self._step

    def _watch(self, frame: FrameType) -> None:
        frame.f_trace = self._step
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False

    def _step(self, frame: FrameType, event: str, arg: object) -> Tracer:
        if event == "return":
            self._returned = True
        elif event == "opcode":
            returned, self._returned = self._returned, False
            if not returned and frame.f_lasti in places(frame.f_code) and is_ours(frame):
                self._behind -= 1
                if self._behind < 0:
                    sys.settrace(None)
                    self.place = where(frame)
                    signal.raise_signal(signal.SIGINT)
        return self._step


def where(frame: FrameType) -> str:
    """The interrupted line, and the nearest line of ours that led to it."""
    here = f"{frame.f_code.co_filename.rsplit('site-packages/')[-1]}:{frame.f_lineno} {frame.f_code.co_qualname}"
    caller: FrameType | None = frame
    while caller is not None and "muxkit" not in caller.f_code.co_filename.rsplit("/wt/")[-1]:
        caller = caller.f_back
    if caller is None or caller is frame:
        return here
    return f"{here} < {caller.f_code.co_filename.rsplit('/muxkit')[-1]}:{caller.f_lineno} {caller.f_code.co_qualname}"


# --- the programs


@attrs.define
class Story:
    """What the program itself saw."""

    stays: bool
    ends: list[BaseException] = attrs.field(factory=list)
    """What left a block of the library."""
    caught: int = 0
    told: str = ""
    """What was wrong with what arrived."""

    async def again(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run it, and again if it was interrupted and this program stays."""
        while True:
            try:
                return await operation()
            except KeyboardInterrupt:
                if not self.stays:
                    raise
                self.caught += 1

    def compare(self, got: object, expected: object) -> None:
        if got != expected:
            self.told = f"got {got}, expected {expected}"


class Talk(Protocol):
    """What a conversation needs of a channel: muxkit's, or two of Trio's."""

    async def send(self, message: bytes, /) -> None: ...

    async def receive(self) -> bytes: ...


async def noting(story: Story, operation: Callable[..., Awaitable[object]], **options: Any) -> None:
    """Note how a block of the library ended, before a nursery of this program can make a group of it."""
    try:
        await operation(**options)
    except BaseException as error:
        if not isinstance(error, trio.Cancelled):
            story.ends.append(error)
        raise


async def converse(channel: Talk, story: Story) -> None:
    """Messages there and back, one by one."""
    sent = [b"%d" % number * (1 + 50 * number) for number in range(MESSAGES)]
    got = []
    for message in sent:
        await story.again(partial(channel.send, message))
        got.append(await story.again(channel.receive))
    story.compare(got, sent)


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def of_sessions(protocol: str, story: Story) -> None:
    async def client() -> None:
        async with muxkit.connect(f"{protocol}+mem://interrupts") as session:
            for _ in range(CHANNELS):
                await story.again(partial(one_channel, session))

    async def one_channel(session: muxkit.Session) -> None:
        async with session.open() as channel:
            await converse(channel, story)

    async with trio.open_nursery() as nursery:
        started = trio.Event()

        class Started:
            def started(self, value: object = None) -> None:
                started.set()

        nursery.start_soon(
            partial(
                noting,
                story,
                muxkit.serve,
                handler=muxkit.each_channel(echo),
                url=f"{protocol}+mem://interrupts",
                task_status=Started(),
            )
        )
        await started.wait()
        await noting(story, client)
        nursery.cancel_scope.cancel()


async def of_restream(protocol: str, story: Story) -> None:
    async def client() -> None:
        async with restream.numbers(
            "restream+mem://interrupts", count=NUMBERS, uuid="6" * 8 + "-0000-4000-8000-" + "0" * 12
        ) as reader:
            got = []
            while True:
                try:
                    got.append(await story.again(reader.receive))
                except trio.EndOfChannel:
                    break
            if len(got) != NUMBERS:
                story.told = f"{len(got)} numbers of {NUMBERS}"

    async with trio.open_nursery() as nursery:
        started = trio.Event()

        class Started:
            def started(self, value: object = None) -> None:
                started.set()

        async def serve() -> None:
            async with restream.open_store("memory:") as store:
                await restream.serve("restream+mem://interrupts", store, task_status=Started())

        nursery.start_soon(noting, story, serve)
        await started.wait()
        await noting(story, client)
        nursery.cancel_scope.cancel()


async def of_trio(protocol: str, story: Story) -> None:
    """The same shape with memory channels."""

    async def answer(receives: trio.MemoryReceiveChannel[bytes], sends: trio.MemorySendChannel[bytes]) -> None:
        async for message in receives:
            await sends.send(message)

    class Both:
        def __init__(self, sends: trio.MemorySendChannel[bytes], receives: trio.MemoryReceiveChannel[bytes]) -> None:
            self.send, self.receive = sends.send, receives.receive

    async with trio.open_nursery() as nursery:
        there, arrives = trio.open_memory_channel[bytes](2)
        back, returns = trio.open_memory_channel[bytes](2)
        nursery.start_soon(answer, arrives, back)

        async def client() -> None:
            async with there, returns:
                for _ in range(CHANNELS):
                    await story.again(partial(converse, Both(there, returns), story))

        await noting(story, client)
        nursery.cancel_scope.cancel()


def program(protocol: str) -> Callable[[str, Story], Awaitable[None]]:
    return {CONTROL: of_trio, "restream": of_restream}.get(protocol, of_sessions)


# --- sorting


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from leaves(member)
    else:
        yield error


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its members, and what led to them."""
    heap, seen = [error], set()
    while heap:
        one = heap.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        heap += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            heap += one.exceptions


class Records(logging.Handler):
    """What the library wrote to its log, as errors."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.errors: list[BaseException] = []
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])
        if isinstance(record.args, tuple):
            self.errors += [argument for argument in record.args if isinstance(argument, BaseException)]
        if record.levelno >= logging.ERROR:
            self.texts.append(record.getMessage())


@attrs.define
class Run:
    """One seed's end."""

    seed: int
    kind: str
    place: str
    story: str = ""
    error: BaseException | None = None


def calls_of(protocol: str) -> int:
    """How many Python calls a run makes that nothing interrupts."""
    return min(_run(protocol, -1, 10**9, 0, stays=False)[1].calls for _ in range(2))


def _run(protocol: str, seed: int, call: int, behind: int, *, stays: bool) -> tuple[Run, Striker]:
    story = Story(stays)
    striker = Striker(call, behind)
    records = Records()
    logger = logging.getLogger("muxkit")
    level, propagates = logger.level, logger.propagate
    unraised: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda what: unraised.append(what.exc_value or what.err_msg)
    tracer = sys.gettrace()
    logger.addHandler(records)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    error: BaseException | None = None

    async def main() -> None:
        try:
            with trio.fail_after(PATIENCE):
                sys.settrace(striker.count)
                await program(protocol)(protocol, story)
        finally:
            sys.settrace(None)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0), strict_exception_groups=True)
        except BaseException as raised:
            error = raised
        finally:
            sys.settrace(tracer)
            sys.unraisablehook = hook
            logger.removeHandler(records)
            logger.setLevel(level)
            logger.propagate = propagates
            if seed % COLLECT_EVERY == 0:
                gc.collect()
    kind = sort(story, error, records, struck=bool(striker.place))
    if kind in CLEAN and (warned or unraised):
        kind = f"warning: {unraised or warned[0].message}"
    return Run(seed, kind, striker.place, f"stays={stays} {story.told}", error), striker


def sort(story: Story, error: BaseException | None, records: Records, *, struck: bool) -> str:
    """Which kind of end this is; the worst that holds."""
    everything = [one for end in (error, *story.ends, *records.errors) for one in chain(end)]
    if any(isinstance(one, trio.TrioInternalError) for one in everything):
        return "internal error"
    if any(isinstance(one, RemoteProtocolError) for one in everything):
        return "broken protocol"
    if any(isinstance(one, trio.TooSlowError) for one in everything):
        return "hangs"
    if any(
        isinstance(end, BaseExceptionGroup) and not all(isinstance(leaf, trio.Cancelled) for leaf in leaves(end))
        for end in story.ends
    ):
        return "group"
    if records.texts:
        return f"logged: {records.texts[0][:200]}"
    ends = list(leaves(error)) if error else []
    interrupts = [leaf for leaf in ends if isinstance(leaf, KeyboardInterrupt)]
    rest = [leaf for leaf in ends if not isinstance(leaf, KeyboardInterrupt)]
    if any(not isinstance(leaf, (MuxError, trio.BrokenResourceError)) for leaf in rest):
        return f"other: {rest!r}"
    if rest and not interrupts and not story.caught:
        return f"other: {rest!r}"
    if len(interrupts) + story.caught > 1:
        return "more than one interrupt"
    if not struck:
        return "not reached"
    if not interrupts and not story.caught:
        return "swallowed"
    if rest and not interrupts:
        return "lost with a typed error"
    if story.told and not interrupts:
        return "wrong messages"
    return "interrupt" if interrupts else "caught"


def run(protocol: str, seed: int, calls: int) -> Run:
    """One run, interrupted where the seed says."""
    dice = random.Random(f"{protocol} {seed}")
    return _run(protocol, seed, dice.randrange(1, calls), dice.randrange(BEHIND), stays=bool(seed % 2))[0]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--protocol", action="append", choices=[*PROTOCOLS, CONTROL])
    arguments.add_argument("--seeds", type=int, default=10_000)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--show", type=int, default=8, help="places of each unclean kind")
    arguments.add_argument("--trace", action="store_true", help="print the errors")
    options = arguments.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background begins with it ignored
    bad = 0
    for protocol in options.protocol or PROTOCOLS:
        begun = process_time()
        calls = calls_of(protocol)
        kinds: Counter[str] = Counter()
        places_of: dict[str, Counter[str]] = {}
        for seed in range(options.first, options.first + options.seeds):
            done = run(protocol, seed, calls)
            kinds[done.kind] += 1
            if done.kind not in CLEAN:
                bad += protocol != CONTROL
                places_of.setdefault(done.kind, Counter())[f"{done.place} [{done.seed} {done.story}]"] += 1
                if options.trace and done.error is not None:
                    traceback.print_exception(done.error)
        print(
            f"{protocol}: {calls} calls, {options.seeds} seeds, {process_time() - begun:.0f} s: {dict(kinds)}",
            flush=True,
        )
        for kind, found in places_of.items():
            for place, count in found.most_common(options.show):
                print(f"    {kind}: {count} x {place}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
