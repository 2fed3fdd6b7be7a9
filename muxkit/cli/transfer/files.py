"""Files over channels: a sandboxed directory, and resumable transfers.

Each request has its own channel with the name `muxkit.files`. Messages are MessagePack, except the bytes of a file:

    client    Request     the operation and the path
    sender    Offer       the size and the time of a file
    receiver  Answer      how much of it exists already, and the SHA-256 of that
    sender    Start       where the bytes begin: after the existing ones, or at 0 if those differ
    sender    bytes …     until the size is reached
    sender    End         the SHA-256 of the whole file
    receiver  Done        the file is stored under its name

The sender is the client of a `put` and the server of a `get`. A receiver writes to a partial file, which it renames
when the checksum is correct. An interrupted transfer leaves the partial file, which the next `Answer` describes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, Literal, TypeVar

import attrs
import msgspec
import trio

import muxkit
from muxkit.cli.terminal import printable

if sys.platform != "win32":
    import fcntl

NAME: Final = "muxkit.files"
SUFFIX: Final = b".muxkit-part"
PIECE: Final = 65_536  # bytes in one message
BLOCK: Final = 1 << 20  # bytes that are read, hashed or written at a time
BATCH: Final = 500  # entries of a listing in one message
LISTING_MOST: Final = 1_000_000  # entries that a client takes
LISTING_BYTES: Final = 256 << 20  # bytes of the paths in them
PATH_MOST: Final = 4096  # bytes
NAME_MOST: Final = 255  # bytes, of one part of a path
# Parts of a path. A listing opens each folder from the root, so its cost grows with the square of the depth: one path
# of 1,900 parts, which fits into `PATH_MOST`, made it take longer than 10 s. Real folders are seldom 40 deep.
DEPTH_MOST: Final = 256

REFUSED, DIFFERS, BROKEN, TAKEN_OVER = 403, 409, 422, 410  # codes of aborts

Parts = tuple[bytes, ...]
OnBytes = Callable[[int], object]
StructT = TypeVar("StructT", bound=msgspec.Struct)


class Request(msgspec.Struct):
    """A client's request. The path is relative to the server's folder, and empty for all of it."""

    op: Literal["list", "get", "put", "mkdir"]
    path: bytes = b""


class Entry(msgspec.Struct):
    """A file or an empty folder."""

    path: bytes
    size: int
    is_folder: bool


class Offer(msgspec.Struct):
    """A file that will be sent."""

    size: int
    mtime_ns: int
    executable: bool


class Answer(msgspec.Struct):
    """What the receiver has of the file."""

    have: int
    sha256: bytes


class Start(msgspec.Struct):
    """Where the following bytes begin."""

    offset: int


class End(msgspec.Struct):
    """The checksum of the whole file."""

    sha256: bytes


class Done(msgspec.Struct):
    """The file is stored."""


class FileRefused(Exception):
    """A file that isn't sent or accepted. The text is for the other side too, and contains no path of this side."""

    def __init__(self, reason: str, code: int = REFUSED) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


@attrs.frozen
class Transferred:
    """One file that was sent or received."""

    size: int
    already: int
    """Bytes that were there before."""
    sha256: bytes


# ---------------------------------------------------------------------------- folders


def parts_of(path: bytes) -> Parts:
    """Split a path from the other side. Raises `FileRefused` if it could lead out of the folder."""
    if not path or len(path) > PATH_MOST or b"\0" in path:
        raise FileRefused("invalid path of a file")
    parts = tuple(path.split(b"/"))
    if len(parts) > DEPTH_MOST:
        raise FileRefused(f"the path has {len(parts)} parts: expected at most {DEPTH_MOST}")
    for part in parts:
        if part in (b"", b".", b"..") or len(part) > NAME_MOST:
            raise FileRefused("the path leads out of the folder")
        if part.endswith(SUFFIX):
            raise FileRefused(f"names that end with {SUFFIX.decode()} are for unfinished files")
    return parts


