"""Plans of faults for a simulated network: drawing them from a seed, writing them as text, and carrying them out.

    muxkit plan 1, seed 17
    weather delay=0.01
    at 1.25 delay client > server by 0.4 for 2
    at 3 cut client - server reset
    at 4 partition client > server for 5
    at 6 throttle server > client to 1000 for 3
    wake 142 by 3

Times are seconds since the network began. `wake 142 by 3` changes the order of tasks in one pass of Trio's loop: among
the passes in which several tasks became ready, it is number 142, and the order is drawn from the number 3. In all
other passes the oldest task runs first.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal, TypeVar

import attrs
import trio

from muxkit.runtime.pumps.turns import untimed
from muxkit.testing._chaos import Cut
from muxkit.testing._sim import SimNetwork, SimWeather

FaultKind = Literal["delay", "throttle", "partition", "cut", "wake"]
FAULT_KINDS: Final[frozenset[FaultKind]] = frozenset({"delay", "throttle", "partition", "cut", "wake"})
LASTING: Final = ("delay", "throttle", "partition")
WAKES: Final = (0, 4, 16, 64)  # how many passes of the loop a drawn plan reorders; one of these is drawn
SMALLEST: Final = 0.001  # s; shrinking makes no number of a plan smaller than this, except 0
CALM: Final = SimWeather(delay=0.01)
HEAD: Final = re.compile(r"muxkit plan 1, seed (-?\d+)")
NUMBER: Final = r"(\d+(?:\.\d*)?(?:e-?\d+)?)"
HOSTS: Final = r"(\S+) ([>-]) (\S+)"
FORMS: Final = {
    "delay": re.compile(rf"at {NUMBER} delay {HOSTS} by {NUMBER} for {NUMBER}"),
    "throttle": re.compile(rf"at {NUMBER} throttle {HOSTS} to {NUMBER} for {NUMBER}"),
    "partition": re.compile(rf"at {NUMBER} partition {HOSTS} for {NUMBER}"),
    "cut": re.compile(rf"at {NUMBER} cut {HOSTS} (\w+)"),
}
WAKE: Final = re.compile(r"wake (\d+) by (\d+)")

ValueT = TypeVar("ValueT")


@attrs.frozen(kw_only=True)
class Fault:
    """Something that happens to the network at a certain time, and possibly for a while."""

    at: float
    what: Literal["delay", "throttle", "partition", "cut"]
    source: str
    target: str
    amount: float = 0.0
    """The additional seconds of a delay, or the bytes per second of a throttle."""
    seconds: float = 0.0
    """How long the fault lasts. A cut has no duration."""
    both_ways: bool = False
    how: Cut = Cut.RESET

    def __str__(self) -> str:
        hosts = f"{self.source} {'-' if self.both_ways else '>'} {self.target}"
        lasting = f"for {number(self.seconds)}"
        if self.what == "delay":
            lasting = f"by {number(self.amount)} {lasting}"
        elif self.what == "throttle":
            lasting = f"to {number(self.amount)} {lasting}"
        rest = self.how.value if self.what == "cut" else lasting
        return f"at {number(self.at)} {self.what} {hosts} {rest}"


@attrs.frozen
class Wake:
    """Runs the tasks of one pass of Trio's loop in another order."""

    number: int
    """The number of the pass, among those in which more than one task became ready."""
    by: int
    """The seed of the order."""

    def __str__(self) -> str:
        return f"wake {self.number} by {self.by}"


