"""The library's layout follows the rules that tests/house.py measures."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests import house

if TYPE_CHECKING:
    from pathlib import Path

# A break of a rule that is meant, with its reason.
TYPES_ONLY = "what closes the circle is imported for types only, so that calls can be followed in both directions"
MEANT: dict[str, str] = dict.fromkeys(
    (
        # A half has its stream or its entity, and that has its halves.
        "circle: muxkit.protocols.yamux.receive muxkit.protocols.yamux.send muxkit.protocols.yamux.state",
        "circle: muxkit.protocols.bpmux.control muxkit.protocols.bpmux.entities muxkit.protocols.bpmux.receive "
        "muxkit.protocols.bpmux.send muxkit.protocols.bpmux.state",
        # A half refers to the table that it stands in, and events name halves.
        "circle: muxkit.protocols.relink.events muxkit.protocols.relink.receive muxkit.protocols.relink.send "
        "muxkit.protocols.relink.state",
        # A half has the state that all share, and that has the halves and the streams of the peer.
        "circle: muxkit.protocols.aqueduct.events muxkit.protocols.aqueduct.half muxkit.protocols.aqueduct.handshake "
        "muxkit.protocols.aqueduct.reader muxkit.protocols.aqueduct.receive muxkit.protocols.aqueduct.rules "
        "muxkit.protocols.aqueduct.send muxkit.protocols.aqueduct.state muxkit.protocols.aqueduct.unread",
        # A channel has its connection, and that opens channels.
        "circle: muxkit.protocols.aqueduct._channels muxkit.protocols.aqueduct._connection",
        "circle: muxkit.protocols.e3x._channels muxkit.protocols.e3x._connection",
        "circle: muxkit.protocols.relink._channels muxkit.protocols.relink._connection",
        "circle: muxkit.runtime.channel muxkit.runtime.connection muxkit.runtime.halves.receive "
        "muxkit.runtime.halves.send",
    ),
    TYPES_ONLY,
)


def test_no_imports_form_a_circle_and_no_private_module_is_imported_from_outside() -> None:
    faults = house.layout_faults(house.modules_in())
    assert [fault for fault in faults if fault not in MEANT] == []
    assert [fault for fault in MEANT if fault not in faults] == []  # what was mended needs no excuse


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"muxkit/a.py": "import muxkit.b", "muxkit/b.py": "def f():\n    import muxkit.a"},
            "circle: muxkit.a muxkit.b",
        ),
        (
            {"muxkit/one/_a.py": "x\n" * 130, "muxkit/two.py": "from muxkit.one import _a"},
            "private: muxkit.two imports",
        ),
    ],
)
def test_a_break_of_the_layout_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    assert any(fault.startswith(said) for fault in house.layout_faults(house.modules_in(tmp_path)))
