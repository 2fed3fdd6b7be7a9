"""Every line that the library logs has its meaning on the page of log lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import logs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[logs.Line]]:
    """Read a module with this body."""
    monkeypatch.setattr(logs, "ROOT", tmp_path)

    def read(body: str) -> list[logs.Line]:
        file = tmp_path / "module.py"
        file.write_text(body, encoding="utf-8")
        return [*logs.Module(file).lines()]

    return read


def test_every_line_has_a_meaning() -> None:
    assert "| level | line | fields | meaning |" in logs.page()


def test_the_meaning_of_a_line_stands_above_its_call(read: Callable[[str], list[logs.Line]]) -> None:
    [line] = read('if late:\n    # log: Nobody came\n    # in time.\n    log.info("over", extra={"event": "end"})\n')
    assert (line.level, line.text, line.fields) == ("INFO", "over", ("event=end",))
    assert line.meaning == logs.Meaning("Nobody came in time.", None, None)


def test_a_text_that_says_little_is_shown_in_other_words(read: Callable[[str], list[logs.Line]]) -> None:
    [line] = read('# log "PATH: PROBLEM" INFO, DEBUG: A file is missing.\nlog.log(level, "%s: %s", path, problem)\n')
    assert line.meaning == logs.Meaning("A file is missing.", "PATH: PROBLEM", "INFO, DEBUG")


def test_a_line_without_a_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    new = logs.Line("muxkit", "INFO", "a new line: %s", (), "muxkit/_door.py")
    known = logs.lines()
    monkeypatch.setattr(logs, "lines", lambda: (*known, new))
    with pytest.raises(logs.Incomplete, match="a new line"):
        logs.page()


def test_a_meaning_above_no_line_is_refused(read: Callable[[str], list[logs.Line]]) -> None:
    with pytest.raises(logs.Incomplete, match=r"module\.py: a meaning stands above no call"):
        read('# log: Nobody came.\nprint("over")\n')


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
