"""The frame of the project holds: layers, data files, and what the wheel and the package index are promised."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import muxkit
from tests import conformance

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("muxkit", "adapters", "examples")
TOP_LEVEL = (*SOURCES, "tests", "docs", ".ci", ".github")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def text_files() -> Iterator[Path]:
    """Every file that belongs to the project and is not made by a tool (`.git` is a file in a worktree)."""
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git")
    for folder in TOP_LEVEL:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                yield path


FLAT = ("bpmux", "e3x", "yamux")  # protocols whose engines lie beside their sessions


def sans_io_modules() -> list[str]:
    """The modules that do no I/O: the ground floor, core, and all of a protocol but its session."""
    files = [
        *(ROOT / "muxkit" / f"_{name}.py" for name in ("errors", "lazy", "limits", "observer")),
        *(ROOT / "muxkit" / "core").rglob("*.py"),
        *(ROOT / "muxkit" / "protocols").glob("*/engine/**/*.py"),
        *(file for name in FLAT for file in (ROOT / "muxkit" / "protocols" / name).glob("*.py")),
    ]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(files)
        if not any(part.startswith(("_session", "_channels", "_connection")) for part in path.parts)
    ]
    assert "muxkit.core" in names
    assert "muxkit.protocols.bpmux.engine" in names
    return names


# ---------------------------------------------------------------------------- layers


def loaded_by_importing(*modules: str) -> set[str]:
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_rules_can_be_imported_without_trio() -> None:
    assert "trio" not in loaded_by_importing(*sans_io_modules())


def test_importing_muxkit_alone_does_not_import_trio() -> None:
    assert "trio" not in loaded_by_importing("muxkit")


def test_every_entry_point_of_ours_can_be_loaded() -> None:
    for group, declared in project()["project"]["entry-points"].items():
        installed = {point.name: point for point in entry_points(group=group)}
        for name, value in declared.items():
            assert name in installed, f"{group}: {name} is not installed; run .ci/setup test"
            assert installed[name].value == value
            installed[name].load()


# ---------------------------------------------------------------------------- sizes and files


@pytest.mark.parametrize("package", ["muxkit", "adapters/muxkit_adapters", "adapters/pyspark_muxkit"])
def test_a_package_is_marked_as_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_no_file_holds_a_path_of_one_machine() -> None:
    machine = re.compile(r"(?<![a-z0-9.])/(?:work|farm|root|tmp/[a-z]|home/[a-z])\w*" + r"|\.\./" + "shared")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if machine.search(line)
    ]
    assert found == []


def test_no_file_holds_the_markers_of_a_merge_conflict() -> None:
    """Was: docs/releasing.md had them for many changes, and the site showed them."""
    marker = re.compile(r"^(<{7}|>{7}|\|{7}) ", re.MULTILINE)
    assert [path for path in text_files() if marker.search(path.read_text(errors="replace"))] == []


# ---------------------------------------------------------------------------- what a package index shows


def metadata() -> ProjectMetadata[Any]:
    """The metadata of a wheel, made as a build makes it."""
    return ProjectMetadata(str(ROOT), PluginManager())


def test_the_version_is_in_one_place() -> None:
    assert metadata().version == muxkit.__version__
    assert "version" not in project()["project"]


def test_each_link_of_the_readme_on_a_package_index_leads_to_a_file_of_the_released_version() -> None:
    """Was: README linked to a site that did not exist, since relative links lead nowhere on an index."""
    source, tag = project()["project"]["urls"]["Source"], f"v{muxkit.__version__}"
    written = re.findall(r"\]\(([^)\s#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    shown = re.findall(r"\]\(([^)\s#]+)", metadata().core.readme)
    ours = [target for target in written if "://" not in target]
    assert len(ours) > 10
    assert [target for target in ours if not (ROOT / target).exists()] == []
    forms = {target: "raw" if target.endswith(".svg") else "blob" for target in written}
    assert shown == [each if "://" in each else f"{source}/{forms[each]}/{tag}/{each}" for each in written]


# ---------------------------------------------------------------------------- what is installed


def test_every_dependency_is_pinned_to_one_version() -> None:
    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    pinned = {plain(pin.partition("==")[0]) for pin in pins}
    data = project()
    wanted = [*data["build-system"]["requires"], *data["project"]["dependencies"]]
    for extra in data["project"]["optional-dependencies"].values():
        wanted += [name for name in extra if not name.startswith("muxkit[")]
    for group in data["dependency-groups"].values():
        wanted += group
    names = {plain(re.split(r"[^\w.-]", name)[0]) for name in wanted}
    assert names - pinned == set(), "run `make lock`"


def test_the_extra_named_all_holds_every_other_but_those_of_spark() -> None:
    extras = project()["project"]["optional-dependencies"]
    assert extras["all"] == [f"muxkit[{','.join(sorted(extras.keys() - {'all', 'java', 'spark'}))}]"]


# ---------------------------------------------------------------------------- pages and data


def test_news_fragments_are_named_after_an_issue_and_a_kind() -> None:
    kinds = "|".join(each["directory"] for each in project()["tool"]["towncrier"]["type"])
    names = [path.name for path in (ROOT / "docs" / "changes").iterdir() if path.name != ".gitignore"]
    assert [name for name in names if not re.fullmatch(rf"\d+\.({kinds})\.md", name)] == []


def test_clauses_and_requirements_are_well_formed() -> None:
    for protocol in conformance.protocols():
        ids = [rule.id for rule in conformance.clauses(protocol)]
        assert len(set(ids)) == len(ids)
        assert [each for each in ids if not re.fullmatch(rf"{protocol}-[A-Z]\d\d", each)] == []
    ids = [rule.id for rule in conformance.requirements()]
    assert ids == sorted(set(ids))
    assert [each for each in ids if not re.fullmatch(r"R-\d\d", each)] == []


def test_each_module_of_the_runtime_is_loaded_before_its_functions_are_protected_from_interrupts() -> None:
    """Was: the connection below a session was loaded later, so Ctrl-C struck in the middle of its work."""
    files = sorted((ROOT / "muxkit" / "runtime").rglob("*.py"))
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert names - loaded_by_importing("muxkit.runtime") == set()
