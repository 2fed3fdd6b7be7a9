"""Check that the installed aioquic still has the private names that the QUIC transport relies on.

aioquic has no public way to tie credit to consumption, to count unsent bytes, or to ask a client for a certificate, so
`connection.py` subclasses its connection and uses names that aioquic may change in any release. The package metadata
therefore allows a range of versions, and this module looks at the version that is really installed. It reads classes
and the names that their constructors assign, so a check costs a few microseconds and opens no connection.

A missing name is reported when the transport is imported, by the class and the name, instead of as an `AttributeError`
in the middle of a connection. A test compares the table below with the names that `connection.py` uses.
"""

from __future__ import annotations

from importlib.metadata import version
from inspect import isfunction
from types import MappingProxyType
from typing import Final

from aioquic import tls
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketRecovery
from aioquic.quic.stream import QuicStreamReceiver, QuicStreamSender

PRIVATE_NAMES: Final = MappingProxyType(
    {
        QuicConnection: frozenset(
            {
                "_crypto_buffers",
                "_retry_count",
                "_close_begin",
                "_close_event",
                "_close_pending",
                "_crypto_streams",
                "_datagrams_pending",
                "_handle_ack_frame",
                "_handle_crypto_frame",
                "_handle_stream_frame",
                "_handshake_complete",
                "_handshake_confirmed",
                "_handshake_done_pending",
                "_host_cids",
                "_initialize",
                "_is_client",
                "_local_max_data",
                "_local_max_streams_bidi",
                "_local_max_streams_uni",
                "_local_next_stream_id_uni",
                "_loss",
                "_max_datagram_size",
                "_network_paths",
                "_on_max_stream_data_delivery",
                "_packet_number",
                "_peer_cid",
                "_ping_pending",
                "_probe_pending",
                "_quic_logger",
                "_remote_max_data",
                "_remote_max_datagram_frame_size",
                "_remote_max_streams_uni",
                "_retire_connection_ids",
                "_spaces",
                "_state",
                "_streams",
                "_streams_queue",
                "_update_traffic_key",
                "_write_application",
                "_write_stream_limits",
            }
        ),
        tls.Context: frozenset(
            {
                "_certificate_request",
                "_max_early_data",
                "_peer_certificate",
                "_peer_certificate_chain",
                "_request_client_certificate",
                "_server_expect_finished",
            }
        ),
        QuicPacketRecovery: frozenset({"_cc", "_pacer", "_rtt_initialized", "_rtt_latest", "_rtt_smoothed"}),
        QuicPacketBuilder: frozenset({"_packet"}),
        QuicStreamReceiver: frozenset({"_buffer", "_buffer_start", "_ranges"}),
        QuicStreamSender: frozenset(
            {"_buffer", "_buffer_fin", "_buffer_start", "_buffer_stop", "_pending", "_pending_eof", "_reset_error_code"}
        ),
    }
)


def names_of(kind: type) -> set[str]:
    """Return the names that instances of `kind` have: those of its classes, and those its constructor assigns."""
    constructor = vars(kind).get("__init__")
    return {*dir(kind), *(constructor.__code__.co_names if isfunction(constructor) else ())}


def check_aioquic() -> None:
    """Raise `ImportError` if the installed aioquic lacks a private name, and say which one."""
    missing = [f"{kind.__name__}.{name}" for kind, names in PRIVATE_NAMES.items() for name in names - names_of(kind)]
    if missing:
        raise ImportError(
            f"unsupported aioquic {version('aioquic')}: muxkit's QUIC transport relies on "
            f"{', '.join(sorted(missing))}, which this version doesn't have. "
            "Install an older one, e.g. aioquic==1.7.2, or a newer muxkit."
        )
