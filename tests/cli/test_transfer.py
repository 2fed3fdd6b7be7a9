"""`muxkit send` and `muxkit recv`: trees, cuts, killed processes, and peers that lie."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

import muxkit as library
from muxkit.cli.transfer import files
from muxkit.cli.transfer.files import End, Entry, FileRefused, Folder, Offer, Request, Start, parts_of
from muxkit.testing import ChaosPlan, Way, chaos_relay
from tests.cli._command import ESCAPE, PATIENCE, environment, muxkit
from tests.cli._forking import Muxkit
from tests.cli._terminal import on_a_terminal
from tests.cli.test_pipe import PROTOCOLS, serving

MIB = 1 << 20

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="files are sent and received on Unix only"),
]


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


def tree(folder: Path) -> Path:
    """A folder with files of several sizes, names that are no text, and what cannot be sent."""
    root = folder / "tree"
    (root / "a folder" / "deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "big").write_bytes(os.urandom(3 * MIB + 17))
    (root / "nothing").write_bytes(b"")
    (root / "a folder" / "line\nbreak").write_text("tea")
    (root / "a folder" / "deep" / os.fsdecode(b"caf\xe9")).write_text("latin-1")
    script = root / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    os.utime(script, ns=(10**18, 10**18 + 5))
    (root / "link").symlink_to("/etc/passwd")
    (root / "up").symlink_to("..")
    os.mkfifo(root / "fifo")
    return root


def contents(root: Path) -> dict[str, Any]:
    """What is in a folder, apart from links and special files."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            continue
        key = str(path.relative_to(root))
        state = path.stat()
        found[key] = (path.read_bytes(), state.st_mode & 0o111, state.st_mtime_ns) if path.is_file() else None
    return found