@attrs.frozen(kw_only=True)
class Plan:
    """Everything that decides a run on a simulated network. `str(plan)` is a text that `parse` reads."""

    seed: int = 0
    """Decides everything that `weather` leaves to chance."""
    weather: SimWeather = CALM
    faults: tuple[Fault, ...] = ()
    wakes: tuple[Wake, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"muxkit plan 1, seed {self.seed}", _weather_line(self.weather), *map(str, self.events)])

    @property
    def events(self) -> tuple[Fault | Wake, ...]:
        """All faults by time, followed by the reordered passes."""
        return (*self.faults, *self.wakes)

    def with_events(self, events: Collection[Fault | Wake]) -> Plan:
        """Return a copy of this plan with other events."""
        faults = sorted((each for each in events if isinstance(each, Fault)), key=lambda fault: (fault.at, str(fault)))
        wakes = sorted((each for each in events if isinstance(each, Wake)), key=lambda wake: wake.number)
        return attrs.evolve(self, faults=tuple(faults), wakes=tuple(wakes))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text of a plan. Empty lines and comments, which begin with `#`, are ignored.

        Raises:
            ValueError: if the text isn't a valid plan.
        """
        lines = [line for each in text.splitlines() if (line := each.partition("#")[0].strip())]
        head = HEAD.fullmatch(lines[0]) if lines else None
        if head is None:
            raise ValueError(f"a plan begins with the line 'muxkit plan 1, seed N', not {(lines or [''])[0]!r}")
        weather = SimWeather()
        events: list[Fault | Wake] = []
        for line in lines[1:]:
            if line.split()[0] == "weather":
                weather = _read_weather(line)
            else:
                events.append(_read_event(line))
        return cls(seed=int(head[1]), weather=weather).with_events(events)

    @classmethod
    def draw(
        cls,
        seed: int,
        *,
        routes: Collection[tuple[str, str]],
        length: float,
        weather: SimWeather = CALM,
        kinds: Collection[FaultKind] = FAULT_KINDS,
        most: int = 6,
        passes: int = 0,
        moments: Sequence[float] = (),
    ) -> Plan:
        """Draw a plan for a run of `length` seconds over these routes.

        Each plan has only some of the kinds. If every plan had a cut, cuts would hide the failures that delays cause on
        their own.

        Args:
            seed: decides the plan.
            routes: the pairs of source and target host that the run uses.
            length: the duration of the run, in seconds.
            weather: the network conditions, apart from the faults.
            kinds: the kinds of faults to draw.
            most: the largest number of faults.
            passes: how many passes of Trio's loop could be reordered.
            moments: the times at which data was sent. About half of the faults start at one of them, and some of these
                last until another one.
        """
        dice = random.Random(f"muxkit plan/{seed}")
        pairs = sorted(routes)
        lasting = sorted(set(kinds) - {"wake"})
        usable = [kind for kind in lasting if dice.random() < 0.5] or lasting
        count = dice.randint(1, most) if pairs and usable and most else 0
        faults = []
        for _ in range(count):
            is_aimed = dice.random() < 0.5 and bool(moments)
            at = math.floor(1000 * dice.choice(moments)) / 1000 if is_aimed else round(dice.uniform(0.0, length), 3)
            fault = _draw_fault(dice, dice.choice(usable), *dice.choice(pairs), at, length)
            later = [moment for moment in moments if moment > at]
            if is_aimed and later and fault.what in LASTING and dice.random() < 0.5:
                # Many bugs need two things to coincide. This lets data that is sent now arrive when other data is sent.
                span = round(dice.choice(later) - at, 3)
                fault = attrs.evolve(fault, seconds=span, amount=span if fault.what == "delay" else fault.amount)
            faults.append(fault)
        wakes: list[Wake] = []
        if "wake" in kinds and passes:
            chosen = dice.sample(range(passes), min(passes, dice.choice(WAKES)))
            wakes = [Wake(each, dice.randrange(1000)) for each in chosen]
        return cls(seed=seed, weather=weather).with_events([*faults, *wakes])


def _draw_fault(dice: random.Random, what: str, source: str, target: str, at: float, length: float) -> Fault:
    """Draw a fault whose size fits a run of `length` seconds. Durations are spread evenly on a logarithmic scale."""
    span = max(length, 0.1)
    seconds = round(span * 10 ** dice.uniform(-2, 0.3), 3)
    amount = round(span * 10 ** dice.uniform(-2, 0.3), 3)
    both = dice.random() < 0.3
    match what:
        case "delay":
            return Fault(
                at=at, what="delay", source=source, target=target, amount=amount, seconds=seconds, both_ways=both
            )
        case "throttle":
            rate = float(round(10 ** dice.uniform(1, 5)))
            return Fault(
                at=at, what="throttle", source=source, target=target, amount=rate, seconds=seconds, both_ways=both
            )
        case "partition":
            return Fault(at=at, what="partition", source=source, target=target, seconds=seconds, both_ways=not both)
        case _:
            how = dice.choice((Cut.RESET, Cut.RESET, Cut.END, Cut.STALL))
            return Fault(at=at, what="cut", source=source, target=target, both_ways=True, how=how)


def number(value: float) -> str:
    """Format a number so that parsing it returns the same value. Integers have no `.0`."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _weather_line(weather: SimWeather) -> str:
    usual = SimWeather()
    words = ["weather"]
    for field in attrs.fields(SimWeather):
        value = getattr(weather, field.name)
        if value != getattr(usual, field.name):
            words.append(f"{field.name}={value if value is None or isinstance(value, bool) else number(value)}")
    return " ".join(words)


