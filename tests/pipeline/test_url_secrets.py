"""The password and the query of a URL stay out of logs and errors: both may let others in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit.pipeline import OptionError
from muxkit.pipeline.errors import StagingUnavailable
from muxkit.pipeline.options import SinkOptions, SourceOptions
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Offset
from muxkit.pipeline.source.planner import StreamPlanner
from muxkit.pipeline.staging.client import StagingClient
from muxkit.pipeline.staging.records import Key
from tests.pipeline._source_servers import ONE

if TYPE_CHECKING:
    from trio.testing import MockClock

PLACE = "127.0.0.1:1/a?token=sesame"  # nothing listens there


@pytest.mark.parametrize(
    "options",
    [
        {"servers": "http://joe:sesame@host", "streams": ONE},
        {"servers": "restream+tcp://host", "streams": "restream+tcp://joe:sesame@host#1"},
    ],
    ids=["servers", "streams"],
)
def test_a_refused_url_of_a_source_is_shown_without_its_password(options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="host") as refused:
        SourceOptions.parse(options)
    assert "sesame" not in str(refused.value)


def test_a_refused_url_of_a_sink_is_shown_without_its_password() -> None:
    with pytest.raises(OptionError, match="host") as refused:
        SinkOptions.parse({"url": "http://joe:sesame@host"}, streaming=True)
    assert "sesame" not in str(refused.value)


async def test_a_server_that_is_away_is_logged_without_its_query(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    options = SourceOptions.parse({"servers": f"restream+ws://{PLACE}", "streams": ONE})
    assert await StreamPlanner(options, Client(options)).statuses(Offset()) == []
    assert "127.0.0.1:1/a is away" in caplog.text
    assert "sesame" not in caplog.text


async def test_a_staging_server_that_is_away_is_shown_without_its_query(autojump_clock: MockClock) -> None:
    client = StagingClient(f"bpmux+ws://{PLACE}", patience=1.0)
    with pytest.raises(StagingUnavailable, match="a could not be used") as failed:
        await client.standing(Key("main", "app"))
    assert "sesame" not in str(failed.value)


def test_options_of_a_source_do_not_show_the_query_of_a_server() -> None:
    options = SourceOptions.parse({"servers": f"restream+ws://{PLACE}", "streams": f"restream+ws://{PLACE}#{ONE}"})
    assert "sesame" not in repr(options)


def test_options_of_a_sink_do_not_show_the_query_of_a_server() -> None:
    assert "sesame" not in repr(SinkOptions.parse({"url": f"bpmux+ws://{PLACE}"}, streaming=True))


def test_offsets_inside_too_many_brackets_are_an_error_of_the_option() -> None:
    with pytest.raises(OptionError, match="startingOffsets"):
        SourceOptions.parse({"servers": "restream+tcp://host", "streams": ONE, "startingOffsets": "[" * 100_000})
