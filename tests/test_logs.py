"""The page of log lines is that of the sources, and every line has its meaning."""

from __future__ import annotations

import pytest

from tests import logs


def test_the_page_is_up_to_date() -> None:
    assert logs.PAGE.read_text(encoding="utf-8") == logs.page(), "python tests/logs.py"


def test_a_line_without_a_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    new = logs.Line("muxkit", "INFO", "a new line: %s", (), "muxkit/_door.py")
    known = logs.lines()
    monkeypatch.setattr(logs, "lines", lambda: (*known, new))
    with pytest.raises(logs.Incomplete, match="a new line"):
        logs.page()


def test_a_meaning_without_a_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = tuple(line for line in logs.lines() if not line.text.startswith("shutting down;"))
    monkeypatch.setattr(logs, "lines", lambda: known)
    with pytest.raises(logs.Incomplete, match="shutting down;"):
        logs.page()


def test_no_module_logs_in_a_way_that_the_page_does_not_see() -> None:
    """A logger of another name, or `logging.warning`, would be left out."""
    unseen = []
    for folder in logs.SOURCES:
        for path in sorted((logs.ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if any(f"logging.{level}(" in text for level in logs.LEVELS):
                unseen.append(path)
            if "getLogger(" in text and not any(f"{name} = " in text or f"{name}: " in text for name in logs.LOGGERS):
                unseen.append(path)
    assert [path.name for path in unseen] == ALLOWED


ALLOWED = ["common.py", "forward.py", "connection.py"]
"""They give a handler or a level to a logger, and log nothing themselves."""
