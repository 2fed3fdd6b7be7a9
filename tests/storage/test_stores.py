"""Every durable store, of sessions or of staged rows: its address, its file, and its database; one suite over both."""

from __future__ import annotations

import os
import sqlite3
import sys
from typing import TYPE_CHECKING, Any

import attrs
import psycopg
import pytest
import trio

from muxkit.pipeline import open_staging
from muxkit.pipeline.staging.backends import SQLITE_SCHEMA as STAGING_SCHEMA
from muxkit.protocols.restream import open_store
from muxkit.protocols.restream.store.sqlite import SCHEMA as SESSIONS_SCHEMA
from muxkit.storage import StoreClosed, StoreFailed, StoreLocked, StoreVersion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

pytest_plugins = ["tests.protocols.restream.stores_fixtures", "tests.protocols.restream._postgres"]


@attrs.frozen
class Kind:
    """One kind of store: how it is opened, a call that reads it, and the table that holds its version."""

    open: Callable[[str], AbstractAsyncContextManager[Any]]
    read: Callable[[Any], Awaitable[object]]
    version_table: str
    version: int


SESSIONS = Kind(open_store, lambda store: store.sessions(), "restream_store", SESSIONS_SCHEMA.version)
STAGING = Kind(open_staging, lambda store: store.head("orders"), "staging_store", STAGING_SCHEMA.version)


@pytest.fixture(params=[SESSIONS, STAGING], ids=["sessions", "staging"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each kind of store."""
    found: Kind = request.param
    return found


@pytest.fixture
def path(quick_path: Path) -> Path:
    return quick_path


def change(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(sql).fetchall()
    connection.close()


def content(path: Path) -> bytes:
    return path.read_bytes()


async def refused(kind: Kind, where: str, error: type[Exception], match: str) -> Exception:
    """Open a store that must be refused; return the error."""
    with pytest.raises(error, match=match) as caught:
        async with kind.open(where):
            pytest.fail("it was opened")
    return caught.value


# ---------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("where", ["", "memory", "memory:x", "sqlite:", "sqlite", "redis://here", "a.db", "mysql:x"])
async def test_an_address_that_names_no_store_is_refused(kind: Kind, where: str) -> None:
    await refused(kind, where, ValueError, r"names no store: memory:, sqlite:PATH or postgresql://…")


async def test_a_closed_store_says_so(kind: Kind) -> None:
    async with kind.open("memory:") as store:
        await kind.read(store)
    with pytest.raises(StoreClosed):
        await kind.read(store)


# ---------------------------------------------------------------------------- files


@pytest.mark.requirement("R-55")
async def test_a_second_store_in_the_same_process_is_refused_too(kind: Kind, path: Path) -> None:
    where = f"sqlite:{path}"
    async with kind.open(where):
        await refused(kind, where, StoreLocked, f"process {os.getpid()}")
    async with kind.open(where):
        pass


@pytest.mark.requirement("R-55")
async def test_a_program_that_has_the_file_open_is_an_error_at_once(kind: Kind, path: Path) -> None:
    async with kind.open(f"sqlite:{path}"):
        pass
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await refused(kind, f"sqlite:{path}", StoreLocked, "in use by another process")
    other.close()


async def test_a_file_of_a_newer_version_is_left_alone(kind: Kind, path: Path) -> None:
    async with kind.open(f"sqlite:{path}"):
        pass
    change(path, "PRAGMA user_version = 9")
    before = content(path)
    reason = f"of version 9, and this muxkit knows up to {kind.version}; use a newer muxkit"
    await refused(kind, f"sqlite:{path}", StoreVersion, reason)
    assert content(path) == before


async def test_the_database_of_another_program_is_left_alone(kind: Kind, path: Path) -> None:
    change(path, "CREATE TABLE recipes (name)")
    before = content(path)
    await refused(kind, f"sqlite:{path}", StoreVersion, "is a database of something else")
    assert content(path) == before


@pytest.mark.parametrize(("own", "other"), [(SESSIONS, STAGING), (STAGING, SESSIONS)], ids=["sessions", "staging"])
async def test_a_file_of_the_other_kind_is_refused_and_left_alone(own: Kind, other: Kind, path: Path) -> None:
    async with own.open(f"sqlite:{path}"):
        pass
    before = content(path)
    await refused(other, f"sqlite:{path}", StoreVersion, "is a database of something else")
    assert content(path) == before
    async with own.open(f"sqlite:{path}") as store:
        await own.read(store)


async def test_a_directory_that_does_not_exist_is_named(kind: Kind, tmp_path: Path) -> None:
    where = f"sqlite:{tmp_path / 'nowhere' / 'rows.db'}"
    await refused(kind, where, StoreFailed, "nowhere to be a directory; create it first")


async def test_a_directory_in_the_place_of_the_file_is_an_error(kind: Kind, path: Path) -> None:
    os.mkdir(path)
    await refused(kind, f"sqlite:{path}", StoreFailed, path.name)


# ---------------------------------------------------------------------------- databases


async def test_tables_of_a_newer_version_are_left_alone(kind: Kind, schema: str) -> None:
    async with kind.open(schema):
        pass
    with psycopg.connect(schema, autocommit=True) as connection:
        connection.execute(f"UPDATE {kind.version_table} SET version = 9")
    await refused(
        kind, schema, StoreVersion, f"of version 9, and this muxkit knows up to {kind.version}; use a newer muxkit"
    )


async def test_a_database_that_cannot_be_reached_is_a_clear_error(kind: Kind, tmp_path: Path) -> None:
    where = f"postgresql://somebody:secret-canary@/sessions?host={tmp_path}"
    error = await refused(kind, where, StoreFailed, "^can't reach the database")
    assert isinstance(error, StoreFailed)
    assert "secret-canary" not in str(error)
    assert str(tmp_path) not in error.for_client


async def test_giving_up_does_not_wait_for_a_database_that_is_silent(kind: Kind) -> None:
    silent = trio.socket.socket()
    await silent.bind(("127.0.0.1", 0))
    silent.listen(1)
    port = silent.getsockname()[1]
    with silent, trio.move_on_after(0.2) as scope:
        async with kind.open(f"postgresql://user@127.0.0.1:{port}/sessions"):
            pytest.fail("it was opened")
    assert scope.cancelled_caught


async def test_what_is_no_address_is_refused(kind: Kind) -> None:
    await refused(kind, "postgresql://[", ValueError, "invalid address of a database")


async def test_without_psycopg_the_error_says_what_to_install(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    await refused(kind, "postgresql:///sessions", StoreFailed, r"pip install 'muxkit\[postgres\]'")