def _read_weather(line: str) -> SimWeather:
    values: dict[str, Any] = {}
    names = {field.name: getattr(SimWeather(), field.name) for field in attrs.fields(SimWeather)}
    for word in line.split()[1:]:
        name, _, text = word.partition("=")
        if name not in names:
            raise ValueError(f"{line!r}: there is no weather {name!r}; there are: {', '.join(names)}")
        if text in ("True", "False"):
            values[name] = text == "True"
        else:
            whole = name in ("queue", "buffer", "mtu")
            values[name] = int(text) if whole else float(text)
    return SimWeather(**values)


def _read_event(line: str) -> Fault | Wake:
    if found := WAKE.fullmatch(line):
        return Wake(int(found[1]), int(found[2]))
    for what, form in FORMS.items():
        if found := form.fullmatch(line):
            at, source, arrow, target, *rest = found.groups()
            both = arrow == "-"
            start = float(at)
            if what == "delay":
                return _lasting("delay", start, source, target, both, float(rest[0]), float(rest[1]))
            if what == "throttle":
                return _lasting("throttle", start, source, target, both, float(rest[0]), float(rest[1]))
            if what == "partition":
                return _lasting("partition", start, source, target, both, 0.0, float(rest[0]))
            how = Cut(rest[0])
            return Fault(at=start, what="cut", source=source, target=target, both_ways=both, how=how)
    raise ValueError(f"{line!r} is no event of a plan, such as 'at 1.5 partition client - server for 2'")


def _lasting(
    what: Literal["delay", "throttle", "partition"],
    at: float,
    source: str,
    target: str,
    both: bool,
    amount: float,
    seconds: float,
) -> Fault:
    return Fault(at=at, what=what, source=source, target=target, both_ways=both, amount=amount, seconds=seconds)


# ---------------------------------------------------------------------------- carrying it out


