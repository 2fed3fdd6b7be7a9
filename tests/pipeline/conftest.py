"""One session of Spark for all tests that are marked `spark`: a JVM takes seconds to start and half a gigabyte."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


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
            "spark.sql.streaming.stateStore.providerClass": (
                "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
            ),
        },
    )
    try:
        yield session
    finally:
        session.stop()
