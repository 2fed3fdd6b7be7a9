"""The page of troubleshooting has a cause and a remedy for each text that the suite makes a program read."""

from __future__ import annotations

import pytest

from tests.troubleshooting import FOREIGN, Seen, groups, matches, own_texts, read_by_peers

ENTRIES = [entry for entries in groups().values() for entry in entries]


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return [*(each for each in read_by_peers() if not each.text.startswith(FOREIGN)), *own_texts()]


def test_each_text_that_a_program_reads_has_a_cause_and_a_remedy(seen: list[Seen]) -> None:
    assert len(seen) > 150
    assert [each for each in seen if not any(entry.has(each.text) for entry in ENTRIES)] == []


def test_each_text_of_the_catalogue_is_one_that_a_program_reads(seen: list[Seen]) -> None:
    parts = [part for entry in ENTRIES for part in entry.texts]
    assert [part for part in parts if not any(matches(part, each.text) for each in seen)] == []
    assert len(set(parts)) == len(parts)
