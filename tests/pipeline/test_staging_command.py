"""`muxkit stage serve` serves, forwards, and ends in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from click.testing import CliRunner

from muxkit.cli.commands import stage
from muxkit.pipeline import StagingClient
from muxkit.pipeline.errors import StagingRefused
from muxkit.protocols import restream
from tests.pipeline._staging_world import KEY, rows, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OUTAGE_LIMIT = 20.0  # s
TCP = "bpmux+tcp://127.0.0.1:0"
UUID = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"
PROGRAM = "from muxkit.cli.commands import stage; stage()"


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def told(process: subprocess.Popen[str], what: str) -> str:
    """The address behind these words."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(what), line
    return line.removeprefix(what).strip()


def end(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=OUTAGE_LIMIT)
    assert (process.returncode, errors) == (0, "")
    return rest


def commit(url: str, batch: int, *, token: str = "") -> None:
    async def main() -> None:
        client = StagingClient(url, token=token, patience=OUTAGE_LIMIT)
        await client.commit(KEY, batch, await write(client, f"t{batch}", batch, rows(10 * batch, 10)))

    trio.run(main)


def test_what_was_committed_is_there_when_it_is_started_again(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'staged.db'}"
    for batch in range(2):
        with running(TCP, "--store", store, "--json") as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["urls"][0]
            commit(url, batch)
            standing = trio.run(StagingClient(url).standing, KEY)
            assert (standing.batch, standing.head) == (batch, 10 * batch + 10)
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=OUTAGE_LIMIT)
            assert (process.returncode, json.loads(rest)["event"]) == (0, "ending")


def test_what_is_committed_is_served_by_restream() -> None:
    arguments = ["--forward", f"{KEY.stream}={UUID}", "--restream", "restream+tcp://127.0.0.1:0"]
    with running(TCP, *arguments) as process:
        stream_at = told(process, "restream on ")
        commit(told(process, "listening on "), 0)

        async def read() -> list[object]:
            async with restream.stream(stream_at, uuid=UUID) as stream:
                return [(await stream.receive()).data for _ in range(10)]

        assert len(trio.run(read)) == 10
        assert end(process) == "ending\n"


def test_only_who_is_in_the_file_may_write(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("first\nsecond\n")
    with running(TCP, "--token-file", str(tmp_path / "tokens")) as process:
        url = told(process, "listening on ")
        commit(url, 0, token="second")
        with pytest.raises(StagingRefused):
            commit(url, 1)
        end(process)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tcp://127.0.0.1:0"], "invalid URL"),
        (["bpmux+tcp://0.0.0.0:0"], "or give --insecure to send everything readable"),  # was: "pass insecure=True"
        (["bpmux+tls://127.0.0.1:0"], "give --cert (and --key)"),  # was: "a server needs ssl_context="
        # Was: it started, and failed with the first client.
        (["restream+tcp://127.0.0.1:0"], "restream has no channels: use restream.serve"),
        (["bpmux+unix:///nowhere/socket", "--insecure"], "this transport does not take insecure"),
        ([TCP, "--store", "mysql:x"], "expected memory:, sqlite:PATH or postgresql://"),
        ([TCP, "--forward", "orders"], "expected STREAM=UUID"),
        ([TCP, "--forward", "a=1", "--forward", "a=2"], "each stream once"),
        ([TCP, "--restream", "restream+tcp://127.0.0.1:0"], "--restream requires --forward STREAM=UUID"),
        ([TCP, "--forward", "a=1", "--restream", "tcp://127.0.0.1:0"], "invalid URL"),
        ([TCP, "--token-file", "/dev/null"], "expected at least one token"),
    ],
)
def test_what_cannot_be_meant_is_a_matter_of_usage(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(stage, ["serve", *arguments])
    assert done.exit_code == 2
    assert sentence in done.output
