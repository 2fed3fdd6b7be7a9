"""Functions that feed engines with JSON values or raw bytes, and return the values that they wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from muxkit.protocols.restream import (
    ClientConfig,
    ClientEngine,
    ClientEvent,
    Failed,
    HungUp,
    ServerConfig,
    ServerEngine,
    ServerEvent,
    Verifier,
)
from muxkit.testing._pair import drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._errors import RemoteProtocolError
    from muxkit.protocols.restream import Json, JsonObject

UUID = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"
OTHER = "bf575c35-c25b-4386-8430-d5e2a93f3b1b"
EXAMPLE = [1522805012, 3535044222, 402765600, 681225668, 505780829]
EXAMPLE_CRC = 3848541339


def line(value: object) -> bytes:
    """Encode a value with spaces, as another implementation may."""
    return json.dumps(value).encode() + b"\n"


def lines(*values: object) -> bytes:
    return b"".join(map(line, values))


def said(engine: ServerEngine | ClientEngine) -> list[Json]:
    """Return the messages that the engine has to write."""
    written = drain(engine)
    assert written == b"" or written.endswith(b"\n")
    return [json.loads(text) for text in written.split(b"\n")[:-1]]


# --- a server


def tell(server: ServerEngine, *values: object) -> Sequence[ServerEvent]:
    """Feed a server engine with these lines; return its events."""
    server.receive_bytes(lines(*values), 0.0)
    return server.events()


def asked(*values: object, config: ServerConfig | None = None) -> ServerEngine:
    """Make a server engine that received this, and whose events were fetched."""
    server = ServerEngine(config)
    assert not any(isinstance(event, Failed) for event in tell(server, *values))
    return server


def registered(head: int = 0, *, acknowledged: int = 0, state: int | None = None) -> ServerEngine:
    """Make a server engine in a session whose messages up to `head` were sent."""
    request = {"uuid": UUID, "params": {"count": 9}} if state is None else {"uuid": UUID, "state": state}
    server = asked(request)
    assert server.accept(acknowledged=acknowledged, head=0 if state is None else head)
    if state is None:
        for id in range(1, head + 1):
            server.send_message(id, {"value": id})
        assert len(said(server)) == head
    return server


def violation(server: ServerEngine, data: bytes | Sequence[object], rule: str = "") -> RemoteProtocolError:
    """Check that these lines end in a violation: one `Failed`, one error line, and nothing after it."""
    server.receive_bytes(data if isinstance(data, bytes) else lines(*data), 0.0)
    return refused(server, rule)


def refused(server: ServerEngine, rule: str = "") -> RemoteProtocolError:
    *before, last = server.events()
    assert isinstance(last, Failed), f"no violation: {last}"
    assert not any(isinstance(event, Failed) for event in before)
    if rule:
        assert last.error.rule == f"restream-{rule}"
    assert server.closing
    *_, error = said(server)
    assert isinstance(error, dict)
    assert next(iter(error)) == "error"
    assert error.keys() <= {"error", "code", "acknowledged"}
    assert isinstance(error["error"], str)
    assert error["error"]
    is_silent(server)
    return last.error


def is_silent(engine: ServerEngine | ClientEngine) -> None:
    """Check that further lines cause no event and no output."""
    assert not engine.has_output()
    assert engine.next_deadline() is None
    engine.receive_bytes(b"{}\nnope\n", 1.0)
    engine.receive_eof(1.0)
    engine.handle_deadline(1000.0)
    assert not engine.events()
    assert not engine.has_output()
    assert engine.buffers_to_send() == []


def is_silent_but_for_the_end(server: ServerEngine) -> None:
    server.receive_bytes(b"{}\n", 0.0)
    assert server.events() == ()
    server.receive_eof(0.0)
    assert server.events() == [HungUp()]


# --- a client


def joined(client: ClientEngine) -> list[Json]:
    """Start a connection; return the client's first message."""
    client.connection_made(0.0)
    return said(client)


def hear(client: ClientEngine, *values: object) -> Sequence[ClientEvent]:
    """Feed a client engine with these lines; return its events."""
    client.receive_bytes(lines(*values), 0.0)
    return client.events()


def reader(
    count: int | None = 5,
    *,
    params: JsonObject | None = None,
    verifier: Verifier | None = None,
    config: ClientConfig | None = None,
) -> ClientEngine:
    """Make a client engine with a connection that has requested a session."""
    asked_for: JsonObject = {"count": count} if params is None else params
    client = ClientEngine.stateful(UUID, asked_for, verifier=verifier, config=config)
    assert joined(client) == [{"uuid": UUID, "params": asked_for}]
    return client


def example() -> list[dict[str, object]]:
    """Return the five messages of the specification's example."""
    messages: list[dict[str, object]] = [{"id": id, "data": {"value": it}} for id, it in enumerate(EXAMPLE, 1)]
    messages[-1]["data"] = {"value": EXAMPLE[-1], "crc": EXAMPLE_CRC}
    return messages


def broken(client: ClientEngine, data: bytes | Sequence[object], rule: str = "") -> RemoteProtocolError:
    """Check that these lines end a client's stream: one `Failed`, and nothing after it."""
    client.receive_bytes(data if isinstance(data, bytes) else lines(*data), 0.0)
    *before, last = client.events()
    assert isinstance(last, Failed), f"no violation: {last}"
    assert not any(isinstance(event, Failed) for event in before)
    if rule:
        assert last.error.rule == f"restream-{rule}"
    assert not client.may_resume
    is_silent(client)
    return last.error
