"""Medians, ratios and verdicts follow from the passes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from muxkit_bench.contestants.contestant import ours, raw
from muxkit_bench.report.figures import Figures, Spread, baseline_of, value_by_cpu, value_of
from muxkit_bench.report.results import Entry, Machine, Pass, Report, Shape
from muxkit_bench.report.targets import TARGETS, judge
from muxkit_bench.report.words import agreeing, extent, short
from muxkit_bench.run.cells import JOBS, Cell, cells

OURS = Entry(name="bpmux+tcp", title="ours", baseline="raw tcp")
RAW = Entry(name="raw tcp", title="raw", baseline="raw tcp")
COALESCED = Entry(name="raw tcp, coalesced", title="raw", baseline="raw tcp")
MACHINE = Machine(
    system="Linux", processor="a processor", cores=2, pinned=[0, 1], python="CPython", packages={}, load_before=[]
)


def shape(job: str, channels: int = 1, *, unit: str = "messages/s", baseline: str = "each") -> Shape:
    return Shape(
        key=f"{job}/{channels}",
        job=job.partition(" ")[0],
        title=job,
        channels=channels,
        unit=unit,
        higher_is_better=True,
        counted="message",
        baseline=baseline,
    )


def a_pass(number: int, cell: str, peer: str, rate: float = 1.0, **also: float) -> Pass:
    return Pass(
        round=number, cell=cell, peer=peer, units=rate * 2, seconds=2.0, client_cpu=1.0, server_cpu=0.5, also=also
    )


def report(shapes: list[Shape], passes: list[Pass]) -> Report:
    return Report(
        began="2030-01-01T00:00:00+00:00",
        seconds=1.0,
        rounds=3,
        seed=1,
        pass_seconds=0.25,
        muxkit="0",
        machine=MACHINE,
        entries=[OURS, RAW, COALESCED],
        left_out=[],
        cells=shapes,
        passes=passes,
    )


def rates(cell: str, peer: str, *values: float) -> list[Pass]:
    return [a_pass(number, cell, peer, rate) for number, rate in enumerate(values, start=1)]


# ---------------------------------------------------------------------------- ratios


def test_a_ratio_is_of_values_of_the_same_round() -> None:
    small = shape("small")
    figures = Figures(
        report([small], [*rates("small/1", OURS.name, 10, 30, 90), *rates("small/1", RAW.name, 10, 10, 10)])
    )
    assert figures.ratios(small, OURS) == [1, 3, 9]


def test_the_ratio_that_is_told_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    small = shape("small")
    passes = [*rates("small/1", OURS.name, 10, 20, 90), *rates("small/1", RAW.name, 1, 10, 10)]
    line = Figures(report([small], passes)).line(small, OURS)
    assert line is not None
    assert line.ratio == Spread(9.0, 2.0, 10.0)
    assert line.value == Spread(20.0, 10.0, 90.0)


def test_a_round_in_which_one_of_the_two_is_missing_gives_no_ratio() -> None:
    small = shape("small")
    passes = [*rates("small/1", OURS.name, 10, 20, 30), a_pass(3, "small/1", RAW.name, 10)]
    assert Figures(report([small], passes)).ratios(small, OURS) == [3]


def test_a_baseline_is_not_compared_with_itself() -> None:
    small = shape("small")
    line = Figures(report([small], rates("small/1", RAW.name, 1, 2, 3))).line(small, RAW)
    assert line is not None
    assert line.ratio is None


def test_batches_are_compared_with_the_coalesced_connection() -> None:
    assert baseline_of(shape("send_many", baseline="coalesced"), OURS) == COALESCED.name
    assert baseline_of(shape("small"), OURS) == RAW.name


def test_who_was_not_measured_has_no_line() -> None:
    small = shape("small")
    lines = Figures(report([small], rates("small/1", OURS.name, 1))).lines(small)
    assert [line.entry.name for line in lines] == [OURS.name]


def test_cpu_time_is_told_in_microseconds_a_unit() -> None:
    small = shape("small")
    line = Figures(report([small], rates("small/1", OURS.name, 1000))).line(small, OURS)
    assert line is not None
    assert line.client_cpu == Spread(500.0, 500.0, 500.0)
    assert line.server_cpu == Spread(250.0, 250.0, 250.0)


def test_a_ratio_by_cpu_is_of_the_busier_ends() -> None:
    small = shape("small")
    passes = [
        msgspec.structs.replace(a_pass(1, "small/1", OURS.name, 100.0), client_cpu=0.1, server_cpu=0.4),
        msgspec.structs.replace(a_pass(1, "small/1", RAW.name, 10.0), client_cpu=0.2, server_cpu=0.1),
    ]
    line = Figures(report([small], passes)).line(small, OURS)
    assert line is not None
    assert line.ratio_by_cpu == Spread(5.0, 5.0, 5.0)  # 200 messages in 0.4 s to 20 in 0.2 s


def test_a_round_trip_by_cpu_is_what_both_ends_took() -> None:
    rtt = msgspec.structs.replace(shape("rtt", unit="µs"), higher_is_better=False)
    one = msgspec.structs.replace(a_pass(1, "rtt/1", OURS.name, 50.0), client_cpu=0.003, server_cpu=0.001)
    assert value_by_cpu(rtt, one) == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("job", "also", "value"),
    [
        ("small", {}, 5.0),
        ("rtt", {"p50": 1e-4, "p99": 2e-4}, 100.0),
        ("neighbour", {"p50": 2e-4, "p99": 3e-4, "idle_p50": 1e-4}, 200.0),
        ("idle", {"client_bytes": 900.0, "server_bytes": 1100.0}, 1100.0),
    ],
)
def test_each_job_has_its_figure(job: str, also: dict[str, float], value: float) -> None:
    assert value_of(shape(job), a_pass(1, "", "", 5.0, **also)) == pytest.approx(value)


# ---------------------------------------------------------------------------- targets


def test_a_target_is_judged_by_the_median_of_the_ratios() -> None:
    small = shape("small")
    for ours_at, is_met in ((60.0, True), (59.0, False)):
        passes = [*rates("small/1", OURS.name, 10, ours_at, 900), *rates("small/1", RAW.name, 10, 10, 10)]
        (row,) = judge([report([small], passes)])
        (verdict,) = row.verdicts
        assert verdict is not None
        assert verdict.is_met is is_met


def test_a_target_that_no_run_speaks_of_is_not_judged() -> None:
    assert judge([report([shape("small")], rates("small/1", OURS.name, 1, 2))]) == []


def test_a_target_of_two_runs_is_met_as_often_as_it_was() -> None:
    rtt = shape("rtt", unit="µs")

    def run(ours: float) -> Report:
        return report(
            [rtt], [a_pass(1, "rtt/1", OURS.name, p50=ours, p99=1.0), a_pass(1, "rtt/1", RAW.name, p50=1e-4, p99=1.0)]
        )

    (row,) = judge([run(0.8e-4), run(1.0e-4)])
    assert row.met == (1, 2)


def test_the_neighbour_is_compared_with_the_idle_round_trip_of_a_raw_connection() -> None:
    passes = [
        a_pass(1, "neighbour/2", OURS.name, p50=3e-4, p99=5e-4, idle_p50=1e-4, bulk=700.0),
        a_pass(1, "neighbour/2", RAW.name, p50=9e-4, p99=9e-4, idle_p50=2e-4, bulk=700.0),
    ]
    medians = [
        row.verdicts[0].spread.median for row in judge([report([shape("neighbour", 2)], passes)]) if row.verdicts[0]
    ]
    assert medians == pytest.approx([1.5, 5.0, 700.0])


def test_a_channel_among_others_is_judged_by_its_cost_among_few() -> None:
    shapes = [shape("among 64 B", 100), shape("among 64 B", 10_000)]
    passes = [*rates("among 64 B/100", OURS.name, 90), *rates("among 64 B/10000", OURS.name, 45)]
    (row,) = judge([report(shapes, passes)])
    assert row.target.title == "small on one channel among 10,000 open ones, cost to that among 100"
    assert row.verdicts[0] is not None
    assert row.verdicts[0].spread.median == pytest.approx(2.0)
    assert not row.verdicts[0].is_met


def test_the_compiled_build_is_judged_by_its_own_bounds_beside_the_installed_one() -> None:
    small, other = shape("small"), Entry(name=f"{OURS.name}, compiled", title="compiled", baseline="raw tcp")
    passes = [*rates("small/1", OURS.name, 70), *rates("small/1", RAW.name, 10), *rates("small/1", other.name, 70)]
    rows = judge([report([small], passes)])
    assert [(row.target.title.partition(":")[0], row.target.bound, row.met) for row in rows] == [
        ("small, 1 channel, to raw send_all each", 6, (1, 1)),
        ("compiled", 8, (0, 1)),
    ]


def test_an_installed_build_that_is_compiled_is_judged_by_the_bounds_of_that() -> None:
    passes = [*rates("small/1", OURS.name, 70), *rates("small/1", RAW.name, 10)]
    whole = msgspec.structs.replace(report([shape("small")], passes), is_compiled=True)
    (row,) = judge([whole])
    assert (row.target.bound, row.met) == (8, (0, 1))


def test_a_quick_run_says_nothing_about_targets() -> None:
    small = shape("small")
    whole = report([small], [*rates("small/1", OURS.name, 90), *rates("small/1", RAW.name, 10)])
    hasty = msgspec.structs.replace(whole, quick=True)
    assert judge([hasty]) == []
    (row,) = judge([hasty, whole])
    assert row.verdicts[0] is None
    assert row.met == (1, 1)


def test_flatness_is_the_cost_of_a_message_at_many_channels_in_costs_at_few() -> None:
    shapes = [shape("flat", 100), shape("flat", 10_000)]
    passes = [*rates("flat/100", OURS.name, 90), *rates("flat/10000", OURS.name, 60)]
    (row,) = judge([report(shapes, passes)])
    assert row.verdicts[0] is not None
    assert row.verdicts[0].spread.median == pytest.approx(1.5)
    assert row.verdicts[0].is_met


def test_every_cell_that_a_target_needs_is_measured_by_default() -> None:
    named = {cell.key: cell for cell in cells(JOBS)}
    passes = [
        a_pass(1, key, peer, p50=1.0, p99=1.0, idle_p50=1.0, bulk=1.0, client_bytes=1.0, server_bytes=1.0)
        for key in named
        for peer in (OURS.name, RAW.name)
    ]
    judged = judge([report([shape_of(cell) for cell in named.values()], passes)])
    assert [row.target for row in judged] == list(TARGETS)


def shape_of(cell: Cell) -> Shape:
    return Shape(
        key=cell.key,
        job=cell.job,
        title=cell.title,
        channels=cell.channels,
        unit=cell.unit,
        higher_is_better=cell.higher_is_better,
        counted=cell.counted,
        baseline=cell.baseline,
    )


# ---------------------------------------------------------------------------- who takes part


def test_small_messages_are_compared_with_both_forms_of_a_raw_connection() -> None:
    plain, coalesced = raw("tcp", Path("x"))
    (small,) = [cell for cell in cells(("small",)) if cell.channels == 100]
    assert plain.takes_part(small)
    assert coalesced.takes_part(small)
    (batched,) = [cell for cell in cells(("send_many",)) if cell.channels == 100]
    assert not plain.takes_part(batched)
    assert coalesced.takes_part(batched)


def test_a_coalesced_connection_sends_its_messages_in_batches() -> None:
    (small, *_) = cells(("small",))
    assert small.task(seconds=1.0, count=0, coalesced=False)["batch"] == 1
    assert small.task(seconds=1.0, count=0, coalesced=True)["batch"] == 64


def test_no_raw_connection_is_opened_for_ten_thousand_channels() -> None:
    most = max(cells(("small",)), key=lambda cell: cell.channels)
    assert most.channels == 10_000
    assert not any(one.takes_part(most) for one in raw("tcp", Path("x")))


def test_a_session_over_a_unix_socket_is_compared_with_a_unix_socket() -> None:
    assert ours("bpmux", "unix", Path("x")).baseline == "raw unix"
    assert ours("bpmux", "wss", Path("x")).baseline == "raw tcp"


# ---------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0.0365, "0.0365"),
        (0.5, "0.500"),
        (4.256, "4.26"),
        (42.0, "42.0"),
        (99.97, "100"),
        (1234.4, "1,234"),
        (9999.6, "10.0 k"),
        (383_938, "384 k"),
        (999_600, "1.00 M"),
        (4_862_087, "4.86 M"),
    ],
)
def test_a_number_is_written_with_three_digits_that_count(number: float, words: str) -> None:
    assert short(number) == words


@pytest.mark.parametrize(
    ("number", "bound", "words"),
    [
        (0.6996, 0.7, "0.6996"),
        (0.7, 0.7, "0.700"),
        (0.71, 0.7, "0.710"),
        (5.9999, 6.0, "5.9999"),
        (999.96, 1000.0, "999.96"),
        (999_600.0, 1e6, "999,600"),
        (1.3504, 1.35, "1.3504"),
        (0.1 + 0.7, 0.8, "0.7999999999999999"),
    ],
)
def test_a_number_is_not_rounded_to_the_other_side_of_its_bound(number: float, bound: float, words: str) -> None:
    assert agreeing(number, lambda shown: (shown > bound, shown < bound) == (number > bound, number < bound)) == words


def test_a_single_round_has_no_spread() -> None:
    assert extent(Spread(1.0, 1.0, 1.0)) == ""
    assert extent(Spread(2.0, 1.0, 3.0)) == "1.00 – 3.00"
