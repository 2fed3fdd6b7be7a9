"""aioquic still has the names that it does not promise; each missing one is reported by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

import muxkit_adapters.quic.connection
from muxkit_adapters.quic import compatibility

FENCED = Path(muxkit_adapters.quic.connection.__file__)
OURS = {"_data", "_peer_streams", "_queue", "_unacked", "_given_up", "_committed", "_skipped", "_skip_at"}
OURS |= {"_is_ended_by_us", "_check_gaps", "_grant", "_ids", "_expect_finished_of_client", "_measured"}


def private_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    } | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__")
    }


def names_of_aioquic() -> set[str]:
    connection = QuicConnection(configuration=QuicConfiguration(server_name="x"))
    connection.connect(("127.0.0.1", 1), now=0.0)
    stream = QuicStream(stream_id=2)
    found: set[str] = set()
    builder = QuicPacketBuilder(host_cid=b"", peer_cid=b"", version=1, is_client=True, max_datagram_size=1200)
    for thing in (connection, connection.tls, connection._loss, builder, stream, stream.sender, stream.receiver):
        found |= set(dir(thing))
    return found | set(dir(QuicPacketSpace()))


NEEDED = private_names(FENCED) - OURS - {"_has_work", "_has_output", "_violation"}


def test_the_table_of_private_names_is_complete() -> None:
    assert frozenset().union(*compatibility.PRIVATE_NAMES.values()) == NEEDED


@pytest.mark.requirement("R-09")
def test_the_installed_aioquic_has_every_private_name() -> None:
    compatibility.check_aioquic()


@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k, names in compatibility.PRIVATE_NAMES.items() for n in sorted(names)]
)
def test_the_names_that_are_looked_for_exist_in_a_connection(kind: type, name: str) -> None:
    """The check reads constructors instead of calling them; here each name is looked up in a real object."""
    assert name in names_of_aioquic(), kind


def test_an_aioquic_that_lacks_a_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {QuicConnection: frozenset({"_streams", "_moved_elsewhere"})}
    monkeypatch.setattr(compatibility, "PRIVATE_NAMES", moved)
    with pytest.raises(ImportError, match=r"unsupported aioquic \d.*QuicConnection\._moved_elsewhere, which"):
        compatibility.check_aioquic()


def test_there_is_something_to_look_for() -> None:
    assert {"_write_stream_limits", "_remote_max_data", "_buffer_stop", "_handle_ack_frame"} <= NEEDED


def test_no_other_file_touches_private_names_of_aioquic() -> None:
    theirs = {name for name in names_of_aioquic() if name.startswith("_") and not name.startswith("__")}
    for path in FENCED.parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        if path == FENCED:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in theirs:
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                assert is_own, f"{path.name}:{node.lineno} uses {node.attr}"


def test_credit_is_raised_by_the_methods_that_are_replaced() -> None:
    """What the fence holds back must be what aioquic does by itself, or the fence stands in the wrong place."""
    connection = QuicConnection(configuration=QuicConfiguration(server_name="x", max_data=1000))
    connection._local_max_data.used = 900
    builder = _Recorder()
    connection._write_connection_limits(builder=builder, space=QuicPacketSpace())  # type: ignore[arg-type]
    assert connection._local_max_data.value == 2000
    stream = QuicStream(stream_id=2, max_stream_data_local=1000)
    stream.receiver.highest_offset = 900
    connection._write_stream_limits(builder=builder, space=QuicPacketSpace(), stream=stream)  # type: ignore[arg-type]
    assert stream.max_stream_data_local == 2000
    assert QuicProtocolVersion.VERSION_1 in connection.configuration.supported_versions


class _Recorder:
    """Stands where a packet is built."""

    quic_logger_frames: list[object] | None = None

    def start_frame(self, *args: object, **options: object) -> _Recorder:
        return self

    def push_uint_var(self, value: int) -> None: ...
