"""Plugins are found as entry points of installed packages, and what is wrong with one is named."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import muxkit
from muxkit import _plugins
from muxkit._plugins import OWN, PROTOCOLS, TRANSPORTS, Group, Plugin, PluginError, installed, load, load_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes real distributions: a folder on the path with a module and its metadata."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_plugins, "_loaded", {})  # no plugin of an earlier test
    made: list[str] = []

    def make(package: str, *entries: str, code: str = "", group: str = "transports", metadata: bool = True) -> None:
        made.append(package)
        (tmp_path / f"{package}.py").write_text(code, encoding="utf-8")
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        lines = "\n".join((f"[muxkit.{group}]", *entries, ""))
        (info / "entry_points.txt").write_text(lines, encoding="utf-8")
        importlib.invalidate_caches()

    yield make
    for name in made:
        sys.modules.pop(name, None)


GOOD = "class T:\n    def connect(self): ...\n    def serve(self): ...\ntransport = T()\n"


def test_every_plugin_of_our_own_is_found_under_its_name() -> None:
    assert [each.problem for each in installed() if each.package == "muxkit"] == [None] * sum(map(len, OWN.values()))
    for group, own in OWN.items():
        for name, target in own.items():
            module, _, attribute = target.partition(":")
            assert load(group, name) is getattr(importlib.import_module(module), attribute)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What was looked up in the metadata of all installed packages."""
    asked: list[dict[str, str]] = []

    def entry_points(**parameters: str) -> object:
        asked.append(parameters)
        return importlib.metadata.entry_points(**parameters)

    monkeypatch.setattr(_plugins, "entry_points", entry_points)
    return asked


async def test_sessions_over_our_own_plugins_read_no_metadata(lookups: list[dict[str, str]]) -> None:
    for protocol in ("bpmux", "relink", "aqueduct", "e3x", "yamux"):
        url = f"{protocol}+mem://metadata-{protocol}"
        async with muxkit.open_server(echo, url), muxkit.connect(url) as session, session.open() as channel:
            await channel.send(b"tea")
            assert await channel.receive() == b"tea"
    assert lookups == []


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


def test_a_strangers_transport_is_looked_up_once_in_a_process(install: Install, lookups: list[dict[str, str]]) -> None:
    install("stranger", "pigeon = stranger:transport", code=GOOD)
    assert load(TRANSPORTS, "pigeon") is load_transport("pigeon", "bpmux") is load(TRANSPORTS, "pigeon")
    assert lookups == [{"group": TRANSPORTS, "name": "pigeon"}]


def test_a_transport_that_is_installed_after_it_was_missed_is_found(install: Install) -> None:
    with pytest.raises(PluginError, match="no transport 'pigeon'"):
        load(TRANSPORTS, "pigeon")
    install("stranger", "pigeon = stranger:transport", code=GOOD)
    assert type(load(TRANSPORTS, "pigeon")).__name__ == "T"


@pytest.mark.parametrize(
    ("group", "name", "meant"),
    [(PROTOCOLS, "bmpux", "bpmux"), (PROTOCOLS, "aquaduct", "aqueduct"), (TRANSPORTS, "tpc", "tcp")],
)
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(group: Group, name: str, meant: str) -> None:
    with pytest.raises(PluginError, match=f"no {group[7:-1]} '{name}'; did you mean '{meant}'\\?"):
        load(group, name)


def test_a_strangers_transport_works_the_day_it_is_installed(install: Install) -> None:
    install("stranger", "pigeon = stranger:transport", code=GOOD)
    assert type(load(TRANSPORTS, "pigeon")).__name__ == "T"
    assert Plugin("transport", "pigeon", "stranger", "stranger:transport", None) in installed()


def test_a_missing_plugin_says_what_there_is() -> None:
    with pytest.raises(PluginError, match=r"no transport 'carrier'; there are: .*mem.*tcp.*'muxkit.transports'"):
        load(TRANSPORTS, "carrier")
    with pytest.raises(PluginError, match=r"no protocol 'nope'; there are: .*bpmux"):
        load(PROTOCOLS, "nope")


def test_a_name_that_is_taken_twice_names_both_packages(install: Install) -> None:
    install("loft_one", "pigeon = loft_one:transport", code=GOOD)
    install("loft_two", "pigeon = loft_two:transport", code=GOOD)
    with pytest.raises(PluginError, match="'pigeon' is offered by loft_one and loft_two; uninstall all but one"):
        load(TRANSPORTS, "pigeon")
    problems = [plugin.problem for plugin in installed() if plugin.name == "pigeon"]
    assert problems == ["offered by loft_one and loft_two"] * 2


