"""What a command imports before it does anything: no more than it needs, so that it starts fast."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest

from muxkit.cli.commands import Commands, Later, commands

HEAVY = ("rich", "trio", "muxkit.core", "muxkit.protocols", "muxkit.runtime", "muxkit_adapters", "muxkit_bench")
MAIN = "import sys; sys.argv[1:] = {arguments!r}\nfrom muxkit.cli import main\nmain()\n"


def modules_after(program: str) -> set[str]:
    """Run a program in a process of its own; return the names of the modules that it has imported at its end."""
    report = "\nimport json, sys\nprint()\nprint(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program + report],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_of_command(*arguments: str) -> set[str]:
    return modules_after(MAIN.format(arguments=list(arguments)))


@pytest.mark.parametrize("arguments", [["--version"], ["restream", "--help"], ["unheard-of"]])
def test_no_command_is_imported_for_a_question_about_the_command_line(arguments: list[str]) -> None:
    """`muxkit --version` took 0.8 s, since it imported every command, Trio, rich and the protocols."""
    assert {*HEAVY, "muxkit.cli.common", "msgspec"} & modules_of_command(*arguments) == set()


def test_the_list_of_commands_imports_none_of_them() -> None:
    loaded = modules_of_command("--help")
    assert {*HEAVY, "muxkit.cli.common", "msgspec"} & loaded == {"muxkit_bench"}
    assert {name for name in loaded if name.startswith("muxkit_bench.")} == {"muxkit_bench.commands"}


def test_the_metadata_of_packages_is_not_read_to_run_a_command_of_the_library() -> None:
    program = (
        "import importlib.metadata as metadata\n"
        "def refuse(**_): raise AssertionError('the entry points were read')\n"
        "metadata.entry_points = refuse\n"
    )
    modules_after(program + MAIN.format(arguments=["pipe", "--help"]))


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        ("pipe", "muxkit.forward muxkit.metrics muxkit.protocols.bpmux muxkit.pipeline muxkit.testing rich"),
        ("forward", "muxkit.metrics muxkit.protocols.bpmux muxkit.pipeline muxkit.testing rich"),
        ("serve", "muxkit.metrics muxkit.protocols.bpmux muxkit.pipeline muxkit.testing rich"),
        ("send", "muxkit.forward muxkit.metrics muxkit.protocols.bpmux muxkit.pipeline muxkit.testing rich"),
    ],
)
def test_a_common_command_imports_nothing_for_its_help_that_belongs_to_others(command: str, unneeded: str) -> None:
    assert {*unneeded.split()} & modules_of_command(command, "--help") == set()


def test_the_library_itself_imports_neither_trio_nor_the_metadata_of_packages() -> None:
    assert {"trio", "importlib.metadata", "msgspec", "ssl"} & modules_after("import muxkit") == set()


# ---------------------------------------------------------------------------- the table


def groups(group: click.Group) -> list[Commands]:
    context = click.Context(group)
    inner = [group.get_command(context, name) for name in group.list_commands(context)]
    found = [group] if isinstance(group, Commands) else []
    return [*found, *(each for one in inner if isinstance(one, click.Group) for each in groups(one))]


TABLES: dict[str, Later] = {
    f"{group.name} {name}": later for group in groups(commands) for name, later in group.table.items()
}


@pytest.mark.parametrize("name", TABLES)
def test_a_row_of_the_table_leads_to_the_command_of_that_name(name: str) -> None:
    assert TABLES[name].load().name == name.split()[-1]


@pytest.mark.parametrize("name", TABLES)
def test_the_line_about_a_command_fits_on_a_line(name: str) -> None:
    line = TABLES[name].line
    assert line.endswith(".")
    assert len(line) <= 64
