"""The file beside a SQLite file that locks it and records that a store was made in it.

The lock is the operating system's, so it ends with its process however that ends. The record keeps a lost or emptied
file from being taken for a new one.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

from muxkit.storage.errors import (
    StoreError,
    StoreFailed,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
)

if TYPE_CHECKING:
    from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, 1 << 20, os.SEEK_SET)  # locks of this system forbid reading, so lock a byte far behind the text
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


MADE = "a store was made"


class LockFile:
    """`PATH.lock`, which stays when the store is closed."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self.path = store.with_name(store.name + ".lock")
        self._file: int | None = None
        self.was_made = False

    def acquire(self) -> None:
        """Lock the file; raises `StoreLocked` at once if another process, or this one, has it already."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            _lock(file)
        except OSError as error:
            pid = _pid(_read(file))
            os.close(file)
            raise StoreLocked(str(self._store), pid) from error
        self._file = file
        self.was_made = MADE in _read(file)
        try:
            self._write()
        except OSError as error:
            self.release()
            raise _unwritable(self.path, error) from error

    def mark_made(self) -> None:
        """Record that there is a store: from now on an empty file is a loss."""
        if not self.was_made:
            self.was_made = True
            self._write()

    def release(self) -> None:
        """Unlock the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._file is None:
            return
        text = f"pid {os.getpid()}\n" + (f"{MADE}\n" if self.was_made else "")
        # Overwritten, then cut: the record is there at every moment.
        os.pwrite(self._file, text.encode(), 0) if hasattr(os, "pwrite") else _overwrite(self._file, text.encode())
        os.ftruncate(self._file, len(text))
        os.fsync(self._file)


def _overwrite(file: int, text: bytes) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, text)


def _read(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, 200).decode("ascii", "replace")


def _pid(text: str) -> int | None:
    words = text.split()
    return int(words[1]) if words[:1] == ["pid"] and len(words) > 1 and words[1].isdecimal() else None


def _unwritable(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreReadOnly(f"{path} cannot be written: {error.strerror}; the store needs to write in {path.parent}")
    if error.errno == errno.ENOSPC:
        return StoreFull(f"{path} cannot be written: {error.strerror}; make room on its disk")
    if not path.parent.is_dir():
        return StoreFailed(f"{path.parent} is no directory; make it first")
    return StoreFailed(f"{path} cannot be used: {error.strerror}")
