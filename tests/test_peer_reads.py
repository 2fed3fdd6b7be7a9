"""What a peer reads when something goes wrong at the other end: each line of the page is made to happen."""

from __future__ import annotations

import re
import sys

import pytest

from tests.peer_reads import PAGE, SITUATIONS, Situation, cell, scheme

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the texts of the system differ there")


@pytest.mark.filterwarnings("ignore::muxkit.PlaintextWarning")
@pytest.mark.parametrize("each", SITUATIONS, ids=lambda each: f"{each.what}-{scheme(each.over)}")
def test_the_page_says_what_is_read(each: Situation) -> None:
    """F2: "the connection broke while reading; 234,464 bytes were not sent", whatever happened."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {each.what[0].upper()}{each.what[1:]}\n")[2]
    lines = section.partition("\n## ")[0].splitlines()
    assert f"| `{scheme(each.over)}` | {cell(each.read())} |" in lines


def test_a_message_above_the_limit_reads_which_limit_and_the_number() -> None:
    """F2: "the connection broke while reading", and with Relink "the listener has another link for us"."""
    section = PAGE.read_text(encoding="utf-8").partition("## A message is larger than the receiver's limit\n")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert len(rows) >= 5
    for row in rows:
        limit = r"a message of (at least )?\d{6} bytes.* 200000|message .*too large: expected at most 200000"
        assert re.search(rf"({limit}).*raise Limits\(message=…\)", row)