def shown(path: bytes) -> str:
    """Return a path for people."""
    return printable(os.fsdecode(path))


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of the file system into refusals without paths."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise FileRefused("a symbolic link is a part of the path") from error
        if error.errno == errno.ENOTDIR:
            raise FileRefused("a part of the path isn't a folder, or is a symbolic link") from error
        raise FileRefused(os.strerror(error.errno or errno.EIO).lower(), BROKEN) from error


class Folder:
    """A sandboxed directory. Each component of a path is opened separately, and no symbolic link is followed."""

    def __init__(self, path: Path) -> None:
        if sys.platform == "win32":
            raise muxkit.Unsupported(
                "files are sent and received on Unix only: Windows cannot open a path step by step"
            )
        self._root: int = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.mask: int = os.umask(0o077)
        os.umask(self.mask)
        self.taken: dict[tuple[int, int], tuple[trio.CancelScope, trio.Event]] = {}
        """The transfers that write to unfinished files here, and their ends, by the device and number of the file."""

    def close(self) -> None:
        os.close(self._root)

    @contextmanager
    def open_folder(self, parts: Parts, *, create: bool = False) -> Iterator[int]:
        """Open a folder inside this one. It uses one descriptor, however deep the folder is."""
        current = os.dup(self._root)
        try:
            with _refusals():
                for part in parts:
                    if create:
                        with suppress(FileExistsError):
                            os.mkdir(part, 0o777, dir_fd=current)
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    above, current = current, os.open(part, flags, dir_fd=current)
                    os.close(above)
                yield current
        finally:
            os.close(current)

    def make(self, parts: Parts) -> None:
        """Create a folder inside this one, with its parents."""
        with self.open_folder(parts, create=True):
            pass

    @contextmanager
    def open_file(self, parts: Parts) -> Iterator[int]:
        """Open a regular file for reading."""
        with self.open_folder(parts[:-1]) as folder, _refusals():
            # O_NONBLOCK, or a named pipe would wait for a writer.
            number = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise FileRefused("not a regular file")
            yield number
        finally:
            os.close(number)

    def entries(self, parts: Parts = ()) -> Iterator[Entry]:
        """Iterate over the files below a path, which may be a file. Everything that is neither a file nor a folder is
        skipped.
        """
        if parts:
            with self.open_folder(parts[:-1]) as folder, _refusals():
                found = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                yield Entry(b"/".join(parts), found.st_size, is_folder=False)
                return
        waiting = [parts]
        while waiting:
            current = waiting.pop()
            is_empty = True
            with ExitStack() as stack:
                stack.enter_context(_refusals())
                try:
                    folder = stack.enter_context(self.open_folder(current))
                except FileRefused as refused:
                    if current != parts and isinstance(refused.__cause__, FileNotFoundError):
                        continue  # it was removed meanwhile
                    raise
                for each in sorted(stack.enter_context(os.scandir(folder)), key=lambda each: each.name):
                    name = os.fsencode(each.name)
                    if name.endswith(SUFFIX):
                        continue
                    is_empty = False
                    if each.is_dir(follow_symlinks=False):
                        waiting.append((*current, name))
                    elif each.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            size = each.stat(follow_symlinks=False).st_size
                            yield Entry(b"/".join((*current, name)), size, is_folder=False)
            if is_empty and current:
                yield Entry(b"/".join(current), 0, is_folder=True)


# ---------------------------------------------------------------------------- messages


async def tell(channel: muxkit.Channel, message: msgspec.Struct) -> None:
    await channel.send(msgspec.msgpack.encode(message))


async def hear(channel: muxkit.Channel, kind: type[StructT]) -> StructT:
    """Receive a message of a transfer. Raises `FileRefused` if it is of another type."""
    try:
        return msgspec.msgpack.decode(await channel.receive(), type=kind)
    except msgspec.MsgspecError as error:
        raise FileRefused(f"a message is no {kind.__name__}", BROKEN) from error
    except trio.EndOfChannel as error:
        raise FileRefused("the other side ended before the transfer was complete", BROKEN) from error


# ---------------------------------------------------------------------------- one file


