"""The options of transports that need a certificate, for both ends of a benchmark."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import muxkit
from muxkit_bench.contestants.contestant import CERTIFICATE, CERTIFIED, KEY


def options(url: str, purpose: ssl.Purpose, folder: str) -> dict[str, Any]:
    """Return the options that the transport of a URL needs, with the certificate in a folder."""
    transport = url.partition("://")[0].partition("+")[2]
    if transport not in CERTIFIED:
        return {}
    is_client = purpose is ssl.Purpose.SERVER_AUTH
    certificate, key = Path(folder) / CERTIFICATE, Path(folder) / KEY
    if transport == "quic":
        return {"ca": certificate} if is_client else {"certificate": certificate, "key": key}
    if transport == "dtls":
        from muxkit_adapters import dtls  # it needs packages that the others do not

        made = dtls.client_context(ca=certificate) if is_client else dtls.server_context(certificate, key)
        return {"ssl_context": made}
    return {"tls": muxkit.TLS(ca=certificate) if is_client else muxkit.TLS(cert=certificate, key=key)}