def events(text: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in map(json.loads, text.splitlines()) if each["event"] == kind]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_tree_goes_there_and_comes_back(protocol: str, tmp_path: Path, there: Path) -> None:
    root = tree(tmp_path)
    with serving(f"{protocol}+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (_, url):
        sent = muxkit("send", url, str(root))
        again = muxkit("send", url, str(root), "--json")
        back = muxkit("recv", url, str(tmp_path / "back"))
    assert (sent.returncode, sent.stderr) == (0, "")
    assert sent.stdout.startswith("sent 5 files, 3,145,765 bytes, 0 of them up to date, ")
    assert sent.stdout.endswith("; skipped 3 links and special files\n")
    assert contents(there / "tree") == contents(root)
    [total] = events(again.stdout, "total")
    assert (total["files"], total["bytes"], total["already"]) == (5, 3_145_765, 3_145_765)
    assert (back.returncode, back.stderr) == (0, "")
    assert contents(tmp_path / "back" / "tree") == contents(root)
    assert not list(tmp_path.rglob("*.muxkit-part"))


def test_a_line_for_each_file_is_what_sha256sum_prints(tmp_path: Path, there: Path) -> None:
    (tmp_path / "one").write_bytes(b"tea")
    with serving("bpmux+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (_, url):
        done = muxkit("send", url, str(tmp_path / "one"), "-v", FORCE_COLOR="1")
    assert done.stdout.startswith(f"{hashlib.sha256(b'tea').hexdigest()}  one  ")
    assert ESCAPE not in done.stdout + done.stderr


def test_a_named_link_is_followed_and_a_file_can_be_asked_for_alone(tmp_path: Path, there: Path) -> None:
    (tmp_path / "real").write_text("tea")
    (tmp_path / "link").symlink_to("real")
    with serving("bpmux+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (_, url):
        assert muxkit("send", url, str(tmp_path / "link")).returncode == 0
        (there / "other").write_text("not asked for")
        assert muxkit("recv", url, str(tmp_path / "back"), "link").returncode == 0
        missing = muxkit("recv", url, str(tmp_path / "back"), "no-such")
    assert os.listdir(tmp_path / "back") == ["link"]
    assert missing.returncode == 1
    assert "no-such: no such file or directory" in missing.stderr


def test_a_file_that_differs_is_replaced_only_if_that_is_allowed(tmp_path: Path, there: Path) -> None:
    (tmp_path / "same-size").write_text("new")
    (tmp_path / "longer").write_text("longer")
    for name in ("same-size", "longer"):
        (there / name).write_text("old")
    names = [str(tmp_path / "same-size"), str(tmp_path / "longer")]
    with serving("bpmux+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (_, url):
        refused = muxkit("send", url, *names)
        assert {path.name: path.read_text() for path in there.iterdir()} == {"same-size": "old", "longer": "old"}
        back = tmp_path / "back"
        back.mkdir()
        (back / "longer").write_text("mine")
        mine = muxkit("recv", url, str(back))
        assert (back / "longer").read_text() == "mine"
        assert muxkit("recv", url, str(back), "--overwrite").returncode == 0
        assert (back / "longer").read_text() == "old"
    with serving("bpmux+tcp://127.0.0.1:0", "--files", str(there), "--upload", "--overwrite") as (_, url):
        assert muxkit("send", url, *names).returncode == 0
    assert {path.name: path.read_text() for path in there.iterdir()} == {"same-size": "new", "longer": "longer"}
    assert (refused.returncode, mine.returncode) == (1, 1)
    assert refused.stderr.count("a different file with this name exists") == 2
    assert refused.stderr.endswith("muxkit: 2 files were not sent\n")


def test_a_server_without_uploads_takes_none(tmp_path: Path, there: Path) -> None:
    (tmp_path / "one").write_text("tea")
    with serving("bpmux+tcp://127.0.0.1:0", "--files", str(there)) as (_, url):
        done = muxkit("send", url, str(tmp_path / "one"))
    assert (done.returncode, os.listdir(there)) == (1, [])
    assert "one: this server accepts no files" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--echo", "--files", "."], "expected one of"),
        (["--echo", "--upload"], "--upload requires --files"),
        (["--files", ".", "--overwrite"], "--overwrite requires --upload"),
    ],
    ids=" ".join,
)
def test_what_does_not_go_together_is_wrong_usage(arguments: list[str], said: str) -> None:
    done = muxkit("serve", "bpmux+tcp://127.0.0.1:0", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_two_sources_of_one_name_are_wrong_usage(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_text(name)
    done = muxkit("send", "bpmux+tcp://127.0.0.1:1", str(tmp_path / "a/same"), str(tmp_path / "b/same"))
    assert done.returncode == 2
    assert "the same name" in done.stderr


def test_a_bar_is_for_terminals(tmp_path: Path, there: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(20 * MIB))
    with serving("bpmux+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (_, url):
        code, written = on_a_terminal("send", url, str(tmp_path / "big"))
    assert code == 0
    assert "20,971,520 bytes" in written
    assert ESCAPE in written


# ---------------------------------------------------------------------------- cuts, and processes that are killed


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with Muxkit(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


async def size_reaches(path: Path, size: int, process: subprocess.Popen[str] | None = None) -> None:
    """Wait while a process works: a change of another process's files wakes no task."""
    with trio.fail_after(PATIENCE):
        while _size(path) < size:
            assert process is None or process.poll() is None
            await trio.sleep(0.005)


@pytest.mark.parametrize("protocol", ["bpmux", "relink"])
@pytest.mark.parametrize("direction", ["send", "recv"])
async def test_a_killed_command_goes_on_where_it_was(
    protocol: str, direction: str, tmp_path: Path, there: Path
) -> None:
    source = (tmp_path if direction == "send" else there) / "big"
    source.write_bytes(os.urandom(24 * MIB))
    target = there if direction == "send" else tmp_path / "back"
    unfinished = target / ".big.muxkit-part"
    what = str(source) if direction == "send" else str(target)
    with serving(f"{protocol}+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (_, url):
        place = url.removeprefix(f"{protocol}+tcp://").partition("/")
        slow = ChaosPlan(rate=16 * MIB)
        async with chaos_relay(place[0], slow, seed=1) as relay:
            through = url.replace(place[0], relay.address)
            with command(direction, through, what) as process:
                await size_reaches(unfinished, 6 * MIB, process)
                process.kill()
                process.wait()
        assert not (target / "big").exists()
        had = unfinished.stat().st_size
        done = await trio.to_thread.run_sync(partial(muxkit, direction, url, what, "--json"))
    assert done.returncode == 0, done.stderr
    [told] = events(done.stdout, "file")
    assert told["already"] >= had >= 6 * MIB
    assert told["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert (target / "big").read_bytes() == source.read_bytes()
    assert not unfinished.exists()


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct"])
@pytest.mark.parametrize("direction", ["send", "recv"])
async def test_cuts_lose_nothing_and_repeat_little(protocol: str, direction: str, tmp_path: Path, there: Path) -> None:
    source = (tmp_path if direction == "send" else there) / "tree"
    source.mkdir()
    for number in range(5):
        (source / str(number)).write_bytes(os.urandom(3 * MIB))
    target = there if direction == "send" else tmp_path / "back"
    way = Way.THERE if direction == "send" else Way.BACK
    bad = ChaosPlan(cut_after=(2 * MIB, 5 * MIB), cut_ways=(way,), reset=0.5)
    with serving(f"{protocol}+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (_, url):
        place = url.removeprefix(f"{protocol}+tcp://").partition("/")[0]
        async with chaos_relay(place, bad, seed=7) as relay:
            through = url.replace(place, relay.address)
            what = str(source) if direction == "send" else str(target)
            done = await trio.to_thread.run_sync(partial(muxkit, direction, through, what, "--json"))
            cuts = relay.cuts
    assert done.returncode == 0, done.stderr + done.stdout
    assert cuts >= 3
    assert contents(target / "tree") == contents(source)
    [total] = events(done.stdout, "total")
    assert (total["files"], total["bytes"]) == (5, 15 * MIB)
    if protocol != "relink":  # which heals by itself
        assert len(events(done.stdout, "outage")) >= 3
        assert total["already"] > 0


async def test_a_server_that_is_killed_and_started_again_gets_the_rest(tmp_path: Path, there: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(os.urandom(24 * MIB))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [f"bpmux+tcp://127.0.0.1:{port}", "--files", str(there), "--upload"]
    async with chaos_relay(f"127.0.0.1:{port}", ChaosPlan(rate=16 * MIB), seed=1) as relay:
        with serving(*arguments) as (server, _):
            with command("send", f"bpmux+tcp://{relay.address}", str(source), "--json") as process:
                await size_reaches(there / ".big.muxkit-part", 6 * MIB, process)
                server.kill()
                server.wait()
                with serving(*arguments):
                    said, _ = await trio.to_thread.run_sync(partial(process.communicate, timeout=PATIENCE))
    assert process.returncode == 0, said
    assert events(said, "file")[0]["already"] >= 6 * MIB
    assert (there / "big").read_bytes() == source.read_bytes()


def test_no_server_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("tea")
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"bpmux+tcp://127.0.0.1:{free.getsockname()[1]}"
    done = muxkit("send", url, str(tmp_path / "one"))
    assert done.returncode == 3
    assert "refused" in done.stderr


async def test_a_server_that_stays_away_is_given_up_when_patience_is_over(tmp_path: Path, there: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(bytes(24 * MIB))
    with serving("bpmux+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (server, url):
        place = url.removeprefix("bpmux+tcp://")
        async with chaos_relay(place, ChaosPlan(rate=16 * MIB), seed=1) as relay:
            slow = f"bpmux+tcp://{relay.address}"
            with command("send", slow, str(source), "--json", "--patience", "2") as process:
                await size_reaches(there / ".big.muxkit-part", MIB, process)
                server.kill()
                said, errors = await trio.to_thread.run_sync(partial(process.communicate, timeout=PATIENCE))
    assert process.returncode in (1, 3)
    assert events(said, "outage")
    assert len(errors.splitlines()) == 1


def test_the_begin_of_another_file_is_not_gone_on_with(tmp_path: Path, there: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 100_000)
    (there / ".one.muxkit-part").write_bytes(b"y" * 50_000)
    with serving("bpmux+tcp://127.0.0.1:0", "--files", str(there), "--upload") as (_, url):
        done = muxkit("send", url, str(tmp_path / "one"), "--json")
    assert events(done.stdout, "file")[0]["already"] == 0
    assert (there / "one").read_bytes() == b"x" * 100_000


# ---------------------------------------------------------------------------- peers that lie


@pytest.mark.parametrize(
    "path",
    [
        b"",
        b"/etc/passwd",
        b"..",
        b"../x",
        b"a/../../x",
        b"a//b",
        b"./a",
        b"a/.",
        b"a\0b",
        b"a/" * 3000 + b"b",
        b"x" * 256,
        b".one.muxkit-part",
    ],
)
def test_a_path_that_could_lead_out_is_refused(path: bytes) -> None:
    with pytest.raises(FileRefused):
        parts_of(path)


def test_a_path_of_very_many_folders_is_refused_since_listing_them_costs_the_square_of_their_number() -> None:
    assert len(parts_of(b"/".join([b"a"] * 256))) == 256
    with pytest.raises(FileRefused, match="257 parts"):
        parts_of(b"/".join([b"a"] * 257))


Handler = Callable[[library.Channel], Awaitable[None]]


@asynccontextmanager
async def lying(entries: list[Entry], body: bytes = b"pwned") -> AsyncIterator[str]:
    """A server that lists and sends what it likes."""

    async def handle(channel: library.Channel) -> None:
        request = msgspec.msgpack.decode(await channel.receive(), type=Request)
        if request.op == "list":
            await channel.send(msgspec.msgpack.encode(entries))
            await channel.finish()
            return
        await files.tell(channel, Offer(len(body), 0, executable=False))
        await channel.receive()
        await files.tell(channel, Start(0))
        await channel.send(body)
        await files.tell(channel, End(hashlib.sha256(body).digest()))
        await channel.receive()

    async with library.open_server(library.by_name({files.NAME: handle}), "bpmux+tcp://127.0.0.1:0") as server:
        yield server.url


async def test_a_server_that_lies_writes_nothing_outside_of_the_folder(tmp_path: Path) -> None:
    back, outside = tmp_path / "back", tmp_path / "outside"
    for folder in (back, outside):
        folder.mkdir()
    (outside / "precious").write_text("mine")
    (back / "into").symlink_to(outside)
    (back / "name").symlink_to(outside / "precious")
    (back / "dangling").symlink_to(outside / "new")
    (back / ".part.muxkit-part").symlink_to(outside / "precious")
    os.mkfifo(back / ".pipe.muxkit-part")
    paths = [
        b"../outside/a",
        b"/" + os.fsencode(outside) + b"/b",
        b"into/c",
        b"name",
        b"dangling",
        b"x/../../outside/d",
    ]
    paths += [b"part", b"pipe", b"into"]
    entries = [Entry(path, 5, is_folder=False) for path in paths] + [Entry(b"into/folder", 0, is_folder=True)]
    entries.append(Entry(b"fine", 5, is_folder=False))
    async with lying(entries) as url:
        done = await trio.to_thread.run_sync(partial(muxkit, "recv", url, str(back), "--overwrite"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == len(entries), done.stderr  # one for each but the last, and the total
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"precious": "mine"}
    assert (back / "fine").read_text() == "pwned"
    assert (back / "name").is_symlink()
    assert (back / "dangling").is_symlink()


async def test_a_listing_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LISTING_MOST", 1000)
    sent = 0

    async def handle(channel: library.Channel) -> None:
        nonlocal sent
        while True:
            await channel.send(msgspec.msgpack.encode([Entry(b"%d" % sent, 1, is_folder=False)] * 100))
            sent += 100

    async with library.open_server(library.by_name({files.NAME: handle}), "bpmux+mem://lists") as server:
        async with library.connect(server.url) as session:
            with pytest.raises(FileRefused, match="more than 1,000 files"), trio.fail_after(PATIENCE):
                await files.list_files(session, b"")


async def test_names_of_a_server_do_not_command_the_terminal(tmp_path: Path) -> None:
    async with lying([Entry(b"\x1b[2Jclear", 5, is_folder=False)]) as url:
        done = await trio.to_thread.run_sync(partial(muxkit, "recv", url, str(tmp_path / "back"), "-v"))
    assert done.returncode == 0
    assert ESCAPE not in done.stdout + done.stderr
    assert "\\x1b[2Jclear" in done.stdout


@asynccontextmanager
async def own_server(folder: Path) -> AsyncIterator[tuple[library.Session, Folder]]:
    """The server of the command, and a session with it that may say what it likes."""
    opened = Folder(folder)
    handler = library.by_name({files.NAME: files.serve_folder(opened, upload=True, overwrite=True)})
    try:
        async with library.open_server(handler, "bpmux+mem://files") as server, library.connect(server.url) as session:
            yield session, opened
    finally:
        opened.close()


async def refused(session: library.Session, *messages: msgspec.Struct | bytes) -> tuple[str, int]:
    """Send messages on a channel; return why the server aborts it."""
    with trio.fail_after(PATIENCE):
        channel = await session.open(files.NAME)
        try:
            for message in messages:
                await channel.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
            async for _ in channel:
                pass
        except (library.ChannelCancelled, library.ChannelStopped) as error:
            channel.abort()
            return error.reason, error.code
    raise AssertionError("the server did not abort it")


async def test_a_client_that_lies_reads_and_writes_nothing_outside_of_the_folder(tmp_path: Path, there: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (there / "out").symlink_to(tmp_path)
    (there / "secret").symlink_to(tmp_path / "secret")
    os.mkfifo(there / "fifo")
    async with own_server(there) as (session, _):
        for path in (b"../secret", b"out/secret", b"secret", b"fifo", b"out"):
            reason, code = await refused(session, Request("get", path))
            assert (code in (403, 422), str(tmp_path) in reason) == (True, False), reason
        for path in (b"../new", b"out/new", b"secret", b"fifo"):
            reason, code = await refused(session, Request("put", path), Offer(1, 0, executable=False))
            assert code == 403, reason
        await refused(session, Request("mkdir", b"out/new"))
        assert {entry.path for entry in await files.list_files(session, b"")} == set()
    assert sorted(os.listdir(tmp_path)) == ["secret", "there"]
    assert (tmp_path / "secret").read_text() == "mine"


async def test_a_deep_path_costs_no_more_descriptors_than_a_short_one(there: Path) -> None:
    """Or a client that may upload could take those that others need, with a few transfers that it stalls."""
    async with own_server(there) as (session, _):
        before = len(os.listdir("/dev/fd"))
        for path in (b"one", b"a/" * 200 + b"one"):
            channel = await session.open(files.NAME)
            await files.tell(channel, Request("put", path))
            await files.tell(channel, Offer(6, 0, executable=False))
            await files.hear(channel, files.Answer)
        assert len(os.listdir("/dev/fd")) - before == 2 * 2  # the folder and the unfinished file


def test_what_is_removed_while_a_folder_is_listed_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"tea")
    (tmp_path / "folder").mkdir()
    folder = Folder(tmp_path)
    found = folder.entries()
    first = next(found)
    (tmp_path / "b").unlink()
    (tmp_path / "folder").rmdir()
    assert [entry.path for entry in (first, *found)] == [b"a", b"c"]
    folder.close()


async def test_a_wrong_checksum_stores_nothing(there: Path) -> None:
    async with own_server(there) as (session, _):
        wrong = End(bytes(32))
        told = await refused(session, Request("put", b"one"), Offer(3, 0, executable=False), Start(0), b"tea", wrong)
    assert told == ("wrong checksum", 422)
    assert os.listdir(there) == []


@pytest.mark.parametrize(
    "messages",
    [
        (b"\xff",),
        (Request("put", b"one"), b"tea"),
        (Request("put", b"one"), Offer(-1, 0, executable=False)),
        (Request("put", b"one"), Offer(3, 0, executable=False), Start(2)),
        (Request("put", b"one"), Offer(3, 0, executable=False), Start(0), b"teapot"),
        (Request("put", b"one"), Offer(3, 0, executable=False), Start(0), b""),
        (Request("put", b"one"), Offer(200_000, 0, executable=False), Start(0), bytes(100_000)),
    ],
)
async def test_messages_that_do_not_belong_there_end_the_transfer(
    messages: tuple[msgspec.Struct | bytes, ...], there: Path
) -> None:
    async with own_server(there) as (session, _):
        _, code = await refused(session, *messages)
        assert code == 422
        assert not (there / "one").exists()


async def test_a_later_transfer_of_the_same_file_takes_over_from_one_that_stalls(there: Path) -> None:
    """The client of the first may be dead without the server knowing it yet."""
    async with own_server(there) as (session, folder):
        first = await session.open(files.NAME)
        for message in (Request("put", b"one"), Offer(6, 0, executable=False), Start(0)):
            await files.tell(first, message)
        await first.send(b"abc")
        await files.hear(first, files.Answer)
        with trio.fail_after(PATIENCE):
            await size_reaches(there / ".one.muxkit-part", 3)
            (there.parent / "source").write_bytes(b"abcdef")
            async with await trio.open_file(there.parent / "source", "rb") as source:
                done = await files.put(session, source.fileno(), b"one", lambda _: None)
            with pytest.raises(library.ChannelCancelled, match="another transfer of this file has begun"):
                await first.receive()
    assert (done.size, done.already) == (6, 3)
    assert (there / "one").read_bytes() == b"abcdef"
    assert folder.taken == {}
