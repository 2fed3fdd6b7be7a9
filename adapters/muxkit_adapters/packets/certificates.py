"""Certificates for DTLS: contexts that verify them, the check of host names and addresses, and the texts of errors.

`dtls` uses pyOpenSSL because Python's `ssl` module doesn't support DTLS. The server's certificate is verified by
default, including its name, and clients' certificates if the server has a `client_ca`.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Final

from muxkit.runtime import ExtraNeeded

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from OpenSSL import SSL as SSL
    from OpenSSL import crypto
    from service_identity import CertificateError, VerificationError
    from service_identity.cryptography import verify_certificate_hostname, verify_certificate_ip_address
except ImportError as _error:
    raise ExtraNeeded("dtls", "dtls", link="packets") from _error

from muxkit import TLS, Identity

from .._addresses import CERTIFICATE_NEEDED
from .._identity import of_x509

log: Final = logging.getLogger("muxkit.adapters")

Path = str | os.PathLike[str]


DTLS_1_2 = 0xFEFD  # version numbers of DTLS count downwards
CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"
ALERT = 21  # the record type
FATAL = 2  # the level of an alert

REFUSED = {
    9: "certificate is not yet valid",
    10: "certificate has expired",
    18: "self-signed certificate",
    19: "self-signed certificate in certificate chain",
    20: "unable to get local issuer certificate",
    21: "unable to verify the first certificate",
    23: "certificate revoked",
    26: "unsuitable certificate purpose",
}
ALERTS = {
    40: "handshake failure",
    42: "bad certificate",
    43: "unsupported certificate",
    44: "certificate revoked",
    45: "certificate expired",
    46: "certificate unknown",
    48: "unknown authority",
    51: "decrypt error",
    70: "protocol version",
    71: "insufficient security",
    116: "certificate required",
}


class Context(SSL.Context):
    """A pyOpenSSL context for DTLS 1.2, for many connections. It verifies no peer until `set_verify` is called.

    Trio sets the same options for every connection, but pyOpenSSL allows no changes after the first connection.
    Therefore this class skips calls that change nothing.
    """

    def __init__(self) -> None:
        super().__init__(SSL.DTLS_METHOD)
        self._options_set = 0
        self._has_cookie_callback = False
        self.set_min_proto_version(DTLS_1_2)
        self.set_max_proto_version(DTLS_1_2)  # the part of the handshake that Trio implements supports no later version
        self.set_cipher_list(CIPHERS)

    def set_options(self, options: int) -> int:
        """Set options as in pyOpenSSL, unless they are set already. Return all options."""
        if options & ~self._options_set:
            self._options_set = super().set_options(options)
        return self._options_set

    def set_cookie_verify_callback(self, callback: Callable[[SSL.Connection, bytes], bool]) -> None:
        """Set the callback as in pyOpenSSL. Only the first call has an effect."""
        if not self._has_cookie_callback:
            super().set_cookie_verify_callback(callback)
            self._has_cookie_callback = True


def client_context(*, ca: Path | None = None, certificate: Path | None = None, key: Path | None = None) -> Context:
    """Return a context that verifies the server.

    Args:
        ca: a PEM file of certificate authorities. By default those of the system.
        certificate: a PEM file with the client's certificate chain, if it has one.
        key: the file with its key. By default the key is in the file of the certificate.
    """
    context = Context()
    context.set_verify(SSL.VERIFY_PEER)
    if ca is None:
        context.set_default_verify_paths()
    else:
        context.load_verify_locations(ca)
    if certificate is not None:
        _show(context, certificate, key)
    return context


def server_context(certificate: Path, key: Path | None = None, *, client_ca: Path | None = None) -> Context:
    """Return a context for a server.

    Args:
        certificate: a PEM file with the server's certificate chain.
        key: the file with its key. By default the key is in the file of the certificate.
        client_ca: a PEM file of certificate authorities. If given, clients must present a certificate of one of them.
    """
    context = Context()
    _show(context, certificate, key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT)
    return context


def context_of(tls: TLS, *, is_client: bool) -> Context:
    """Return the context that `tls` describes. Raises ValueError if its files are unusable."""
    context = Context()
    if not is_client and tls.cert is None:
        raise ValueError(CERTIFICATE_NEEDED)
    authorities = tls.ca if is_client else tls.client_ca
    try:
        if tls.cert is not None:
            _show(context, tls.cert, tls.key, tls.password)
        if isinstance(authorities, bytes):
            _trust_text(context, authorities)
        elif authorities is not None:
            context.load_verify_locations(authorities)
        elif is_client:
            context.set_default_verify_paths()
    except SSL.Error as error:
        raise ValueError(f"{tls}: {reason_of(error)}") from error
    if is_client and tls.verify:
        context.set_verify(SSL.VERIFY_PEER)
    elif not is_client and authorities is not None:
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT)
    return context


class Renewed:
    """Returns the context of a server's next connection. It makes a new one after the files of `tls` were reloaded."""

    def __init__(self, tls: TLS) -> None:
        self._tls = tls
        self._generation = tls.generation
        self._made = context_of(tls, is_client=False)

    def __call__(self) -> Context:
        if self._generation != self._tls.generation:
            self._generation = self._tls.generation
            try:
                self._made = context_of(self._tls, is_client=False)
            except (OSError, ValueError) as error:  # the files have changed again, and are unusable
                # log: The certificate files have changed and can't be used.
                log.error("dtls goes on with the certificates that it had: %s", error)
        return self._made


