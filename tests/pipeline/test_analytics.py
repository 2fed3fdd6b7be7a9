"""Answers about captures whose figures can be worked out on paper, by DuckDB and by Spark."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import attrs
import pytest

from muxkit.pipeline import Answers, Raw, Selection, analyse
from muxkit.pipeline.capture.analysis import answers
from tests.pipeline._captures import Made, assert_same, record_sessions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from muxkit.pipeline.capture.analysis import Row

SECOND = 1_000_000


def asked(made: Made) -> Answers:
    return answers(made.ask())


def one(rows: object) -> Row:
    """The only row."""
    assert isinstance(rows, list)
    (row,) = rows
    found: Row = row
    return found


# ---------------------------------------------------------------------------- volumes, rates, connections


def test_volumes_are_told_by_connection_channel_and_direction() -> None:
    made = Made()
    for us, direction, channel, size, of in (
        (0, "in", "c 1", 10, "a"), (SECOND, "in", "c 1", 20, "a"), (0, "out", "c 1", 5, "a"), (0, "in", "c 1", 7, "b"),
    ):  # fmt: skip
        made.frame(us, direction, channel, "payload", size, of=of)
    made.frame(0, "in", "c 2", "end")
    found = [
        (row["connection"], row["direction"], row["channel"], row["frames"], row["bytes"])
        for row in asked(made).volumes
    ]
    assert found == [
        ("test/a", "in", "c 1", 2, 30), ("test/b", "in", "c 1", 1, 7), ("test/a", "out", "c 1", 1, 5),
        ("test/a", "in", "c 2", 1, 0),
    ]  # fmt: skip
    assert asked(made).volumes[0]["bytes_per_second"] == 30.0


def test_rates_are_sums_over_slices_of_time() -> None:
    made = Made()
    for second in range(601):
        made.frame(second * SECOND, "in", "c 1", "payload", second)
    found = asked(made)
    assert found.width_us == 5 * SECOND
    rates = [(row["bucket_us"], row["bytes"]) for row in found.rates]
    assert rates[:2] == [(0, 0 + 1 + 2 + 3 + 4), (5 * SECOND, 5 + 6 + 7 + 8 + 9)]
    assert sum(row["frames"] for row in found.rates) == 601  # type: ignore[misc]  # counts are numbers


def test_connections_are_told_with_what_ended_them_and_what_is_missing() -> None:
    made = Made()
    made.frame(5, "in", "c 1", "payload", 10)
    made.frame(9, "out", "c 2", "payload", 3)
    made.add(10, "error", kind="RemoteProtocolError", rule="x-A01", text="no")
    made.add(11, "dropped", size=40)
    made.add(11, "gap", "in", size=7)
    row = one(asked(made).connections)
    assert row["missing"] == 7
    assert (row["first_us"], row["last_us"], row["frames"], row["channels"]) == (5, 11, 2, 2)
    assert (row["bytes_in"], row["bytes_out"], row["errors"], row["dropped"]) == (10, 3, 1, 40)


def test_an_empty_capture_has_empty_answers() -> None:
    found = asked(Made())
    assert found.count == 0
    assert not any(
        getattr(found, field.name) for field in attrs.fields(Answers) if field.name not in ("width_us", "totals")
    )
    assert not any(found.totals.values())


# ---------------------------------------------------------------------------- credit


def granted(made: Made, us: int, amount: int, channel: str = "out-sink 1") -> None:
    made.add(us, "credit", "in", channel, credit=amount)


def test_a_channel_is_stopped_from_its_last_byte_of_credit_to_the_next_grant() -> None:
    made = Made()
    granted(made, 0, 100)
    made.frame(10, "out", "out-sink 1", "payload", 60)
    made.frame(20, "out", "out-sink 1", "payload", 40)
    granted(made, 70, 10)
    made.frame(80, "out", "out-sink 1", "payload", 10)
    granted(made, 95, 1000)
    row = one(asked(made).credit)
    assert (row["stops"], row["stopped_us"], row["least"]) == (2, 50 + 15, 0)
    assert (row["grants"], row["granted"]) == (3, 1110)


def test_no_credit_at_the_end_is_no_stop() -> None:
    made = Made()
    granted(made, 0, 100)
    made.frame(10, "out", "out-sink 1", "payload", 100)
    made.frame(500, "in", "c 2", "payload", 1)
    assert one(asked(made).credit)["stopped_us"] == 0


def test_an_opening_is_not_paid_by_the_channel_that_it_opens() -> None:
    made = Made()
    made.add(0, "state", None, "out-sink 1", "open")
    made.frame(1, "out", "out-sink 1", "payload", 999)
    granted(made, 10, 100)
    made.frame(20, "out", "out-sink 1", "payload", 99)
    granted(made, 30, 1)
    row = one(asked(made).credit)
    assert (row["stops"], row["least"]) == (0, 1)


def test_a_channel_that_has_the_id_of_one_that_is_gone_has_credit_of_its_own() -> None:
    made = Made()
    granted(made, 0, 100)
    made.frame(10, "out", "out-sink 1", "payload", 30)
    made.add(20, "state", None, "out-sink 1", "gone")
    made.frame(25, "out", "out-sink 1", "payload", 5)  # it is opened again
    granted(made, 30, 50)
    made.frame(40, "out", "out-sink 1", "payload", 50)
    granted(made, 60, 50)
    row = one(asked(made).credit)
    assert (row["stops"], row["stopped_us"]) == (1, 20)


# ---------------------------------------------------------------------------- round trips


def test_pings_are_answered_in_order() -> None:
    made = Made()
    made.frame(0, "out", "c 1", "ping")
    made.frame(10, "out", "c 1", "ping")
    made.frame(100, "in", "c 1", "pong")
    made.frame(130, "in", "c 1", "pong")
    made.frame(131, "in", "c 2", "pong")  # no ping asked for it
    row = one(asked(made).round_trips)
    assert (row["what"], row["trips"], row["p50_us"], row["most_us"]) == ("ping", 2, 100, 120)


def test_a_ping_that_was_lost_with_its_transport_is_answered_by_no_later_pong() -> None:
    made = Made()
    made.frame(0, "out", "link", "ping")
    made.frame(1000, "out", "link", "resume")
    made.frame(2000, "out", "link", "ping")
    made.frame(2007, "in", "link", "pong")
    row = one(asked(made).round_trips)
    assert (row["trips"], row["most_us"]) == (1, 7)


def test_percentiles_are_the_least_value_that_so_many_do_not_exceed() -> None:
    made = Made()
    for trip in range(1, 201):
        made.frame(1000 * trip, "out", "c 1", "ping")
        made.frame(1000 * trip + trip, "in", "c 1", "pong")
    row = one(asked(made).round_trips)
    assert (row["p50_us"], row["p90_us"], row["p99_us"], row["most_us"]) == (100, 180, 198, 200)


def test_a_request_lasts_until_the_last_part_of_its_answer() -> None:
    made = Made()
    for begin in (0, 1000):  # the second has the same id
        made.add(begin, "state", None, "out-request 1", "open")
        made.frame(begin + 5, "out", "out-request 1", "payload", 10)
        made.frame(begin + 40, "in", "out-request 1", "payload", 100)
        made.frame(begin + 45, "in", "out-request 1", "payload", 100)
        made.add(begin + 45, "state", None, "out-request 1", "gone")
    row = one(asked(made).round_trips)
    assert (row["what"], row["trips"], row["p50_us"], row["most_us"]) == ("request", 2, 40, 40)


def test_an_acknowledgement_is_measured_from_the_message_that_it_names() -> None:
    made = Made()
    for id in range(3):
        made.frame(id, "out", "out 1", "message", 10, id)
    made.frame(50, "out", "out 1", "message", 10, 2)  # again, over another transport
    made.frame(60, "in", "out 1", "received", 0, 2)
    made.frame(90, "in", "out 1", "consumed", 0, 1)
    made.frame(91, "in", "out 2", "consumed", 0, 1)
    found = {row["what"]: row["most_us"] for row in asked(made).round_trips}
    assert found == {"received": 58, "consumed": 89}


# ---------------------------------------------------------------------------- resends, fairness, violations


def test_messages_that_went_out_twice_are_counted() -> None:
    made = Made()
    for id in (0, 1, 2, 1, 2, 2, 3):
        made.frame(1, "out", "out 1", "message", 10, id)
    for id in (0, 1):
        made.frame(1, "out", "out 2", "message", 10, id)
    row = one(asked(made).resends)
    assert (row["channel"], row["messages"], row["resent"]) == ("out 1", 7, 3)


def test_a_channel_that_was_opened_again_sends_nothing_twice() -> None:
    made = Made()
    made.frame(1, "out", "out 1", "message", 10, 0)
    made.frame(2, "in", "out 1", "closed")
    made.frame(3, "out", "out 1", "message", 10, 0)
    assert asked(made).resends == []


@pytest.mark.parametrize(
    ("shares", "jain"), [((10, 10, 10, 10), 1.0), ((40, 0, 0, 0), None), ((30, 10), 0.8), ((1, 0, 3), 0.8)], ids=str
)
def test_fairness_is_one_if_all_have_the_same(shares: tuple[int, ...], jain: float | None) -> None:
    made = Made()
    for place, share in enumerate(shares):
        made.frame(place, "in", f"c {place}", "payload", share)
    found = asked(made).fairness
    assert [row["jain"] for row in found] == ([] if jain is None else [pytest.approx(jain)])


def test_taking_turns_is_fair_as_a_whole_and_not_in_each_slice() -> None:
    made = Made()
    for slice in range(118):
        made.frame(slice * 100_000, "in", f"c {slice % 2}", "payload", 100)
        made.frame(slice * 100_000 + 1, "in", f"c {1 - slice % 2}", "payload", 300)
    for slice in (118, 119):  # one is alone here: that is neither fair nor unfair
        made.frame(slice * 100_000, "in", f"c {slice % 2}", "payload", 100)
    row = one(asked(made).fairness)
    assert row["jain"] == 1.0
    assert row["mean"] == pytest.approx(0.8)
    assert row["least"] == pytest.approx(0.8)
    assert row["slices"] == 118


def test_violations_are_told_with_their_clause_and_how_often() -> None:
    made = Made()
    for us, of in ((3, "b"), (2, "a")):
        made.add(us, "error", kind="RemoteProtocolError", rule="bpmux-R29", text="too much", id=77, connection=of)
    made.add(9, "lost", kind="LinkLost", text="gone")
    violation, loss = asked(made).violations
    assert (violation["rule"], violation["times"], violation["connections"]) == ("bpmux-R29", 2, 2)
    assert (violation["first_us"], violation["connection"], violation["at_byte"]) == (2, "test/a", 77)
    assert (loss["event"], loss["rule"]) == ("lost", None)


# ---------------------------------------------------------------------------- whole captures


async def test_raw_bytes_lead_to_the_answers_that_live_frames_do(tmp_path: Path) -> None:
    await record_sessions(tmp_path)
    live, told = analyse(tmp_path), analyse(tmp_path, raw=Raw(protocol="bpmux", engine=True))
    assert live.count > 100

    def volumes(found: Answers) -> set[tuple[object, ...]]:
        return {
            tuple(row[name] for name in ("connection", "direction", "channel", "frames", "bytes"))
            for row in found.volumes
        }

    def credit(found: Answers) -> set[tuple[object, ...]]:
        return {
            tuple(row[name] for name in ("connection", "channel", "granted", "stops", "least")) for row in found.credit
        }

    assert volumes(live) == volumes(told)
    assert credit(live) == credit(told)
    assert any(row["stops"] for row in live.credit)
    # One is the test's own, and another measures the round trip for the windows, because a channel receives in bulk.
    assert {row["what"] for row in live.round_trips} == {"ping"}


@pytest.fixture
def quick_spark(spark: SparkSession) -> Iterator[SparkSession]:
    """Spark without what pays for large data only: compiled plans, plans that change on the way, several tasks."""
    quick = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
    }
    before = {name: spark.conf.get(name, None) for name in quick}
    for name, value in quick.items():
        spark.conf.set(name, value)
    yield spark
    for name, old in before.items():
        if old is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, old)


@pytest.mark.spark
async def test_spark_gives_the_answers_that_one_process_gives(tmp_path: Path, quick_spark: SparkSession) -> None:
    await record_sessions(tmp_path, channels=3, messages=5)
    raw = Raw(protocol="bpmux", engine=True)
    here, there = analyse(tmp_path, raw=raw), analyse(tmp_path, raw=raw, spark=quick_spark)
    assert_same(here, there)
    one = Selection(connection="one", since=datetime(2026, 1, 1))
    assert analyse(tmp_path, only=one, spark=quick_spark).volumes == analyse(tmp_path, only=one).volumes
    before = Selection(until=datetime(2026, 1, 1))
    assert analyse(f"file://{tmp_path}", only=before, spark=quick_spark).count == 0
