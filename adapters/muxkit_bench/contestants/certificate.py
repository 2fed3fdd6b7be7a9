"""How do the ends of the bench trust each other over TLS, DTLS and QUIC? By a certificate that is made for one run."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from muxkit.cli.outcome import CommandFailed

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "MUXKIT_BENCH_FOLDER"  # the variable that tells the processes where the certificate is
CERTIFICATE = "certificate.pem"
KEY = "key.pem"
CERTIFIED = frozenset({"tls", "wss", "quic", "dtls"})  # transports that need one


def make_certificate(folder: Path) -> None:
    """For 127.0.0.1, valid for a day; raises `CommandFailed` without the program `openssl`."""
    program = shutil.which("openssl")
    if program is None:
        raise CommandFailed("needs the program openssl, to make a certificate")
    made = subprocess.run(
        [
            *(program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(folder / KEY), "-out", str(folder / CERTIFICATE), "-days", "1"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise CommandFailed(f"openssl could not make a certificate: {made.stderr.strip().splitlines()[-1:]}")