def test_a_package_cannot_take_one_of_our_names(install: Install) -> None:
    install("usurper", "tcp = usurper:transport", code=GOOD)
    assert load(TRANSPORTS, "tcp") is importlib.import_module("muxkit_adapters.tcp").transport
    problems = {plugin.package: plugin.problem for plugin in installed() if plugin.name == "tcp"}
    assert problems == {"muxkit": None, "usurper": "muxkit has a transport of this name, which is used"}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("other = 1\n", "AttributeError: .*has no attribute 'transport'"),
        ("transport = (\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("raise RuntimeError('no wings')\n", "RuntimeError: no wings"),
        ("transport = object()\n", "has no connect and no serve"),
        ("class transport:\n    connect = None\n", "has no serve"),
    ],
)
def test_a_broken_plugin_names_its_package_and_what_is_wrong(install: Install, code: str, problem: str) -> None:
    install("hurt", "pigeon = hurt:transport", code=code)
    with pytest.raises(PluginError, match=f"the transport 'pigeon' of hurt is broken: hurt:transport .*{problem}"):
        load(TRANSPORTS, "pigeon")
    (plugin,) = (plugin for plugin in installed() if plugin.name == "pigeon")
    assert plugin.problem is not None


def test_a_protocol_needs_a_session_and_its_options(install: Install) -> None:
    install("odd", "odd = odd:protocol", code="class protocol: ...\n", group="protocols")
    with pytest.raises(PluginError, match="has no session and no options"):
        load(PROTOCOLS, "odd")


def test_a_package_with_damaged_metadata_does_not_hide_the_others(install: Install) -> None:
    install("nameless", "pigeon = nameless:transport", code=GOOD, metadata=False)
    assert {plugin.name for plugin in installed()} >= {"tcp", "mem", "bpmux"}


def test_a_broken_plugin_does_not_keep_others_from_working(install: Install) -> None:
    install("hurt", "pigeon = hurt:transport", code="1 / 0\n")
    assert load(TRANSPORTS, "mem")


PACKETS = "class T:\n    link = 'packets'\n    def connect(self): ...\n    def serve(self): ...\ntransport = T()\n"


def test_a_transport_that_carries_something_else_is_refused_with_those_that_would_do(install: Install) -> None:
    install("posted", "parcel = posted:transport", code=PACKETS)
    refusal = r"^bpmux can't run over 'parcel': expected .* a byte stream, got .* may be lost; use one of: .*mem, .*tcp"
    with pytest.raises(PluginError, match=refusal) as caught:
        load_transport("parcel", "bpmux")
    assert "parcel" not in str(caught.value).partition("use one of:")[2]
    assert load_transport("parcel", "e3x", frozenset({"stream", "packets"})) is load(TRANSPORTS, "parcel")


async def test_the_door_compares_the_kinds_before_anything_is_dialled(install: Install) -> None:
    install("posted", "parcel = posted:transport", code=PACKETS)
    with pytest.raises(PluginError, match="relink can't run over 'parcel'"):
        async with muxkit.connect("relink+parcel://nowhere"):
            pass


MISSING = pytest.mark.parametrize(("name", "missing"), [("quic", "aioquic"), ("dtls", "OpenSSL")])


def said_without(missing: str, call: str) -> str:
    """What a `PluginError` says in a process that cannot import a package."""
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from muxkit._plugins import TRANSPORTS, PluginError, installed, load, load_transport\n"
        f"try: print({call})\n"
        "except PluginError as error: print(error)"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@MISSING
def test_a_transport_whose_extra_is_not_installed_says_how_it_is_installed(name: str, missing: str) -> None:
    """F16: "the transport 'quic' of muxkit is broken: muxkit_adapters.quic:transport cannot be loaded: …"."""
    text = f"{name} is not installed: pip install 'muxkit[{name}]'"
    assert said_without(missing, f"load(TRANSPORTS, {name!r})") == text
    links = "frozenset({'stream', 'packets', 'multistream'})"
    assert said_without(missing, f"load_transport({name!r}, 'aqueduct', {links})") == text


@MISSING
def test_a_transport_that_would_not_do_is_not_recommended_to_be_installed(name: str, missing: str) -> None:
    """F16: also for `bpmux+quic`, which can never work."""
    text = said_without(missing, f"load_transport({name!r}, 'bpmux')")
    assert text.startswith(f"bpmux can't run over {name!r}: expected a transport for a byte stream, got ")
    assert "install" not in text


@MISSING
def test_the_list_of_plugins_tells_the_extra(name: str, missing: str) -> None:
    call = f"[(one.problem, one.extra) for one in installed() if one.name == {name!r}]"
    assert said_without(missing, call) == f"[('needs muxkit[{name}]', '{name}')]"


def test_the_error_is_one_of_muxkits() -> None:
    assert issubclass(PluginError, muxkit.MuxError)
