"""The fixture `node`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.web._node import Node, node_for


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return node_for(tmp_path)
