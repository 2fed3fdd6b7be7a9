"""The identity of the peer, from a verified certificate or from the kernel's credentials of a Unix socket.

The links of the transports use these functions for their `identity`. They don't verify anything. The caller passes only
a certificate that was verified.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from muxkit import Identity

if TYPE_CHECKING:
    from cryptography import x509

PEER_CREDENTIALS: int | None = getattr(socket, "SO_PEERCRED", None)  # only Linux has it
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
UNKNOWN = 0xFFFFFFFF

# Abbreviations of RFC 4514. OpenSSL reports the long names.
SHORT = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "STREET",
    "userId": "UID",
}
EMAIL = "emailAddress"
KINDS = {"DNS", "IP Address", "URI", "email"}

Names = tuple[tuple[tuple[str, str], ...], ...]


def of_certificate(der: bytes, told: Mapping[str, object]) -> Identity:
    """Return the identity in a certificate. `told` is the result of `getpeercert()` for it."""
    subject = cast("Names", told.get("subject", ()))
    names = cast("tuple[tuple[str, str], ...]", told.get("subjectAltName", ()))
    return Identity(
        certificate=der,
        subject=",".join("+".join(_written(*pair) for pair in part) for part in reversed(subject)) or None,
        names=tuple(_address(name) if kind == "IP Address" else name for kind, name in names if kind in KINDS),
    )


def of_x509(certificate: x509.Certificate) -> Identity:
    """Return the identity in a certificate that the cryptography package has parsed."""
    # Only transports that depend on cryptography call this function, so we import it here.
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    return Identity(
        certificate=certificate.public_bytes(Encoding.DER),
        subject=certificate.subject.rfc4514_string({NameOID.EMAIL_ADDRESS: EMAIL}) or None,
        names=tuple(_names(certificate)),
    )


def of_socket(sock: socket.socket) -> Identity | None:
    """Return the credentials that the process at the other end of a Unix socket had when it connected or listened.

    Returns None if the system doesn't report them.
    """
    if PEER_CREDENTIALS is None or sock.family != getattr(socket, "AF_UNIX", None):
        return None
    try:
        pid, uid, gid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, PEER_CREDENTIALS, CREDENTIALS.size))
    except OSError:
        return None
    if uid & UNKNOWN == UNKNOWN:  # the kernel doesn't know the peer, because the socket isn't connected
        return None
    return Identity(pid=pid or None, uid=uid & UNKNOWN, gid=gid & UNKNOWN)  # a pid of 0 is of another PID namespace


def _names(certificate: x509.Certificate) -> Iterator[str]:
    from cryptography import x509

    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):  # extensions are parsed on access, and invalid ones raise ValueError
        return
    for name in extension.value:
        if isinstance(name, x509.DNSName | x509.IPAddress | x509.RFC822Name | x509.UniformResourceIdentifier):
            yield str(name.value)


def _written(kind: str, value: str) -> str:
    escaped = "".join(f"\\{sign}" if sign in '",+;<>\\' else "\\00" if sign == "\0" else sign for sign in value)
    if escaped[:1] in ("#", " "):
        escaped = f"\\{escaped}"
    if value[1:].endswith(" "):
        escaped = f"{escaped[:-1]}\\ "
    return f"{SHORT.get(kind, kind)}={escaped}"


def _address(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name
