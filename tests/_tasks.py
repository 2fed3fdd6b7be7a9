"""Counts the tasks of a Trio run, to find those that a session or a server has left behind."""

from __future__ import annotations

import trio

from muxkit.runtime.pumps.turns import SYSTEM_TASKS


def living_tasks() -> int:
    """Return the number of tasks, without the system tasks that all sessions of a Trio run share."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found, count = [root], 0
    while found:
        task = found.pop()
        count += task.name not in SYSTEM_TASKS
        found += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return count
