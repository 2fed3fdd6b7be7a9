"""The programs of the pages that need a JVM, among them the tutorial whose reader kills query and server."""

from __future__ import annotations

import json
import ssl
import sys
from typing import TYPE_CHECKING

import pytest
import trio
import trustme

from muxkit.pipeline import open_staging, serve_staging
from muxkit.protocols import restream
from tests._pages import free_ports, kill, ports, program, python, run, running, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(900),
    pytest.mark.extras("spark"),
    pytest.mark.skipif(sys.platform == "win32", reason="it kills groups of processes"),
]

TUTORIAL = "docs/tutorial/spark.md"
# What a page takes for granted: a session of Spark, where it is the page before that made it.
SESSION = "from muxkit.pipeline import spark_session\nspark = spark_session()\n"


def committed(folder: Path) -> int:
    """How many batches the query has done."""
    log = folder / "checkpoint" / "commits"
    return sum(path.name.isdigit() for path in log.iterdir()) if log.is_dir() else 0


def plain(code: str) -> list[str]:
    """A JVM complains on its own: its warnings are none of the program's."""
    return [each for each in python(code) if each not in ("-W", "error")]


@pytest.mark.requirement("R-71")
def test_the_table_has_each_message_once_after_query_and_server_were_killed(tmp_path: Path) -> None:
    """Was: The server of the Spark tutorial could not be started again: its session existed already, and the error had
    no public name.
    """
    with ports(7000) as free:
        server, query = (plain(free_ports(program(TUTORIAL, number), free)) for number in (1, 2))
    with running(server, tmp_path, "server") as feeding, running(query, tmp_path, "query") as reading:
        until(lambda: committed(tmp_path) > 0, feeding, reading)
        kill(reading)
        before = committed(tmp_path)
        with running(query, tmp_path, "query") as again:
            until(lambda: committed(tmp_path) > before, feeding, again)
            kill(feeding)
            before = committed(tmp_path)
            with running(server, tmp_path, "server") as restarted:
                until(lambda: committed(tmp_path) > before + 1, restarted, again)
    assert "Traceback" not in (tmp_path / "server").read_text(encoding="utf-8")
    count = 'print(*table.selectExpr("count(*)", "count(distinct stream, id)", "max(id)").first())'
    done = run(plain(f"{SESSION}{program(TUTORIAL, 3)}\n{count}"), tmp_path)
    assert done.returncode == 0, done.stderr
    rows, distinct, highest = map(int, done.stdout.splitlines()[-1].split())
    assert rows == distinct == highest > 0


UUID = "10000000-0000-4000-8000-000000000001"
DIRECTORY = "d0000000-0000-4000-8000-00000000000d"
FOLLOW = """
query = stream.writeStream.format("noop").option("checkpointLocation", "checkpoint").start()
query.processAllAvailable()
"""


def test_a_query_follows_a_directory_and_says_how_far_behind_it_is(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def main() -> list[str]:
        async with restream.open_store("memory:", keep=3600) as store, trio.open_nursery() as nursery:
            for uuid in (DIRECTORY, UUID):
                await store.register(uuid, {}, params={}, attached=False)
            await store.append(DIRECTORY, UUID)
            await store.append_many(UUID, [*range(100)])

            async def serve(task_status: trio.TaskStatus[restream.Served]) -> None:
                await restream.serve(
                    "restream+tls://127.0.0.1:0",
                    store,
                    application=restream.Fed(),
                    config=restream.ServerConfig(status=True),
                    ssl_context=context,
                    task_status=task_status,
                )

            code = program(TUTORIAL, 4)
            for name in ("a", "b"):
                served: restream.Served = await nursery.start(serve)
                code = code.replace(f"restream+tls://{name}.example:7000", served.url)
            code = f"{SESSION}{code}{FOLLOW}{program(TUTORIAL, 5)}"
            done = await trio.to_thread.run_sync(lambda: run(plain(code), tmp_path))
            nursery.cancel_scope.cancel()
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert trio.run(main)[-1] == str({UUID: 0})


RECORD = """
import trio, muxkit
from muxkit import pipeline
async def main():
    async with trio.open_nursery() as nursery:
        async def drop(channel):
            async for _ in channel: pass
        served = await nursery.start(muxkit.serve, muxkit.each_channel(drop), "bpmux+mem://recorded")
        with pipeline.Capture("captures", raw=True) as capture:
            async with muxkit.connect(served.url, observer=capture.connection("one")) as session:
                async with session.open() as channel:
                    await channel.send(b"hello")
        nursery.cancel_scope.cancel()
trio.run(main)
"""

ONE_AFTER_ANOTHER = """
import json, sys
for part in json.loads(sys.argv[1]):
    space = {"__name__": "page"}
    for code in part:
        exec(compile(code, "page", "exec"), space)
"""


def test_the_programs_that_are_given_a_frame_run_one_after_another(tmp_path: Path) -> None:
    streaming = 'frame = spark.readStream.format("rate").load().selectExpr("string(value) as value")\n'
    plain_frame = 'frame = spark.range(5).selectExpr("string(id) as value")\n'
    stop = "query.processAllAvailable()\nquery.stop()\n"

    async def main() -> None:
        async with open_staging("memory:") as store, trio.open_nursery() as nursery:
            served = await nursery.start(serve_staging, "bpmux+tcp://127.0.0.1:0", store)
            free = {7000: int(served.url.rpartition(":")[2])}
            sink = [free_ports(program("docs/how-to/spark-sink.md", number), free) for number in (2, 3)]
            parts = [
                [RECORD, program("docs/how-to/captures.md", 3), "assert frames.count() > 0"],
                [program("docs/how-to/fleet.md", 2)],
                [SESSION + program("docs/reference/spark.md", 1), "assert frame.isStreaming"],
                [
                    program("docs/reference/spark.md", 2),
                    "assert frame.columns == ['stream', 'id', 'time', 'value', 'key', 'headers']",
                ],
                [SESSION + plain_frame, sink[1]],
                [SESSION + streaming, sink[0], stop],
            ]
            command = [*plain(ONE_AFTER_ANOTHER), json.dumps(parts)]
            done = await trio.to_thread.run_sync(lambda: run(command, tmp_path))
            assert done.returncode == 0, done.stderr
            assert (await store.head("main"), await store.head("orders") > 0) == (5, True)
            nursery.cancel_scope.cancel()

    trio.run(main)