async def send_file(channel: muxkit.Channel, number: int, on_bytes: OnBytes = lambda _: None) -> Transferred:
    """Send an open file. `on_bytes` is called with the number of bytes that the other side has received in addition."""
    found = os.fstat(number)
    size = found.st_size
    offer = Offer(size, found.st_mtime_ns, executable=bool(found.st_mode & stat.S_IXUSR))
    await tell(channel, offer)
    answer = await hear(channel, Answer)
    offset, digest = 0, hashlib.sha256()
    if 0 < answer.have <= size:
        of_begin = await trio.to_thread.run_sync(_hash_begin, number, answer.have)
        if of_begin.digest() == answer.sha256:
            offset, digest = answer.have, of_begin
    await tell(channel, Start(offset))
    on_bytes(offset)
    position = offset
    while position < size:
        block = await trio.to_thread.run_sync(_read, number, position, min(BLOCK, size - position), digest)
        if not block:
            raise FileRefused("the file was truncated while it was being sent", BROKEN)
        await channel.send_many([block[start : start + PIECE] for start in range(0, len(block), PIECE)])
        position += len(block)
        on_bytes(len(block))
    await tell(channel, End(digest.digest()))
    await hear(channel, Done)
    return Transferred(size, offset, digest.digest())


def _read(number: int, position: int, count: int, digest: hashlib._Hash) -> bytes:
    data = os.pread(number, count, position)
    digest.update(data)
    return data