class PlanRun:
    """Carries out the faults of a plan on a network."""

    def __init__(self, network: SimNetwork, plan: Plan) -> None:
        self.plan: Plan = plan
        self.done: list[Fault] = []
        """The faults that have begun."""
        self._network = network
        self._active: list[Fault] = []

    async def run(self) -> None:
        """Carry the plan out, and return when its last fault has ended."""
        moments: list[tuple[float, int, int, Fault]] = []
        for index, fault in enumerate(self.plan.faults):
            moments.append((fault.at, 0, index, fault))
            if fault.what in LASTING:
                moments.append((fault.at + fault.seconds, 1, index, fault))
        for when, ends, _, fault in sorted(moments, key=lambda moment: moment[:3]):
            await trio.sleep(max(0.0, when - self._network.now()))
            if fault.what == "cut":
                self._network.cut(fault.source, fault.target, how=fault.how)
                self.done.append(fault)
            elif not ends:
                self._active.append(fault)
                self.done.append(fault)
                self._renew(fault)
            else:
                self._active.remove(fault)
                self._renew(fault)

    def _renew(self, changed: Fault) -> None:
        """Apply the faults that are active now to the routes of a fault that began or ended."""
        for source, target in _ways(changed):
            now = [fault for fault in self._active if (source, target) in _ways(fault) and fault.what == changed.what]
            match changed.what:
                case "delay":
                    self._network.delay(sum(fault.amount for fault in now), source, target)
                case "throttle":
                    self._network.throttle(min((fault.amount for fault in now), default=None), source, target)
                case _:
                    if now:
                        self._network.partition(source, target, one_way=True)
                    else:
                        self._network.heal(source, target, one_way=True)


def _ways(fault: Fault) -> list[tuple[str, str]]:
    there = (fault.source, fault.target)
    return [there, there[::-1]] if fault.both_ways and fault.source != fault.target else [there]


class TaskOrder(random.Random):
    """Replaces the random generator with which Trio shuffles tasks. The oldest runs first, except in chosen passes."""

    def __init__(self, wakes: Mapping[int, int], seed: int | None) -> None:
        super().__init__(0 if seed is None else f"muxkit wakes/{seed}")
        self.passes = 0
        self._is_shuffling = seed is not None
        self._wakes = wakes

    def shuffle(self, x: Any) -> None:  # noqa: ANN401 - as in `random.Random`
        """Order a batch of tasks. Trio runs the last one first."""
        x.reverse()
        if self._is_shuffling:
            super().shuffle(x)
        elif len(x) > 1:
            by = self._wakes.get(self.passes)
            self.passes += 1
            if by is not None:
                random.Random(f"muxkit wake/{by}").shuffle(x)


@contextmanager
def determined(seed: int, wakes: Mapping[int, int] | None = None, *, shuffled: bool = False) -> Iterator[TaskOrder]:
    """Make Trio runs in the block depend only on the seed: the order of tasks, `random`, `secrets` and `uuid.uuid4`.

    Tasks that become ready together run oldest first, except in the passes that `wakes` names. With `shuffled`, the
    seed decides their order in every pass. The block changes global state, so use only one at a time in a process. The
    results of threads and of measurements of processor time still vary.
    """
    # Trio has no public way to decide the order of tasks. If these names are missing, only that order varies.
    from trio._core import _run

    order = TaskOrder(wakes or {}, seed if shuffled else None)
    dice = random.Random(f"muxkit bytes/{seed}")
    state = random.getstate()
    changes: list[tuple[dict[str, Any], str, object]] = []
    if hasattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING") and hasattr(_run, "_r"):
        changes += [(vars(_run), "_ALLOW_DETERMINISTIC_SCHEDULING", True), (vars(_run), "_r", order)]
    # Ids and tokens are drawn from these. Otherwise their bytes, and so the data on the wire, would differ each time.
    changes += [(vars(os), "urandom", dice.randbytes), (vars(random), "_urandom", dice.randbytes)]
    before = [(names, name, names[name]) for names, name, _ in changes]
    random.seed(seed)
    try:
        for names, name, value in changes:
            names[name] = value
        with untimed():
            yield order
    finally:
        for names, name, value in before:
            names[name] = value
        random.setstate(state)


# ---------------------------------------------------------------------------- making it smaller


class EnoughTried(Exception):
    """Raised when the runs for shrinking a plan are used up."""


