"""Hints: what the first bytes of a peer look like, for the error that says why they could not be read."""

from __future__ import annotations

HEAD = 24  # bytes that are kept of each connection's begin

_METHODS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"TRACE ")


def looks_like(head: bytes) -> str | None:
    """Name what a peer that begins with these bytes probably speaks, None if they could be anything."""
    if head[:1] == b"\x16" and head[1:2] == b"\x03":
        return "TLS"
    if head[:1] == b"\x15" and head[1:2] == b"\x03":
        return "a TLS alert"
    if head.startswith(b"HTTP/"):
        return "an HTTP response"
    if head.startswith(b"PRI * HTTP/2"):
        return "HTTP/2"
    if head.startswith(_METHODS):
        return "an HTTP request"
    if head.startswith(b"SSH-"):
        return "SSH"
    if head.startswith((b"220 ", b"220-")):
        return "a mail or FTP server"
    if head.lstrip()[:1] == b"{":
        return "JSON, such as restream"
    return None
