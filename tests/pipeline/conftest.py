"""One session of Spark for all tests that are marked `spark`: a JVM takes seconds to start and half a gigabyte."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


PATIENCE = 400.0  # s: the first of these tests waits for the JVM as well, and a busy machine takes its time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nothing is decided by how fast a JVM is."""
    for item in items:
        if item.get_closest_marker("spark") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PATIENCE))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores, which tries each task twice; what it writes is gone with the run."""
    if sys.platform == "win32":
        pytest.skip("Spark wants more of a Windows machine than Java")
    from muxkit.pipeline import spark_session

    folder = tmp_path_factory.mktemp("spark")
    session = spark_session(
        name="muxkit tests",
        attempts=2,
        config={
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder / "local"),
            "spark.sql.streaming.stopTimeout": "60s",
            "spark.python.authenticate.socketTimeout": "120s",  # to take what was asked for; else 15 s
            "spark.sql.streaming.stateStore.providerClass": (
                "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
            ),
        },
    )
    try:
        yield session
    finally:
        session.stop()
