"""`--or` of the commands that connect: other URLs of the server, which race with the first."""

from __future__ import annotations

import sys

import pytest

from tests.cli._command import completed, environment, muxkit
from tests.cli.test_pipe import serving

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]


def test_the_other_url_is_used_when_the_first_is_down() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--echo") as (_, url):
        done = completed("pipe", "bpmux+tcp://127.0.0.1:1", "--or", url, input=b"second", env=environment())
    assert (done.returncode, done.stdout) == (0, b"second"), done.stderr


def test_all_urls_are_named_when_none_answers() -> None:
    done = muxkit("pipe", "bpmux+tcp://127.0.0.1:1", "--or", "bpmux+tcp://127.0.0.1:2")
    assert done.returncode == 3
    said = " ".join(done.stderr.split())
    assert "no connection to any of 2 URLs: bpmux+tcp://127.0.0.1:1: " in said
    assert "; bpmux+tcp://127.0.0.1:2: " in said


def test_an_invalid_other_url_is_a_usage_error() -> None:
    done = muxkit("pipe", "bpmux+tcp://127.0.0.1:1", "--or", "nonsense")
    assert done.returncode == 2
    assert "invalid URL 'nonsense'" in " ".join(done.stderr.split())


def test_a_server_has_no_other_url() -> None:
    done = muxkit("forward", "--serve", "bpmux+tcp://127.0.0.1:0", "--allow", "127.0.0.1:1", "--or", "bpmux+tcp://x:1")
    assert done.returncode == 2
    assert "--or is for clients" in done.stderr