def smaller(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Shrink a plan: return a plan near `plan` that still fails, with few events and then with simple numbers.

    `fails` runs a plan and returns whether it fails in the same way. It may raise `EnoughTried` to end the search.
    """
    best = [plan]

    def try_(candidate: Plan) -> bool:
        if candidate == best[0] or not fails(candidate):
            return False
        best[0] = candidate
        return True

    with suppress(EnoughTried):
        try_(plan.with_events(()))
        while True:
            before = best[0]
            _fewer(best, try_)
            _calmer(best, try_)
            _simpler(best, try_)
            if best[0] == before:
                break
    return best[0]


def _fewer(best: list[Plan], try_: Callable[[Plan], bool]) -> None:
    """Remove events: first halves, then quarters and so on (the `ddmin` algorithm of Zeller and Hildebrandt)."""
    parts = 2
    while len(events := best[0].events) > 1:
        size = math.ceil(len(events) / parts)
        pieces = [events[start : start + size] for start in range(0, len(events), size)]
        if any(try_(best[0].with_events(piece)) for piece in pieces):
            parts = 2
        elif any(
            try_(best[0].with_events([each for piece in pieces if piece is not left_out for each in piece]))
            for left_out in pieces
        ):
            parts = max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(len(events), 2 * parts)
    if best[0].events:
        try_(best[0].with_events(()))


def _calmer(best: list[Plan], try_: Callable[[Plan], bool]) -> None:
    """Reset the settings of the network conditions to their defaults, one by one, except the delay."""
    usual = SimWeather()
    for field in attrs.fields(SimWeather):
        value = getattr(usual, field.name)
        if field.name != "delay" and getattr(best[0].weather, field.name) != value:
            try_(attrs.evolve(best[0], weather=attrs.evolve(best[0].weather, **{field.name: value})))


def _simpler(best: list[Plan], try_: Callable[[Plan], bool]) -> None:
    """Replace the numbers of each event with simpler ones: shorter, smaller, and with fewer digits."""
    for index in range(len(best[0].events)):
        event = best[0].events[index]
        names = ("seconds", "amount", "at") if isinstance(event, Fault) else ("by",)
        for name in names:
            for _ in range(40):
                event = best[0].events[index]
                numbers = _simpler_numbers(getattr(event, name))
                if isinstance(event, Fault) and event.what == "throttle" and name == "amount":
                    numbers = [each for each in numbers if each >= 1 and len(number(each)) < len(number(event.amount))]
                if not any(try_(_replaced(best[0], index, name, value)) for value in numbers):
                    break
                if best[0].events[index] == event:  # the changed event has moved to another position
                    break
        event = best[0].events[index]
        if isinstance(event, Fault) and event.both_ways and event.what != "cut":
            for source, target in _ways(event):
                one = attrs.evolve(event, source=source, target=target, both_ways=False)
                if try_(_with(best[0], index, one)):
                    break


def _simpler_numbers(value: float) -> Sequence[float]:
    """Return simpler numbers, starting with the simplest."""
    if value == 0:
        return ()
    if isinstance(value, int):
        return [each for each in (0, 1, value // 2) if each < value]
    half = float(f"{value / 2:.1g}")
    rounded = [float(f"{value:.{digits}g}") for digits in (1, 2)]
    shorter = [each for each in rounded if len(number(each)) < len(number(value))]
    return [0.0, *([half] if SMALLEST <= half < value else []), *shorter]


def _replaced(plan: Plan, index: int, name: str, value: float) -> Plan:
    event = plan.events[index]
    change: dict[str, Any] = {name: value}
    changed: Fault | Wake = type(event)(**(attrs.asdict(event, recurse=False) | change))
    return _with(plan, index, changed)


def _with(plan: Plan, index: int, event: Fault | Wake) -> Plan:
    events = [*plan.events]
    events[index] = event
    return plan.with_events(events)


def counts(plan: Plan) -> str:
    """Return how many events of each kind a plan has, such as `2 delays, 1 cut`."""
    kinds = Counter(event.what if isinstance(event, Fault) else "wake" for event in plan.events)
    return ", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in sorted(kinds.items())) or "nothing"
