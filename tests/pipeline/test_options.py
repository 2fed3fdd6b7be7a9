"""The options of a source, and the errors of those that are refused."""

from __future__ import annotations

import pytest

from muxkit.pipeline import OptionError
from muxkit.pipeline.options import SOURCE_OPTIONS, AckMode, Planning, Reference, SourceOptions, Start, Verify
from tests.pipeline._source_servers import ONE, TWO

SERVER = "restream+tcp://127.0.0.1:7000"
LEAST = {"servers": SERVER, "streams": ONE}


def parse(**options: str) -> SourceOptions:
    return SourceOptions.parse(LEAST | options)


def test_two_options_are_enough_and_the_others_have_defaults() -> None:
    options = parse()
    assert options.servers == (SERVER,)
    assert options.streams == (Reference(ONE),)
    assert options.starting is Start.EARLIEST
    assert (options.most_messages, options.most_bytes, options.least_messages) == (None, None, None)
    assert options.fail_on_data_loss
    assert options.acknowledging is AckMode.NEVER
    assert parse(reader="store").acknowledging is AckMode.IDLE
    assert options.planning is Planning.AUTO
    assert options.verify is Verify.NONE


def test_names_are_taken_in_any_case_as_spark_gives_them() -> None:
    options = SourceOptions.parse({"SERVERS": SERVER, "streams": ONE, "maxmessagespertrigger": "10"})
    assert options.most_messages == 10


def test_streams_stand_between_white_space_or_commas_and_count_once() -> None:
    options = parse(streams=f" {TWO},{ONE}\n{TWO.upper()} , ")
    assert options.streams == (Reference(ONE), Reference(TWO))


def test_a_stream_may_bring_its_server_and_the_server_several_hosts() -> None:
    url = "restream+tls://a.example:1,b.example:2"
    options = SourceOptions.parse({"streams": f"{url}#{ONE},{SERVER}#{TWO}"})
    assert options.streams == (Reference(ONE, url), Reference(TWO, SERVER))


def test_starting_offsets_may_be_json() -> None:
    assert parse(startingOffsets=f'{{"{ONE.upper()}": 17}}').starting == {ONE: 17}
    assert parse(startingOffsets="Latest").starting is Start.LATEST


def test_ending_offsets_are_latest_or_json() -> None:
    assert parse(endingOffsets="latest").ending is None
    assert parse(endingOffsets=f'{{"{ONE}": 3}}').ending == {ONE: 3}


@pytest.mark.parametrize(
    "text", ["2026-11-25T12:00:00Z", "2026-11-25 12:00", "2026-11-25T13:00:00+01:00", "1795608000000"]
)
def test_a_moment_is_iso_8601_or_milliseconds(text: str) -> None:
    given = {"servers": SERVER, "streams": ONE, "startingTimestamp": text}
    assert SourceOptions.parse(given).starting_time == 1_795_608_000.0


def test_sizes_and_times_have_units() -> None:
    options = parse(maxBytesPerTrigger="1.5m", readTimeout="500ms", statusTimeout="2", maxTriggerDelay="15m")
    assert options.most_bytes == 3 << 19
    assert (options.read_timeout, options.status_timeout, options.most_delay) == (0.5, 2.0, 900.0)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("maxMessagesPerTrigger", "0", "expected a whole number above 0"),
        ("maxMessagesPerTrigger", "-1", "expected a whole number above 0"),
        ("maxMessagesPerTrigger", "many", "expected a whole number above 0"),
        ("maxBytesPerTrigger", "10 parsecs", "expected a size"),
        ("readTimeout", "0", "expected a time above 0"),
        ("readTimeout", "1e400", "expected a time above 0"),
        ("failOnDataLoss", "perhaps", "expected true or false"),
        ("ackMode", "sometimes", "expected one of idle, commit, never"),
        ("planning", "guess", "expected one of auto, status, prefetch"),
        ("startingOffsets", "middle", "expected earliest, latest or JSON"),
        ("startingOffsets", '{"x": 1}', "expected a uuid, or url#uuid"),
        ("startingOffsets", f'{{"{ONE}": -1}}', "expected earliest, latest or JSON"),
        ("startingOffsets", f'{{"{ONE}": 4294967296}}', "expected earliest, latest or JSON"),
        ("startingOffsets", f'{{"{ONE}": true}}', "expected earliest, latest or JSON"),
        ("endingOffsets", "earliest", "expected latest or JSON"),
        ("streams", "one", "expected a uuid, or url#uuid"),
        ("servers", "127.0.0.1:7000", "expected a URL such as restream"),
        ("tlsKeyFile", "key.pem", "tlsCertFile is missing"),
        ("minMessagesPerTrigger", "many", "expected a whole number above 0"),
    ],
)
def test_an_error_names_its_option_and_what_was_wrong(name: str, value: str, told: str) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        parse(**{name: value})
    assert caught.value.option == name
    assert str(caught.value).startswith(f"option {name}: ")


def test_a_slip_in_a_name_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(OptionError, match=r"option maxmessagepertrigger: there is no such option; .*maxMessagesPerTr"):
        parse(maxMessagePerTrigger="1")


def test_spark_may_add_a_path() -> None:
    assert parse(path="somewhere").servers == (SERVER,)


def test_at_least_one_way_to_streams_is_needed() -> None:
    with pytest.raises(OptionError, match="streamsFile or directory"):
        SourceOptions.parse({"servers": SERVER})


def test_a_stream_without_a_server_needs_servers() -> None:
    with pytest.raises(OptionError, match=f"stream {ONE} comes without a server"):
        SourceOptions.parse({"streams": ONE})


def test_prefetch_cannot_look_for_the_server_of_a_stream() -> None:
    with pytest.raises(OptionError, match="write url#uuid"):
        parse(servers=f"{SERVER} restream+tcp://127.0.0.1:7001", planning="prefetch")


def test_the_least_of_a_batch_is_not_above_the_most() -> None:
    with pytest.raises(OptionError, match="20 is above maxMessagesPerTrigger=10"):
        parse(minMessagesPerTrigger="20", maxMessagesPerTrigger="10")


def test_a_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(OptionError) as caught:
        parse(ackMode="x" * 10_000)
    assert len(str(caught.value)) < 300


def test_every_option_is_in_the_reference() -> None:
    from tests.test_project import ROOT

    page = (ROOT / "docs" / "reference" / "spark.md").read_text(encoding="utf-8")
    assert [name for name in SOURCE_OPTIONS if f"`{name}`" not in page] == []