def check_context(context: object) -> None:
    """Raise TypeError if this is another kind of context, such as one of the `ssl` module."""
    if not isinstance(context, Context):
        raise TypeError(
            f"ssl_context is a {type(context).__module__}.{type(context).__name__}: a dtls.Context is needed, "
            "as dtls.client_context() and dtls.server_context() make"
        )


def verifies(context: SSL.Context) -> bool:
    """Return True if a context verifies the peer."""
    return bool(context.get_verify_mode() & SSL.VERIFY_PEER)


class Verdict:
    """The result of verifying a peer's certificate for one connection."""

    def __init__(self, hostname: str | None) -> None:
        self._hostname = hostname
        self.reason: str | None = None
        """Why the certificate was refused, or None."""
        self.alert: int | None = None
        """The number of the peer's last fatal alert, or None. Alerts aren't authenticated, so it may be forged."""

    def watch(self, connection: SSL.Connection, mode: int) -> None:
        """Verify the peer of this connection with this object."""
        if mode & SSL.VERIFY_PEER:  # otherwise OpenSSL calls the function and ignores its result
            connection.set_verify(mode, self._verify)
        name = self._hostname
        if name is not None and _as_ip(name) is None:
            connection.set_tlsext_host_name(name.encode("idna"))

    def heard(self, packet: bytes) -> None:
        """Look for a fatal alert in a packet of the handshake."""
        if len(packet) == 15 and packet[0] == ALERT and packet[3:5] == b"\0\0" and packet[13] == FATAL:
            self.alert = packet[14]

    def _verify(self, connection: SSL.Connection, certificate: crypto.X509, code: int, depth: int, ok: int) -> bool:
        if not ok:
            self.reason = self.reason or REFUSED.get(code, f"verification error {code}")
            return False
        if depth == 0 and self._hostname is not None:
            try:
                self._check_name(certificate, self._hostname)
            except (VerificationError, CertificateError):
                self.reason = f"not valid for {self._hostname!r}"
                return False
        return True

    @staticmethod
    def _check_name(certificate: crypto.X509, name: str) -> None:
        if _as_ip(name) is None:
            verify_certificate_hostname(certificate.to_cryptography(), name)
        else:
            verify_certificate_ip_address(certificate.to_cryptography(), name)


def identity_of(connection: SSL.Connection) -> Identity | None:
    """Return the identity in the peer's certificate, or None if the peer presented none."""
    certificate = connection.get_peer_certificate()
    return None if certificate is None else of_x509(certificate.to_cryptography())


def reason_of(error: SSL.Error) -> str:
    """Describe why DTLS failed. The text contains none of the transferred data."""
    found = error.args[0] if error.args else None
    if isinstance(found, list) and found and isinstance(found[0], tuple):
        return f"DTLS failed: {found[0][-1]}"
    return f"DTLS failed: {type(error).__name__}"


def _trust_text(context: Context, pem: bytes) -> None:
    store = context.get_cert_store()
    assert store is not None
    for certificate in x509.load_pem_x509_certificates(pem):
        store.add_cert(crypto.X509.from_cryptography(certificate))


def _show(context: Context, certificate: Path, key: Path | None, password: str | None = None) -> None:
    context.use_certificate_chain_file(certificate)
    if password is None:
        context.use_privatekey_file(key or certificate)
    else:
        unlocked = load_pem_private_key(FilePath(key or certificate).read_bytes(), password.encode())
        context.use_privatekey(unlocked)  # type: ignore[arg-type]  # pyOpenSSL accepts a key of cryptography
    context.check_privatekey()


def _as_ip(name: str) -> str | None:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return None
