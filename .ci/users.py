"""Follow the pages as a reader does: in a clone of its own, in fresh environments, with the commands that stand there.

Run by .ci/run, with the environment of the suite and the name of a part: `pages`, `compiled`, `pipeline`, `oldest`,
`newest` or `sparks`.
The commands are taken from the pages; `tests/data/pages.toml` lists which of them are run here. Versions are those of
.ci/constraints.txt.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests._jvm import QUICK  # noqa: E402 - the tests are no package that is installed
from tests._pages import command  # noqa: E402 - as above

README = "README.md"
INSTALL = "docs/how-to/install.md"
LEFT_OUT = (".git", ".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")


# What runs on compiled modules or leans on them: the rules of the four protocols with their sessions, the runtime above
# the engines, Ctrl-C in what calls them, restream's subclasses of errors, the decoders. Left out: memory, which is not
# that of the sources, and what only starts commands, speaks to a socket or needs Spark, and has no compiled module of
# its own.
COMPILED_TESTS = (
    "tests/core",
    "tests/runtime",
    "tests/protocols/bpmux",
    "tests/protocols/relink",
    "tests/protocols/e3x",
    "tests/protocols/aqueduct",
    "tests/protocols/restream/test_engine_sessions.py",
    "tests/protocols/restream/test_server.py",
    "tests/pipeline/test_decode.py",
    "tests/system/test_interrupts.py",
    "tests/test_channels_of_all.py",
)
SECOND_MARKS = "not alone and not soak and not spark"

# The compiled run leaves this one out. It measures rates on simulated lines for many virtual seconds, and what it calls
# is compiled in the other simulations of e3x too.
COMPILED_LEFT_OUT = "tests/protocols/e3x/test_goodput.py"

# How a part of the suite is run once more: each property with fewer examples and seeds, since the suite itself tries
# them all.
SECOND_RUN = (
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist=loadfile", "--no-loadscope-reorder"),
    *("-m", SECOND_MARKS, "--hypothesis-profile=again"),
)


class Reader:
    """A clone and a shell, in a home that is empty but for what pip has loaded before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clone = folder / "clone"
        shutil.copytree(ROOT, self.clone, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        home = folder / "home"
        home.mkdir()
        cache = subprocess.check_output([sys.executable, "-m", "pip", "cache", "dir"], text=True)
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "PIP_CACHE_DIR": cache.strip(),
            "PIP_CONSTRAINT": str(self.clone / ".ci" / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # Python compiles the modules that a program imports. Compiling all modules of Spark and pandas takes pip
            # longer than unpacking them, and most are never imported. (A false value switches this option on.)
            "PIP_NO_COMPILE": "no",
            "SPARK_SUBMIT_OPTS": QUICK,
        }
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "MUXKIT_COMPILE"):
            self.environment.pop(name, None)
        self.path = os.environ["PATH"]

    def enter(self, name: str) -> Path:
        """A fresh environment, in which everything is run from now on; gives its interpreter."""
        made = self.folder / name
        subprocess.run([os.environ.get("PYTHON") or "python3", "-m", "venv", made], check=True)
        self.environment["PATH"] = f"{made / 'bin'}{os.pathsep}{self.path}"
        return made / "bin" / "python"

    def types(self, page: str, line: str, *, folder: Path | None = None) -> str:
        """Run a command as it stands on its page; gives what it prints."""
        text = command(page, line)
        print(f"-- {page}: {text}", flush=True)
        return self.runs("bash", "-c", text, folder=folder)

    def runs(self, *words: str | Path, folder: Path | None = None, **changes: str) -> str:
        done = subprocess.run(
            words,
            cwd=folder or self.clone,
            env={**self.environment, **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        if done.returncode or "does not provide the extra" in done.stdout:
            raise SystemExit(f"{done.stdout}\nexit code {done.returncode}: {words}")
        return done.stdout

    def adds(self, python: Path, extras: str) -> None:
        """Install extras that pages name, as the page about installing says."""
        print(f"-- pip install '.[{extras}]'", flush=True)
        self.runs(python, "-m", "pip", "install", f".[{extras}]")

    def follows_pages(self, python: Path, extras: str) -> None:
        """Run what the pages show for an environment with these extras, in this one."""
        suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak", "tests/pages"]
        said = self.runs(*suite, folder=ROOT, MUXKIT_PAGES_PYTHON=str(python), MUXKIT_PAGES_EXTRAS=extras)
        print(f"with [{extras}]: {said.splitlines()[-1]}", flush=True)


def pages(reader: Reader) -> None:
    """What README, tutorials and how-tos show, in environments with the extras that they name and no more.

    One environment grows from page to page, as long as the next page asks for more than the one before.
    """
    growing = reader.enter("growing")
    assert_the_same("pip install .", README)
    reader.types(INSTALL, "pip install .")
    reader.follows_pages(growing, "")

    assert_the_same("pip install '.[cli]'", README)
    reader.types(INSTALL, "pip install '.[cli]'")
    reader.follows_pages(growing, "cli")
    reader.types("docs/reference/bench.md", "muxkit bench --quick", folder=reader.folder)
    reader.types("examples/custom_transport/README.md", "pip install ./examples/custom_transport")
    listed = reader.types("examples/custom_transport/README.md", "muxkit plugins", folder=reader.folder)
    assert "exec" in listed.split(), listed
    tried = reader.types("examples/custom_transport/README.md", "python -m muxkit_exec", folder=reader.folder)
    assert "Traceback" not in tried, tried

    reader.adds(growing, "cli,otel,prometheus")
    reader.follows_pages(growing, "cli,otel,prometheus")
    reader.adds(growing, "anyio")
    reader.follows_pages(growing, "anyio")
    reader.types(INSTALL, "pip install 'muxkit[quic]'", folder=reader.folder)  # it keeps the muxkit that is there
    reader.runs(growing, "-c", "import muxkit_adapters.quic", folder=reader.folder)

    reader.enter("wheel")
    reader.types(INSTALL, "pip wheel --no-deps --wheel-dir dist .")
    reader.types(INSTALL, 'pip install "$(ls dist/muxkit-*.whl)[cli]"')
    reader.types(INSTALL, "muxkit doctor", folder=reader.folder)

    with_spark = reader.enter("spark")
    reader.adds(with_spark, "spark")
    reader.follows_pages(with_spark, "spark")
    reader.adds(with_spark, "java")

    with_duckdb = reader.enter("duckdb")
    reader.adds(with_duckdb, "duckdb")
    reader.follows_pages(with_duckdb, "duckdb")
    reader.adds(with_duckdb, "cli,duckdb")
    reader.follows_pages(with_duckdb, "cli,duckdb")

    print(reader.types(README, "make demo").splitlines()[-1])


def assert_the_same(line: str, *others: str) -> None:
    """What was run for one page is what other pages show."""
    assert [page for page in others if command(page, line) != line] == []


def compiled(reader: Reader) -> None:
    """The engines as machine code: what is imported is that, and it does what the sources do.

    The C compiler does not optimise here. That takes minutes, and what mypyc has made of the sources is the same.
    """
    python = reader.enter("compiled")
    reader.environment["MUXKIT_COMPILE_LEVEL"] = "0"
    reader.types(INSTALL, "MUXKIT_COMPILE=1 pip install .")
    where = "import muxkit.{0} as part; print(part.__file__); assert part.__file__.endswith(('.so', '.pyd'))"
    for module in (
        "core._windows",
        "protocols.bpmux.engine",
        "protocols.relink.engine",
        "protocols.e3x.engine",
        "protocols.aqueduct.engine",
    ):
        print(reader.runs(python, "-c", where.format(module), folder=reader.folder).strip())
    reader.runs(python, "-m", "pip", "install", "--quiet", "click", "rich")  # what the extra `cli` asks for
    said = reader.types(INSTALL, "muxkit --version", folder=reader.folder)
    assert ", compiled (" in said, said
    print(said.strip())
    reader.runs(python, reader.clone / ".ci" / "smoke.py", folder=reader.folder)

    # The suite's own interpreter has pytest; it finds the compiled modules first, and no source beside the tests.
    packages = reader.runs(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip()
    tests = reader.folder / "tests"
    tests.mkdir()
    shutil.copytree(ROOT / "tests", tests / "tests")  # with what pytest has compiled of them already
    shutil.copytree(reader.clone / "docs", tests / "docs")  # some tests compare settings with a page
    shutil.copy(reader.clone / "pyproject.toml", tests)
    reader.runs(sys.executable, "-c", where.format("core._windows"), folder=tests, PYTHONPATH=packages)
    chosen = (*COMPILED_TESTS, f"--ignore={COMPILED_LEFT_OUT}")
    said = reader.runs(sys.executable, *SECOND_RUN, *chosen, folder=tests, PYTHONPATH=packages)
    print(said.splitlines()[-1], flush=True)


def pipeline(reader: Reader) -> None:
    """Servers and a Spark query, killed and counted, from a set-up of their own."""
    print("\n".join(reader.types("docs/tutorial/spark.md", "make pipeline").splitlines()[-4:]))


DIRECT = ("aioquic", "attrs", "msgspec", "pyopenssl", "trio", "trio-websocket", "wsproto")
VERSION_TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-trio", "pytest-xdist", "trustme")
# What calls a dependency: the runtime and sessions Trio, the messages of restream msgspec, and the transports theirs.
VERSION_TESTS = (
    "tests/runtime",
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/protocols/bpmux/test_session*.py"))),
    "tests/protocols/restream/test_messages.py",
    "tests/test_channels_of_all.py",
    "tests/adapters/test_quic.py",
    "tests/adapters/test_quic_canary.py",
    "tests/adapters/test_tls.py",
    "tests/adapters/test_websocket.py",
)


def oldest(reader: Reader) -> None:
    """What calls the dependencies, with the oldest version that is declared of each."""
    _with_versions(reader, "lowest-direct")


def newest(reader: Reader) -> None:
    """The same with the newest versions of the package index, which may be newer than those of .ci/constraints.txt."""
    _with_versions(reader, "highest")


def _with_versions(reader: Reader, resolution: str) -> None:
    uv = Path(sys.executable).with_name("uv")
    cache = subprocess.check_output([uv, "cache", "dir"], text=True).strip()
    made, versions = reader.folder / resolution, reader.folder / f"{resolution}.txt"
    python = made / "bin" / "python"

    def run(*words: str | Path) -> str:
        return reader.runs(uv, "--quiet", "--cache-dir", cache, "--no-python-downloads", *words)

    run("venv", "--python", sys.executable, made)
    asked = ("--python", python, "--resolution", resolution, "--extra", "all", "--no-annotate", "--no-header")
    run("pip", "compile", *asked, "--output-file", versions, "pyproject.toml")
    lines = versions.read_text(encoding="utf-8").splitlines()
    print("with", *(line for line in lines if line.partition("==")[0] in DIRECT), flush=True)
    run("pip", "install", "--python", python, "--constraint", versions, "--editable", ".[all]", *VERSION_TOOLS)
    shutil.copytree(ROOT / "tests", reader.clone / "tests", dirs_exist_ok=True)  # what pytest has compiled of them
    print(reader.runs(python, *SECOND_RUN, *VERSION_TESTS).splitlines()[-1], flush=True)


SPARKS = ("4.0.*", "4.1.*", "4.2.*")  # the suite itself runs with that of .ci/constraints.txt
SPARK_TESTS = (
    "tests/pipeline/test_source_spark.py",
    "tests/pipeline/test_source_kill.py",
    "tests/pipeline/test_sink_spark.py",
    "tests/pipeline/test_sink_kills.py",
)
# The connection of an older pyspark to its JVM leaves sockets to the garbage collector, which pytest would report.
SPARK_RUN = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-n", "0", "-m", "spark")


def sparks(reader: Reader) -> None:
    """The source and the sink with each version of Spark that is supported and is not the one of the suite."""
    pins = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = reader.folder / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith(("pyspark=", "py4j="))))
    for spark in SPARKS:
        python = reader.enter(f"spark-{spark[:3]}")
        wanted = (f"pyspark=={spark}", "--editable", ".[all,spark]", *VERSION_TOOLS)
        reader.runs(python, "-m", "pip", "install", *wanted, PIP_CONSTRAINT=str(constraints))
        print(f"with pyspark {spark}:", reader.runs(python, *SPARK_RUN, *SPARK_TESTS).splitlines()[-1], flush=True)


PARTS = {
    "pages": pages,
    "compiled": compiled,
    "pipeline": pipeline,
    "oldest": oldest,
    "newest": newest,
    "sparks": sparks,
}

if __name__ == "__main__":
    [part] = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="muxkit-") as scratch:
        PARTS[part](Reader(Path(scratch)))