def _hash_begin(number: int, count: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    position = 0
    while position < count and _read_into(number, position, min(BLOCK, count - position), digest):
        position += min(BLOCK, count - position)
    return digest


def _read_into(number: int, position: int, count: int, digest: hashlib._Hash) -> bool:
    return len(_read(number, position, count, digest)) == count


async def receive_file(
    channel: muxkit.Channel, folder: Folder, parts: Parts, *, overwrite: bool, on_bytes: OnBytes = lambda _: None
) -> Transferred:
    """Receive a file into a folder. `on_bytes` is called with the number of bytes that have arrived in addition."""
    offer = await hear(channel, Offer)
    if offer.size < 0:
        raise FileRefused("a size is below 0", BROKEN)
    with _Arrival.open(folder, parts, offer, overwrite=overwrite) as arrival:
        is_long_enough = await trio.to_thread.run_sync(arrival.compare)
        if is_long_enough:  # the file stands under its name, and may be the same
            await tell(channel, Answer(offer.size, arrival.digest.digest()))
            if (await hear(channel, Start)).offset == offer.size:
                on_bytes(offer.size)
                await _end(channel, arrival)
                return Transferred(offer.size, offer.size, arrival.digest.digest())
        arrival.check_overwrite()
        offset = 0
        async with arrival.taking() as scope:
            if not is_long_enough:
                have = await trio.to_thread.run_sync(arrival.begin)
                await tell(channel, Answer(have, arrival.digest.digest()))
                offset = (await hear(channel, Start)).offset
                if offset not in (0, have):
                    raise FileRefused("the bytes begin at another place", BROKEN)
            await trio.to_thread.run_sync(arrival.begin_at, offset)
            on_bytes(offset)
            while arrival.position < offer.size:
                pieces = await _receive_pieces(channel, offer.size - arrival.position)
                await trio.to_thread.run_sync(arrival.write, pieces)
                on_bytes(sum(map(len, pieces)))
            await _end(channel, arrival)
        if scope.cancelled_caught:
            raise FileRefused("another transfer of this file has begun", TAKEN_OVER)
        return Transferred(offer.size, offset, arrival.digest.digest())


async def _receive_pieces(channel: muxkit.Channel, most: int) -> list[bytes]:
    """Receive bytes that have arrived of a file, and nothing that follows it."""
    try:
        # At least so many messages are to come, since none is longer than a piece.
        pieces = await channel.receive_many(min(-(-most // PIECE), BLOCK // PIECE))
    except trio.EndOfChannel as error:
        raise FileRefused("the other side ended before the transfer was complete", BROKEN) from error
    if not all(0 < len(piece) <= PIECE for piece in pieces) or sum(map(len, pieces)) > most:
        raise FileRefused("the file's bytes arrived in unexpected pieces", BROKEN)
    return pieces


async def _end(channel: muxkit.Channel, arrival: _Arrival) -> None:
    end = await hear(channel, End)
    if end.sha256 != arrival.digest.digest():
        await trio.to_thread.run_sync(arrival.forget)
        raise FileRefused("wrong checksum", BROKEN)
    await trio.to_thread.run_sync(arrival.store)
    await tell(channel, Done())


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class _Arrival:
    """A file that is being received: its partial file and its final name."""

    def __init__(self, folder: Folder, parent: int, name: bytes, offer: Offer, *, overwrite: bool) -> None:
        self._folder = folder
        self._parent = parent
        self._name = name
        self._offer = offer
        self._overwrite = overwrite
        long = len(name) + len(SUFFIX) + 1 > NAME_MOST
        self._unfinished = b"." + (hashlib.sha256(name).hexdigest().encode() if long else name) + SUFFIX
        self._number: int | None = None
        self.digest = hashlib.sha256()
        self.position = 0

    @classmethod
    @contextmanager
    def open(cls, folder: Folder, parts: Parts, offer: Offer, *, overwrite: bool) -> Iterator[_Arrival]:
        with folder.open_folder(parts[:-1], create=True) as parent:
            arrival = cls(folder, parent, parts[-1], offer, overwrite=overwrite)
            try:
                yield arrival
            finally:
                arrival._close()

    def _close(self) -> None:
        if self._number is not None:
            os.close(self._number)
            self._number = None

    def _stored(self) -> os.stat_result | None:
        with _refusals():
            try:
                found = os.stat(self._name, dir_fd=self._parent, follow_symlinks=False)
            except FileNotFoundError:
                return None
        if stat.S_ISLNK(found.st_mode):
            raise FileRefused("a symbolic link has this name")
        if not stat.S_ISREG(found.st_mode):
            raise FileRefused("something other than a file has this name")
        return found

    def compare(self) -> bool:
        """Hash the existing file if it is as long as the offered one. Return False if there is none."""
        stored = self._stored()
        if stored is None or stored.st_size != self._offer.size:
            return False
        with _refusals():
            number = os.open(
                self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._parent
            )
        try:
            self.digest = _hash_begin(number, self._offer.size)
        finally:
            os.close(number)
        return True

    def check_overwrite(self) -> None:
        if not self._overwrite and self._stored() is not None:
            raise FileRefused("a different file with this name exists", DIFFERS)

    @asynccontextmanager
    async def taking(self) -> AsyncIterator[trio.CancelScope]:
        """Open the partial file for exclusive writing.

        An earlier transfer in this process is cancelled first, because its client may be dead. Raises `FileRefused` if
        another process is writing to the file.
        """
        number = await self._take()
        scope, ended = trio.CancelScope(), trio.Event()
        key = _identity(os.fstat(number))
        self._folder.taken[key] = scope, ended
        try:
            with scope:
                yield scope
        finally:
            del self._folder.taken[key]
            self._close()
            ended.set()

    async def _take(self) -> int:
        while True:
            self._number = number = self._open_unfinished()
            key = _identity(os.fstat(number))
            if key in self._folder.taken:
                scope, ended = self._folder.taken[key]
                scope.cancel()
                await ended.wait()
            else:
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise FileRefused("another process is receiving this file", TAKEN_OVER) from error
                with suppress(FileNotFoundError):
                    # Or it was given its name meanwhile, and what is open here is a file that is finished.
                    found = os.stat(self._unfinished, dir_fd=self._parent, follow_symlinks=False)
                    if _identity(found) == key:
                        return number
            self._close()

    def _open_unfinished(self) -> int:
        with _refusals():
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            number = os.open(self._unfinished, flags, 0o600, dir_fd=self._parent)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise FileRefused("something other than a file has the name of the partial file")
        return number

    def begin(self) -> int:
        """Hash the partial file, and return how many bytes it has."""
        assert self._number is not None
        with _refusals():
            have = min(os.fstat(self._number).st_size, self._offer.size)
            self.digest = _hash_begin(self._number, have)
        return have

    def begin_at(self, offset: int) -> None:
        assert self._number is not None
        with _refusals():
            os.ftruncate(self._number, offset)
        if offset == 0:
            self.digest = hashlib.sha256()
        self.position = offset

    def write(self, pieces: Sequence[bytes]) -> None:
        assert self._number is not None
        data = b"".join(pieces)
        rest = memoryview(data)
        with _refusals():
            while rest:
                count = os.pwrite(self._number, rest, self.position)
                self.position += count
                rest = rest[count:]
        self.digest.update(data)

    def forget(self) -> None:
        """Remove the partial file, whose bytes are wrong."""
        if self._number is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._unfinished, dir_fd=self._parent)

    def store(self) -> None:
        """Give the file its name when its bytes are on the disk."""
        if self._number is None:  # it was there, and is the same
            return
        with _refusals():
            mode = 0o777 if self._offer.executable else 0o666
            os.fchmod(self._number, mode & ~self._folder.mask)
            os.utime(self._number, ns=(self._offer.mtime_ns, self._offer.mtime_ns))
            os.fsync(self._number)
            if self._overwrite:
                self._stored()  # raises for what is no file
                os.replace(self._unfinished, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
                return
            try:
                os.link(self._unfinished, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
            except FileExistsError as error:
                raise FileRefused("a different file with this name exists", DIFFERS) from error
            os.unlink(self._unfinished, dir_fd=self._parent)


# ---------------------------------------------------------------------------- the server


def serve_folder(folder: Folder, *, upload: bool, overwrite: bool) -> Callable[[muxkit.Channel], Awaitable[None]]:
    """Return a channel handler for the files in a folder. Clients may add files if `upload` is true."""

    async def handle(channel: muxkit.Channel) -> None:
        try:
            request = await hear(channel, Request)
            if request.op == "list":
                await _send_list(channel, folder, parts_of(request.path) if request.path else ())
            elif request.op == "get":
                with folder.open_file(parts_of(request.path)) as number:
                    await send_file(channel, number)
            elif not upload:
                raise FileRefused("this server accepts no files")
            elif request.op == "put":
                await receive_file(channel, folder, parts_of(request.path), overwrite=overwrite)
            else:
                folder.make(parts_of(request.path))
                await tell(channel, Done())
        except FileRefused as refused:
            channel.abort(refused.reason, code=refused.code)
        else:
            await channel.finish()

    return handle


async def _send_list(channel: muxkit.Channel, folder: Folder, parts: Parts) -> None:
    entries = folder.entries(parts)

    def take_batch() -> list[Entry]:
        return list(islice(entries, BATCH))

    while batch := await trio.to_thread.run_sync(take_batch):
        await channel.send(msgspec.msgpack.encode(batch))


# ---------------------------------------------------------------------------- the client


async def list_files(session: muxkit.Session, path: bytes) -> list[Entry]:
    """Request the files below a path of the server."""
    async with session.open(NAME) as channel:
        await tell(channel, Request("list", path))
        found: list[Entry] = []
        size = 0
        async for message in channel:
            try:
                batch = msgspec.msgpack.decode(message, type=list[Entry])
            except msgspec.MsgspecError as error:
                raise FileRefused("a message is no list of files", BROKEN) from error
            size += sum(len(entry.path) for entry in batch)
            if len(found) + len(batch) > LISTING_MOST or size > LISTING_BYTES:
                raise FileRefused(
                    f"the server lists more than {LISTING_MOST:,} files, or {LISTING_BYTES >> 20} MiB of their paths: "
                    "ask for folders in it"
                )
            found += batch
        return found


async def put(session: muxkit.Session, number: int, path: bytes, on_bytes: OnBytes) -> Transferred:
    """Send an open file to the server."""
    async with session.open(NAME) as channel:
        await tell(channel, Request("put", path))
        return await send_file(channel, number, on_bytes)


async def put_folder(session: muxkit.Session, path: bytes) -> None:
    """Create a folder on the server."""
    async with session.open(NAME) as channel:
        await tell(channel, Request("mkdir", path))
        await hear(channel, Done)


async def get(
    session: muxkit.Session, path: bytes, folder: Folder, parts: Parts, *, overwrite: bool, on_bytes: OnBytes
) -> Transferred:
    """Receive a file from the server."""
    async with session.open(NAME) as channel:
        await tell(channel, Request("get", path))
        return await receive_file(channel, folder, parts, overwrite=overwrite, on_bytes=on_bytes)
