"""`muxkit serve --balancer`: commands learn the address of the real client."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.cli._command import muxkit
from tests.cli.test_pipe import serving

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]


def test_the_server_takes_headers_from_the_balancers_that_are_named() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--exec", "sh -c 'echo $MUXKIT_PEER'", "--balancer", "127.0.0.1") as (
        _,
        url,
    ):
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.settimeout(60)
            sock.sendall(b"PROXY TCP4 203.0.113.7 192.0.2.1 4711 80\r\n")
            sock.sendall(bytes.fromhex("a80084 d8010084".replace(" ", "")))  # credit, and a duplex with credit
            got = b""
            while b"203.0.113.7" not in got:
                data = sock.recv(4096)
                assert data, got
                got += data
    assert b"tcp 203.0.113.7:4711" in got


def test_what_is_no_network_is_a_usage_error() -> None:
    done = muxkit("serve", "bpmux+tcp://127.0.0.1:0", "--echo", "--balancer", "balancer.internal")
    assert done.returncode == 2
    assert "expected addresses or networks, such as" in " ".join(done.stderr.split())
