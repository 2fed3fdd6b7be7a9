"""A disk that can lose its power, be full, or fail: files in memory behind SQLite's interface to the system.

After a power cut only synced bytes are certain. Each other sector of 512 bytes may have reached the disk or not, and a
file that was deleted without a sync of its directory may be back.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import apsw
import attrs

from muxkit.storage.sqlite import ERROR, FULL, IOERR, SqliteFault, Value, Version

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

SECTOR = 512

_names = count(1)


@attrs.define
class _Content:
    """One file: what programs see, what is synced, and what was written since."""

    seen: bytearray = attrs.field(factory=bytearray)
    durable: bytearray = attrs.field(factory=bytearray)
    pending: list[tuple[int, bytes | None]] = attrs.field(factory=list)  # None: cut to this size

    def write(self, offset: int, data: bytes) -> None:
        _write(self.seen, offset, data)
        self.pending.append((offset, data))

    def truncate(self, size: int) -> None:
        del self.seen[size:]
        self.pending.append((size, None))

    def sync(self) -> None:
        self.durable = bytearray(self.seen)
        self.pending.clear()

    def survive(self, luck: random.Random) -> _Content:
        """Return what a power cut leaves of the file."""
        left = bytearray(self.durable)
        for offset, data in self.pending:
            if data is None:
                if luck.random() < 0.5:
                    del left[offset:]
                continue
            for start in range(0, len(data), SECTOR):
                if luck.random() < 0.5:
                    _write(left, offset + start, data[start : start + SECTOR])
        return _Content(bytearray(left), left)


class Disk:
    """Files by name. `fails` is called before each operation that changes something, and may raise."""

    def __init__(self, fails: Callable[[str], None] = lambda operation: None) -> None:
        self.files: dict[str, _Content] = {}
        self.deleted: dict[str, _Content] = {}  # their names may still be on the disk
        self.fails = fails
        self.name = f"muxkit-disk-{next(_names)}"
        self._vfs = _System(self)

    def connect(self, path: Path) -> ApswConnection:
        """Return the function with which a store opens a file."""
        return ApswConnection(str(path), self.name, self.deleted.clear)

    def survive(self, luck: random.Random) -> Disk:
        """Return the disk after the power is back."""
        after = Disk()
        for name, content in self.deleted.items():
            if name not in self.files and luck.random() < 0.5:
                after.files[name] = content.survive(luck)
        for name, content in self.files.items():
            after.files[name] = content.survive(luck)
        return after

    def unplug(self) -> None:
        """Unregister the interface; no connection may be open."""
        self._vfs.unregister()


class PowerCut:
    """Allows this many operations, and none after them."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def __call__(self, operation: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise apsw.IOError(f"no power for {operation}")


class _System(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        super().__init__(disk.name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else (name or f"temporary-{next(_names)}")
        if path not in self._disk.files:
            self._disk.fails("open")
            self._disk.files[path] = _Content()
        flags[1] = flags[0]
        return _File(self._disk, path)  # type: ignore[return-value]  # anything with these methods will do

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self._disk.fails("delete")
        content = self._disk.files.pop(filename, None)
        if content is not None and not syncdir:
            self._disk.deleted[filename] = content
        if syncdir:
            self._disk.deleted.pop(filename, None)

    def xAccess(self, pathname: str, flags: int) -> bool:
        return pathname in self._disk.files

    def xFullPathname(self, name: str) -> str:
        return name


class _File:
    """One open file of SQLite. Locks do nothing, as there is one connection."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._content = disk.files[path]

    def xRead(self, amount: int, offset: int) -> bytes:
        return bytes(self._content.seen[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        try:
            self._disk.fails("write")
        except apsw.IOError:
            self._content.pending.append((offset, bytes(data)))  # it may have got through in part
            raise
        self._content.write(offset, bytes(data))

    def xTruncate(self, size: int) -> None:
        self._disk.fails("truncate")
        self._content.truncate(size)

    def xSync(self, flags: int) -> None:
        self._disk.fails("sync")
        self._content.sync()

    def xFileSize(self) -> int:
        return len(self._content.seen)

    def xFileControl(self, op: int, ptr: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return SECTOR

    def xDeviceCharacteristics(self) -> int:
        return 0

    def xLock(self, level: int) -> None:
        pass

    def xUnlock(self, level: int) -> None:
        pass

    def xCheckReservedLock(self) -> bool:
        return False

    def xClose(self) -> None:
        pass


class ApswConnection:
    """A connection of the newest SQLite (the standard library's is often older), on any disk."""

    def __init__(self, path: str, vfs: str | None = None, sync_names: Callable[[], None] = lambda: None) -> None:
        self.sync_names = sync_names
        self.version: Version = _version(apsw.sqlite_lib_version())
        try:
            self._connection = apsw.Connection(path, vfs=vfs)
        except apsw.Error as error:
            raise _fault(error) from error

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def run(self, sql: str, values: Sequence[Value] = (), /) -> list[tuple[Value, ...]]:
        try:
            return [tuple(row) for row in self._connection.execute(sql, tuple(values))]
        except apsw.Error as error:
            raise _fault(error) from error

    def run_many(self, sql: str, values: Sequence[Sequence[Value]], /) -> None:
        try:
            self._connection.executemany(sql, [tuple(each) for each in values])
        except apsw.Error as error:
            raise _fault(error) from error

    def close(self) -> None:
        try:
            self._connection.close()
        except apsw.Error as error:
            raise _fault(error) from error


def _write(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _fault(error: apsw.Error) -> SqliteFault:
    # An error that the disk above raised comes without a code.
    own = {apsw.FullError: FULL, apsw.IOError: IOERR}.get(type(error), ERROR)
    return SqliteFault(getattr(error, "result", own), str(error))


def _version(text: str) -> Version:
    major, minor, patch = text.split(".")
    return int(major), int(minor), int(patch)
